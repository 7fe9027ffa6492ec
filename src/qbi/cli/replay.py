"""`qbi replay`: what a real update gives away."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from qbi.cli.common import Json, console, log, plain
from qbi.errors import BadValue
from qbi.files import check_place, to_json, write_atomically

if TYPE_CHECKING:
    from torch import Tensor

    from qbi.auditing.replay import LayerReplay

MOST_SHOWN = 24


def replay(
    before: Annotated[
        Path,
        typer.Argument(
            help="The model as it was sent (.safetensors, .npz, .pt; NVFlare's .dxo, .fobs), or a gradient."
        ),
    ],
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

    Candidates are ranked by how many rows gave them; those with two or more are likely single samples,
    which is no proof. For updates of one's own clients.

    [bold]Examples:[/bold]

      qbi replay sent.safetensors returned.safetensors --shape 3,32,32

      qbi replay gradient.pt
    """
    from qbi.auditing.replay import difference
    from qbi.auditing.replay import replay as read

    check_place(out)
    dimensions = _shape(shape)
    first = _load(before)
    update = {n: v.float() for n, v in first.items() if v.is_floating_point()}
    if after is not None:
        update = difference(first, _load(after))
    found = read(update, first if after is not None else None, shape=dimensions or ())
    if layer is not None:
        found = [f for f in found if f.layer == layer]
        if not found:
            raise BadValue(f"--layer: no linear layer with a bias is called {layer!r} there.")
    document = to_json(
        {"before": str(before), "after": None if after is None else str(after), "layers": [f.document() for f in found]}
    )
    for name in ("candidates.safetensors", "replay.png"):
        (out / name).unlink(missing_ok=True)  # of an earlier run
    write_atomically(out / "replay.json", document)
    if not no_samples and len(found[0].support):
        _write(found[0], dimensions, out)
    if json:
        typer.echo(document, nl=False)
        return
    _show(found, is_gradient=after is None)
    console.print(f"Everything is under {out}.")


def _load(path: Path) -> "dict[str, Tensor]":
    """A checkpoint, or a file of NVFlare's exchange objects."""
    from qbi.data.checkpoint import load_parameters

    if path.suffix in (".dxo", ".fobs") and path.is_file():
        from qbi.integrations.nvflare.files import load_exchange

        return load_exchange(path)
    return load_parameters(path)


def _show(found: "list[LayerReplay]", *, is_gradient: bool) -> None:
    table = Table(title="What this update gives away")
    for name in ("layer", "rows", "rows that moved", "candidates", "agree", "came apart"):
        table.add_column(name, justify="left" if name == "layer" else "right")
    for entry in found:
        numbers = (entry.rows, entry.moved, len(entry.support), entry.agree, entry.apart)
        table.add_row(plain(entry.layer), *(str(n) for n in numbers))
    console.print(table)
    if is_gradient and all(f.agree == 0 and f.moved == f.rows for f in found):
        console.print(
            "[yellow]No two rows agree and every row is filled: this looks like weights, not like a gradient. Give the weights before and "
            "after a step, or the gradient itself.[/yellow]"
        )
    console.print(
        "Agree: two rows or more gave the same vector. Came apart: of a whole batch, silent where the sent weights say so. Both are likely "
        "samples; neither is a proof."
    )


def _write(best: "LayerReplay", dimensions: tuple[int, ...] | None, out: Path) -> None:
    """The candidates of the most telling layer, and a picture of them where their shape is known."""
    from safetensors.torch import save

    from qbi.report.pictures import grid, stretched

    write_atomically(out / "candidates.safetensors", save({"samples": best.samples, "support": best.support}))
    if dimensions is None:
        return
    if math.prod(dimensions) != best.samples.shape[1]:
        log.print(
            f"[yellow]--shape: no picture is drawn: “{plain(best.layer)}” sees {best.samples.shape[1]} values, and "
            f"{','.join(map(str, dimensions))} are {math.prod(dimensions)}; choose another --layer or the shape of what arrives there.[/yellow]"
        )
        return
    images = stretched(best.samples[:MOST_SHOWN].reshape(-1, *dimensions))
    write_atomically(out / "replay.png", grid(images, "candidates, best first"))


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
