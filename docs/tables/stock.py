"""Stock filters, and what settings are worth."""

from typing import Any

from tables.reading import RECOGNISABLE, load, table


def filters() -> str:
    """Every stock filter against three servers."""
    rows = []
    for r in load("filters")["rows"]:
        read = [
            f"{100 * r['read'][s]['psnr>30']:.0f}, {100 * r['read'][s][RECOGNISABLE]:.0f}"
            for s in ("passive", "cascade", "qbi")
        ]
        name = r["filter"] + (f" ({r['settings']})" if r["settings"] else "")
        rows.append(
            [name, *read, f"{100 * r['accuracy']:.1f}", _said(r["claimed"]), _said(r["epsilon"]), _said(r["in all"])]
        )
    return table(
        ["filter", "passive", "cascade", "QBI", "accuracy, %", "ε claimed", "ε of a round", "ε of 20 rounds"], rows
    )


def _said(value: Any) -> str:
    if value is None:
        return "–"
    return value if isinstance(value, str) else f"{value:,.3g}" if value < 1000 else f"{value:,.0f}"
