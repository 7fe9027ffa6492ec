"""Tables and single numbers of the documents, each made from a file in `docs/data` that a command wrote."""

import json
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
FRONTIER = DOCS.parent / "src/qbi/report/frontier.json"


@cache
def load(name: str) -> Any:
    """What a command wrote."""
    path = FRONTIER if name == "frontier" else DOCS / "data" / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8"))


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Markdown."""
    head = list(head)
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *map(list, rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def _cell(entry: dict[str, Any] | None) -> str:
    if entry is None:
        return "–"
    spread = "" if entry["half_width"] is None else f" ± {entry['half_width']:.1f}"
    return f"{entry['accuracy']:.1f}{spread}"


def frontier() -> str:
    """Accuracy by noise, for each network, optimiser and batch size."""
    cells = [c for c in load("frontier")["cells"] if not c["remedy"]]
    noises = sorted({c["noise"] for c in cells})
    rows = []
    for network, optimiser, size in sorted({(c["network"], c["optimiser"], c["batch_size"]) for c in cells}):
        own = {
            c["noise"]: c
            for c in cells
            if (c["network"], c["optimiser"], c["batch_size"]) == (network, optimiser, size)
        }
        rows.append([f"{network}, {optimiser}, B = {size}", *(_cell(own.get(n)) for n in noises)])
    names = ["plain" if n < 0 else "clipped only" if n == 0 else f"σ = {n:g}" for n in noises]
    return table(["", *names], rows)


def remedies() -> str:
    """What lowers the price."""
    cells = [c for c in load("frontier")["cells"] if c["remedy"]]
    rows = []
    noises = (-1.0, 0.1, 0.15, 0.2, 0.3)
    for network, remedy, optimiser, size in sorted(
        {(c["network"], c["remedy"], c["optimiser"], c["batch_size"]) for c in cells}
    ):
        key = (network, remedy, optimiser, size)
        own = {c["noise"]: c for c in cells if (c["network"], c["remedy"], c["optimiser"], c["batch_size"]) == key}
        rows.append([f"{network}, {remedy}, {optimiser}, B = {size}", *(_cell(own.get(n)) for n in noises)])
    return table(["", "plain", *(f"σ = {n:g}" for n in noises[1:])], rows)


def best_case() -> str:
    """The best-case server beside the bounds."""
    head = [
        "σ",
        "bits",
        "read, dB",
        "linear bound",
        "bound",
        "at 19 dB",
        "bound",
        "at 30 dB",
        "read after 16 rounds, dB",
        "at 19 dB",
        "at 30 dB",
    ]
    rows = [
        [
            f"{r['noise']:g}",
            f"{r['bits']:,.1f}",
            f"{r['read 1']:.1f}",
            f"{r['linear 1']:.1f}",
            f"{r['most 1']:.1f}",
            f"{100 * r['19 dB 1']:.1f} %",
            f"{100 * r['chance 1']:.1f} %",
            f"{100 * r['30 dB 1']:.1f} %",
            f"{r['read 16']:.1f}",
            f"{100 * r['19 dB 16']:.1f} %",
            f"{100 * r['30 dB 16']:.1f} %",
        ]
        for r in load("best-case")["rows"]
    ]
    return table(head, rows)


def policies() -> str:
    """The quickstart under every policy."""
    rows = [[name, *(str(v) for v in found)] for name, found in load("policies")["policies"].items()]
    return table(["policy", "seed 0", "seed 1", "seed 2"], rows)


def overhead() -> str:
    """Time and memory of a step."""
    rows = [
        [
            f"{r['model']}, B = {r['batch']}",
            f"{1000 * r['plain']:.1f}",
            f"{1000 * r['budget']:.1f}",
            f"{r['budget'] / r['plain']:.1f}",
            f"{r['budget MiB'] - r['plain MiB']}",
        ]
        for r in load("overhead")["rows"]
    ]
    return table(["model", "plain, ms", "budget, ms", "ratio", "more memory, MiB"], rows)


def flower() -> str:
    """The example's federation with and without the guard."""
    rows = [
        [
            "budget" if r["guard"] else "none",
            str(r["seed"]),
            f"{100 * r['accuracy']:.1f}",
            f"{sum(r['read in the attack'])} of {r['in the batch']}",
            "–" if r["bits by client"] is None else f"{max(r['bits by client'].values()):.0f}",
        ]
        for r in load("flower")["runs"]
    ]
    for guard in (False, True):
        found = [100 * r["accuracy"] for r in load("flower")["runs"] if r["guard"] is guard]
        half = 2.776 * statistics.stdev(found) / len(found) ** 0.5  # Student's t, five seeds
        rows.append(["budget" if guard else "none", "mean", f"{statistics.fmean(found):.1f} ± {half:.1f}", "", ""])
    return table(
        [
            "guard",
            "seed",
            "accuracy, %",
            "read by the cascade in round 5 (30 dB)",
            "bits of the client that spent most",
        ],
        rows,
    )


EXACT, FAITHFUL, RECOGNISABLE = "mse<1e-10", "psnr>60", "psnr>19"


def _time(seconds: float) -> str:
    if seconds >= 100:
        return f"{seconds:,.0f} s"
    if seconds >= 1:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{1000 * seconds:.2g} ms" if seconds < 0.1 else f"{1000 * seconds:.0f} ms"


def bench(name: str) -> str:
    """`qbi bench` on one machine."""
    rows = [
        [
            r["task"],
            r["shape"],
            _time(r["ours_seconds"]),
            _time(r["naive_seconds"]),
            f"{r['ratio']:,.0f}" if r["ratio"] >= 10 else f"{r['ratio']:.2g}",
            ("extrapolated from " if r["naive_extrapolated"] else "") + r["note"],
        ]
        for r in load(name)["results"]
    ]
    return table(["task", "shape", "ours", "naive", "ratio", "naive measured as"], rows)


def aggp_step(name: str) -> str:
    """What AGGP adds to a step."""
    found = load(name)["aggp_step"]
    return f"{100 * found['share']:.1f} % ({1000 * found['added_seconds']:.2f} ms on {1000 * found['plain_seconds']:.1f} ms)"


def aggp_steps() -> str:
    """The same, measured many times on a GPU."""
    shares = load("aggp-h200")["shares"]
    return f"{statistics.median(shares):.1f} % (median of {len(shares)} runs, from {min(shares):.1f} to {max(shares):.1f}, {sum(s > 5 for s in shares)} of them above 5)"


def pairs_time(name: str) -> str:
    """PAIRS at ImageNet's size."""
    found = next(r for r in load(name)["results"] if r["task"] == "PAIRS" and r["shape"].startswith("ImageNet"))
    return f"{_time(found['ours_seconds'])}, {found['ratio']:,.0f} times as fast as forward passes"


def audits() -> str:
    """Time and memory of an audit by size."""
    rows = [
        [f"{r['features']:,}", f"{r['neurons']:,}", f"{r['seconds']:.1f} s", f"{r['gib']:.1f} GiB"]
        for r in load("audit")["rows"]
    ]
    return table(["M", "N", "time", "peak memory of the process"], rows)


def large_audits() -> str:
    """Models at ImageNet's size."""
    rows = [[r["model"], f"{r['seconds']:.0f} s", f"{r['gib']:.1f} GiB", r["verdict"]] for r in load("audit")["large"]]
    return table(["model, 224×224", "time", "peak memory", "verdict"], rows)


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


def _two(outcome: dict[str, Any] | None) -> str:
    if outcome is None:
        return "–"
    return f"{100 * outcome['recall'][FAITHFUL]:.0f}, {100 * outcome['recall'][RECOGNISABLE]:.0f}"


def _matrix(name: str) -> tuple[list[str], list[str], list[int], dict[tuple[str, str, int], dict[str, Any]]]:
    outcomes = load(name)["outcomes"]
    found = {(o["attack"], o["defence"], o["batch_size"]): o for o in outcomes}
    return (
        list(dict.fromkeys(o["attack"] for o in outcomes)),
        list(dict.fromkeys(o["defence"] for o in outcomes)),
        sorted({o["batch_size"] for o in outcomes}),
        found,
    )


def compared(name: str, sizes: Sequence[int] = ()) -> str:
    """R at 60 and 19 dB of every pair."""
    attacks, defences, every, found = _matrix(name)
    rows = [
        [str(size), defence, *(_two(found.get((attack, defence, size))) for attack in attacks)]
        for size in sizes or every
        for defence in defences
    ]
    return table(["B", "defence", *attacks], rows)


def _accuracy(defence: str) -> tuple[float, float]:
    """The mean over batch sizes, and the largest half-width of one."""
    found = [e["accuracies"] for e in load("compare")["accuracy"] if e["defence"] == defence]
    half = [2.776 * statistics.stdev(a) / len(a) ** 0.5 for a in found]  # Student's t, five trainings
    return 100 * statistics.fmean(statistics.fmean(a) for a in found), 100 * max(half)


ROW_BY_ROW = ("qbi", "pairs", "trap-weights", "imprint", "mirrored")
WHOLE = ("passive", "cascade", "scaled", "copies")


def worst_cases() -> str:
    """What each defence leaves at most, of servers that read row by row and of those that read an answer as a whole."""
    _, defences, _, _ = _matrix("compare")
    rows = []
    for defence in defences:
        cells = [defence]
        for attacks in (ROW_BY_ROW, WHOLE):
            for name in ("compare", "rounds"):
                own = [o for o in load(name)["outcomes"] if o["defence"] == defence and o["attack"] in attacks]
                cells.append(
                    f"{max(100 * o['recall'][FAITHFUL] for o in own):.0f}, {max(100 * o['recall'][RECOGNISABLE] for o in own):.0f}"
                )
        exposed = max(o["exposed"] for o in load("rounds")["outcomes"] if o["defence"] == defence)
        mean, half = _accuracy(defence)
        rows.append([*cells, f"{100 * exposed:.1f} %", f"{mean:.1f} (± {half:.1f})"])
    head = ["defence", "row by row, one round", "16 rounds", "as a whole, one round", "16 rounds"]
    return table([*head, "exact values", "accuracy"], rows)


def worst(defence: str, attack: str, size: int, level: str = FAITHFUL) -> str:
    """One R in percent."""
    return f"{100 * _matrix('compare')[3][attack, defence, size]['recall'][level]:.0f} %"


def aggp_imagenet() -> str:
    """AGGP at the paper's twelve settings on ImageNet."""
    rows = []
    for neurons in (200, 500, 1000):
        attacks, _, sizes, found = _matrix(f"aggp-imagenet-{neurons}")
        for size in sizes:
            cells = []
            for attack in attacks:
                before, after = found[attack, "none", size]["recall"], found[attack, "aggp", size]["recall"]
                cells.append(f"{100 * before[EXACT]:.0f} → {100 * after[EXACT]:.0f} ({100 * after[RECOGNISABLE]:.0f})")
            rows.append([f"({neurons}, {size})", *cells])
    return table(["(N, B)", "qbi", "pairs", "trap-weights"], rows)


def epsilons() -> str:
    """What the accountant gives for three epochs on the training images of the comparison."""
    from qbi.defences import DPSGD

    rows = []
    for size in (20, 64, 200):
        steps = 3 * math.ceil(4882 / size)
        rows.append(
            [
                str(size),
                str(steps),
                f"{DPSGD(1.0, 1.0).guarantee(sample_rate=size / 4882, steps=steps, delta=1e-5).epsilon:.2f}",
            ]
        )
    return table(["B", "steps", "ε at δ = 10⁻⁵"], rows)


def answers() -> str:
    """Servers that know the detectors."""
    rows = [
        [a["server"], "found" if a["reported"] else "**missed**", f"{a['strength']:.2f}", f"{100 * a['recall']:.0f} %"]
        for a in load("detection")["answers"]
    ]
    return table(["server", "by `inspect`", "suspicion, in bounds", "read of a batch of 20"], rows)


def held_out() -> str:
    """Benign models that no bound was set on."""
    found = load("detection")
    said = f"{len(found['held-out reported'])} of {found['held-out']}"
    return said + (f": {'; '.join(found['held-out reported'])}" if found["held-out reported"] else "")


def trap_imagenet() -> str:
    """R of trap weights on ImageNet beside the published one."""
    rows = next(t for t in load("reproduction")["tables"] if t["name"] == "imagenet-recall")["rows"]
    entry = next(r for r in rows if r["label"] == "(200, 20)")["entries"][0]
    return f"{entry['ours']:.0f} % instead of {entry['published']:.0f} %"


def _at_72() -> dict[str, Any]:
    found: dict[str, Any] = next(r for r in load("best-case")["rows"] if r["noise"] == 0.1)
    return found


def read_at_72() -> str:
    """What the best case reads at the default budget."""
    found = _at_72()
    return f"{found['read 1']:.1f} dB, {100 * found['30 dB 1']:.1f} % of images at 30 dB, and {100 * found['19 dB 1']:.0f} % recognisably"


def cost(network: str) -> str:
    """Points between the best plain training and the best one at the default budget."""
    cells = [c for c in load("frontier")["cells"] if c["network"] == network and not c["remedy"]]
    best = {noise: max(c["accuracy"] for c in cells if c["noise"] == noise) for noise in (-1.0, 0.1)}
    return f"{best[-1.0] - best[0.1]:.1f}"


def saturation() -> str:
    """Who is isolated and who is read, by the scale of the rows."""
    rows = load("saturation")["rows"]
    keys = [k for k in rows[0] if k != "scale"]
    return table(["scale of the rows", *keys], [[r["scale"], *(str(r[k]) for k in keys)] for r in rows])


TABLES: dict[str, Callable[[], str]] = {
    "frontier": frontier,
    "remedies": remedies,
    "best-case": best_case,
    "policies": policies,
    "overhead": overhead,
    "flower": flower,
    "bench-cpu": lambda: bench("bench-cpu"),
    "bench-h200": lambda: bench("bench-h200"),
    "audits": audits,
    "large-audits": large_audits,
    "reproduction": reproduction,
    "federation": federation,
    "beyond-imagenet": lambda: beyond("imagenet"),
    "beyond-cifar": lambda: beyond("cifar10"),
    "beyond-imdb": lambda: beyond("imdb"),
    "compare": lambda: compared("compare"),
    "rounds": lambda: compared("rounds"),
    "wide": lambda: compared("wide"),
    "dp-sgd": lambda: compared("dp-sgd"),
    "worst-cases": worst_cases,
    "aggp-imagenet": aggp_imagenet,
    "answers": answers,
    "saturation": saturation,
    "epsilons": epsilons,
}

VALUES: dict[str, Callable[[], str]] = {
    "trap-imagenet": trap_imagenet,
    "most-72": lambda: f"{_at_72()['most 1']:.1f} dB",
    "read-72": read_at_72,
    "cost-quickstart": lambda: cost("quickstart"),
    "cost-two-layer": lambda: cost("two-layer"),
    "aggp-step-cpu": lambda: aggp_step("bench-cpu"),
    "aggp-steps-gpu": aggp_steps,
    "pairs-cpu": lambda: pairs_time("bench-cpu"),
    "pairs-gpu": lambda: pairs_time("bench-h200"),
    "held-out": held_out,
    "aggp-imprint": lambda: worst("aggp", "imprint", 64),
    "aggp-mirrored": lambda: worst("aggp", "mirrored", 20),
}
