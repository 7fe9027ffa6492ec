"""From what a user typed to data and a model for `qbi audit`."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from qbi.auditing.samples import Samples, array_samples, image_samples, text_samples
from qbi.data.arrays import ARRAYS
from qbi.data.builtin_text import builtin_text
from qbi.data.open import open_images
from qbi.data.text import load_text, word_tokens
from qbi.errors import BadValue, QbiError
from qbi.models import image_cnn, text_model

MOST_PIXELS = 2**28
"""Pixels of synthetic photos that are painted at the most; their batch as floats takes twelve times as many bytes."""

FEWEST_PAINTED = 256
"""Photos that are painted at the least, so that curves over batch sizes have data."""


def auxiliary_samples(source: str, wanted: int, size: int, seed: int, skip_bad: bool, *, raw: bool) -> Samples:
    """The same of `--aux`."""
    try:
        return audited_samples(source, wanted, 0, size, seed, skip_bad, raw=raw)
    except QbiError as problem:
        # What opens data does not know which option named them.
        raise type(problem)(str(problem).replace("--data:", "--aux:", 1)) from None


def audited_samples(
    source: str, wanted: int, spare: int, size: int, seed: int, skip_bad: bool, *, raw: bool
) -> Samples:
    """What the user named, as samples: at least `wanted` of them, and `spare` ones beside, where they are painted."""
    path = Path(source)
    if source in ("text", "photos") and path.exists():
        raise BadValue(
            f"--data: {source!r} is built in, and there is a folder or file of that name; write ./{source} for that one."
        )
    if source == "text":
        return text_samples(word_tokens(builtin_text(), length=64, vocabulary=4000))
    if path.suffix == ".csv":
        return text_samples(word_tokens(load_text(path), length=64, vocabulary=4000))
    if path.suffix in ARRAYS:
        return array_samples(path)
    count = max(wanted + spare, FEWEST_PAINTED)
    if source == "photos" and count * size**2 > MOST_PIXELS:
        count = wanted + spare
        if count * size**2 > MOST_PIXELS:
            raise BadValue(
                f"audit: {count} photos of {size}×{size} are more than fit; lower --batch-size, --neurons or --size."
            )
    return image_samples(open_images(source, size=size, count=count, seed=seed, skip_bad=skip_bad), raw=raw)


def check_like(samples: Samples, helper: Samples) -> None:
    """Auxiliary data must be of the same kind and shape as the client's."""
    own, other = [tuple(p.shape[1:]) for p in samples.inputs], [tuple(p.shape[1:]) for p in helper.inputs]
    if own != other or samples.kind != helper.kind:
        raise BadValue(
            f"--aux: {helper.kind} of {other}, and the data are {samples.kind} of {own}; they must be alike."
        )


def paper_model(samples: Samples, neurons: int, norm: str, seed: int) -> nn.Module:
    """The paper's model for this kind of data."""
    torch.manual_seed(seed)
    kind: Any = None if norm == "none" else norm
    if samples.images is not None:
        return image_cnn(samples.images.shape, neurons, max(2, len(samples.classes)), norm=kind)
    if samples.vocabulary:
        return text_model(len(samples.vocabulary), samples.inputs[0].shape[1], 64, neurons, norm=kind)
    raise BadValue("MODEL: arrays need a model of yours; name it as package.module:callable or path.py:callable.")
