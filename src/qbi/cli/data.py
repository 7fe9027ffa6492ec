"""`qbi data`: which data sets are found where, and how to get the others."""

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from qbi.cli.common import Json, console
from qbi.data.locating import PUBLISHED, find
from qbi.files import to_json


def data(
    root: Annotated[Path, typer.Option("--data", help="Folder with the data sets or their archives.")] = Path("data"),
    json: Json = False,
) -> None:
    """Say which of the paper's data sets are found, and where the others come from.

    Built in and always there: synthetic photos, Gaussian noise, and text from Python's standard library.

    [bold]Example:[/bold] qbi data --data ~/datasets
    """
    found = {p.name: find(root, p.name) for p in PUBLISHED}
    if json:
        places = {name: None if there is None else str(there.path) for name, there in found.items()}
        sources = {p.name: {"source": p.source, "checksum": p.checksum} for p in PUBLISHED}
        typer.echo(to_json({"found": places, "sources": sources}), nl=False)
        return
    table = Table(title=f"Data below {root}")
    for title in ("data set", "found", "otherwise from", "checksum"):
        table.add_column(title, overflow="fold")
    for published in PUBLISHED:
        there = found[published.name]
        where = "[red]not found[/red]" if there is None else f"[green]{there.path.relative_to(root)}[/green]"
        table.add_row(published.title, where, published.source, published.checksum)
    table.add_row("synthetic photos, noise, text", "[green]built in[/green]", "", "")
    console.print(table)
