"""What a use of a parameter says of each sample's gradient: one class for each kind of operation.

Shapes: m samples, T positions, g groups. A *pair* kind has a gradient Σ_t b_t ⊗ a_t, given as a (m, g, T, i) and b (m, g, T, o).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn import functional as F


@runtime_checkable
class Kind(Protocol):
    """How a gradient follows from what went in and what came back; samples come first in both."""

    def weight_gradients(self, given: Tensor, back: Tensor) -> Tensor:
        """Each sample's gradient of the weight: (m, *weight)."""
        ...

    def bias_gradients(self, back: Tensor) -> Tensor:
        """Each sample's gradient of the bias: (m, *bias)."""
        ...


@dataclass(frozen=True)
class Pairs:
    """A linear map: x·Wᵀ, or x·W where `transposed`."""

    shape: tuple[int, ...]
    transposed: bool = False

    def pairs(self, given: Tensor, back: Tensor) -> tuple[Tensor, Tensor]:
        """(m, 1, T, i) and (m, 1, T, o), whose products add up to the gradient of the weight."""
        samples = len(back)
        a = given.reshape(samples, 1, -1, given.shape[-1])
        b = back.reshape(samples, 1, -1, back.shape[-1])
        return (b, a) if self.transposed else (a, b)

    def positions(self, back: Tensor) -> int:
        """T."""
        return back[0].numel() // max(1, back.shape[-1])

    def weight_gradients(self, given: Tensor, back: Tensor) -> Tensor:
        """Σ_t b_t ⊗ a_t."""
        a, b = self.pairs(given, back)
        return (b.mT @ a).reshape(len(back), *self.shape)

    def bias_gradients(self, back: Tensor) -> Tensor:
        """Σ_t b_t."""
        return back.reshape(len(back), -1, back.shape[-1]).sum(1)


WIDE, MANY = 16, 128
"""Channels and positions from which one convolution with many groups is faster than patches, on a CPU."""


@dataclass(frozen=True)
class Convolution:
    """A convolution over one to three sides; `padding` is (before, after) of each side."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]
    groups: int

    def pairs(self, given: Tensor, back: Tensor) -> tuple[Tensor, Tensor]:
        """Patches (m, g, T, i) and backprops (m, g, T, o)."""
        samples, sides = len(back), len(self.stride)
        images = given.reshape(-1, *given.shape[-sides - 1 :])
        patches = self.patches(images)  # images, g, i, positions
        returned = back.reshape(len(images), self.groups, -1, patches.shape[-1])
        if len(images) != samples:
            patches, returned = (
                v.unflatten(0, (samples, -1)).permute(0, 2, 3, 1, 4).flatten(3) for v in (patches, returned)
            )
        return patches.mT, returned.mT

    def positions(self, back: Tensor) -> int:
        """T."""
        return back[0].numel() // max(1, self.shape[0])

    def weight_gradients(self, given: Tensor, back: Tensor) -> Tensor:
        """Σ_t b_t ⊗ a_t: by patches, or, where a core does that faster, as the backward pass of one convolution with a group a sample."""
        samples, sides = len(back), len(self.stride)
        alone = given.numel() == samples * math.prod(given.shape[-sides - 1 :])
        if back.device.type == "cpu" and alone and self.shape[1] >= WIDE and self.positions(back) >= MANY:
            return self._grouped(given, back)
        a, b = self.pairs(given, back)
        return (b.mT @ a).reshape(samples, *self.shape)

    def _grouped(self, given: Tensor, back: Tensor) -> Tensor:
        samples, sides = len(back), len(self.stride)
        images = self._padded(given.reshape(-1, *given.shape[-sides - 1 :]))
        many = (samples * self.shape[0], *self.shape[1:])
        _, found, _ = torch.ops.aten.convolution_backward(
            back.reshape(1, many[0], *back.shape[-sides:]),
            images.reshape(1, -1, *images.shape[2:]),
            images.new_empty(many),
            [0],
            self.stride,
            [0] * sides,
            self.dilation,
            False,
            [0] * sides,
            samples * self.groups,
            [False, True, False],
        )
        gradients: Tensor = found.reshape(samples, *self.shape)
        return gradients

    def bias_gradients(self, back: Tensor) -> Tensor:
        """Summed over positions."""
        sides = len(self.stride)
        return back.reshape(len(back), -1, self.shape[0], math.prod(back.shape[-sides:])).sum((1, 3))

    def _padded(self, images: Tensor) -> Tensor:
        pad = [n for side in reversed(self.padding) for n in side]
        return F.pad(images, pad) if any(pad) else images

    def patches(self, images: Tensor) -> Tensor:
        """Every patch the kernel looks at: (images, g, i, positions)."""
        sides, out = len(self.stride), self._padded(images)
        for side, (size, step, spread) in enumerate(zip(self.shape[2:], self.stride, self.dilation, strict=True)):
            out = out.unfold(2 + side, spread * (size - 1) + 1, step)[..., ::spread]
        # images, channels, positions…, kernel…
        out = out.movedim(tuple(range(2, 2 + sides)), tuple(range(-sides, 0))).flatten(-sides)
        patches: Tensor = out.unflatten(1, (self.groups, -1)).flatten(2, -2)
        return patches


@dataclass(frozen=True)
class Adjoint:
    """A transposed convolution: the backward pass of `forward` as an operation of its own."""

    forward: Convolution
    output_padding: tuple[int, ...]

    def weight_gradients(self, given: Tensor, back: Tensor) -> Tensor:
        """As the convolution's, with input and backprop in each other's place."""
        return self.forward.weight_gradients(back, given)

    def bias_gradients(self, back: Tensor) -> Tensor:
        """Summed over positions."""
        sides = len(self.forward.stride)
        channels = self.forward.shape[1] * self.forward.groups
        return back.reshape(len(back), -1, channels, math.prod(back.shape[-sides:])).sum((1, 3))


def convolve_back(given: Tensor, kernel: Tensor, kind: Adjoint) -> Tensor:
    """A transposed convolution with the settings of a use."""
    forward = kind.forward
    sides = len(forward.stride)
    function = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[sides - 1]
    before = tuple(side[0] for side in forward.padding)
    out: Tensor = function(
        given, kernel, None, forward.stride, before, kind.output_padding, forward.groups, forward.dilation
    )
    return out


@dataclass(frozen=True)
class LookUp:
    """An embedding: rows of a table by their numbers. `given` holds the numbers."""

    shape: tuple[int, ...]
    padding: int | None
    by_frequency: bool = False
    """Whether each row's gradient is divided by how often the sample has it."""

    def flat(self, given: Tensor, back: Tensor) -> tuple[Tensor, Tensor]:
        """Numbers (m, T) and what came back to each (m, T, width); nothing comes back to padding."""
        index = given.reshape(len(back), -1)
        rows = back.reshape(len(back), index.shape[1], -1)
        if self.padding is not None:
            rows = rows * (index != self.padding)[..., None]
        if self.by_frequency:
            rows = rows / (index[:, :, None] == index[:, None, :]).sum(2)[..., None]
        return index, rows

    def weight_gradients(self, given: Tensor, back: Tensor) -> Tensor:
        """The whole table for each sample."""
        index, rows = self.flat(given, back)
        table = rows.new_zeros(len(back), *self.shape)
        return table.scatter_add_(1, index[..., None].expand_as(rows), rows)

    def bias_gradients(self, back: Tensor) -> Tensor:
        """There is none."""
        raise NotImplementedError


@dataclass(frozen=True)
class ScaleAndShift:
    """x·w + b, value by value: what a norm does after it has normalised. `axes` are the axes of `back`, from the end, that w has."""

    shape: tuple[int, ...]
    axes: tuple[int, ...]

    def _summed(self, values: Tensor) -> Tensor:
        keep = {values.dim() + axis for axis in self.axes} | {0}
        gone = [axis for axis in range(values.dim()) if axis not in keep]
        return (values.sum(gone) if gone else values).reshape(len(values), *self.shape)

    def weight_gradients(self, given: Tensor, back: Tensor) -> Tensor:
        """Σ a·b over positions."""
        return self._summed(given * back)

    def bias_gradients(self, back: Tensor) -> Tensor:
        """Σ b over positions."""
        return self._summed(back)


def padding_of(
    padding: int | str | Sequence[int], kernel: Sequence[int], dilation: Sequence[int]
) -> tuple[tuple[int, int], ...]:
    """Values added before and after each side."""
    if padding == "valid":
        return tuple((0, 0) for _ in kernel)
    if padding == "same":
        totals = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
        return tuple((t // 2, t - t // 2) for t in totals)
    assert not isinstance(padding, str)
    each = several(padding, len(kernel))
    return tuple((p, p) for p in each)


def several(value: int | Sequence[int], sides: int) -> tuple[int, ...]:
    """One number for each side."""
    if isinstance(value, int):
        return (value,) * sides
    out = tuple(value)
    return out * sides if len(out) == 1 else out


def largest(values: Tensor) -> Tensor:
    """Each sample's largest size, NaN where there is one."""
    flat = values.reshape(len(values), -1)
    if not flat.shape[1]:
        return torch.zeros(len(values), dtype=torch.double, device=values.device)
    size: Tensor = torch.linalg.vector_norm(flat, ord=torch.inf, dim=1)
    return size.double()
