"""Puts tables into the documents from the files that commands wrote: between `<!-- table NAME -->` and `<!-- end -->`.

python docs/render.py          write them
python docs/render.py --check  say which differ, with exit code 1
"""

import json
import re
import statistics
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
ROOT = DOCS.parent
FRONTIER = ROOT / "src/qbi/report/frontier.json"
MARKED = re.compile(r"(<!-- table ([a-z-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


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


TABLES: dict[str, Callable[[], str]] = {
    "frontier": frontier,
    "remedies": remedies,
    "best-case": best_case,
    "policies": policies,
    "overhead": overhead,
    "flower": flower,
}


def rendered(text: str) -> str:
    """A page with its tables as the files have them."""
    return MARKED.sub(lambda found: f"{found[1]}\n{TABLES[found[2]]()}\n{found[3]}", text)


def main() -> int:
    """Write, or check."""
    wrong = []
    for page in [*sorted(DOCS.glob("*.md")), ROOT / "README.md"]:
        before = page.read_text(encoding="utf-8")
        after = rendered(before)
        if after != before:
            wrong.append(page.name)
            if "--check" not in sys.argv:
                page.write_text(after, encoding="utf-8")
    if "--check" in sys.argv and wrong:
        print(f"tables differ from their files in {', '.join(wrong)}: run make docs")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
