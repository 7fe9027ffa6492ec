"""Options that several commands take."""

from typing import Annotated

import typer

FASTEST = 1e6
"""Learning rates above it overflow in float32."""

ImageSource = Annotated[
    str,
    typer.Option(help="'photos' (built in), a folder or archive of images, CIFAR-10 as a file or folder, or hf:NAME."),
]
