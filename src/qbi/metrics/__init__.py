"""How much leaked: A, P, R by activations, recovery by gradients, similarity, intervals."""

from qbi.metrics.intervals import mean_interval, share_interval
from qbi.metrics.leakage import Observation, leakage, observe
from qbi.metrics.matching import Threshold, match, thresholds_for
from qbi.metrics.similarity import l1, psnr, ssim

__all__ = [
    "Observation",
    "Threshold",
    "l1",
    "leakage",
    "match",
    "mean_interval",
    "observe",
    "psnr",
    "share_interval",
    "ssim",
    "thresholds_for",
]
