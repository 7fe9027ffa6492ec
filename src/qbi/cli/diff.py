"""`qbi diff`: two audits, before and after a change."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from qbi.cli.common import Json, console, percent, plain
from qbi.errors import BadValue
from qbi.files import to_json

if TYPE_CHECKING:
    from qbi.report.comparison import AuditDiff, Changed

WORSE, UNKNOWN = 1, 3
"""Exit codes: more is read than before; what was read before could not be tested again."""


def diff(
    before: Annotated[Path, typer.Argument(help="The audit.json of the first audit.")],
    after: Annotated[Path, typer.Argument(help="The audit.json of the second one.")],
    tolerance: Annotated[
        float, typer.Option(min=0, max=1, help="Shares that differ by no more than this are the same.")
    ] = 0.0,
    json: Json = False,
) -> None:
    """Compare two audits, before and after a change: what a server reads now, layer by layer; exit code 1 if it got worse.

    Worse is a model or a layer that is read more, that leaks and did not, or that was tested and no longer is. Exit code 3: what leaked
    before was not tested again.

    [bold]Examples:[/bold]

      qbi diff before/audit.json after/audit.json

      qbi diff main.json branch.json --tolerance 0.05 --json
    """
    from qbi.report.comparison import compare_audits
    from qbi.report.saved import load_audit

    if not 0 <= tolerance <= 1:
        raise BadValue(f"--tolerance: {tolerance} is no share; give a number from 0 to 1.")
    found = compare_audits(load_audit(before), load_audit(after), tolerance)
    if json:
        typer.echo(to_json(found.document()), nl=False)
    else:
        _show(found)
    if found.got_worse:
        raise typer.Exit(WORSE)
    if found.change == "unknown":
        raise typer.Exit(UNKNOWN)


def _show(found: "AuditDiff") -> None:
    _table("layers", ("before", "after"), [(c, (c.status_before, c.status_after)) for c in found.layers])
    exact = [(c, (percent(c.exact_before), percent(c.exact_after))) for c in found.attacks]
    _table("attacks and side information", ("exact before, %", "exact after, %"), exact)
    console.print(plain(found.verdict), style="bold", highlight=False)
    for line in found.settings:
        console.print(plain(f"? The audits differ in their settings too: {line}"), style="yellow", highlight=False)


def _table(title: str, heads: tuple[str, str], rows: "list[tuple[Changed, tuple[str, str]]]") -> None:
    table = Table(title=title)
    for name in ("", *heads, "read before, %", "read after, %", "change"):
        table.add_column(name, justify="right" if "%" in name else "left", overflow="fold")
    for row, more in rows:
        name = row.layer if row.what == "layer" else f"{row.what}, {row.layer}"
        change = "" if row.change == "same" else row.change
        style = "red" if row.change == "worse" else None
        table.add_row(plain(name), *more, percent(row.before), percent(row.after), change, style=style)
    if rows:
        console.print(table)
