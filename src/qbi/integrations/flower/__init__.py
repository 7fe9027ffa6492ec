"""Flower: a guard for clients, an auditing server for one's own test clients, readers for what a run leaves behind."""

import os

from qbi.errors import MissingExtra

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
try:
    import flwr  # noqa: F401
except ImportError as problem:
    raise MissingExtra("flwr", "flower") from problem

from qbi.integrations.flower.guard import guarded_by, leak_guard
from qbi.integrations.flower.records import save_record, state_of
from qbi.integrations.flower.server import Recording, audit_server_app, read_reply

__all__ = [
    "Recording",
    "audit_server_app",
    "guarded_by",
    "leak_guard",
    "read_reply",
    "save_record",
    "state_of",
]
