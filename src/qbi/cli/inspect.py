"""`qbi inspect`: does a received model look crafted?"""

from pathlib import Path
from typing import Annotated

import typer

from qbi.cli.common import Json, console, plain
from qbi.files import to_json


def inspect(
    model: Annotated[
        str,
        typer.Argument(
            help="A .safetensors, .npz or weights-only .pt file, or package.module:callable, path.py:callable."
        ),
    ],
    model_arg: Annotated[list[str] | None, typer.Option(help="name=value for the callable; may be repeated.")] = None,
    json: Json = False,
) -> None:
    """Look for signs of a crafted model, before any data are touched; exit code 1 if there are any.

    [bold]Examples:[/bold]

      qbi inspect received.safetensors

      qbi inspect my_package.models:make_net
    """
    from qbi.auditing.loading import load_model, parse_arguments, users_code
    from qbi.data.checkpoint import load_parameters
    from qbi.detection import inspect_parameters
    from qbi.detection.detectors import FEWEST_INPUTS
    from qbi.errors import DataError
    from qbi.finite import is_finite
    from qbi.linear_maps import linear_rows

    if ":" in model and not Path(model).exists():
        with users_code(f"MODEL: {model}"):
            state = dict(load_model(model, parse_arguments(model_arg or [])).state_dict())
    else:
        state = load_parameters(Path(model))
    if not all(is_finite(v) for v in state.values() if v.is_floating_point()):
        raise DataError(f"{model}: it holds NaN or infinite parameters; do not train on it.")
    kernels = [v for n, v in state.items() if n.endswith("weight") and v.is_floating_point() and v.dim() in (3, 4, 5)]
    if not kernels and all(rows.shape[1] < FEWEST_INPUTS for _, rows, _ in linear_rows(state)):
        raise DataError(
            f"{model}: nothing in it can be inspected: no convolution, and no weight matrix of {FEWEST_INPUTS} inputs or "
            "more under a name that ends in “weight”. Give a state_dict of the model."
        )
    signs = inspect_parameters(state)
    if json:
        listed = [
            {"layer": s.layer, "detector": s.detector, "rows": list(s.rows), "total": s.total, "score": s.score}
            for s in signs
        ]
        typer.echo(to_json({"model": model, "signs": listed}), nl=False)
    else:
        for sign in signs:
            console.print(f"[red]{plain(str(sign))}[/red]")
        console.print("Signs of a crafted model." if signs else "No sign of a crafted model in the parameters.")
    if signs:
        raise typer.Exit(1)
