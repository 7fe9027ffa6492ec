"""An audit's JSON, read back: whatever else a file holds is one sentence."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from qbi.errors import DataError, first_line
from qbi.metrics import THRESHOLDS

SCHEMA = "qbi-audit/4"
"""What an audit's JSON is called inside; `docs/report.schema.json` describes it."""

LARGEST = 64 * 2**20
"""Bytes that are read; reports of models with thousands of layers have a few millions."""

STATES = ("leaks", "nothing read", "not tested")
"""The second was said by versions before 0.3; none says it any more."""


def load_audit(path: Path) -> dict[str, Any]:
    """The document that `qbi audit` wrote, with the parts that a comparison needs as they must be."""
    if not path.is_file():
        raise DataError(f"{path}: no such file; give an audit.json that qbi audit wrote.")
    if path.stat().st_size > LARGEST:
        raise DataError(f"{path}: {path.stat().st_size:,} bytes, more than any report has; give an audit.json.")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError, OSError) as problem:
        raise DataError(f"{path}: not readable as JSON ({first_line(problem)}); give an audit.json.") from None
    if not isinstance(found, dict) or not str(found.get("schema", "")).startswith("qbi-audit/"):
        raise DataError(f"{path}: not an audit; give an audit.json that qbi audit wrote.")
    if found["schema"] != SCHEMA:
        raise DataError(f"{path}: {str(found['schema'])[:40]}, and this version reads {SCHEMA}; run the audit again.")
    wrong = next((place for place, test in PARTS.items() if not _holds(found, place, test)), None)
    if wrong is not None:
        raise DataError(f"{path}: “{wrong}” is missing or damaged; run the audit again.")
    return found


def _holds(document: dict[str, Any], place: str, test: Callable[[Any], bool]) -> bool:
    """Whether what stands at a place, in every entry of a list, passes the test."""
    values: list[Any] = [document]
    for name in place.split("."):
        values = [v for value in values for v in (value if isinstance(value, list) else [value])]
        if not all(isinstance(v, dict) and name in v for v in values):
            return False
        values = [v[name] for v in values]
    return all(map(test, values))


def _is_share(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and math.isfinite(value) and 0 <= value <= 1 + 1e-9


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


def _has_shares(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(v, dict) and _is_share(v.get("mean")) for v in value.values())


def _is_empty_or(part: str) -> Callable[[Any], bool]:
    return lambda value: value is None or (isinstance(value, dict) and _is_share(value.get(part)))


PARTS: dict[str, Callable[[Any], bool]] = {
    "verdict.text": _is_text,
    "verdict.status": lambda value: value in STATES,
    "verdict.share": _is_share,
    "verdict.threshold": lambda value: value in [t.key for t in THRESHOLDS],
    "model.name": _is_text,
    "data.name": _is_text,
    "data.kind": _is_text,
    "client": lambda value: isinstance(value, dict),
    "batches": lambda value: isinstance(value, int),
    "seed": lambda value: isinstance(value, int),
    "outcomes": _is_list,
    "outcomes.layer": _is_text,
    "outcomes.status": lambda value: value in STATES,
    "outcomes.share": _is_share,
    "attacks": _is_list,
    "attacks.attack": _is_text,
    "attacks.layer": _is_text,
    "attacks.share": _is_share,
    "attacks.recovered_from_gradients": _has_shares,
    "side_information": _is_list,
    "side_information.what": _is_text,
    "side_information.layer": _is_text,
    "side_information.share": _is_share,
    "sentences": _is_empty_or("words"),
}
"""What must stand where; a name after a list's is looked up in each of its entries."""
