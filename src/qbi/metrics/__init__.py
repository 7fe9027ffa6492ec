"""How much leaked: thresholds, one-to-one matching, similarity, means and intervals."""

from qbi.metrics.guess import Guess
from qbi.metrics.intervals import mean_interval
from qbi.metrics.matching import Recoveries, match, nearest_shown, shares
from qbi.metrics.similarity import l1, psnr, ssim
from qbi.metrics.thresholds import CLEAR, EXACT, FAITHFUL, RECOGNISABLE, THRESHOLDS, Threshold

__all__ = [
    "CLEAR",
    "EXACT",
    "FAITHFUL",
    "RECOGNISABLE",
    "THRESHOLDS",
    "Guess",
    "Recoveries",
    "Threshold",
    "l1",
    "match",
    "mean_interval",
    "nearest_shown",
    "psnr",
    "shares",
    "ssim",
]
