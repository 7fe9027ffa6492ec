"""Each sample's norm over all parameters, and the sum of clipped gradients: book-keeping from inputs and backprops.

Two ways, by what is less work for a use of a parameter:
- *formed*: the samples' own gradients are formed in float32; they are what is measured and what is summed;
- *products*: where a sample's gradient is much larger than what makes it, the norm comes from products of inputs and of backprops, and the
  sum is one product with the backprops scaled, both in float64, in which products of float32 are exact.

What arithmetic adds to one sample's influence, relative to the clip (γ_n = n·u/(1 − n·u), any order of summation):
- norms of formed gradients: blocks of 1,024 squares in float32, γ_1026/2 = 3.1e-5;
- weights rounded to float32 and weighted sums over at most 32 samples: 2·32·γ_34 + 2⁻²³ = 1.3e-4;
- products: norms are raised by 1e-5 of Σ_t ‖a_t‖·‖b_t‖, which bounds every intermediate; sums over at most 2¹⁷ terms of 128 samples
  differ by 2·128·1e5·γ_{2¹⁷} = 3.7e-4 in float64; the norms themselves err by far less;
- sums of parts in float64: below 1e-9.
Together below `ROUNDING`, which is part of the sensitivity. A server cannot make it larger: weights under which large products cancel
raise the norm, and the sample counts for less.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qbi.private.products import Returned, add_products, product_squares
from qbi.uses import Use
from qbi.uses.kinds import Convolution, LookUp, Pairs, largest

ROUNDING = 1e-3
"""What arithmetic adds to a sample's influence, relative to the clip."""

SLICE = 32
"""Samples in one float32 sum."""

BLOCK = 1024
"""Squares that are added up in float32."""

HUGE = 1e30
"""A sample whose products could reach this is left out: beyond it float32 ends."""

FEW_POSITIONS = 32
"""Below so many positions, forming a sample's gradient costs more than products do."""

MOST_FORMED = 2**28
"""Values of samples' gradients that are held at once (1 GiB)."""

MOST_FORMED_ON_CPU = 2**26
"""The same where fresh memory is what costs (256 MiB)."""


@dataclass(frozen=True)
class Seen:
    """What was seen of each sample: for the owner alone."""

    norms: Tensor
    fine: Tensor
    """Which samples have values that arithmetic can hold; the others count for nothing."""


def add_clipped(
    sums: Mapping[str, Tensor], uses: Sequence[Returned], whole: Mapping[str, Tensor], clip: float, used: Tensor
) -> Seen:
    """Norms over all parameters, weights min(1, C/norm), and the weighted sums, which are added to `sums`.

    Args:
        sums: float64, in the parameters' shapes.
        uses: every use of a parameter with a rule.
        whole: samples' gradients of the other parameters, (m, *shape).
        clip: C.
        used: which samples count; the others only fill the batch.
    """
    fine = torch.ones_like(used)
    for part in uses:
        fine &= _holds(part)
    for gradients in whole.values():
        fine &= largest(gradients) < HUGE
    formed, products = _sorted(uses, whole, fine)
    squares = torch.zeros(len(used), dtype=torch.float64, device=used.device)
    for gradients in formed.values():
        squares += _squares(gradients)
    for part in products:
        squares += product_squares(part)
    norms = squares.sqrt()
    fine &= norms.isfinite()
    weights = torch.where(fine & used, clip / norms.clamp_min(clip), 0.0)
    for name, gradients in formed.items():
        _add_formed(sums[name], gradients, weights)
    for part in products:
        assert part.use.weight is not None
        add_products(sums[part.use.weight], part, weights)
    return Seen(norms, fine)


def _holds(part: Returned) -> Tensor:
    """Which samples' products stay within float32; not those with NaN."""
    kind, back = part.use.kind, largest(part.back)
    if isinstance(kind, LookUp):
        return back < HUGE
    values = part.back[0].numel()
    return (largest(part.given).clamp_min(1.0) * back * max(1, values) < HUGE) & (back < HUGE)


def _sorted(
    uses: Sequence[Returned], whole: Mapping[str, Tensor], fine: Tensor
) -> tuple[dict[str, Tensor], list[Returned]]:
    """Samples' gradients by parameter where they are formed; the uses whose weight goes by products."""
    formed = {name: _only(gradients.float(), fine) for name, gradients in whole.items()}
    products = []
    often = _often(part.use for part in uses) | set(whole)

    def add(name: str, gradients: Tensor) -> None:
        formed[name] = formed[name] + gradients if name in formed else gradients

    for part in uses:
        # What is not fine may hold NaN: zeros stand in its place, in what went in and in what came back.
        clean = Returned(part.use, _only(part.given, fine), _only(part.back, fine))
        kind, use = part.use.kind, part.use
        if use.bias is not None:
            add(use.bias, kind.bias_gradients(clean.back).float())
        if use.weight is None:
            continue
        if use.weight not in often and by_products(use, clean.back):
            products.append(clean)
        else:
            add(use.weight, kind.weight_gradients(clean.given, clean.back).float())
    assert not formed.keys() & {part.use.weight for part in products}, "a parameter's norm is taken in one way"
    return formed, products


def _often(uses: Iterable[Use]) -> set[str]:
    """Parameters with more than one use, as a weight or as a bias: their gradient is a sum, so its norm is known only when it is formed."""
    roles = Counter(name for use in uses for name in (use.weight, use.bias) if name is not None)
    return {name for name, times in roles.items() if times > 1}


def by_products(use: Use, back: Tensor) -> bool:
    """Whether a use's weight goes by products, judged by shapes alone."""
    kind = use.kind
    if isinstance(kind, LookUp):
        return True
    if not isinstance(kind, Pairs | Convolution):
        return False
    size = 1
    for side in kind.shape:
        size *= side
    positions = kind.positions(back)
    return size > BLOCK and (positions < FEW_POSITIONS or size * len(back) > MOST_FORMED)


def formed_values(uses: Sequence[Use], whole: dict[str, torch.Size], shapes: dict[str, torch.Size]) -> int:
    """Values that are formed for each sample, for planning how many samples go at once."""
    names = _often(uses) | set(whole)
    for use in uses:
        if use.weight is not None and not by_products(use, use.out.movedim(use.axis, 0)[:1]):
            names.add(use.weight)
    return sum(shapes[n].numel() for n in names)


def _only(values: Tensor, fine: Tensor) -> Tensor:
    """Zeros in the place of samples that are not fine: they may hold NaN, and zero times NaN is no number."""
    if fine.device.type == "cpu" and bool(fine.all()):
        return values
    return torch.where(
        fine.reshape(-1, *[1] * (values.dim() - 1)), values, torch.zeros((), dtype=values.dtype, device=values.device)
    )


def _squares(gradients: Tensor) -> Tensor:
    """Squared norms: short blocks in float32, the blocks in float64."""
    flat = gradients.reshape(len(gradients), -1)
    even = flat.shape[1] // BLOCK * BLOCK
    total = torch.linalg.vector_norm(flat[:, even:], dim=1).double().square()
    if even:
        blocks = torch.linalg.vector_norm(flat[:, :even].unflatten(1, (-1, BLOCK)), dim=2)
        total = total + blocks.double().square().sum(1)
    squares: Tensor = total
    return squares


def _add_formed(total: Tensor, gradients: Tensor, weights: Tensor) -> None:
    """total += Σ wᵢ·gᵢ: a few samples at a time in float32, these in float64."""
    flat = gradients.reshape(len(gradients), -1)
    for few, w in zip(flat.split(SLICE), weights.float().split(SLICE), strict=True):
        total.view(-1).add_((w[None] @ few)[0])
