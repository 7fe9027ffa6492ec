"""`qbi measure`: the measurements behind the tables of the pages."""

from inspect import signature
from pathlib import Path
from typing import Annotated

import typer

from qbi.cli.common import announce, console
from qbi.errors import BadValue
from qbi.files import check_place, to_json, write_atomically


def measure(
    name: Annotated[str, typer.Argument(help="Which; all are named where none is given.")] = "",
    data: Annotated[str, typer.Option(help="The images, as `qbi data` names them.")] = "photos",
    out: Annotated[
        Path | None, typer.Option(help="The file to write; in a clone, the one that the pages are made of.")
    ] = None,
    only: Annotated[
        str, typer.Option(help="Entries whose names have this part, where a measurement keeps its entries.")
    ] = "",
) -> None:
    """Measure what a table of the pages shows, and write it down.

    [bold]Examples:[/bold]

      qbi measure

      qbi measure best-case --data cifar-10-python.tar.gz

      qbi measure audit-times --out times.json

      qbi measure sentences --data aclImdb.tar.xz --only BERT-768
    """
    from qbi.lab.measurements import CLONE, MEASUREMENTS

    if not name:
        for known in MEASUREMENTS.values():
            console.print(f"{known.name:14}{known.question}")
        return
    if name not in MEASUREMENTS:
        raise BadValue(f"measure: {name!r}; there are {', '.join(MEASUREMENTS)}.")
    asked = MEASUREMENTS[name]
    place = out or (CLONE / asked.place if (CLONE / "docs").is_dir() else Path(f"{name}.json"))
    check_place(place.parent)
    if only and "only" not in signature(asked.measure).parameters:
        raise BadValue(f"--only: {name} is measured as a whole; leave it out.")
    announce(asked.question)
    write_atomically(place, to_json(asked.measure(data, only=only) if only else asked.measure(data)))
    console.print(f"Written: {place}")
