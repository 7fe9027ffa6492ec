"""Shows what a federated-learning server could read out of its clients' gradients, and stops it.

`qbi.audit(model, data)` is the main job; the parts it is made of are the packages below.
"""

import importlib
from typing import Any

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """`qbi.audit` without importing torch before it is asked for."""
    if name == "audit":
        return importlib.import_module("qbi.audit")
    raise AttributeError(f"module 'qbi' has no attribute {name!r}")
