"""Signs of a crafted model: in its parameters before any data are touched, and in the step it provokes."""

from qbi.detection.gradients import layer_dsnr, row_dsnr
from qbi.detection.parameters import Sign, inspect_parameters

__all__ = ["Sign", "inspect_parameters", "layer_dsnr", "row_dsnr"]
