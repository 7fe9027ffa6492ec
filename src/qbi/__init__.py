"""Shows what a federated-learning server could read out of its clients' gradients, and stops it.

`qbi.audit(model, data)` is the main job; the names below are the rest of the front door. Nothing heavy is imported before
it is asked for.
"""

import importlib
from typing import TYPE_CHECKING

__version__ = "0.2.0"

if TYPE_CHECKING:
    from qbi.attacks import (
        ATTACKS,
        PAIRS,
        QBI,
        Attack,
        Cascade,
        Imprint,
        Knowledge,
        Mirrored,
        Mounted,
        Passive,
        Reading,
        TrapWeights,
        mount,
    )
    from qbi.auditing import AuditResult, Client, Samples, audit
    from qbi.defences import AGGP, LeakRefused, defended_step
    from qbi.detection import inspect_parameters
    from qbi.errors import BadValue, CannotMount, CannotRead, DataError, MissingExtra, QbiError
    from qbi.extraction import extract
    from qbi.federation import client_step
    from qbi.metrics import CLEAR, EXACT, FAITHFUL, RECOGNISABLE, match
    from qbi.private import Budget, BudgetSpent, Ledger, Private, find_rate, with_group_norm

__all__ = [
    "AGGP",
    "ATTACKS",
    "CLEAR",
    "EXACT",
    "FAITHFUL",
    "PAIRS",
    "QBI",
    "RECOGNISABLE",
    "Attack",
    "AuditResult",
    "BadValue",
    "Budget",
    "BudgetSpent",
    "CannotMount",
    "CannotRead",
    "Cascade",
    "Client",
    "DataError",
    "Imprint",
    "Knowledge",
    "LeakRefused",
    "Ledger",
    "Mirrored",
    "MissingExtra",
    "Mounted",
    "Passive",
    "Private",
    "QbiError",
    "Reading",
    "Samples",
    "TrapWeights",
    "audit",
    "client_step",
    "defended_step",
    "extract",
    "find_rate",
    "inspect_parameters",
    "match",
    "mount",
    "with_group_norm",
]

_ROOMS = {
    "qbi.attacks": (
        [
            "ATTACKS",
            "PAIRS",
            "QBI",
            "Attack",
            "Cascade",
            "Imprint",
            "Knowledge",
            "Mirrored",
            "Mounted",
            "Passive",
            "Reading",
            "TrapWeights",
            "mount",
        ]
    ),
    "qbi.auditing": ["AuditResult", "Client", "Samples", "audit"],
    "qbi.defences": ["AGGP", "LeakRefused", "defended_step"],
    "qbi.errors": ["BadValue", "CannotMount", "CannotRead", "DataError", "MissingExtra", "QbiError"],
    "qbi.detection": ["inspect_parameters"],
    "qbi.extraction": ["extract"],
    "qbi.federation": ["client_step"],
    "qbi.metrics": ["CLEAR", "EXACT", "FAITHFUL", "RECOGNISABLE", "match"],
    "qbi.private": ["Budget", "BudgetSpent", "Ledger", "Private", "find_rate", "with_group_norm"],
}
_ROOM_OF = {name: room for room, names in _ROOMS.items() for name in names}


def __getattr__(name: str) -> object:
    """A public name, imported from its room when it is first asked for."""
    if name in ("AmbientGuard", "LeakGuard"):
        from qbi.private.boundary import THREE_LINES

        raise AttributeError(
            f"qbi.{name} is gone: watching training code could be got around. Now the step is ours:\n{THREE_LINES}"
        )
    if name not in _ROOM_OF:
        raise AttributeError(f"module 'qbi' has no attribute {name!r}")
    found = getattr(importlib.import_module(_ROOM_OF[name]), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
