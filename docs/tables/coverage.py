"""What the quick tests run through."""

from tables.reading import load, table


def coverage() -> str:
    """Statements of each room, and the share that is run."""
    data = load("coverage")
    rows = [[f"`{r['room']}`", f"{r['statements']:,}", f"{100 * r['run']:.0f} %"] for r in data["rows"]]
    total = data["total"]
    return table(
        ["room", "statements", "run"], [*rows, ["all", f"{total['statements']:,}", f"{100 * total['run']:.0f} %"]]
    )
