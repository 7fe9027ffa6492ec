"""The user's data as a model takes them, and the way back to pictures and words."""

from dataclasses import dataclass, field
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from qbi.carrier import flat
from qbi.data.arrays import read_arrays
from qbi.data.images import denormalised, normalised, unit_pixels
from qbi.errors import DataError
from qbi.records import ImageData, TextData


@dataclass(frozen=True)
class Samples:
    """Inputs (one tensor for each input of the model), targets, and what is known of their meaning."""

    name: str
    inputs: tuple[Tensor, ...]
    targets: Tensor
    classes: tuple[str, ...] = ()
    images: ImageData | None = field(default=None, repr=False)
    raw: bool = False
    """Whether images are fed as [0, 1] pixels instead of normalised."""
    vocabulary: tuple[str, ...] = field(default=(), repr=False)

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
    inputs: Tensor | tuple[Tensor, ...], targets: Tensor | None = None, *, name: str = "your data"
) -> Samples:
    """Tensors as they are; without targets, class 0 for all."""
    parts = inputs if isinstance(inputs, tuple) else (inputs,)
    count = len(parts[0])
    if any(len(part) != count for part in parts) or (targets is not None and len(targets) != count):
        sizes = ", ".join(str(len(part)) for part in parts)
        raise DataError(f"{name}: inputs of {sizes} samples and {count if targets is None else len(targets)} targets.")
    return Samples(name, parts, torch.zeros(count, dtype=torch.long) if targets is None else targets)


def array_samples(path: Path) -> Samples:
    """Arrays from a file: `x` (or x0, x1 … for several inputs) and, if there are targets, `y`. Nothing is unpickled."""
    inputs, targets = read_arrays(path)
    return tensor_samples(inputs, targets, name=path.name)
