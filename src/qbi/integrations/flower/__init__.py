"""Flower: a guard for clients, an auditing server for one's own test clients, readers for what a run leaves behind."""

import os

from qbi.errors import MissingExtra

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
try:
    import flwr  # noqa: F401
except ImportError as problem:
    raise MissingExtra("flwr", "flower") from problem

from qbi.integrations.flower.guard import guarded_by, leak_guard
from qbi.integrations.flower.records import load_arrays, save_arrays, state_of
from qbi.integrations.flower.server import Crafted, Recording, audit_server_app, craft

__all__ = [
    "Crafted",
    "Recording",
    "audit_server_app",
    "craft",
    "guarded_by",
    "leak_guard",
    "load_arrays",
    "save_arrays",
    "state_of",
]
