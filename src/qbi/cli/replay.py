"""`qbi replay`: what a real update gives away."""

import math
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from qbi.cli.common import Json, console
from qbi.errors import BadValue
from qbi.files import to_json, write_atomically

MOST_SHOWN = 24


def replay(
    before: Annotated[Path, typer.Argument(help="The model as it was sent (.safetensors, .npz, .pt), or a gradient.")],
    after: Annotated[
        Path | None, typer.Argument(help="The model as it came back; left out, BEFORE is a gradient.")
    ] = None,
    shape: Annotated[str | None, typer.Option(help="Shape of a sample, such as 3,32,32, for pictures.")] = None,
    layer: Annotated[str | None, typer.Option(help="Only this layer.")] = None,
    no_samples: Annotated[bool, typer.Option("--no-samples", help="Write no candidates and no picture.")] = False,
    out: Annotated[Path, typer.Option(help="Folder for what is found.")] = Path("out/replay"),
    json: Json = False,
) -> None:
    """Read what one client's real update gives away, without knowing the truth.

    Candidates are ranked by how many rows gave them; those with two or more are sure to be single samples. For updates
    of one's own clients.

    [bold]Examples:[/bold]

      qbi replay sent.safetensors returned.safetensors --shape 3,32,32

      qbi replay gradient.pt
    """
    from safetensors.torch import save

    from qbi.auditing.replay import difference
    from qbi.auditing.replay import replay as read
    from qbi.data.checkpoint import load_parameters
    from qbi.report.pictures import grid, stretched

    dimensions = _shape(shape)
    first = load_parameters(before)
    update = {n: v.float() for n, v in first.items() if v.is_floating_point()}
    if after is not None:
        update = difference(first, load_parameters(after))
    found = read(update, first if after is not None else None, shape=dimensions or ())
    if layer is not None:
        found = [f for f in found if f.layer == layer]
        if not found:
            raise BadValue(f"--layer: no linear layer with a bias is called {layer!r} there.")
    document = to_json(
        {"before": str(before), "after": None if after is None else str(after), "layers": [f.document() for f in found]}
    )
    write_atomically(out / "replay.json", document)
    best = found[0]
    if not no_samples and len(best.support):
        write_atomically(out / "candidates.safetensors", save({"samples": best.samples, "support": best.support}))
        if dimensions is not None:
            if math.prod(dimensions) != best.samples.shape[1]:
                raise BadValue(
                    f"--shape: {shape} is {math.prod(dimensions)} values, but candidates of {best.layer} have "
                    f"{best.samples.shape[1]}."
                )
            images = stretched(best.samples[:MOST_SHOWN].reshape(-1, *dimensions))
            write_atomically(out / "replay.png", grid(images, "candidates, best first"))
    if json:
        typer.echo(document, nl=False)
        return
    table = Table(title="What this update gives away")
    for name in ("layer", "rows", "rows that moved", "candidates", "sure", "proven"):
        table.add_column(name, justify="left" if name == "layer" else "right")
    for entry in found:
        table.add_row(
            entry.layer, str(entry.rows), str(entry.moved), str(len(entry.support)), str(entry.sure), str(entry.proven)
        )
    console.print(table)
    console.print(
        f"Sure: two rows or more gave the same vector. Proven: a whole batch, each sample silent where the sent weights say so. Everything is under {out}."
    )


def _shape(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        found = ()
    if len(found) != 3 or min(found) < 1:
        raise BadValue(f"--shape: {text!r} is not channels,height,width, such as 3,32,32.")
    return found
