"""How well something was read, in the words of its kind of data: dB are for pictures, spreads for all else."""

from collections.abc import Mapping

from qbi.metrics import THRESHOLDS, Threshold

SPREADS = 4.0
"""The range, in standard deviations of a feature, on which all but pictures are judged: two to either side."""


def threshold_words(threshold: Threshold, kind: str) -> str:
    """A threshold as a reader of this kind of data understands it.

    >>> threshold_words(THRESHOLDS[1], "images"), threshold_words(THRESHOLDS[1], "numbers")
    ('at 60 dB', "within 0.4 % of a feature's spread")
    """
    if kind == "images" or threshold.psnr is None:
        return threshold.words
    return f"within {_share(threshold):.2g} % of a feature's spread"


def shares_in_words(shares: Mapping[Threshold, float], kind: str) -> str:
    """What was read at each threshold, in percent, in one line.

    >>> shares_in_words(dict.fromkeys(THRESHOLDS, 0.5), "numbers")
    "exact: 50.0 %; within 0.4, 13, 45 % of a feature's spread: 50.0, 50.0, 50.0 %"
    """
    if kind == "images":
        return ", ".join(f"{threshold}: {100 * share:.1f} %" for threshold, share in shares.items())
    exact = ", ".join(f"{t}: {100 * share:.1f} %" for t, share in shares.items() if t.psnr is None)
    loose = {t: share for t, share in shares.items() if t.psnr is not None}
    within = ", ".join(f"{_share(t):.2g}" for t in loose)
    return f"{exact}; within {within} % of a feature's spread: {', '.join(f'{100 * s:.1f}' for s in loose.values())} %"


def level_words(kind: str) -> tuple[str, str]:
    """The loose thresholds together, and what they mean: an entry of a glossary."""
    if kind == "images":
        return (
            "19, 30, 60 dB",
            "A picture one recognises; a good one; one without a difference that an eye could see.",
        )
    shares = ", ".join(f"{_share(t):.2g}" for t in reversed(THRESHOLDS) if t.psnr is not None)
    return f"within {shares} % of a spread", "How far off a value is, typically, in standard deviations of its feature."


def _share(threshold: Threshold) -> float:
    return 100 * float(threshold.largest_error(SPREADS) ** 0.5)
