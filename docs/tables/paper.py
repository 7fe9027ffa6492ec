"""The paper's evaluation, and what goes beyond it."""

from typing import Any

from tables.reading import DOCS, load, table


def _entry(entry: dict[str, Any]) -> str:
    """Ours ± 95 % (the paper's value, difference)."""
    if entry["ours"] is None:
        return "–" if entry["published"] is None else f"– ({entry['published']:g})"
    text = f"{entry['ours']:.1f}" + ("" if entry["half_width"] is None else f" ± {entry['half_width']:.2f}")
    return text if entry["published"] is None else f"{text} ({entry['published']:g}, {entry['difference']:+.1f})"


def _reproduced(found: dict[str, Any]) -> str:
    rows = [[row["label"], *map(_entry, row["entries"])] for row in found["rows"]]
    return table(["", *found["columns"]], rows)


def reproduction() -> str:
    """Every table of the paper, the paper's value beside ours, and what the figures say."""
    document = load("reproduction")
    facts = [f"- {name}: {text}" for name, text in document["facts"].items()]
    parts = ["\n".join(facts)]
    for found in document["tables"]:
        if found["name"] in ("federation", "beyond-imagenet", "beyond-cifar10", "beyond-imdb"):
            continue
        parts += [
            f"## {found['title']}",
            _reproduced(found).rstrip(),
            found["verdict"] + ("\n" + found["note"] if found["note"] else ""),
        ]
    for figure in document["figures"]:
        parts.append(f"## {figure['title']}")
        if (DOCS / "figures" / f"{figure['name']}.png").exists():
            parts.append(f"![{figure['title']}](figures/{figure['name']}.png)")
        parts.append(figure["caption"])
    return "\n\n".join(parts) + "\n"


def federation() -> str:
    """R in a federation."""
    return _reproduced(next(t for t in load("reproduction")["tables"] if t["name"] == "federation"))


def beyond(data: str) -> str:
    """The cascade beside the paper's attacks; of images, honest models have a table of their own, measured later."""
    found = load(f"beyond-{data}")["tables"][0]
    shown = [n for n, name in enumerate(found["columns"]) if data == "imdb" or not name.startswith("unmixing")]
    rows = []
    for row in found["rows"]:
        runs = max(row["entries"][n]["runs"] or 0 for n in shown)
        rows.append([row["label"], str(runs), *(_entry(row["entries"][n]) for n in shown)])
    return table(["(N, B)", "batches", *(found["columns"][n] for n in shown)], rows)


def unmixed() -> str:
    """Honest two-layer networks: everything exact, what is proven, and another batch."""
    rows = []
    for r in load("unmixing")["rows"]:
        spread = f" ± {100 * r['deviation']:.1f}" if r["deviation"] else ""
        shares = [
            f"{100 * r['exact']:.1f}{spread}",
            *(f"{100 * r[k]:.1f}" for k in ("faithful", "certified", "control")),
        ]
        kind = "ImageNet" if r["side"] > 32 else "CIFAR-10"
        rows.append([kind, f"({r['neurons']}, {r['size']})", str(r["batches"]), *shares, f"{r['seconds']:.1f}"])
    header = ["images", "(N, B)", "batches", "exact, %", "60 dB, %", "proven, %", "another batch, %", "seconds"]
    return table(header, rows)


def trap_imagenet() -> str:
    """R of trap weights on ImageNet beside the published one."""
    rows = next(t for t in load("reproduction")["tables"] if t["name"] == "imagenet-recall")["rows"]
    entry = next(r for r in rows if r["label"] == "(200, 20)")["entries"][0]
    return f"{entry['ours']:.0f} % instead of {entry['published']:.0f} %"


def saturation() -> str:
    """Who is isolated and who is read, by the scale of the rows."""
    rows = load("saturation")["rows"]
    keys = [k for k in rows[0] if k != "scale"]
    return table(["scale of the rows", *keys], [[r["scale"], *(str(r[k]) for k in keys)] for r in rows])
