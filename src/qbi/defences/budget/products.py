"""Layers whose gradient is a sum of products of what came in and what came back: linear maps and convolutions.

Norms of samples' gradients come from the products where that is less work, and from one sample's gradient at a time where that is smaller.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from qbi.defences.calls import Call
from qbi.defences.layout import Layout, Place, leaves
from qbi.errors import BadValue

MOST_VALUES = 2**25
"""Values of per-sample gradients that are held at once."""

ROUNDING = 8 * 2.0**-23
"""Relative error allowed for in sums of products, times the root of their number: see `slack`."""

HUGE = 1e30
"""Features above this are not told apart from infinite ones: the sample is left out."""

SPARSE = 0.5
"""Share of a convolution's filters below which only those that something came back to are worked on."""

Weights = dict[str, Tensor]
"""Parameters by their name inside the module."""


Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d


def is_pair(module: nn.Module) -> bool:
    """Whether a layer's gradient is a sum of products of what came in and what came back."""
    plain = type(module) in (nn.Conv1d, nn.Conv2d, nn.Conv3d) and module.padding_mode == "zeros"
    return type(module) is nn.Linear or plain


def split(values: Tensor, place: Place, samples: int, call: Call) -> Tensor:
    """A tensor with the samples in front; refused where they mix."""
    if not isinstance(place, Layout):
        raise BadValue(
            f"samples of a batch mix before or in “{call.name}” ({type(call.module).__name__}), so none has a gradient of its own. "
            "Use GroupNorm or LayerNorm for BatchNorm (`convert=True` does), or freeze its statistics with eval()."
        )
    return place.split(values, samples)


def squares(gradients: Weights) -> Tensor:
    """Squared norms over all parameters of gradients, one per sample."""
    return torch.stack([g.flatten(1).float().square().sum(1) for g in gradients.values()]).sum(0)


def pair_norms(
    call: Call, places: Sequence[Place], names: Sequence[str], samples: int
) -> tuple[Tensor, Weights | None]:
    """A number of samples at a time: patches of a convolution are many times what came in."""
    module = call.module
    _refuse_channels(call, [places[0], places[len(leaves(call.given))]])
    back = split(call.gradients[0], places[len(leaves(call.given))], samples, call)
    into = split(leaves(call.given)[0].to(back.dtype), places[0], samples, call)
    groups, wide, high, positions = _sizes(module, back)
    by_products = "weight" in names and positions * (wide + high) <= wide * high
    each = groups * (positions * (wide + high) + (positions**2 if by_products else wide * high))
    kept = not by_products and ("weight" not in names or samples * groups * wide * high <= MOST_VALUES)
    total, found = back.new_zeros(samples, dtype=torch.float32), list[Weights]()
    for chosen in torch.arange(samples, device=back.device).split(max(1, MOST_VALUES // each)):
        if kept and len(chosen) == 1 and isinstance(module, Convolution):
            # The patches of one sample would not fit: a backward pass of its own forms none.
            own = convolved(module, _images(module, into[chosen]), _images(module, back[chosen]).float(), names)
            part = {n: g[None] for n, g in own.items()}
        else:
            a, g = _as_pairs(module, into[chosen], back[chosen])
            part = _formed(module, a, g, [n for n in names if n == "bias" or not by_products])
            if not kept:
                total[chosen] += _from_products(a, g, whole=by_products)
        if part:
            total[chosen] += squares(part)
        if kept:
            found.append(part)
    return total, {n: torch.cat([part[n] for part in found]) for n in found[0]} if kept else None


def _refuse_channels(call: Call, places: Sequence[Place]) -> None:
    """A convolution whose groups are the samples has products of another shape."""
    if isinstance(call.module, Convolution) and any(isinstance(p, Layout) and p.axis != 0 for p in places):
        raise BadValue(f"samples stand in the channels of “{call.name}”; call it with samples along the first axis")


def _formed(module: nn.Module, a: Tensor, g: Tensor, names: Sequence[str]) -> Weights:
    """Samples' own gradients."""
    part: Weights = {}
    if "bias" in names:
        part["bias"] = g.sum(3).flatten(1)
    if "weight" in names:
        part["weight"] = (g @ a.mT).reshape(len(a), *module.get_parameter("weight").shape)
    return part


def _from_products(a: Tensor, g: Tensor, *, whole: bool) -> Tensor:
    """What products say of squared norms: the weights' `whole`, and what rounding hides where gradients are summed in another order."""
    (one, size), (other, pull) = _sized(a), _sized(g)
    products, positions = (size * pull).square(), a.shape[3]
    total = torch.zeros_like(products)
    if whole and positions == 1:
        total += (one.square().sum((2, 3)) * other.square().sum((2, 3))).sum(1) * products
    elif whole:
        total += ((one.mT @ one) * (other.mT @ other)).sum((1, 2, 3)).clamp_min(0) * products
    if positions > 1:
        # The bias is a product with one.
        hidden = slack(one.square().sum((1, 2, 3)), other.square().sum((1, 2, 3)), a.shape[2] + g.shape[2])
        total += hidden * torch.maximum(products, pull.square())
    # Beside features as large as that, weighted pulls leave float32.
    return torch.where(size > HUGE, torch.inf, total).float()


def _sized(values: Tensor) -> tuple[Tensor, Tensor]:
    """Each sample's values divided by the largest of them, and that one in float64.

    A server may send huge features and a tiny pull: squares of either leave float32, and the norm of their product is lost.
    """
    largest = values.abs().amax((1, 2, 3)).clamp_min(torch.finfo(torch.float32).tiny)
    return values / largest[:, None, None, None], largest.double()


def _sizes(module: nn.Module, back: Tensor) -> tuple[int, int, int, int]:
    """Groups, values that come into a product and that come back to it, and products for each sample."""
    if isinstance(module, nn.Linear):
        return 1, module.in_features, module.out_features, back[0].numel() // module.out_features
    assert isinstance(module, Convolution)
    wide = module.in_channels // module.groups * math.prod(module.kernel_size)
    return module.groups, wide, module.out_channels // module.groups, back[0].numel() // module.out_channels


def slack(into: Tensor, back: Tensor, terms: int) -> Tensor:
    """What rounding may hide of a squared norm: a server can send weights under which large products cancel.

    The sum that leaves is formed in another order than the norm, so both may be off by this much of the products' own size.
    """
    return ROUNDING * math.sqrt(terms) * (into + 1) * back


def _as_pairs(module: nn.Module, into: Tensor, back: Tensor) -> tuple[Tensor, Tensor]:
    """What came in and what came back as (samples, groups, values, positions)."""
    samples = len(back)
    if isinstance(module, nn.Linear):
        flat_in, flat_back = into.reshape(samples, 1, -1, into.shape[-1]), back.reshape(samples, 1, -1, back.shape[-1])
        return flat_in.float().mT, flat_back.float().mT
    assert isinstance(module, Convolution)
    images = _images(module, into)
    patches = _patches(module, images)
    back = back.reshape(len(images), module.groups, -1, patches.shape[-1])
    if len(images) == samples:
        return patches.float(), back.float()

    def joined(values: Tensor) -> Tensor:
        each: Tensor = values.unflatten(0, (samples, -1))  # samples, images, groups, values, positions
        return each.permute(0, 2, 3, 1, 4).flatten(3).float()

    return joined(patches), joined(back)


def _images(module: Convolution, values: Tensor) -> Tensor:
    """Channels and sides of everything a convolution looks at, samples and their parts in front."""
    return values.reshape(-1, *values.shape[-(len(module.kernel_size) + 1) :])


def _patches(module: Convolution, images: Tensor) -> Tensor:
    """Every patch a convolution looks at: (images, groups, values of a patch, positions)."""
    sides = len(module.kernel_size)
    pad: list[int] = list(getattr(module, "_reversed_padding_repeated_twice"))  # noqa: B009
    out = nn.functional.pad(images, pad)
    if sides == 2:
        out = nn.functional.unfold(out, module.kernel_size, module.dilation, 0, module.stride)
        grouped: Tensor = out.unflatten(1, (module.groups, -1))
        return grouped
    for side in range(sides):
        size, step, spread = module.kernel_size[side], module.stride[side], module.dilation[side]
        out = out.unfold(2 + side, spread * (size - 1) + 1, step)[..., ::spread]
    # images, channels, positions…, kernel…
    out = out.movedim(tuple(range(2, 2 + sides)), tuple(range(-sides, 0))).flatten(-sides)
    grouped = out.unflatten(1, (module.groups, -1))
    return grouped.flatten(2, -2)


def convolved(module: nn.Module, into: Tensor, back: Tensor, names: Sequence[str]) -> Weights:
    """A convolution's own backward pass, for its weights alone; filters that nothing came back to cost nothing."""
    assert isinstance(module, Convolution)
    live = back.flatten(2).any(2).any(0)
    if module.groups == 1 and bool(live.any()) and float(live.double().mean()) <= SPARSE:
        few = _backward(module, into, back[:, live], module.weight.detach()[live], names)
        whole = {n: module.get_parameter(n).new_zeros(module.get_parameter(n).shape, dtype=back.dtype) for n in few}
        for n, value in few.items():
            whole[n][live] = value
        return whole
    return _backward(module, into, back, module.weight.detach(), names)


def _backward(module: Convolution, into: Tensor, back: Tensor, weight: Tensor, names: Sequence[str]) -> Weights:
    pad = list(getattr(module, "_reversed_padding_repeated_twice"))  # noqa: B009
    if any(pad[::2][i] != pad[1::2][i] for i in range(len(pad) // 2)):
        into, even = nn.functional.pad(into, pad), [0] * (len(pad) // 2)
    else:
        even = pad[::2][::-1]
    _, found, bias = torch.ops.aten.convolution_backward(
        back,
        into.to(back.dtype),
        weight.to(back.dtype),
        [len(weight)],
        module.stride,
        even,
        module.dilation,
        False,
        [0] * len(even),
        module.groups,
        [False, "weight" in names, "bias" in names],
    )
    return {n: v for n, v in (("weight", found), ("bias", bias)) if n in names}
