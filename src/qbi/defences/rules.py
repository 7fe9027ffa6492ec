"""Defences on rows and on whole gradients, beside AGGP."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool
from torch import Tensor

from qbi.defences.base import Kind, change_all, change_rows
from qbi.errors import BadValue
from qbi.exposure import Exposure
from qbi.federation.exposed import ClientStep
from qbi.randomness import Draws, normal_like


class RowRule:
    """A rule that drops whole rows, weight and bias: the base of the rules below, which say which rows."""

    kind: Kind = "heuristic"

    def unsafe_rows(self, exposure: Exposure) -> Bool[Tensor, " n"]:
        """Which rows to drop; a rule of its own drops none."""
        return torch.zeros_like(exposure.backprops[:, 0], dtype=torch.bool)

    def apply(self, step: ClientStep, generator: Draws) -> ClientStep:  # noqa: ARG002
        """Drop the unsafe rows of exposed layers."""

        def change(exposure: Exposure, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
            dropped = self.unsafe_rows(exposure)
            return weight.masked_fill(dropped[:, None], 0), bias.masked_fill(dropped, 0)

        return change_rows(step, change)


@dataclass(frozen=True)
class DropSparse(RowRule):
    """Drop rows in which at most `most` samples stand (SRATTA's q-rule); 0 drops nothing."""

    most: int = 15

    @property
    def name(self) -> str:
        """With its parameter."""
        return f"drop a ≤ {self.most}"

    def unsafe_rows(self, exposure: Exposure) -> Bool[Tensor, " n"]:
        """Few samples."""
        return (exposure.counts > 0) & (exposure.counts <= self.most)


@dataclass(frozen=True)
class DropDominated(RowRule):
    """Drop rows of whose bias gradient one sample carries more than `share` (SRATTA's β-rule); 1 drops nothing."""

    share: float = 0.2

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise BadValue(f"drop dominated rows: share is {self.share}; it must lie above 0 and not above 1.")

    @property
    def name(self) -> str:
        """With its parameter."""
        return f"drop one above {self.share:.0%}"

    def unsafe_rows(self, exposure: Exposure) -> Bool[Tensor, " n"]:
        """One sample outweighs the others."""
        sizes = exposure.backprops.abs()
        return sizes.amax(1) > self.share * sizes.sum(1) if self.share < 1 else torch.zeros_like(sizes[:, 0]) > 0


@dataclass(frozen=True)
class DropClose(RowRule):
    """Drop rows with few samples, and rows whose samples differ from an earlier row's in fewer than `apart` samples.

    The difference of two such rows holds few samples although each holds many: how imprint reads them. Dropped is
    every row with an earlier neighbour, so what is left lies `apart` from each other. Combinations of three or more
    rows are not covered. 0 drops nothing.
    """

    apart: int = 16

    @property
    def name(self) -> str:
        """With its parameter."""
        return f"drop rows < {self.apart} apart"

    def unsafe_rows(self, exposure: Exposure) -> Bool[Tensor, " n"]:
        """Few samples, or close to an earlier row."""
        active = exposure.active.float()
        counts = active.sum(1)
        apart = counts[:, None] + counts - 2 * active @ active.T
        close = (apart < self.apart) & (counts > 0)[:, None] & (counts > 0)
        return ((counts > 0) & (counts < self.apart)) | close.tril(-1).any(1)


@dataclass(frozen=True)
class NoisyRows:
    """Gaussian noise of `relative` times each row's own size, weight and bias, on every row of exposed layers.

    Ours. A rule that looks at rows, or at pairs of them, leaves combinations of more rows uncovered; noise in every row
    covers them all, and its size follows the row: no row is so large or so small that a server could read around it.
    Rows that no sample reaches stay zero. 0 adds none. No guarantee: it averages out over rounds on the same batch.
    """

    relative: float = 3.0
    kind: Kind = "heuristic"

    def __post_init__(self) -> None:
        if not self.relative >= 0:
            raise BadValue(f"noisy rows: level is {self.relative}; it must not be negative.")

    @property
    def name(self) -> str:
        """With its parameter."""
        return f"row noise {self.relative:g}"

    def apply(self, step: ClientStep, generator: Draws) -> ClientStep:
        """Add the noise."""

        def change(exposure: Exposure, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG001
            return noisy_rows(weight, bias, self.relative, generator)

        return change_rows(step, change)


@dataclass(frozen=True)
class HideReadable:
    """Row noise in the layers in which the client finds that somebody could be read, and nowhere else.

    Ours, and the policy `auto`. Readable means: from one row, or from the difference of two. Steps that give
    nothing away are sent as they are. Combinations of three rows or more are not seen. 0 adds no noise.
    """

    relative: float = 3.0
    kind: Kind = "heuristic"

    @property
    def name(self) -> str:
        """With its parameter."""
        return f"row noise {self.relative:g} where readable"

    def apply(self, step: ClientStep, generator: Draws) -> ClientStep:
        """Add the noise where it is needed."""

        def change(exposure: Exposure, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
            return noisy_rows(weight, bias, self.relative if bool(exposure.readable.any()) else 0.0, generator)

        return change_rows(step, change)


def noisy_rows(weight: Tensor, bias: Tensor, relative: float, generator: Draws) -> tuple[Tensor, Tensor]:
    """A layer's gradients with noise of `relative` times each row's size."""
    if not relative:
        return weight, bias

    size = relative * weight.square().mean(1).sqrt()
    # The bias entry is one of M + 1: hidden like the others, and never less than its own size asks for.
    own = torch.maximum(size, relative * bias.abs())
    return torch.addcmul(weight, size[:, None], normal_like(weight, generator)), torch.addcmul(
        bias, own, normal_like(bias, generator)
    )


@dataclass(frozen=True)
class Sparsify:
    """Keep the `share` largest entries of every gradient; 1 keeps all."""

    share: float = 0.1
    kind: Kind = "heuristic"

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise BadValue(f"sparsify: share is {self.share}; it must lie above 0 and not above 1.")

    @property
    def name(self) -> str:
        """With its parameter."""
        return f"top {self.share:.0%}"

    def apply(self, step: ClientStep, generator: Draws) -> ClientStep:  # noqa: ARG002
        """Zero the smaller entries."""

        def change(gradient: Tensor) -> Tensor:
            kept = max(1, round(self.share * gradient.numel()))
            if kept == gradient.numel():
                return gradient
            bound = gradient.abs().flatten().kthvalue(gradient.numel() - kept + 1).values
            return torch.where(gradient.abs() >= bound, gradient, 0)

        return change_all(step, change)


@dataclass(frozen=True)
class Noise:
    """Gaussian noise of `relative` times each gradient's root mean square; no guarantee without clipping. 0 adds none."""

    relative: float = 1.0
    kind: Kind = "heuristic"

    def __post_init__(self) -> None:
        if not self.relative >= 0:
            raise BadValue(f"noise: level is {self.relative}; it must not be negative.")

    @property
    def name(self) -> str:
        """With its parameter."""
        return f"noise {self.relative:g}"

    def apply(self, step: ClientStep, generator: Draws) -> ClientStep:
        """Add the noise."""

        def change(gradient: Tensor) -> Tensor:
            size = self.relative * gradient.square().mean().sqrt()
            return gradient + size * normal_like(gradient, generator) if self.relative else gradient

        return change_all(step, change)
