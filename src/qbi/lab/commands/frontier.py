"""`qbi frontier`: what the budget costs in accuracy, and what lowers the price."""

import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from qbi.cli.common import (
    Device,
    ImageSource,
    Json,
    announce,
    checked_device,
    console,
    counted,
    progress_bar,
    some,
    words,
)
from qbi.errors import BadValue
from qbi.files import check_place, to_json, write_atomically

if TYPE_CHECKING:
    from qbi.lab.frontier import FrontierCell


def frontier(
    data: ImageSource = "builtin:photos",
    networks: Annotated[str, typer.Option(help="two-layer, paper-cnn, quickstart.")] = "two-layer",
    noises: Annotated[
        str, typer.Option(help="σ; plain is trained as it is, 0 is clipping alone.")
    ] = "plain,0.03,0.1,0.3",
    batch_sizes: Annotated[str, typer.Option(help="Samples in a step.")] = "64",
    optimisers: Annotated[str, typer.Option(help="adam, sgd (with momentum 0.9).")] = "adam",
    rates: Annotated[
        str,
        typer.Option(
            help="Learning rates; the best for each setting is shown. Each optimiser's own three, if not given."
        ),
    ] = "",
    remedies: Annotated[
        str,
        typer.Option(help="none, averaged, narrow, frozen, low-rank, low-frequency, pretrained, accumulated."),
    ] = "none",
    epochs: Annotated[int, typer.Option(help="Times each sample takes part.")] = 5,
    seeds: Annotated[int, typer.Option(help="Trainings of each setting.")] = 3,
    jobs: Annotated[int, typer.Option(help="Processes.")] = 1,
    device: Device = "cpu",
    out: Annotated[Path, typer.Option(help="Where to write frontier.json.")] = Path("out/frontier"),
    json: Json = False,
) -> None:
    """Train small networks under the budget and show accuracy against bits.

    [bold]Examples:[/bold]

      qbi frontier --data cifar-10-python.tar.gz

      qbi frontier --data cifar-10-python.tar.gz --networks quickstart --optimisers sgd --batch-sizes 200 --rates 0.3 --epochs 15
    """
    from qbi.data.open import open_images
    from qbi.lab.frontier import compute
    from qbi.lab.frontier_tables import best_rates, curves, settings

    if seeds < 1 or epochs < 1:
        raise BadValue(f"frontier: {seeds} seeds, {epochs} epochs; both must be positive.")
    check_place(out)
    cells = _cells(networks, optimisers, batch_sizes, noises, remedies, rates, epochs, seeds)
    images = open_images(data, size=32, count=6000, seed=0)
    where = checked_device(device)
    announce(
        f"{counted(len(cells), 'training')} of {counted(epochs, 'epoch')} on {len(images):,} images, {jobs} at a time."
    )
    rows = []
    with progress_bar("trained") as tell:
        for done, row in enumerate(compute(cells, images, device=where, jobs=jobs), 1):
            rows.append(row)
            tell("trained", done, len(cells))
    found = best_rates(rows)
    document = {"data": data, "cells": found, "settings": settings(rows), "curves": curves(found)}
    write_atomically(out / "frontier.json", to_json(document))
    if json:
        typer.echo(to_json(document), nl=False)
        return
    table = Table(title="Accuracy on images not trained on, %")
    for name in ("network", "remedy", "optimiser", "B", "σ", "bits per participation", "accuracy", "rate"):
        table.add_column(name)
    for cell in found:
        table.add_row(*_row(cell))
    console.print(table)
    console.print(f"JSON: {out / 'frontier.json'}")


def _cells(
    networks: str, optimisers: str, batch_sizes: str, noises: str, remedies: str, rates: str, epochs: int, seeds: int
) -> "list[FrontierCell]":
    """Every training that was asked for."""
    from qbi.lab.frontier import NETWORKS, RATES, REMEDIES, FrontierCell

    levels = [-1.0 if w == "plain" else _number(w, "--noises") for w in some("--noises", words(noises))]
    sizes = [int(_number(w, "--batch-sizes")) for w in words(batch_sizes)]
    if min(sizes, default=0) < 1:
        raise BadValue(f"--batch-sizes: {batch_sizes}; all must be positive.")
    kinds = [w.replace("none", "") for w in _known("remedies", remedies, ("none", *REMEDIES[1:]))]
    return [
        FrontierCell(network, optimiser, size, noise, rate, remedy, epochs, seed)  # type: ignore[arg-type]
        for network, optimiser, size, noise, remedy, seed in itertools.product(
            _known("networks", networks, NETWORKS),
            _known("optimisers", optimisers, tuple(RATES)),
            sizes,
            levels,
            kinds,
            range(seeds),
        )
        for rate in ([_number(w, "--rates") for w in words(rates)] or RATES[optimiser])
    ]


def _known(option: str, text: str, known: tuple[str, ...]) -> list[str]:
    for word in words(text):
        if word not in known:
            raise BadValue(f"--{option}: {word!r}; there are {', '.join(known)}.")
    return some(f"--{option}", words(text))


def _row(cell: dict[str, object]) -> list[str]:
    from qbi.theory.guarantees import bits

    noise = float(str(cell["noise"]))
    spread = "" if cell["half_width"] is None else f" ± {cell['half_width']}"
    return [
        str(cell["network"]),
        str(cell["remedy"]) or "–",
        str(cell["optimiser"]),
        str(cell["batch_size"]),
        "plain" if noise < 0 else f"{noise:g}",
        "no bound" if noise <= 0 else f"{bits(noise):.3g}",
        f"{cell['accuracy']}{spread}",
        f"{cell['rate']:g}",
    ]


def _number(text: str, option: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise BadValue(f"{option}: {text!r} is no number.") from None
    if not 0 <= value < float("inf"):
        raise BadValue(f"{option}: {text} must not be negative or infinite.")
    return value
