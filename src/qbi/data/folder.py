"""Any folder or archive of images; where they lie in sub-folders, the sub-folder is the class."""

import logging
from collections.abc import Callable
from pathlib import Path

import torch
from PIL import Image

from qbi.data.decode import IMAGE_ENDINGS, Decoded, as_is, centre_crop, decode_all, is_image
from qbi.data.tree import files
from qbi.errors import DataError
from qbi.records import ImageData

log = logging.getLogger("qbi.data")

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


def load_image_folder(root: Path, *, size: int | None = None, skip_bad: bool = False) -> ImageData:
    """Images of any size, cropped to the centre when `size` is given; normalised with ImageNet's statistics."""
    fit = as_is if size is None else centre_crop(size, size)
    return _labelled(root.name, _decode(root, fit, skip_bad))


def load_imagenet(root: Path, *, skip_bad: bool = False, progress: Callable[[int], None] | None = None) -> ImageData:
    """The ImageNet validation set in folders by wnid, with the paper's preprocessing (erratum 14)."""
    return _labelled("ImageNet", _decode(root, centre_crop(224, 256), skip_bad, progress))


def _decode(
    root: Path,
    fit: Callable[[Image.Image], Image.Image],
    skip_bad: bool,
    progress: Callable[[int], None] | None = None,
) -> Decoded:
    try:
        decoded = decode_all(files(root, is_image), fit, skip_bad=skip_bad, progress=progress)
    except DataError as problem:
        named = str(problem).startswith(str(root))
        raise problem if named else DataError(f"{root}: {problem}{_instead(root, str(problem))}") from problem
    if decoded.skipped:
        log.warning("%s: skipped %d unreadable files, the first %s", root, len(decoded.skipped), decoded.skipped[0])
    return decoded


def _instead(root: Path, problem: str) -> str:
    """What lies in a folder without images, and what would be taken."""
    if "(0 skipped)" not in problem or not root.is_dir():
        return ""
    other = next((p.name for p in sorted(root.rglob("*")) if p.is_file() and not p.name.startswith(".")), None)
    held = "it is empty" if other is None else f"it holds files such as {other}"
    return f" Here {held}; images end in {', '.join(IMAGE_ENDINGS)}. Convert others, or give arrays x and y (.npz)."


def _labelled(name: str, decoded: Decoded) -> ImageData:
    folders = [path.split("/")[-2] if "/" in path else "" for path in decoded.names]
    classes = tuple(sorted(set(folders)))
    index = {folder: i for i, folder in enumerate(classes)}
    return ImageData(
        name=name,
        pixels=decoded.pixels,
        labels=torch.tensor([index[folder] for folder in folders]),
        classes=classes,
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
    )
