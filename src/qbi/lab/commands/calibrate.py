"""`qbi calibrate`: how sure `qbi inspect` is."""

import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from qbi.cli.common import Device, ImageSource, Json, announce, checked_device, console, counted, progress_bar
from qbi.files import check_place, to_json, write_atomically


def calibrate(
    data: ImageSource = "builtin:photos",
    seeds: Annotated[int, typer.Option(min=1, help="Trainings of each architecture with each optimiser.")] = 1,
    epochs: Annotated[int, typer.Option(min=1, help="Longest training.")] = 10,
    images: Annotated[int, typer.Option(min=128, help="Images to train on, where they are painted.")] = 1000,
    size: Annotated[int, typer.Option(min=8, help="Side of the images in pixels, where they are scaled.")] = 32,
    out: Annotated[Path, typer.Option(help="Folder for the picture and the JSON.")] = Path("out/calibrate"),
    device: Device = "cpu",
    json: Json = False,
) -> None:
    """Train benign models, craft malicious ones, and count how many of each `qbi inspect` reports.

    [bold]Example:[/bold] qbi calibrate --data cifar-10-python.tar.gz --seeds 4 --device cuda
    """
    from qbi.data.open import open_images
    from qbi.lab.calibrate import calibrate as run
    from qbi.lab.calibrate import trainings
    from qbi.lab.report.roc import roc_picture

    check_place(out)
    photos = open_images(data, size=size, count=images, seed=0)
    where = checked_device(device)
    announce(
        f"{counted(trainings(photos, seeds), 'training')} of {counted(epochs, 'epoch')} on {len(photos):,} images."
    )
    with progress_bar("models trained") as tell:
        found = run(
            photos,
            seeds,
            epochs,
            where,
            lambda done, total: tell("models trained", done, total),
        )
    summary = found.summary()
    groups = {"benign": found.benign, "held_out": found.held_out, "crafted": found.crafted}
    models = {
        group: [asdict(m) | {"suspicion": _finite(m.suspicion)} for m in judged] for group, judged in groups.items()
    }
    document = to_json({"data": photos.name, "bounds": dict(found.bounds), "summary": summary, "models": models})
    write_atomically(out / "calibrate.json", document)
    picture = roc_picture(found.curves(), [m.strength for m in found.benign], [m.strength for m in found.crafted])
    write_atomically(out / "roc.png", picture)
    if json:
        typer.echo(document, nl=False)
        return
    for title, key in (("benign models that the bounds were set on", "benign"), ("other benign models", "held_out")):
        reported = [m for m in groups[key] if m.strength > 1]
        console.print(f"{len(reported)} of {len(groups[key])} {title} are reported.")
        for model in reported:
            console.print(f"  reported: {model.family}, {model.variant}: {model.strength:.2f}")
    missed = [m for m in found.crafted if m.strength <= 1]
    console.print(f"{len(found.crafted) - len(missed)} of {len(found.crafted)} crafted models are found.")
    for model in missed:
        console.print(f"  missed: {model.family}, {model.variant}: {model.strength:.2f}")
    console.print("Servers that know the detectors:")
    for evasion in found.evasions:
        verdict = "found" if evasion.judged.strength > 1 else "missed"
        console.print(f"  {verdict}: {evasion.name}; it reads {100 * evasion.recall:.0f} % of a batch of 20")
    console.print(f"ROC: {out / 'roc.png'}   JSON: {out / 'calibrate.json'}")


def _finite(suspicion: Mapping[str, float]) -> dict[str, float | None]:
    """Detectors that had nothing to judge have no value."""
    return {name: value if math.isfinite(value) else None for name, value in suspicion.items()}
