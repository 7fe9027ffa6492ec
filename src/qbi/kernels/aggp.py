"""AGGP in one launch: a Triton kernel that prunes every row where it stands. Needs an NVIDIA GPU and Triton, which torch brings along.

A program has one row. It finds the size of the k-th largest entry bit by bit, then the lot below which so many entries fall as shall
stay. Lots are computed again in every pass and never stored, so the kernel takes no memory of its own.
"""

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


@triton.jit
def _prune(
    gradient, seen, samples, largest, kept, seed, features, cutoff,
    counted: tl.constexpr, many: tl.constexpr, block: tl.constexpr, whole: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if counted:
        count = tl.load(seen + row).to(tl.int32)
    else:
        sample = tl.arange(0, many)
        outputs = tl.load(seen + sample * tl.num_programs(0).to(tl.int64) + row, mask=sample < samples, other=0)
        count = tl.sum((outputs > 0).to(tl.int32))
    if (count > 0) & (count < cutoff):
        large, stay = tl.load(largest + count), tl.load(kept + count)
        start, own = gradient + row * features, seed + row
        held = tl.arange(0, block)
        if whole:  # a short row stays in registers
            held = _sizes(start, tl.arange(0, block), features)

        bound = tl.full((), 0, tl.int32)
        for place in range(31):
            candidate = bound | (1 << (30 - place))
            bound = tl.where(_reaching(start, held, features, candidate, block, whole) >= large, candidate, bound)

        # Fewer than `stay` lots are at most `low`, at least `stay` are at most `high`. Lots are even: the next guess lies in proportion.
        low, below = tl.full((), -1, tl.int64), tl.full((), 0, tl.int64)
        high = tl.full((), 0x7FFFFFFF, tl.int64)
        above = _reaching(start, held, features, bound, block, whole).to(tl.int64)
        while (above > stay) & (high - low > 1):
            guess = low + ((high - low) * (2 * (stay - below) + 1)) // (2 * (above - below) + 1)
            guess = tl.minimum(tl.maximum(guess, low + 1), high - 1)
            drawn = tl.zeros((block,), tl.int32)
            for first in range(0, features, block):
                at = first + tl.arange(0, block)
                sizes = held if whole else _sizes(start, at, features)
                drawn += ((sizes >= bound) & (_lots(own, at) <= guess)).to(tl.int32)
            found = tl.sum(drawn).to(tl.int64)
            low, below = tl.where(found < stay, guess, low), tl.where(found < stay, found, below)
            high, above = tl.where(found < stay, high, guess), tl.where(found < stay, above, found)

        for first in range(0, features, block):
            at = first + tl.arange(0, block)
            sizes = held if whole else _sizes(start, at, features)
            lost = (sizes < bound) | (_lots(own, at) > high) | (stay == 0)
            tl.store(start + at, tl.zeros((block,), gradient.dtype.element_ty), mask=(at < features) & lost)


@triton.jit
def _reaching(start, held, features, candidate, block: tl.constexpr, whole: tl.constexpr):
    """How many entries of a row are at least so large."""
    if whole:
        return tl.sum((held >= candidate).to(tl.int32))
    reached = tl.zeros((block,), tl.int32)
    for first in range(0, features, block):
        reached += (_sizes(start, first + tl.arange(0, block), features) >= candidate).to(tl.int32)
    return tl.sum(reached)


@triton.jit
def _sizes(start, at, features):
    """Magnitudes as integers that are ordered alike; -1 beyond the row."""
    values = tl.load(start + at, mask=at < features, other=0).to(tl.float32)
    return tl.where(at < features, values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, -1)


@triton.jit
def _lots(seed, at):
    return (tl.randint(seed, at).to(tl.uint32) >> 1).to(tl.int64)


def prune(gradient: Tensor, seen: Tensor, largest: Tensor, kept: Tensor, seed: int, cutoff: int) -> None:
    """Prune in place, given the count of each row, or the outputs (samples × rows) of which those above zero are to be counted.

    `largest` and `kept` say, for every count below `cutoff`, how many entries are large and how many stay.
    """
    rows, features = gradient.shape
    block = max(128, min(BLOCK, triton.next_power_of_2(features)))
    whole = features <= block
    counted, samples = seen.dim() == 1, len(seen)
    many = 1 if counted else triton.next_power_of_2(samples)
    _prune[(rows,)](
        gradient, seen, samples, largest, kept, seed, features, cutoff,
        counted=counted, many=many, block=block, whole=whole, num_warps=8,
    )  # fmt: skip
