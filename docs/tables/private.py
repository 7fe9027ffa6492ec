"""What the private step promises, and what it costs."""

from typing import Any

from qbi.private.goal import PRESETS
from qbi.theory.guarantees import bits
from tables.reading import load, table


def _cell(entry: dict[str, Any] | None) -> str:
    if entry is None:
        return "–"
    spread = "" if entry["half_width"] is None else f" ± {entry['half_width']:.1f}"
    return f"{entry['accuracy']:.1f}{spread}"


SMALL = 6000
"""Images of the main comparison."""


def compared() -> list[tuple[str, int]]:
    """Networks and epochs that were trained plainly and privately."""
    cells = [c for c in load("frontier")["cells"] if c["images"] == SMALL and not c["remedy"]]
    plain, private = ({(c["network"], c["epochs"]) for c in cells if c["noise"] == noise} for noise in (-1.0, 0.1))
    return sorted(plain & private)


def price() -> str:
    """The best plain training beside the best private one, at as many participations."""
    data = load("frontier")
    rows = []
    for network, epochs in compared():
        own = [c for c in data["cells"] if c["network"] == network and c["epochs"] == epochs and c["images"] == SMALL]
        best = {
            n: max((c for c in own if c["noise"] == n), key=lambda c: c["accuracy"], default=None)
            for n in (-1.0, 0.1, 0.2)
        }
        plain = best[-1.0] or {}
        row = [f"{network}, {epochs} epochs", f"{_cell(plain)} ({_how(plain)})"]
        for noise in (0.1, 0.2):
            found = best[noise]
            row += (
                [f"{_cell(found)} ({_how(found)})", f"{found['accuracy'] - plain['accuracy']:+.1f}"]
                if found
                else ["–", "–"]
            )
        rows.append(row)
    return table(["", "plain", "72 bits", "difference", "18 bits", "difference"], rows)


def _how(cell: dict[str, Any] | None) -> str:
    if cell is None:
        return ""
    remedy = f", {cell['remedy']}" if cell["remedy"] else ""
    return f"{cell['optimiser']} {cell['rate']:g}, B = {cell['batch_size']}{remedy}"


def rates() -> str:
    """Every setting that was trained: the rate matters first."""
    data = load("frontier")
    order = sorted(
        data["settings"],
        key=lambda c: (c["network"], c["images"], c["epochs"], c["noise"], c["batch_size"], c["optimiser"], c["rate"]),
    )
    rows = [
        [
            c["network"] + (f", {c['remedy']}" if c["remedy"] else ""),
            f"{c['images']:,}",
            str(c["epochs"]),
            "plain" if c["noise"] < 0 else f"{bits(c['noise']):.3g}",
            str(c["batch_size"]),
            f"{c['optimiser']} {c['rate']:g}",
            _cell(c),
        ]
        for c in order
        if (c["network"], c["epochs"]) in compared() and c["noise"] in (-1.0, 0.1, 0.2)
    ]
    return table(["network", "images", "epochs", "bits a participation", "B", "rate", "accuracy, %"], rows)


def equal_bits() -> str:
    """Accuracy at an equal total of bits, over fewer or more epochs."""
    data = load("frontier")
    rows = []
    for total in (500, 1500, 5000):
        for c in sorted(data["cells"], key=lambda c: (c["network"], c["images"], c["epochs"])):
            if (
                c["noise"] > 0
                and c["noise"] not in (0.1, 0.2)
                and abs(bits(c["noise"], c["epochs"]) / total - 1) < 0.01
            ):
                rows.append(
                    [
                        f"{total:,}",
                        c["network"],
                        f"{c['images']:,}",
                        str(c["epochs"]),
                        f"{bits(c['noise']):.1f}",
                        f"{_cell(c)} ({_how(c)})",
                    ]
                )
    return table(["bits in all", "network", "images", "epochs", "bits each", "accuracy, %"], rows)


def learned() -> str:
    """The learned code."""
    rows = [
        [
            f"{r['noise']:g}",
            str(r["rounds"]),
            f"{r['bits']:,.0f}",
            f"{r['psnr']:.1f}",
            f"{100 * r['at_19']:.1f} %",
            f"{100 * r['at_30']:.1f} %",
            f"{r['best_tenth']:.1f}",
        ]
        for r in sorted(load("learned")["rows"], key=lambda r: (r["rounds"], r["noise"]))
    ]
    return table(["σ", "participations", "bits", "read, dB", "at 19 dB", "at 30 dB", "one in ten above, dB"], rows)


def candidates() -> str:
    """The server with a list."""
    rows = [
        [r["network"], str(r["batch_size"]), f"{r['bits']:g}", f"{r['named']} of {r['of']}"]
        for r in sorted(load("learned")["candidates"], key=lambda r: (r["network"], r["batch_size"], -r["bits"]))
    ]
    return table(["network", "B", "bits", "named"], rows)


def presets() -> str:
    """What the servers above still do at the bits of each preset."""
    exact = min(load("best-case")["rows"], key=lambda r: abs(r["bits"] - PRESETS["exact"]))
    rows = []
    for name, most in PRESETS.items():
        codes = [r for r in load("learned")["rows"] if r["rounds"] == 1 and abs(r["bits"] / most - 1) < 0.05]
        read = [f"{100 * codes[0][key]:.1f} %" for key in ("at_30", "at_19")] if codes else ["–", "–"]
        if name == "exact":
            read = [f"{100 * exact[key]:.1f} %, by the linear map" for key in ("30 dB 1", "19 dB 1")]
        lists = [r for r in load("learned")["candidates"] if (r["batch_size"], r["bits"]) == (2, most)]
        named = f"{sum(r['named'] for r in lists)} of {sum(r['of'] for r in lists)}" if lists else "–"
        rows.append([f"`{name}`", f"{most:,g}", *read, named])
    return table(["preset", "bits in all participations", "at 30 dB", "at 19 dB", "named from a list, B = 2"], rows)


def best_case() -> str:
    """The best linear server."""
    head = ["σ", "bits", "read, dB", "at 19 dB", "at 30 dB", "read after 16 participations, dB", "at 19 dB", "at 30 dB"]
    rows = [
        [
            f"{r['noise']:g}",
            f"{r['bits']:,.1f}",
            *(
                text
                for times in (1, 16)
                for text in (
                    f"{r[f'read {times}']:.1f}",
                    f"{100 * r[f'19 dB {times}']:.1f} %",
                    f"{100 * r[f'30 dB {times}']:.1f} %",
                )
            ),
        ]
        for r in load("best-case")["rows"]
    ]
    return table(head, rows)


def steps(name: str) -> str:
    """One training step beside a plain one and Opacus."""
    data = load(name)
    rows = []
    for r in data["rows"]:
        memory = [
            f" ({r['gigabytes'][w]:.1f} GB)" if r["gigabytes"] else ""
            for w in ("private", "opacus-hooks", "opacus-ghost")
        ]
        ways = [
            f"{r['ratios'][w]:.2f}×{m}"
            for w, m in zip(("private", "opacus-hooks", "opacus-ghost"), memory, strict=True)
        ]
        rows.append(
            [
                f"{r['model']}, {r['parameters']:,} weights, B = {r['batch_size']}",
                f"{1000 * r['seconds']['plain']:.1f} ms",
                *ways,
            ]
        )
    return table(["model", "plain step", "private step", "Opacus, hooks", "Opacus, ghost"], rows)


def slowest(name: str) -> str:
    """The model on which the private step costs most."""
    found = max(load(name)["rows"], key=lambda r: r["ratios"]["private"])
    return f"{found['model']}, {found['ratios']['private']:.1f}×"


def noise_cost() -> str:
    """Of one value on one core."""
    return f"{load('private-cpu')['noise_ns']:.1f} ns"


def learned_at(noise: float, rounds: int) -> dict[str, Any]:
    """What the learned code read in one setting."""
    found: dict[str, Any] = next(r for r in load("learned")["rows"] if (r["noise"], r["rounds"]) == (noise, rounds))
    return found


def read_72() -> str:
    """What the learned code reads at the default."""
    found = learned_at(0.1, 1)
    return f"{found['psnr']:.1f} dB on average, {100 * found['at_30']:.0f} % of images at 30 dB, {100 * found['at_19']:.0f} % recognisably"
