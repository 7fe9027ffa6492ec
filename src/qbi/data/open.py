"""From what a user types after --data to images."""

from collections.abc import Callable
from pathlib import Path

from qbi.data.cifar10 import load_cifar10
from qbi.data.folder import load_image_folder
from qbi.data.hub import PREFIX, load_hub_images
from qbi.data.photos import synthetic_photos
from qbi.errors import BadValue, DataError
from qbi.records import ImageData

BUILT_IN = "photos"
ALWAYS = "builtin:"
"""Before the name of built-in data: those, whatever lies in the folder."""


def built_in(source: str, *names: str) -> str | None:
    """Which of the built-in data are meant, if any; a folder or file of the same name makes the bare name unclear."""
    name = source.removeprefix(ALWAYS)
    if name not in names:
        if source.startswith(ALWAYS):
            raise BadValue(f"--data: nothing built in is called {name!r}; there is {' and '.join(names)}.")
        return None
    if name == source and Path(name).exists():
        raise BadValue(
            f"--data: {name!r} is built in, and there is a folder or file of that name; write ./{name} for that one, "
            f"{ALWAYS}{name} for the built-in data."
        )
    return name


def open_images(
    source: str,
    *,
    size: int,
    count: int,
    seed: int,
    skip_bad: bool = False,
    progress: Callable[[int], None] | None = None,
) -> ImageData:
    """Built-in photos, CIFAR-10 in its published layouts, any folder or archive of images, or `hf:NAME`."""
    if built_in(source, BUILT_IN):
        return synthetic_photos(count, size, seed=seed)
    if source.startswith(PREFIX):
        return load_hub_images(source.removeprefix(PREFIX), size=size, limit=max(count, 1000))
    path = Path(source)
    if not path.exists():
        raise DataError(f"--data: {source} does not exist. Give a folder or archive of images, or '{BUILT_IN}'.")
    if is_cifar10(path):
        return load_cifar10(path)
    return load_image_folder(path, size=size, skip_bad=skip_bad, progress=progress)


def is_cifar10(path: Path) -> bool:
    """Whether the published batches lie there, by the name of the archive or of the files in the folder."""
    if path.is_dir():
        return any(path.glob("data_batch_*")) or any(path.glob("cifar-10-batches-*/data_batch_*"))
    return path.name.startswith(("cifar-10-python", "cifar-10-binary"))
