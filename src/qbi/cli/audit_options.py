"""The options of `qbi audit`, as a table."""

from pathlib import Path
from typing import Annotated, Literal

import typer

Model = Annotated[
    str | None,
    typer.Argument(
        help="package.module:callable, path.py:callable, hf:NAME or timm:NAME (a hub's name or a folder); the paper's own model if left out."
    ),
]
Data = Annotated[
    str,
    typer.Option(
        help="'photos' or 'text' (built in), a folder or archive of images, CIFAR-10, hf:NAME, a .csv of texts, "
        "or arrays x and y in .npz, .safetensors or .pt."
    ),
]
ModelArg = Annotated[list[str] | None, typer.Option(help="name=value for the callable; may be repeated.")]
Attack = Annotated[
    str, typer.Option(help="What the server does, comma-separated, or all; `qbi audit --list-attacks` names them.")
]
ListAttacks = Annotated[bool, typer.Option("--list-attacks", help="Name the attacks and stop.")]
Layers = Annotated[str, typer.Option(help="'most exposed', 'all', or a layer's name.")]
BatchSize = Annotated[int, typer.Option(min=2, help="Samples in the client's batch, B.")]
Batches = Annotated[int, typer.Option(min=1, help="Batches to try, each with fresh rows.")]
Loss = Annotated[str, typer.Option(help="auto, cross-entropy, bce, mse, or module:function.")]
LocalSteps = Annotated[
    int, typer.Option(min=0, help="Local steps before the client sends its weights; 0: it sends a gradient.")
]
Optimiser = Annotated[Literal["sgd", "momentum", "adam"], typer.Option(help="Of the local steps.")]
LearningRate = Annotated[float, typer.Option(help="Of the local steps.")]
Precision = Annotated[Literal["float32", "bfloat16", "float16"], typer.Option(help="Of what the client sends.")]
Aux = Annotated[str | None, typer.Option(help="Auxiliary data for attacks that tune their rows, as --data.")]
Neurons = Annotated[
    int | None, typer.Option(min=1, max=100_000, help="Neurons of the paper's model, N (200); not with MODEL.")
]
Norm = Annotated[
    Literal["none", "batch", "layer"], typer.Option(help="Normalisation in the paper's model; not with MODEL.")
]
Size = Annotated[int, typer.Option(min=4, help="Side of the images in pixels.")]
TrapScale = Annotated[
    float | None, typer.Option(help="Scale of trap weights, below 1; chosen on auxiliary data if left out.")
]
Defences = Annotated[bool, typer.Option(help="Try defences on the strongest attack.")]
Decode = Annotated[
    bool | None,
    typer.Option(
        "--decode/--no-decode",
        help="Where features of images are read: learn to turn them into pictures. Default: where that takes less than a minute.",
    ),
]
Match = Annotated[
    bool | None,
    typer.Option(
        "--match/--no-match",
        help="Gradient matching on the first batch of images. Default: where nothing was read and it takes less than a minute; the time is said first.",
    ),
]
FailAbove = Annotated[
    float | None, typer.Option(min=0, max=1, help="Exit with 1 when more than this share is read, at --fail-at.")
]
LEVELS = ("exact", "60", "30", "recognisable")
"""Names of the thresholds, the strictest first."""

FailAt = Annotated[
    Literal["exact", "60", "30", "recognisable"],
    typer.Option(help="How well a sample must be read to count: exactly, at 60 or 30 dB, or recognisably (19 dB)."),
]
NoSamples = Annotated[bool, typer.Option("--no-samples", help="Leave the data out of everything written.")]
Sarif = Annotated[bool, typer.Option("--sarif", help="Also write audit.sarif for code scanning.")]
Junit = Annotated[bool, typer.Option("--junit", help="Also write audit.xml for a pipeline's test view.")]
Pdf = Annotated[bool, typer.Option("--pdf", help="Also print the report to report.pdf, with Chromium or Chrome.")]
Format = Annotated[
    list[str] | None,
    typer.Option("--format", help="Also write this format: sarif, junit, pdf, model-card, or one of a plugin."),
]
Out = Annotated[Path, typer.Option(help="Folder for the report, the picture and the JSON.")]
SkipBad = Annotated[bool, typer.Option("--skip-bad", help="Skip unreadable images instead of stopping.")]
