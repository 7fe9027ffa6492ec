"""`qbi compare`: attacks × defences."""

from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.table import Table

from qbi.cli.common import FASTEST, ImageSource, Json, Seed, announce, console, counted, progress_bar, some, words
from qbi.errors import BadValue, number_in
from qbi.files import check_place, to_json, write_atomically

if TYPE_CHECKING:
    from qbi.lab.compare import Judgement, Setting

LARGEST_GAIN = 1e6
"""Rows beyond it overflow in float32."""


def compare(
    attacks: Annotated[str, typer.Option(help="Comma-separated, or all.")] = "all",
    defences: Annotated[str, typer.Option(help="Comma-separated, or all.")] = "all",
    batch_sizes: Annotated[str, typer.Option(help="Comma-separated.")] = "20,64",
    neurons: Annotated[int, typer.Option(min=2, help="Neurons of the attacked layer.")] = 200,
    batches: Annotated[int, typer.Option(min=1, help="Batches a pair is averaged over.")] = 3,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds on the same batch; masks unite, noise averages out.")] = 1,
    epochs: Annotated[int, typer.Option(min=0, help="Epochs of training for the accuracy; 0 leaves it out.")] = 0,
    trainings: Annotated[int, typer.Option(min=1, help="Trainings the accuracy is averaged over.")] = 1,
    optimiser: Annotated[Literal["adam", "sgd"], typer.Option(help="Of the training.")] = "adam",
    learning_rate: Annotated[float, typer.Option(help="Of the training.")] = 1e-3,
    gain: Annotated[float | None, typer.Option(help="Scale crafted rows jointly by this.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Processes; the result does not depend on them.")] = 1,
    data: ImageSource = "builtin:photos",
    size: Annotated[int, typer.Option(min=4, help="Side of the images in pixels, where they are scaled.")] = 32,
    out: Annotated[Path, typer.Option(help="Folder for the heat map, the table and the JSON.")] = Path("out/compare"),
    seed: Seed = 0,
    json: Json = False,
) -> None:
    """Run attacks against defences on the same batches: R, SSIM, values exposed, accuracy, time.

    [bold]Example:[/bold] qbi compare --attacks qbi,imprint --defences none,aggp,drop-close --batch-sizes 20,64
    """
    from qbi.attacks import registry as attacks_by_key
    from qbi.data.open import open_images
    from qbi.defences import registry as defences_by_key
    from qbi.lab.compare import Setting, run_matrix
    from qbi.lab.report.matrix import heat_map, to_markdown

    _check(out, learning_rate, gain)
    chosen_attacks = [a.key for a in attacks_by_key.select(some("--attacks", words(attacks)), "compare")]
    chosen_defences = defences_by_key.select(some("--defences", words(defences)), "compare")
    sizes = _numbers(batch_sizes)
    setting = Setting(neurons, batches, rounds, epochs, trainings, optimiser, learning_rate, gain, seed)
    images = open_images(data, size=size, count=max(sizes) + neurons + 400, seed=seed)
    _announce(len(chosen_attacks), len(chosen_defences), sizes, setting)
    with progress_bar("comparing") as tell:
        outcomes, accuracy = run_matrix(
            images,
            chosen_attacks,
            chosen_defences,
            sizes,
            setting,
            jobs=jobs,
            progress=lambda done, total: tell("comparing", done, total),
        )
    rows = [_plain(outcome) for outcome in outcomes]
    costs = [{"defence": d, "batch_size": b, "accuracies": values} for (d, b), values in accuracy.items()]
    document = to_json({"data": images.name, "setting": asdict(setting), "outcomes": rows, "accuracy": costs})
    write_atomically(out / "compare.json", document)
    write_atomically(out / "compare.md", to_markdown(rows, costs))
    write_atomically(out / "compare.png", heat_map(rows))
    if json:
        typer.echo(document, nl=False)
        return
    _show(images.name, neurons, chosen_attacks, chosen_defences, sizes, outcomes, accuracy)
    console.print(f"Heat map, table and JSON: {out}")


def _announce(attacks: int, defences: int, sizes: list[int], setting: "Setting") -> None:
    updates = attacks * defences * len(sizes) * setting.batches * setting.rounds
    trainings = defences * len(sizes) * setting.trainings if setting.epochs else 0
    announce(
        f"{counted(attacks, 'attack')}, {counted(defences, 'defence')}, batches of {', '.join(map(str, sizes))}: "
        f"{counted(updates, 'update')} to read, {counted(trainings, 'training')}."
    )


def _check(out: Path, learning_rate: float, gain: float | None) -> None:
    """What can be told before anything is computed."""
    check_place(out)
    number_in("--learning-rate", learning_rate, most=FASTEST)
    if gain is not None:
        number_in("--gain", gain, most=LARGEST_GAIN)


def _show(
    data: str,
    neurons: int,
    attacks: list[str],
    defences: list[str],
    sizes: list[int],
    outcomes: "list[Judgement]",
    accuracy: dict[tuple[str, int], list[float]],
) -> None:
    from qbi.lab.report.matrix import accuracy_cell
    from qbi.metrics import FAITHFUL, RECOGNISABLE

    table = Table(title=f"{data}, N = {neurons}: R in percent at 60 dB (at 19 dB)")
    for title in ("B", "defence", *attacks, "ms per step", "accuracy %"):
        table.add_column(title, justify="right")
    for size in sizes:
        for defence in defences:
            mine = [o for o in outcomes if (o.batch_size, o.defence) == (size, defence)]
            cells = [f"{100 * o.recall[FAITHFUL]:.0f} ({100 * o.recall[RECOGNISABLE]:.0f})" for o in mine]
            shown = accuracy_cell(accuracy.get((defence, size), []))
            table.add_row(str(size), defence, *cells, f"{1e3 * max(o.seconds for o in mine):.1f}", shown)
    console.print(table)
    formal = sorted({o.defence for o in outcomes if o.kind == "formal"})
    console.print(f"Formal: {', '.join(formal) or 'none of these'}; the others are heuristic: a measurement, no proof.")


def _plain(outcome: "Judgement") -> dict[str, Any]:
    plain = {f.name: getattr(outcome, f.name) for f in fields(outcome)}
    return plain | {"recall": {t.key: share for t, share in outcome.recall.items()}}


def _numbers(text: str) -> list[int]:
    try:
        numbers = [int(part) for part in words(text)]
    except ValueError:
        raise BadValue(f"--batch-sizes: {text!r} is no list of numbers, such as 20,64.") from None
    if not numbers or min(numbers) < 2:
        raise BadValue(f"--batch-sizes: {text!r}; every batch needs at least 2 samples.")
    return numbers
