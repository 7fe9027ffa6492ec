"""`qbi predict`: theory for neurons × batch × features."""

from dataclasses import asdict
from typing import Annotated

import typer
from rich.table import Table

from qbi.cli.common import Json, console, percent
from qbi.files import to_json


def predict(
    neurons: Annotated[int, typer.Option(help="Neurons of the attacked layer, N.")] = 1000,
    batch_size: Annotated[int, typer.Option(help="Samples in the client's batch, B.")] = 20,
    features: Annotated[int, typer.Option(help="Values in one sample, M.")] = 3072,
    exact: Annotated[bool, typer.Option(help="Use the exact bias at finite M.")] = False,
    wanted: Annotated[float | None, typer.Option(help="Also say how many neurons reach this R (0 to 1).")] = None,
    json: Json = False,
) -> None:
    """Say what theory expects of a QBI layer on normal data: bias, A, P, R. Needs no data and no model.

    [bold]Example:[/bold] qbi predict --neurons 200 --batch-size 20 --features 3072
    """
    from qbi import theory

    found = theory.expectation(neurons, batch_size, features, exact=exact)
    needed = None if wanted is None else theory.neurons_needed(wanted, batch_size)
    if json:
        document = asdict(found) | {"bias_kind": "exact" if exact else "asymptotic"}
        if needed is not None:
            document["neurons_needed"] = needed
        typer.echo(to_json(document), nl=False)
        return
    table = Table(title=f"Expected of QBI: N = {neurons}, B = {batch_size}, M = {features}")
    for title in ("bias", "P(fire)·B", "A %", "P %", "R %"):
        table.add_column(title, justify="right")
    table.add_row(
        f"{found.bias:.4f}",
        f"{found.probability * batch_size:.4f}",
        *(percent(v) for v in (found.active, found.precision, found.recall)),
    )
    console.print(table)
    if needed is not None:
        console.print(f"{needed} neurons reach R = {percent(wanted)} %.")
