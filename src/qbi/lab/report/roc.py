"""The detectors' ROC curves, and how far benign and crafted models lie apart, as one picture."""

from collections.abc import Mapping, Sequence

from qbi.report.plotting import new_figure, picture_of

Points = Sequence[tuple[float, float]]


def roc_picture(curves: Mapping[str, Points], benign: Sequence[float], crafted: Sequence[float]) -> bytes:
    """Left the curves; right the strengths of benign and crafted models, the bound at 1."""
    import numpy as np

    figure = new_figure(9, 3.6)
    left, right = figure.subplots(1, 2)
    for name, points in curves.items():
        left.plot([p[0] for p in points], [p[1] for p in points], label=name, linewidth=1.6)
    left.axvline(0.01, color="grey", linewidth=0.8, linestyle=":")
    left.set(xlabel="false-positive rate", ylabel="share of crafted models found", xlim=(-0.01, 0.2), ylim=(0, 1.03))
    left.legend(fontsize=7, loc="lower right")
    bins = np.linspace(0, 4, 60)
    for values, label in ((benign, "benign, trained"), (crafted, "crafted")):
        right.hist(np.clip(values, 0, 4), bins=bins, label=f"{label} ({len(values)})", alpha=0.65)
    right.axvline(1, color="black", linewidth=0.8)
    right.set(xlabel="strongest suspicion / its bound (last bar: 4 and more)", ylabel="models")
    right.legend(fontsize=8)
    return picture_of(figure, dpi=130)
