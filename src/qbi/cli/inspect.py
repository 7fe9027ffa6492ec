"""`qbi inspect`: does a received model look crafted?"""

from pathlib import Path
from typing import Annotated

import typer

from qbi.cli.common import Json, console
from qbi.files import to_json


def inspect(
    checkpoint: Annotated[Path, typer.Argument(help="A safetensors or weights-only .pt file.")],
    json: Json = False,
) -> None:
    """Look for signs of a crafted model in a checkpoint, before any data are touched; exit code 1 if there are any.

    [bold]Example:[/bold] qbi inspect received.safetensors
    """
    from qbi.detection import inspect_parameters
    from qbi.detection.checkpoint import load_parameters
    from qbi.errors import DataError

    state = load_parameters(checkpoint)
    if not all(bool(v.isfinite().all()) for v in state.values() if v.is_floating_point()):
        raise DataError(f"{checkpoint}: it holds NaN or infinite parameters; do not train on it.")
    signs = inspect_parameters(state)
    if json:
        plain = [
            {"layer": s.layer, "detector": s.detector, "rows": list(s.rows), "total": s.total, "score": s.score}
            for s in signs
        ]
        typer.echo(to_json({"checkpoint": str(checkpoint), "signs": plain}), nl=False)
    else:
        for sign in signs:
            console.print(f"[red]{sign}[/red]")
        console.print("Signs of a crafted model." if signs else "No sign of a crafted model in the parameters.")
    if signs:
        raise typer.Exit(1)
