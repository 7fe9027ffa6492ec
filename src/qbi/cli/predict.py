"""`qbi predict`: theory for neurons × batch × features, or the law of any attack that has one."""

from dataclasses import asdict
from typing import Annotated

import typer
from rich.table import Table

from qbi.cli.common import Json, Seed, console, percent
from qbi.errors import BadValue
from qbi.files import to_json

MOST_FEATURES = 20_000
"""Values up to which noise is drawn; with more, samples of noise are as good as orthogonal."""

MOST_FIRING = 2**27
"""Pairs of neurons and samples, of samples, or of samples and values, that are held in memory at the most."""


def predict(
    neurons: Annotated[int, typer.Option(help="Neurons of the attacked layer, N.")] = 1000,
    batch_size: Annotated[int, typer.Option(help="Samples in the client's batch, B.")] = 20,
    features: Annotated[int, typer.Option(help="Values in one sample, M.")] = 3072,
    exact: Annotated[bool, typer.Option(help="Use the exact bias at finite M.")] = False,
    wanted: Annotated[float | None, typer.Option(help="Also say how many neurons reach this R (0 to 1).")] = None,
    attack: Annotated[
        str | None, typer.Option(help="Instead of QBI's closed forms, the law of this attack on normal data.")
    ] = None,
    seed: Seed = 0,
    json: Json = False,
) -> None:
    """Say what theory expects of a QBI layer on normal data: bias, A, P, R. Needs no data and no model.

    [bold]Examples:[/bold]

      qbi predict --neurons 200 --batch-size 20 --features 3072

      qbi predict --attack cascade --neurons 1000 --batch-size 200
    """
    if attack is not None:
        _by_law(attack, neurons, batch_size, features, seed, json=json)
        return
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


def _by_law(key: str, neurons: int, batch_size: int, features: int, seed: int, *, json: bool) -> None:
    """Draw what the attack's law says on normal data."""
    import torch

    from qbi.attacks import InGramSpace, Knowledge
    from qbi.attacks.registry import select
    from qbi.errors import require_positive
    from qbi.gram import gram
    from qbi.randomness import generator

    require_positive("predict", neurons=neurons, batch_size=batch_size, features=features)
    if neurons * batch_size > MOST_FIRING or batch_size * max(batch_size, min(features, MOST_FEATURES)) > MOST_FIRING:
        raise BadValue(
            f"predict: N = {neurons:,} and B = {batch_size:,} are more than a law is drawn for; lower --neurons or "
            "--batch-size, or leave --attack out for QBI's closed forms."
        )
    (kind,) = select([key], "predict")
    knowledge = Knowledge(batch_size, neurons, features)
    if not kind.has_law or kind.auxiliary_needed(knowledge):
        raise BadValue(f"--attack: {key} has no law that needs no data; `qbi audit --attack {key}` measures it.")
    draws = generator(seed, "predict")
    if features <= MOST_FEATURES:
        x = torch.randn(batch_size, features, generator=draws)
        batch = InGramSpace(gram(x), features, x.double().sum(1))
    else:
        batch = InGramSpace(features * torch.eye(batch_size, dtype=torch.float64), features)
    (found,) = kind.prepare(knowledge).expected(batch, [neurons], draws)
    if json:
        typer.echo(to_json({"attack": key, "neurons": neurons, "batch_size": batch_size, **found.document()}), nl=False)
        return
    console.print(
        f"Expected of {kind.name} on normal data: N = {neurons}, B = {batch_size}, M = {features}: "
        f"A {percent(found.active)} %, P {percent(found.precision)} %, R {percent(found.recall)} %."
    )
