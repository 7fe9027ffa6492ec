"""The laboratory's one training loop, and the share of images that a network then classifies rightly."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Step = Callable[[Tensor], None]
"""Leaves a gradient, or a step, for the images at these places."""


def optimiser_for(model: nn.Module, name: str, rate: float) -> torch.optim.Optimizer:
    """Adam, or SGD with momentum 0.9, over what is trained."""
    weights = [p for p in model.parameters() if p.requires_grad]
    if name == "adam":
        return torch.optim.Adam(weights, lr=rate)
    return torch.optim.SGD(weights, lr=rate, momentum=0.9)


def plain_step(model: nn.Module, optimiser: torch.optim.Optimizer, x: Tensor, y: Tensor, *, clip: float = 0.0) -> Step:
    """Cross-entropy, backward, one step; the gradient's norm cut at `clip` where it is given."""

    def step(chosen: Tensor) -> None:
        optimiser.zero_grad(set_to_none=True)
        F.cross_entropy(model(x[chosen]), y[chosen]).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimiser.step()

    return step


def train(
    step: Step, images: Tensor, batch_size: int, epochs: int, order: torch.Generator
) -> Iterator[tuple[int, int]]:
    """Step through `epochs` shufflings of the places in `images`; yields (epoch, batch) after each step."""
    place = images.device
    for epoch in range(epochs):
        shuffled = images[torch.randperm(len(images), generator=order).to(place)]
        for number, chosen in enumerate(shuffled.split(batch_size)):
            step(chosen)
            yield epoch, number


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """The share of images classified rightly."""
    was_training = model.training
    model.eval()
    right = sum(int((model(a).argmax(1) == b).sum()) for a, b in zip(x.split(500), y.split(500), strict=True))
    model.train(was_training)
    return right / len(x)
