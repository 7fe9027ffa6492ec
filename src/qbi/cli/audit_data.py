"""From what a user typed to data and a model for `qbi audit`."""

import copy
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from qbi.auditing.samples import Samples, image_samples, tensor_samples, text_samples
from qbi.cli.common import announce
from qbi.data.arrays import ARRAYS, read_arrays
from qbi.data.builtin_text import builtin_text
from qbi.data.open import BUILT_IN, built_in, open_images
from qbi.data.text import load_text, word_tokens
from qbi.errors import BadValue, DataError, QbiError
from qbi.models import image_cnn, text_model

MOST_PIXELS = 2**28
"""Pixels of synthetic photos that are painted at the most; their batch as floats takes twelve times as many bytes."""

FEWEST_PAINTED = 256
"""Photos that are painted at the least, so that curves over batch sizes have data."""

LARGEST = 1e15
"""Of values in arrays; sums of squares of larger ones leave float32."""


def auxiliary_samples(source: str, wanted: int, size: int, seed: int, skip_bad: bool, *, raw: bool) -> Samples:
    """The same of `--aux`."""
    try:
        return audited_samples(source, wanted, 0, size, seed, skip_bad, raw=raw, labelled=False)
    except QbiError as problem:
        # What opens data does not know which option named them.
        raise type(problem)(str(problem).replace("--data:", "--aux:", 1)) from None


def audited_samples(
    source: str,
    wanted: int,
    spare: int,
    size: int,
    seed: int,
    skip_bad: bool,
    *,
    raw: bool,
    labelled: bool = True,
) -> Samples:
    """What the user named, as samples: at least `wanted` of them, and `spare` ones beside, where they are painted."""
    path, own = Path(source), built_in(source, BUILT_IN, "text")
    if own == "text":
        return text_samples(word_tokens(builtin_text(), length=64, vocabulary=4000))
    if path.suffix == ".csv":
        return text_samples(word_tokens(load_text(path), length=64, vocabulary=4000))
    if path.suffix in ARRAYS:
        return _arrays(path, labelled=labelled)
    count = max(wanted + spare, FEWEST_PAINTED)
    if own == BUILT_IN and count * size**2 > MOST_PIXELS:
        count = wanted + spare
        if count * size**2 > MOST_PIXELS:
            raise BadValue(
                f"audit: {count} photos of {size}×{size} are more than fit; lower --batch-size, --neurons or --size."
            )
    return image_samples(open_images(source, size=size, count=count, seed=seed, skip_bad=skip_bad), raw=raw)


def _arrays(path: Path, *, labelled: bool) -> Samples:
    """Arrays of a file; values that squares in float32 cannot hold and samples that do not differ are refused."""
    inputs, targets = read_arrays(path)
    if labelled and targets is None:
        # Labels that nobody gave would be all the same, and called read.
        raise DataError(
            f"{path}: it has no y; add the labels or targets as y. For a model that reconstructs its input save y = x; "
            "for a loss that takes no targets, zeros."
        )
    samples = tensor_samples(inputs, targets, name=path.name)
    for part in samples.inputs:
        largest = float(part.abs().max()) if part.numel() else 0.0
        if math.isfinite(largest) and largest > LARGEST:
            raise DataError(
                f"{samples.name}: values go up to {largest:.2g}, and above {LARGEST:g} their squares overflow; "
                "scale the features first, such as to mean 0 and spread 1."
            )
    if len(samples) > 1 and all(bool((part == part[:1]).all()) for part in samples.inputs):
        raise DataError(
            f"{samples.name}: its {len(samples)} samples are all the same; nothing tells them apart. "
            "Give samples that differ."
        )
    return samples


def trained_model(model: nn.Module, name: str) -> nn.Module:
    """The model as it is audited: one that trains something, in float32."""
    if any(True for _ in model.parameters()) and not any(p.requires_grad for p in model.parameters()):
        raise BadValue(
            f"MODEL: every parameter of {name} is frozen, so a client sends no gradient and there is nothing to audit; "
            "set requires_grad of what clients train."
        )
    others = {p.dtype for p in model.parameters() if p.is_floating_point()} - {torch.float32}
    if not others:
        return model
    kinds = ", ".join(sorted(str(kind).removeprefix("torch.") for kind in others))
    announce(f"{name}: its parameters of {kinds} are audited as float32; --precision rounds what the client sends.")
    return copy.deepcopy(model).float()


def suited(model: nn.Module, samples: Samples) -> Samples:
    """Whole numbers as float32 where the model takes no others: a table of counts, not of tokens."""
    if all(part.is_floating_point() for part in samples.inputs) or samples.vocabulary:
        return samples
    floats = tuple(part.float() for part in samples.inputs)
    if _takes(model, samples.inputs) or not _takes(model, floats):
        return samples
    announce(f"{samples.name}: its whole numbers are taken as float32, as the model wants them.")
    return replace(samples, inputs=floats)


def _takes(model: nn.Module, inputs: tuple[Tensor, ...]) -> bool:
    """Whether the model runs on some of these; on a copy, so that nothing of it changes."""
    try:
        with torch.no_grad():
            copy.deepcopy(model)(*(part[:2] for part in inputs))
    except Exception:
        return False
    return True


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
