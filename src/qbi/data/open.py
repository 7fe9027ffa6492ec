"""From what a user types after --data to images."""

from collections.abc import Callable
from pathlib import Path

from qbi.data.cifar10 import load_cifar10
from qbi.data.folder import load_image_folder
from qbi.data.hub import PREFIX, load_hub_images
from qbi.data.photos import synthetic_photos
from qbi.errors import DataError
from qbi.records import ImageData

BUILT_IN = "photos"


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
    if source == BUILT_IN:
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
