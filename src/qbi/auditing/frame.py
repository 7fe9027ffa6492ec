"""An audit as a table: one row for each attack on each layer."""

from typing import Any

from qbi.auditing.result import AuditResult
from qbi.errors import MissingExtra


def to_frame(result: AuditResult) -> Any:
    """A `pandas.DataFrame`; layers that no attack stands for have a row without one."""
    try:
        import pandas
    except ImportError:
        raise MissingExtra("pandas", "frames") from None
    rows = [*_tried(result), *_others(result)]
    return pandas.DataFrame(rows, columns=list(dict.fromkeys(key for row in rows for key in row)))


def _tried(result: AuditResult) -> list[dict[str, Any]]:
    states = {o.layer: o.status for o in result.outcomes}
    return [
        {
            "model": result.model,
            "layer": attack.layer,
            "status": states.get(attack.layer, "not tested"),
            "attack": attack.attack,
            "crafted": attack.crafted,
            "unit": attack.unit,
            "share": attack.share_at(result.threshold),
            **{str(threshold): interval.mean for threshold, interval in attack.recovered.items()},
            **attack.measured.document(),
        }
        for attack in result.attacks
    ]


def _others(result: AuditResult) -> list[dict[str, Any]]:
    """Layers without an attack: not tested, or read without one, as tables of tokens are."""
    tried = {a.layer for a in result.attacks}
    return [
        {"model": result.model, "layer": o.layer, "status": o.status, "share": o.share, "reason": o.reason}
        for o in result.outcomes
        if o.layer not in tried
    ]
