"""`qbi claims`: what a federation's privacy settings are worth."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from qbi.cli.common import Json, announce, console, plain
from qbi.errors import BadValue, DataError, QbiError, number_in
from qbi.files import to_json

if TYPE_CHECKING:
    from qbi.auditing.claim_records import Worth

NOT_HELD = 1
"""Exit code where a setting bounds nothing against the server, or less than it claims."""

NOT_SHOWN = 3
"""Exit code where settings in files would hold: files are read, not run, and whether these lines are in force is not shown."""


def claims(
    path: Annotated[
        Path | None,
        typer.Argument(
            help="An NVFlare job or privacy.json, a Flower app, a script; left out, numbers of Opacus by hand."
        ),
    ] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Rounds of the federation; files may say more.")] = None,
    parameters: Annotated[int | None, typer.Option(min=1, help="Parameters of the model.")] = None,
    model: Annotated[Path | None, typer.Option(help="A checkpoint, to count its parameters.")] = None,
    noise_multiplier: Annotated[float | None, typer.Option(min=0, help="Opacus: noise relative to the clip.")] = None,
    sample_rate: Annotated[float | None, typer.Option(help="Opacus: a sample's chance to be in a batch.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Opacus: steps in a round.")] = None,
    delta: Annotated[float, typer.Option(help="Opacus: δ at which ε is said.")] = 1e-5,
    read: Annotated[
        str | None,
        typer.Option(
            help="A model (package.module:callable, file.py:callable): what servers read of its step through each filter."
        ),
    ] = None,
    data: Annotated[str, typer.Option(help="Images for --read: photos, or a data set's archive or folder.")] = "photos",
    size: Annotated[int, typer.Option(min=1, help="Height and width of the images.")] = 32,
    batch_size: Annotated[int, typer.Option(min=1, help="Images in the step that is read.")] = 20,
    json: Json = False,
) -> None:
    """Say what privacy settings are worth against the server: noise, bits, chances, true ε; exit code 1 if one bounds nothing, or less than it claims.

    Exit code 3 if settings in files would hold: whether they are in force is not shown. Files are read, never run; the model of --read is your own code, and is.

    [bold]Examples:[/bold]

      qbi claims jobs/prostate --parameters 7033300 --rounds 100

      qbi claims my-flower-app --read my_app/task.py:make_model --data cifar-10-python.tar.gz

      qbi claims --noise-multiplier 1.1 --sample-rate 0.01 --steps 100 --rounds 10
    """
    from qbi.auditing.claim_files import rounds_in, settings_in
    from qbi.auditing.claim_records import Circumstances, PrivacySetting
    from qbi.auditing.claims import worth
    from qbi.data.checkpoint import load_parameters

    by_hand = {"noise_multiplier": noise_multiplier, "sample_rate": sample_rate, "steps": steps}
    found = settings_in(path) if path is not None else []
    if noise_multiplier is not None:
        missing = [name for name, value in by_hand.items() if value is None]
        if missing:
            raise BadValue(
                f"--{missing[0].replace('_', '-')}: it is missing; Opacus' ε follows from noise, rate and steps."
            )
        number_in("--noise-multiplier", max(noise_multiplier, 1e-300), most=1e6)
        found.append(PrivacySetting("by hand", "Opacus", {**by_hand, "delta": delta}))
    if not found:
        raise DataError(
            f"{path or 'claims'}: no known mechanism in it, so nothing is bounded against the server. Known are those of NVFlare, Flower and Opacus."
        )
    if model is not None:
        parameters = sum(v.numel() for v in load_parameters(model).values())
    filed, complete = rounds_in(path) if path is not None else (None, True)
    stated = rounds is not None or (filed is not None and complete)
    times = max(rounds or 1, filed or 1)  # the larger: fewer rounds than the files say are not to a setting's credit
    judged = [worth(setting, Circumstances(times, parameters)) for setting in found]
    readings = _read(judged, read, data, size, batch_size) if read is not None else []
    if json:
        typer.echo(
            to_json(
                {"rounds": times, "rounds_stated": stated, "settings": [w.document() for w in judged], "read": readings}
            ),
            nl=False,
        )
    else:
        _show(judged, times)
        if not stated:
            counted = "one is" if times == 1 else f"{times:,} are"
            console.print(
                f"Files do not say, in a number that can be read, how many rounds there are; {counted} counted. Give --rounds."
            )
        for one in readings:
            console.print(f"{plain(one['place'])}, {one['mechanism']}, of {batch_size} images:", highlight=False)
            for server, said in one["read"].items():
                words = said if isinstance(said, str) else ", ".join(f"{n} at {t}" for t, n in said.items())
                console.print(f"  – {server}: {plain(words)}", highlight=False)
    if not all(w.holds for w in judged):
        raise typer.Exit(NOT_HELD)
    if path is not None:
        announce("Files are read, not run: whether these lines are in force, and alone, is not shown.")
        raise typer.Exit(NOT_SHOWN)


def _read(judged: "list[Worth]", model: str, data: str, size: int, batch_size: int) -> list[dict[str, Any]]:
    """What servers read through each filter, run by its framework's own code."""
    from qbi.auditing.loading import load_model, users_code
    from qbi.data.images import normalised
    from qbi.data.open import open_images
    from qbi.integrations.filtered import read_through
    from qbi.integrations.stock import filter_of

    images = open_images(data, size=size, count=batch_size + 400, seed=0)
    x, others = normalised(images, slice(0, batch_size)), normalised(images, slice(batch_size, None))
    with users_code(f"--read: {model}"):
        network = load_model(model, {})
        classes = int(network(x[:1]).shape[-1])
    y = images.labels[:batch_size] % classes
    found = []
    for w in judged:
        read: dict[str, Any]
        try:
            read = read_through(filter_of(w.setting), network, x, y, others)
        except QbiError as problem:
            read = {"not run": str(problem)}
        found.append({"place": w.setting.place, "mechanism": w.setting.mechanism, "read": read})
    return found


def _show(judged: "list[Worth]", rounds: int) -> None:
    table = Table(title=f"What these settings are worth against the server, over {rounds} round{'s' * (rounds > 1)}")
    for name in (
        "mechanism",
        "about",
        "noise / clip",
        "ε claimed",
        "ε a round",
        "ε in all",
        "bits in all",
        "1 % becomes",
    ):
        table.add_column(name, justify="left" if name in ("mechanism", "about") else "right")
    for w in judged:
        numbers = (w.noise, w.claimed, w.epsilon, w.epsilon_in_all, w.bits)
        chance = "–" if w.chance is None else f"{100 * w.chance:.3g} %"
        table.add_row(w.setting.mechanism, w.scope, *(_said(n) for n in numbers), chance)
    console.print(table)
    for w in judged:
        console.print(f"{plain(w.setting.place)}, {w.setting.mechanism}:", highlight=False)
        for remark in ([f"defeated by {w.defeated}"] if w.defeated else []) + list(w.remarks):
            console.print(f"  – {plain(remark)}.", highlight=False)


def _said(value: float | None) -> str:
    return (
        "–"
        if value is None
        else "unbounded"
        if math.isinf(value)
        else f"{value:,.4g}"
        if value < 1e4
        else f"{value:,.0f}"
    )
