"""What the tests run through."""

from tables.reading import load, table


def coverage() -> str:
    """Room by room, and in all."""
    found = load("coverage")
    rows = [*found["rows"], {"room": "all", **found["total"]}]
    return table(
        ["room", "statements", "run by quick tests, %"],
        [[r["room"], f"{r['statements']:,}", f"{100 * r['run']:.0f}"] for r in rows],
    )
