"""Signs of a crafted model, before any data are touched."""

from qbi.detection.parameters import Sign, inspect_parameters

__all__ = ["Sign", "inspect_parameters"]
