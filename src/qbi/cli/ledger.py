"""`qbi ledger`: what has left about a data set, and what is left of its budget."""

from pathlib import Path
from typing import Annotated

import typer

from qbi.cli.common import Json, console
from qbi.errors import BadValue, number_in
from qbi.files import check_file, to_json, write_atomically

ROUNDING = 1e-9
"""What adding many entries may lose."""


def ledger(
    path: Annotated[Path, typer.Argument(help="The SQLite file that a private training keeps (`ledger=`).")],
    data: Annotated[str | None, typer.Option(help="Show one data set only.")] = None,
    limit: Annotated[
        float | None, typer.Option(help="Bits about one sample that may leave; the default total.")
    ] = None,
    delta: Annotated[float, typer.Option(help="δ at which ε is said.")] = 1e-5,
    plot: Annotated[
        Path | None, typer.Option(help="Write a picture of the bits over participations here (.png or .svg).")
    ] = None,
    json: Json = False,
) -> None:
    """Show what a ledger holds: bits about one sample, by data set and model family; exit code 1 if a budget is used up.

    [bold]Examples:[/bold]

      qbi ledger ~/clinic.ledger

      qbi ledger ~/clinic.ledger --limit 3000 --plot spent.png
    """
    from qbi.private.goal import LIFETIME_BITS
    from qbi.private.ledger import Ledger
    from qbi.report.spending import draw, summarise

    most = LIFETIME_BITS if limit is None else limit
    number_in("--limit", most)
    if not 0 < delta < 1:
        raise BadValue(f"--delta: {delta:g} is no probability; give one between 0 and 1, such as 1e-5.")
    if plot is not None:
        check_file(plot)
    entries = Ledger(path).entries(data)
    summary = summarise(entries, most, delta)
    if plot is not None:
        write_atomically(plot, draw(entries, most, plot.suffix.lstrip(".") or "png"))
    if json:
        typer.echo(to_json({"ledger": str(path), "limit": most, "data": [s.document() for s in summary]}), nl=False)
    else:
        for one in summary:
            console.print(str(one), markup=False, highlight=False)
        if not summary:
            console.print("Nothing has left yet.")
    if any(one.bits >= one.limit * (1 - ROUNDING) for one in summary):
        raise typer.Exit(1)
