"""The matrix of attacks and defences as Markdown and as a heat map."""

from collections.abc import Sequence
from typing import Any

from qbi.metrics import FAITHFUL, RECOGNISABLE, Threshold, mean_interval
from qbi.report.plotting import new_figure, picture_of

Row = dict[str, Any]


def to_markdown(rows: Sequence[Row], accuracy: Sequence[Row]) -> str:
    """One table per batch size: R at 60 dB and mean SSIM for each attack, exposed values, accuracy."""
    parts = []
    for batch_size in sorted({row["batch_size"] for row in rows}):
        chosen = [row for row in rows if row["batch_size"] == batch_size]
        attacks = list(dict.fromkeys(row["attack"] for row in chosen))
        parts += [f"### B = {batch_size}", ""]
        parts += [
            "| defence | " + " | ".join(f"{a}: R at 60 dB, 19 dB, SSIM" for a in attacks) + " | exposed | accuracy |"
        ]
        parts += ["|---|" + "---|" * (len(attacks) + 2)]
        for defence in dict.fromkeys(row["defence"] for row in chosen):
            mine = {row["attack"]: row for row in chosen if row["defence"] == defence}
            cells = [
                f"{_percent(mine[a], FAITHFUL)}, {_percent(mine[a], RECOGNISABLE)}, {mine[a]['ssim']:.2f}"
                for a in attacks
            ]
            exposed = max(row["exposed"] for row in mine.values())
            right = [a["accuracies"] for a in accuracy if (a["defence"], a["batch_size"]) == (defence, batch_size)]
            shown = accuracy_cell(right[0] if right else [])
            parts.append(f"| {defence} | " + " | ".join(cells) + f" | {100 * exposed:.1f} % | {shown} |")
        parts.append("")
    return "\n".join(parts)


def _percent(row: Row, threshold: Threshold) -> str:
    return f"{100 * row['recall'][threshold.key]:.0f}"


def accuracy_cell(accuracies: Sequence[float]) -> str:
    """Mean accuracy in percent, with its 95 % interval where there are several trainings."""
    if not accuracies:
        return "–"
    if len(accuracies) == 1:
        return f"{100 * accuracies[0]:.1f}"
    found = mean_interval(accuracies)
    return f"{100 * found.mean:.1f} ± {100 * found.half_width:.1f}"


def heat_map(rows: Sequence[Row]) -> bytes:
    """R at 60 dB, one panel a batch size."""
    sizes = sorted({row["batch_size"] for row in rows})
    attacks = list(dict.fromkeys(row["attack"] for row in rows))
    defences = list(dict.fromkeys(row["defence"] for row in rows))
    values = {(r["batch_size"], r["defence"], r["attack"]): r["recall"][FAITHFUL.key] for r in rows}
    figure = new_figure(1.2 + 2.4 * len(sizes), 1.4 + 0.34 * len(defences))
    for panel, (axis, size) in enumerate(zip(figure.subplots(1, len(sizes), squeeze=False)[0], sizes, strict=True)):
        grid = [[values[size, d, a] for a in attacks] for d in defences]
        axis.imshow(grid, vmin=0, vmax=1, cmap="YlOrRd", aspect="auto")
        for y, line in enumerate(grid):
            for x, value in enumerate(line):
                axis.text(x, y, f"{100 * value:.0f}", ha="center", va="center", fontsize=7)
        axis.set_xticks(range(len(attacks)), attacks, rotation=45, ha="right", fontsize=7)
        axis.set_yticks(range(len(defences)), defences if panel == 0 else [""] * len(defences), fontsize=7)
        axis.set_title(f"B = {size}", fontsize=9)
    return picture_of(figure, dpi=120)
