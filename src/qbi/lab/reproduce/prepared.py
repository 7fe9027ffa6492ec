"""Data decoded once, in a form that workers share: memory-mapped files in a cache beside the results.

The parent decodes images, multiplies them once and tokenises texts; workers map the files and read only what a cell
needs. A file's name carries a fingerprint of its source, so changed data are prepared again.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch

from qbi.data.cifar10 import load_cifar10
from qbi.data.folder import load_imagenet
from qbi.data.locating import FoundData
from qbi.data.text import load_imdb
from qbi.errors import DataError
from qbi.lab.reproduce.channel_grams import ChannelGrams, channel_grams
from qbi.lab.wordpiece import wordpiece_tokens
from qbi.records import ImageData, TextData

Progress = Callable[[int], None]


@dataclass(frozen=True)
class PreparedImages:
    """Images with their inner products."""

    data: ImageData
    grams: ChannelGrams


def cache_data(
    found: FoundData, cache_folder: Path, *, skip_bad: bool = False, progress: Progress | None = None
) -> Path:
    """Make the cache of one data set, unless it is there; returns its folder."""
    target = cache_folder / f"{found.name}-{_fingerprint(found.path)}"
    if (target / "meta.json").exists():
        return target
    cache_folder.mkdir(parents=True, exist_ok=True)
    working = Path(tempfile.mkdtemp(dir=cache_folder, prefix=".making-"))
    try:
        if found.name == "imdb":
            _prepare_texts(found.path, working)
        else:
            _prepare_images(found, working, skip_bad, progress)
        try:
            working.rename(target)
        except OSError:
            # Another process was first; what it prepared from the same source is the same.
            if not (target / "meta.json").exists():
                raise
    finally:
        shutil.rmtree(working, ignore_errors=True)
    return target


def _prepare_images(found: FoundData, working: Path, skip_bad: bool, progress: Progress | None) -> None:
    if found.name == "imagenet":
        data = load_imagenet(found.path, skip_bad=skip_bad, progress=progress)
    else:
        data = load_cifar10(found.path)
    grams = channel_grams(data.pixels)
    np.save(working / "pixels.npy", data.pixels.numpy())
    np.save(working / "labels.npy", data.labels.numpy())
    np.save(working / "products.npy", grams.products.float().numpy())
    np.save(working / "sums.npy", grams.sums.numpy())
    meta = {
        "name": data.name,
        "classes": data.classes,
        "mean": data.mean,
        "std": data.std,
        "positions": grams.positions,
    }
    (working / "meta.json").write_text(json.dumps(meta))


def _prepare_texts(path: Path, working: Path) -> None:
    data = wordpiece_tokens(load_imdb(path))
    np.save(working / "tokens.npy", data.tokens.numpy().astype(np.int16))
    np.save(working / "labels.npy", data.labels.numpy())
    (working / "meta.json").write_text(json.dumps({"name": data.name, "vocabulary": data.vocabulary}))


@cache
def map_images(folder: Path, device: str = "cpu") -> PreparedImages:
    """Map prepared images; on a GPU the inner products are copied there."""
    meta = json.loads((folder / "meta.json").read_text())
    data = ImageData(
        name=meta["name"],
        pixels=_mapped(folder / "pixels.npy"),
        labels=_mapped(folder / "labels.npy"),
        classes=tuple(meta["classes"]),
        mean=tuple(meta["mean"]),
        std=tuple(meta["std"]),
    )
    products, sums = _mapped(folder / "products.npy").to(device), _mapped(folder / "sums.npy").to(device)
    return PreparedImages(data=data, grams=ChannelGrams(products, sums, meta["positions"]))


@cache
def map_texts(folder: Path) -> TextData:
    """Map prepared texts."""
    meta = json.loads((folder / "meta.json").read_text())
    tokens = _mapped(folder / "tokens.npy").long()
    labels = _mapped(folder / "labels.npy")
    return TextData(meta["name"], tokens, labels, ("neg", "pos"), tuple(meta["vocabulary"]))


def _mapped(path: Path) -> torch.Tensor:
    # Copy-on-write mapping: shared between workers, and writable as torch wants it.
    return torch.from_numpy(np.load(path, mmap_mode="c"))


def _fingerprint(path: Path) -> str:
    """Changes when the source does: name, size and time of the archive, or of every file in the folder."""
    try:
        entries = sorted(path.rglob("*")) if path.is_dir() else [path]
        facts = [f"{entry.name} {entry.stat().st_size} {int(entry.stat().st_mtime)}" for entry in entries]
    except OSError as problem:
        raise DataError(f"{path}: it cannot be read ({problem.strerror}).") from problem
    return hashlib.sha256(os.linesep.join(facts).encode()).hexdigest()[:12]
