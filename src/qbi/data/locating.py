"""Which of the paper's data sets lie below a folder, and how to get the others."""

from dataclasses import dataclass
from pathlib import Path

from qbi.errors import DataError


@dataclass(frozen=True)
class Published:
    """A data set of the paper: the names under which it is published, and where it comes from."""

    name: str
    title: str
    places: tuple[str, ...]
    source: str
    checksum: str


@dataclass(frozen=True)
class FoundData:
    """A data set that was found, as a folder or an archive."""

    name: str
    path: Path


PUBLISHED = (
    Published(
        "imagenet",
        "ImageNet-1k validation set",
        ("imagenet/val", "imagenet-val*.tar", "ILSVRC2012_img_val*.tar"),
        "image-net.org, after registration; one folder a class (wnid). ILSVRC2012_img_val.tar",
        "md5 29b22e2961454d5413ddabcf34fc5622",
    ),
    Published(
        "cifar10",
        "CIFAR-10",
        ("cifar-10-batches-py", "cifar-10-batches-bin", "cifar-10-python*.tar.gz", "cifar-10-binary*.tar.gz"),
        "www.cs.toronto.edu/~kriz/cifar.html, the Python or the binary version",
        "md5 c58f30108f718f92721af3b95e74349a (python), c32a1d4ab5d03f1284b67883e8d87530 (binary)",
    ),
    Published(
        "imdb",
        "IMDB reviews",
        ("aclImdb", "aclImdb*.tar.*"),
        "ai.stanford.edu/~amaas/data/sentiment, aclImdb_v1.tar.gz",
        "md5 7c2ac02c03563afcf9b574c7e56c153a",
    ),
)


def find(root: Path, name: str) -> FoundData | None:
    """The data set of that name below the folder, if it is there."""
    if not root.is_dir():
        raise DataError(f"--data: {root} is not a folder. Name the folder that holds the data sets or their archives.")
    places = next(published.places for published in PUBLISHED if published.name == name)
    for pattern in places:
        for path in sorted(root.glob(pattern)):
            return FoundData(name, path)
    return None


def require(root: Path, name: str) -> FoundData:
    """The data set of that name, or a sentence on how to get it."""
    found = find(root, name)
    if found is None:
        published = next(p for p in PUBLISHED if p.name == name)
        raise DataError(
            f"{root}: {published.title} is not here (looked for {', '.join(published.places)}). "
            f"Get it from {published.source}, or leave its items out."
        )
    return found
