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
    """Cascade and unmixing beside the paper's attacks."""
    found = load(f"beyond-{data}")["tables"][0]
    rows = [
        [row["label"], str(max(e["runs"] or 0 for e in row["entries"])), *map(_entry, row["entries"])]
        for row in found["rows"]
    ]
    return table(["(N, B)", "batches", *found["columns"]], rows)


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
