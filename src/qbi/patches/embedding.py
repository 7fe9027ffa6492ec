"""Where a model cuts images into patches, and which of its parameters are added to them, position by position."""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qbi.calling import as_client, given_to, hooked
from qbi.federation.client import Loss, default_loss, prediction
from qbi.randomness import generator

AGREES = 1e-3
"""Largest difference, in units of the largest gradient, between what comes back to a patch and to its position."""

MOST_VALUES = 2**24
"""Values of an image up to which each is told by a number of its own, in float32."""


@dataclass(frozen=True)
class PatchEmbedding:
    """A layer that sees patches one by one, and the rows of a parameter that are added to them."""

    layer: str
    places: Tensor = field(repr=False)
    """For each patch, where its values stand in the flattened image, in the order of the layer's weights."""
    positions: str
    """The parameter that is added to the patches."""
    rows: Tensor = field(repr=False)
    """Which of its rows is added to each patch."""
    width: int

    @property
    def patches(self) -> int:
        """Of one image."""
        return len(self.places)


def find_embedding(
    model: nn.Module, shape: tuple[int, ...], label: int = 0, *, loss: Loss = default_loss
) -> PatchEmbedding | None:
    """The patch embedding of a model for images of one shape; None where there is none, or where positions are not learned.

    A server finds it by running the model it sent: an image of numbered pixels says which of them the layer sees together, and a gradient on
    noise says which rows of a parameter get what comes back to each patch.
    """
    pixels = 1
    for size in shape:
        pixels *= size
    if len(shape) != 3 or pixels > MOST_VALUES:
        return None
    place = next(model.parameters())
    counted = torch.arange(pixels, dtype=torch.float32, device=place.device).view(1, *shape)
    found = [(n, m) for n, m in model.named_modules() if _may_be(m)]
    for name, module in found:
        with as_client(model), torch.no_grad():
            # Twice, since a batch norm takes no batch of one.
            seen = given_to(model, module, counted.to(place.dtype).repeat(2, 1, 1, 1))
        places = _places(module, seen[:1], counted) if isinstance(seen, Tensor) and len(seen) == 2 else None
        if places is not None and len(places) > 1:
            return _with_positions(model, name, places, shape, label, loss)
    return None


def _may_be(module: nn.Module) -> bool:
    if isinstance(module, nn.Conv2d):
        whole = module.kernel_size == module.stride and module.groups == 1 and set(module.dilation) == {1}
        return whole and (module.padding in ("valid", (0, 0), 0)) and max(module.kernel_size) > 1
    return isinstance(module, nn.Linear)


def _places(module: nn.Module, seen: Tensor, counted: Tensor) -> Tensor | None:
    """Which pixels each patch is made of; None where the layer sees something else than pixels as they are, each at most once."""
    if isinstance(module, nn.Conv2d):
        if seen.shape != counted.shape or not torch.equal(seen.to(counted), counted):
            return None
        return F.unfold(counted, module.kernel_size, stride=module.stride)[0].T.long().cpu()  # type: ignore[arg-type]
    if seen.dim() != 3:
        return None
    places = seen[0].round().long().cpu()
    known = torch.equal(places.to(seen), seen[0]) and int(places.min()) >= 0 and int(places.max()) < counted.numel()
    return places if known and len(places.unique()) == places.numel() else None


def _with_positions(
    model: nn.Module, name: str, places: Tensor, shape: tuple[int, ...], label: int, loss: Loss
) -> PatchEmbedding | None:
    module = model.get_submodule(name)
    place = next(model.parameters())
    noise = torch.randn(2, *shape, generator=generator(0, "noise for patches")).to(place)
    kept: list[Tensor] = []
    with (
        hooked(after={module: lambda _m, _given, out: kept.append(out)}),
        as_client(model, seed=0),
        torch.enable_grad(),
    ):
        value = loss(prediction(model(noise)), torch.tensor([label, label], device=place.device))
        trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        back, *gradients = torch.autograd.grad(value, [kept[0], *trained.values()], allow_unused=True)
    if back is None:
        return None
    wanted = back.sum(0).flatten(1).T if isinstance(module, nn.Conv2d) else back.sum(0)
    width = wanted.shape[1]
    limit = AGREES * float(wanted.abs().max())
    for parameter, gradient in zip(trained, gradients, strict=True):
        if gradient is None or gradient.shape[-1] != width or gradient.numel() < wanted.numel():
            continue
        apart = torch.cdist(wanted, gradient.reshape(-1, width), p=torch.inf)
        rows = apart.argmin(1)
        if limit > 0 and float(apart.amin(1).max()) <= limit and len(rows.unique()) == len(rows):
            return PatchEmbedding(name, places, parameter, rows.cpu(), width)
    return None
