"""The user's data as a model takes them, and the way back to pictures and words."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from qbi.carrier import flat
from qbi.data.images import denormalised, normalised, unit_pixels
from qbi.errors import DataError, QbiError, first_line
from qbi.records import ImageData, TextData


@dataclass(frozen=True)
class Samples:
    """Inputs (one tensor for each input of the model), targets, and what is known of their meaning.

    >>> len(Samples("patients", (torch.rand(50, 12),), torch.arange(50) % 2))
    50
    """

    name: str
    inputs: tuple[Tensor, ...]
    targets: Tensor
    classes: tuple[str, ...] = ()
    images: ImageData | None = field(default=None, repr=False)
    raw: bool = False
    """Whether images are fed as [0, 1] pixels instead of normalised."""
    vocabulary: tuple[str, ...] = field(default=(), repr=False)
    names: tuple[str, ...] = ()
    """What the model calls its inputs, where they came in a dictionary."""
    label: str = "labels"
    """What it calls its targets, where it takes them to return its loss."""

    def __len__(self) -> int:
        return len(self.targets)

    @property
    def kind(self) -> str:
        """images, text or numbers."""
        if self.images is not None:
            return "images"
        return "text" if self.vocabulary else "numbers"

    def batch(self, chosen: Tensor, device: str = "cpu") -> tuple[tuple[Tensor, ...], Tensor]:
        """The chosen samples, as the model takes them."""
        return tuple(part[chosen].to(device) for part in self.inputs), self.targets[chosen].to(device)

    def pixels(self, flattened: Float[Tensor, "k m"]) -> Float[Tensor, "k m"]:
        """Samples as the model sees them, in the units in which they are judged: [0, 1] pixels for images."""
        if self.images is None or self.raw:
            return flattened
        return flat(denormalised(self.images, flattened)).to(flattened.device)

    @property
    def data_range(self) -> float:
        """The range on which PSNR is taken."""
        if self.images is not None:
            return 1.0
        first = self.inputs[0]
        return float(first.max() - first.min()) or 1.0 if first.is_floating_point() else 1.0


def image_samples(data: ImageData, *, raw: bool = False) -> Samples:
    """Images, normalised with public statistics or as [0, 1] pixels."""
    feed = unit_pixels if raw else normalised
    return Samples(data.name, (feed(data, slice(None)),), data.labels, data.classes, data, raw)


def text_samples(data: TextData) -> Samples:
    """Token ids and the vocabulary behind them."""
    return Samples(data.name, (data.tokens,), data.labels, data.classes, vocabulary=data.vocabulary)


def tensor_samples(
    inputs: Tensor | tuple[Tensor, ...],
    targets: Tensor | None = None,
    *,
    name: str = "your data",
    names: tuple[str, ...] = (),
) -> Samples:
    """Tensors as they are; without targets, class 0 for all."""
    parts = inputs if isinstance(inputs, tuple) else (inputs,)
    count = len(parts[0])
    if any(len(part) != count for part in parts) or (targets is not None and len(targets) != count):
        sizes = ", ".join(str(len(part)) for part in parts)
        raise DataError(f"{name}: inputs of {sizes} samples and {count if targets is None else len(targets)} targets.")
    return Samples(name, parts, torch.zeros(count, dtype=torch.long) if targets is None else targets, names=names)


def mapped_samples(data: Mapping[str, Any]) -> Samples:
    """A dictionary of tensors, such as a tokeniser makes; its targets under `labels` or the like."""
    inputs, targets = as_tensors(data)
    parts = inputs if isinstance(inputs, tuple) else (inputs,)
    target = next((name for name in TARGETS if name in data), None)
    found = tensor_samples(parts, targets, names=tuple(n for n in data if n != target))
    return found if target is None else replace(found, label=target)


def with_targets(samples: Samples) -> Samples:
    """The same for a model that takes its targets among its inputs, the last of them."""
    names = (*samples.names, samples.label) if samples.names else ()
    return replace(samples, inputs=(*samples.inputs, samples.targets), names=names)


MOST_TAKEN = 2000
"""Samples that are taken from a data set or loader."""
TARGETS = ("labels", "label", "targets", "target", "y")


def as_tensors(data: Any) -> tuple[Tensor | tuple[Tensor, ...], Tensor | None]:
    """Inputs and targets from what people have: tensors, arrays, dictionaries of them, data sets, loaders."""
    if isinstance(data, Tensor | np.ndarray):
        return torch.as_tensor(data), None
    if isinstance(data, Mapping):
        target = next((name for name in TARGETS if name in data), None)
        inputs = tuple(torch.as_tensor(value) for name, value in data.items() if name != target)
        return inputs, None if target is None else torch.as_tensor(data[target])
    if isinstance(data, tuple | list) and data and all(isinstance(part, Tensor | np.ndarray) for part in data):
        return _pair(data)
    return _from_iterable(data)


def _from_iterable(data: Any) -> tuple[Tensor | tuple[Tensor, ...], Tensor | None]:
    """A loader's batches one after another, or a data set's items put together."""
    if not hasattr(data, "__iter__") and not (hasattr(data, "__getitem__") and hasattr(data, "__len__")):
        raise DataError(f"data: a {type(data).__name__} is no tensor, array, dictionary, data set or loader.")
    batched = hasattr(data, "batch_size") and hasattr(data, "dataset")
    items = (
        iter(data) if batched or not hasattr(data, "__len__") else (data[i] for i in range(min(len(data), MOST_TAKEN)))
    )
    found, count = [], 0
    for item in items:
        inputs, targets = as_tensors(item) if isinstance(item, Mapping) else _pair(item)
        parts = (inputs if isinstance(inputs, tuple) else (inputs,), torch.as_tensor(0) if targets is None else targets)
        found.append(parts)
        count += len(parts[0][0]) if batched else 1
        if count >= MOST_TAKEN:
            break
    if not found:
        raise DataError("data: the data set is empty.")
    join = torch.cat if batched else torch.stack
    inputs = tuple(join([each[0][i] for each in found]) for i in range(len(found[0][0])))
    return inputs if len(inputs) > 1 else inputs[0], join([each[1] for each in found])


def _pair(item: Any) -> tuple[Tensor | tuple[Tensor, ...], Tensor | None]:
    if not isinstance(item, tuple | list):
        return torch.as_tensor(item), None
    parts = tuple(torch.as_tensor(part) for part in item)
    return (parts[0], parts[1]) if len(parts) == 2 else (parts[:-1], parts[-1])


Data = Samples | ImageData | TextData | Tensor | tuple[Tensor, ...] | Any


def as_samples(data: Data) -> Samples:
    """Whatever a user has, as samples."""
    try:
        return _plain(_as_samples(data))
    except QbiError:
        raise
    except Exception as problem:  # whatever a data set does
        raise DataError(
            f"data: it cannot be made into tensors of one shape ({first_line(problem)}). Give tensors or arrays (x, y), a dictionary of them, or "
            "a data set of pairs; words and labels as numbers."
        ) from problem


def _plain(samples: Samples) -> Samples:
    """Without gradients; refused where values cannot be looked at."""
    parts = (*samples.inputs, samples.targets)
    if any(part.is_sparse or part.is_complex() or part.device.type == "meta" for part in parts):
        raise DataError("data: it has sparse or complex tensors, or tensors without values; give plain ones.")
    inputs = tuple(part.detach() for part in samples.inputs)
    return replace(samples, inputs=inputs, targets=samples.targets.detach())


def _as_samples(data: Data) -> Samples:
    if isinstance(data, Samples):
        return data
    if isinstance(data, ImageData):
        return image_samples(data)
    if isinstance(data, TextData):
        return text_samples(data)
    if isinstance(data, Mapping):
        return mapped_samples(data)
    first = _first_of(data)
    names = () if not isinstance(first, Mapping) else tuple(n for n in first if n not in TARGETS)
    return tensor_samples(*as_tensors(data), names=names)


def _first_of(data: Any) -> Any:
    """The first item of a data set or the first batch of a loader."""
    if isinstance(data, Tensor | tuple | list | Mapping) or not hasattr(data, "__len__"):
        return None
    return next(iter(data), None) if hasattr(data, "dataset") else data[0] if len(data) else None
