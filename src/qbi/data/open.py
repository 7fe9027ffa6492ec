"""From what a user types after --data to images."""

from collections.abc import Callable
from dataclasses import dataclass
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


@dataclass(frozen=True)
class ImageRequest:
    """What a source is asked for: images of one size, so many at least where they are made."""

    source: str
    size: int
    count: int
    seed: int
    skip_bad: bool = False

    @property
    def path(self) -> Path:
        """As a place on disk."""
        return Path(self.source)


@dataclass(frozen=True)
class ImageSource:
    """Images by what a user types after --data: whether it is meant, and how it is opened."""

    key: str
    matches: Callable[[str], bool]
    open: Callable[[ImageRequest], ImageData]


def open_images(source: str, *, size: int, count: int, seed: int, skip_bad: bool = False) -> ImageData:
    """Images of the first source that knows the name: built-in photos, `hf:NAME`, CIFAR-10, any folder or archive of images."""
    asked = ImageRequest(source, size, count, seed, skip_bad)
    for known in SOURCES.values():
        if known.matches(source):
            return known.open(asked)
    raise DataError(f"--data: {source} does not exist. Give a folder or archive of images, or '{BUILT_IN}'.")


def is_cifar10(path: Path) -> bool:
    """Whether the published batches lie there, by the name of the archive or of the files in the folder."""
    if path.is_dir():
        return any(path.glob("data_batch_*")) or any(path.glob("cifar-10-batches-*/data_batch_*"))
    return path.exists() and path.name.startswith(("cifar-10-python", "cifar-10-binary"))


SOURCES: dict[str, ImageSource] = {
    s.key: s
    for s in (
        ImageSource(
            BUILT_IN,
            lambda source: built_in(source, BUILT_IN) is not None,
            lambda asked: synthetic_photos(asked.count, asked.size, seed=asked.seed),
        ),
        ImageSource(
            "hf",
            lambda source: source.startswith(PREFIX),
            lambda asked: load_hub_images(
                asked.source.removeprefix(PREFIX), size=asked.size, limit=max(asked.count, 1000)
            ),
        ),
        ImageSource("cifar-10", lambda source: is_cifar10(Path(source)), lambda asked: load_cifar10(asked.path)),
        ImageSource(
            "folder",
            lambda source: Path(source).exists(),
            lambda asked: load_image_folder(asked.path, size=asked.size, skip_bad=asked.skip_bad),
        ),
    )
}
"""In the order in which they are asked. One of one's own is added with `SOURCES[key] = ImageSource(...)`; the first that matches opens."""
