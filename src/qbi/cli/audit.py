"""`qbi audit`: the main job."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.table import Table

from qbi.cli.common import Device, Json, Seed, checked_device, console, percent, progress_bar
from qbi.errors import BadValue
from qbi.files import to_json, write_atomically

MOST_PIXELS = 2**28
"""Pixels of synthetic photos that are painted at the most; their batch as floats takes twelve times as many bytes."""

if TYPE_CHECKING:
    from qbi.audit import AuditResult


def audit(
    data: Annotated[
        str,
        typer.Option(help="'photos' (built in), a folder or archive of images, CIFAR-10, or hf:NAME."),
    ] = "photos",
    attack: Annotated[Literal["qbi", "pairs", "trap-weights"], typer.Option(help="What the server does.")] = "qbi",
    neurons: Annotated[int, typer.Option(min=1, help="Neurons of the attacked layer, N.")] = 200,
    batch_size: Annotated[int, typer.Option(min=2, help="Samples in the client's batch, B.")] = 20,
    size: Annotated[int, typer.Option(min=4, help="Side of the images in pixels.")] = 64,
    norm: Annotated[Literal["none", "batch", "layer"], typer.Option(help="Normalisation in the model.")] = "none",
    trap_scale: Annotated[float, typer.Option(help="Scale of trap weights, below 1.")] = 0.95,
    fail_above: Annotated[float | None, typer.Option(min=0, max=1, help="Exit with 1 when R exceeds this.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for the picture and the JSON.")] = Path("out/audit"),
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Skip unreadable images instead of stopping.")] = False,
    seed: Seed = 0,
    device: Device = "cpu",
    json: Json = False,
) -> None:
    """Mount an attack on the paper's image CNN, run one real client step, and read the samples back.

    Without options: QBI with 200 neurons on 20 built-in synthetic photos. Writes a picture and a JSON.

    [bold]Examples:[/bold]

      qbi audit

      qbi audit --attack pairs --batch-size 50

      qbi audit --data ./photos --size 128 --fail-above 0.1
    """
    from qbi.audit import audit_images
    from qbi.data.open import open_images
    from qbi.report.pictures import side_by_side

    if fail_above is not None and not 0 <= fail_above <= 1:
        raise BadValue(f"--fail-above: {fail_above} is no share; R lies between 0 and 1.")
    where = checked_device(device)
    wanted = batch_size + (neurons if attack == "pairs" else 0)
    if data == "photos" and wanted * size**2 > MOST_PIXELS:
        raise BadValue(
            f"audit: {wanted} photos of {size}×{size} are more than fit; lower --batch-size, --neurons or --size."
        )
    with progress_bar("loading images") as bar:
        images = open_images(
            data,
            size=size,
            count=wanted,
            seed=seed,
            skip_bad=skip_bad,
            progress=lambda n: bar.advance(bar.task_ids[0], n),
        )
    with progress_bar("PAIRS groups" if attack == "pairs" else "attacking") as bar:
        result = audit_images(
            images,
            attack=attack,
            neurons=neurons,
            batch_size=batch_size,
            norm=None if norm == "none" else norm,
            trap_scale=trap_scale,
            seed=seed,
            device=where,
            progress=lambda done, total: bar.update(bar.task_ids[0], completed=done, total=total),
        )
    picture = side_by_side(result.truth, result.reconstruction, ("what the client holds", "what the server reads"))
    write_atomically(out / "audit.png", picture)
    document = to_json(result.document())
    write_atomically(out / "audit.json", document)
    if json:
        typer.echo(document, nl=False)
    else:
        _show(result, out)
    if fail_above is not None and result.recall > fail_above:
        raise typer.Exit(1)


def _show(result: "AuditResult", out: Path) -> None:
    title = f"{result.attack} on {result.data}: N = {result.neurons}, B = {result.batch_size}, M = {result.features}"
    table = Table(title=title, min_width=len(title))
    table.add_column("")
    for name in ("A %", "P %", "R %"):
        table.add_column(name, justify="right")
    measured = result.measured
    table.add_row("measured", percent(measured.active), percent(measured.precision), percent(measured.recall))
    for name, values in (
        ("predicted for this batch", result.predicted),
        ("limit on normal data", result.limit),
    ):
        table.add_row(name, *(percent(values[key]) for key in ("active", "precision", "recall")))
    console.print(table)
    levels = ", ".join(f"{r.threshold}: {percent(r.recall)} %" for r in result.recoveries)
    console.print(f"Recovered from gradients: {levels}.")
    count = int(result.recoveries[0].recovered.sum())
    console.print(f"The server reads {count} of {result.batch_size} images exactly, through {result.layer}.")
    console.print(f"Picture: {out / 'audit.png'}   JSON: {out / 'audit.json'}   ({result.seconds:.1f} s)")
