"""Which part of a tensor belongs to which sample: found by changing one sample and looking at what moves.

The unit of every promise is a sample, so its place in each tensor must be known, not assumed: sequences may come first, windows
may be folded into the batch. A trial run with random weights, which no server chose, shows it, and shows where samples mix.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from qbi.errors import BadValue


@dataclass(frozen=True)
class Layout:
    """Sample j of B has the rows j·k … j·k + k − 1 along `axis`, or, where the batch is `inner`, every B-th from j on."""

    axis: int
    inner: bool = False

    def split(self, values: Tensor, samples: int) -> Tensor:
        """One entry for each sample, each shaped as the tensor of a batch of one."""
        rows = values.shape[self.axis]
        if samples == 0 or rows % samples:
            raise BadValue(f"{rows} rows of a layer do not divide among {samples} samples.")
        sizes = (rows // samples, samples) if self.inner else (samples, rows // samples)
        apart: Tensor = values.unflatten(self.axis, sizes)
        return apart.movedim(self.axis + self.inner, 0)

    def weigh(self, values: Tensor, weights: Tensor) -> Tensor:
        """Multiply every sample's part by its weight."""
        each = values.shape[self.axis] // len(weights)
        along = weights.repeat(each) if self.inner else weights.repeat_interleave(each)
        return values * along.to(values.dtype).reshape([-1 if d == self.axis else 1 for d in range(values.dim())])


@dataclass(frozen=True)
class Coupled:
    """Samples mix in this tensor."""


Place = Layout | Coupled | None
"""None: the tensor is the same whatever the samples are."""


def find_layout(one: Tensor, other: Tensor, sample: int, samples: int) -> Place:
    """Where a sample stands, from two runs that differ in it alone."""
    if one.shape != other.shape:
        return Coupled()
    if one.numel() and one.dim() and one.shape[0] % samples == 0 and _others_stand(one, other, sample, samples):
        return Layout(0)
    moved = one != other
    if one.is_floating_point():
        # What two identical runs would differ by is rounding: sums in another order.
        moved &= (one - other).abs().nan_to_num(torch.inf) > 1e-5 * one.abs().nan_to_num(0, 0, 0).amax().clamp_min(
            1e-30
        )
    if not bool(moved.any()):
        return None
    for axis, rows in enumerate(one.shape):
        if rows % samples:
            continue
        at = moved.movedim(axis, 0).reshape(rows, -1).any(1).nonzero()[:, 0]
        if bool((at // (rows // samples) == sample).all()):
            return Layout(axis)
        if bool((at % samples == sample).all()):
            return Layout(axis, inner=True)
    return Coupled()


def _others_stand(one: Tensor, other: Tensor, sample: int, samples: int) -> bool:
    """Whether a sample's own rows moved and no bit of the others did: the usual case, found without a copy of large tensors."""
    each = one.shape[0] // samples
    own, behind = slice(sample * each, (sample + 1) * each), slice((sample + 1) * each, None)
    if not (torch.equal(one[: own.start], other[: own.start]) and torch.equal(one[behind], other[behind])):
        return False
    if not one.is_floating_point():
        return not torch.equal(one[own], other[own])
    low, high = torch.aminmax(one)
    return bool((one[own] - other[own]).abs().amax() > 1e-5 * torch.maximum(high, -low).clamp_min(1e-30))


def leaves(values: Any) -> list[Any]:
    """Everything in nested containers, in order."""
    return list(tree_flatten(values)[0])


def detached(values: Any) -> Any:
    """The same containers, their tensors cut off from the graph."""
    return tree_map(lambda v: v.detach() if isinstance(v, Tensor) else v, values)


def batch_of(given: Any, axis: int) -> int:
    """How many samples an input holds: the size of its first tensor."""
    for value in leaves(given):
        if isinstance(value, Tensor) and value.dim() > axis:
            return int(value.shape[axis])
    return 0


def with_another(given: Any, sample: int, samples: int, axis: int) -> Any:
    """The same input with one sample put in another's place."""
    other = (sample + 1) % samples

    def swap(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dim() <= axis or value.shape[axis] != samples:
            return value
        changed = value.clone()
        source = value.select(axis, other)
        if value.is_floating_point() or value.is_complex():
            source = source + 0.1 * torch.randn_like(source) * (1 + source.std(unbiased=False))
        else:
            source = _next_values(value, value.select(axis, sample))
        changed.select(axis, sample).copy_(source)
        return changed

    return tree_map(swap, given)


def _next_values(values: Tensor, own: Tensor) -> Tensor:
    """Whole numbers of which each is another one, and occurs in the batch: a token, a class, a truth value."""
    if values.dtype == torch.bool:
        return ~own
    known = values.unique()
    found: Tensor = known[(torch.searchsorted(known, own.contiguous()) + 1) % len(known)]
    return found


def copied(values: Any) -> Any:
    """The same containers with tensors of their own: a model may work in place on what it is given."""
    return tree_map(lambda v: v.detach().clone() if isinstance(v, Tensor) else v, values)


def random_parameters(parameters: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Weights nobody chose, of an ordinary size."""
    return {
        name: torch.randn_like(p) * (p.shape[0] / p.numel()) ** 0.5 if p.dim() > 1 else 1 + 0.1 * torch.randn_like(p)
        for name, p in parameters
    }


Seen = dict[tuple[str, int], list[Any]]
"""What went into and came out of each call, by the module's name and the number of the call."""


def compare_runs(run: Callable[[Any], Seen], given: Any, samples: int, axis: int) -> dict[tuple[str, int], list[Place]]:
    """The place of the samples in every tensor of every call."""
    if samples == 1:
        return {
            key: [Layout(0) if isinstance(v, Tensor) and v.dim() else None for v in v_]
            for key, v_ in run(copied(given)).items()
        }
    given = tree_map(lambda v: v.nan_to_num(0, 0, 0) if isinstance(v, Tensor) and v.is_floating_point() else v, given)
    sample = samples // 2
    # Made before either run: both then begin with the same random state, and dropout falls on the same values.
    changed = with_another(given, sample, samples, axis)
    first = copied(given)
    # Whole numbers that are all alike, such as types of tokens, cannot be changed: they stand as the batch does.
    alike = {
        (v.data_ptr(), v.shape): Layout(axis)
        for v, w in zip(leaves(first), leaves(changed), strict=True)
        if isinstance(v, Tensor) and v.dim() > axis and v.shape[axis] == samples and torch.equal(v, w)
    }
    one, other = run(first), run(copied(changed))
    if one.keys() != other.keys():
        raise BadValue("the model takes another way for other samples; its gradients cannot be told apart by sample.")
    return {
        key: [
            alike.get((a.data_ptr(), a.shape)) or find_layout(a, b, sample, samples)
            if isinstance(a, Tensor) and isinstance(b, Tensor)
            else None
            for a, b in zip(one[key], other[key], strict=True)
        ]
        for key in one
    }
