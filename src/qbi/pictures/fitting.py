"""Pictures whose features are the ones that were read: a fit through the known layers, with smoothness as the tie-breaker."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from qbi.pictures.decoder import Decoder
from qbi.pictures.prefix import Prefix

STEPS, RATE = 200, 0.01


def fit_pictures(
    prefix: Prefix,
    features: Tensor,
    decoder: Decoder,
    *,
    low: Tensor,
    high: Tensor,
    steps: int = STEPS,
    smooth: float = 1.0,
    near: float = 20.0,
) -> Tensor:
    """Start from what the decoder makes of features, and change it until its own features are those.

    Args:
        prefix: from images to features.
        features: (k, values), as they were read.
        decoder: where to start.
        low, high: the range of the images, broadcast over them.
        steps: of Adam.
        smooth: weight of the total variation.
        near: weight of the distance from the start.
    """
    with torch.no_grad():
        start = decoder(features).float()
    start = start.clamp(low, high)
    found = start.clone().requires_grad_()
    scale = float((high - low).mean())
    optimiser = torch.optim.Adam([found], lr=RATE * scale)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    size = (decoder.spread.square().sum()).clamp_min(1e-12)
    best: Tensor = start
    least = torch.full((len(start),), torch.inf, device=start.device)
    with _frozen(prefix.model), torch.enable_grad():
        for _ in range(steps):
            optimiser.zero_grad()
            miss = (prefix(found) - features).square().sum(1) / size
            rough = (found.diff(dim=2).abs().mean((1, 2, 3)) + found.diff(dim=3).abs().mean((1, 2, 3))) / scale
            away = (found - start).square().mean((1, 2, 3)) / scale**2
            value = miss + smooth * rough + near * away
            better = value.detach() < least
            best = torch.where(better[:, None, None, None], found.detach(), best)
            least = torch.minimum(least, value.detach())
            value.sum().backward()
            optimiser.step()
            schedule.step()
            with torch.no_grad():
                found.copy_(found.clamp(low, high))
    return best


@contextmanager
def _frozen(module: nn.Module) -> Iterator[None]:
    before = [p.requires_grad for p in module.parameters()]
    module.requires_grad_(False)
    try:
        yield
    finally:
        for parameter, wanted in zip(module.parameters(), before, strict=True):
            parameter.requires_grad_(wanted)
