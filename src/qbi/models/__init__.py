"""The paper's models: an image CNN whose convolutions can carry the image, and a text model."""

import math
from collections import OrderedDict
from typing import Literal, no_type_check

import torch
from torch import Tensor, nn

from qbi.errors import require_positive

Norm = Literal["batch", "layer"]


def image_cnn(
    shape: tuple[int, int, int], neurons: int = 1000, classes: int = 10, *, norm: Norm | None = None
) -> nn.Sequential:
    """The image model of the paper's appendix: three convolutions without activation, a hidden layer, a head.

    Kernel 3, stride 1, padding 1, no bias (erratum 16). BatchNorm acts per channel before flattening, LayerNorm
    over the whole flattened image.
    """
    require_positive("image CNN", neurons=neurons, classes=classes)
    channels = shape[0]
    features = math.prod(shape)
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    layers["conv1"] = nn.Conv2d(channels, 128, 3, padding=1, bias=False)
    layers["conv2"] = nn.Conv2d(128, 256, 3, padding=1, bias=False)
    layers["conv3"] = nn.Conv2d(256, channels, 3, padding=1, bias=False)
    if norm == "batch":
        layers["norm"] = nn.BatchNorm2d(channels)
    layers["flatten"] = nn.Flatten()
    if norm == "layer":
        layers["norm"] = nn.LayerNorm(features)
    layers.update(_head(features, neurons, classes))
    return nn.Sequential(layers)


def text_model(
    vocabulary: int = 10_000,
    tokens: int = 250,
    dimension: int = 250,
    neurons: int = 1000,
    *,
    norm: Norm | None = None,
) -> nn.Sequential:
    """The text model of the paper's appendix: embedded tokens straight into a hidden layer with ReLU (erratum 8)."""
    require_positive("text model", vocabulary=vocabulary, tokens=tokens, dimension=dimension, neurons=neurons)
    features = tokens * dimension
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    layers["embedding"] = nn.Embedding(vocabulary, dimension)
    layers["flatten"] = nn.Flatten()
    if norm is not None:
        layers["norm"] = nn.BatchNorm1d(features) if norm == "batch" else nn.LayerNorm(features)
    layers.update(_head(features, neurons, 1))
    return nn.Sequential(layers)


def two_layer(features: int, neurons: int, classes: int, *, seed: int | None = None) -> nn.Sequential:
    """Linear, ReLU, Linear: the smallest network that leaks. With a seed its weights are drawn apart from the global state."""
    if seed is None:
        return nn.Sequential(nn.Linear(features, neurons), nn.ReLU(), nn.Linear(neurons, classes))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed % 2**31)
        return two_layer(features, neurons, classes)


def _head(features: int, neurons: int, classes: int) -> dict[str, nn.Module]:
    return {"fc1": nn.Linear(features, neurons), "relu": nn.ReLU(), "fc2": nn.Linear(neurons, classes)}


class Residual(nn.Module):
    """x + branch(x), as a block that an attack can silence."""

    def __init__(self, branch: nn.Module, *, rectified: bool = False) -> None:
        super().__init__()
        self.branch = branch
        self.rectified = rectified

    @no_type_check  # tracers pass their own kind of value through here
    def forward(self, x: Tensor) -> Tensor:
        """Add the branch to the input, through a ReLU if the block ends in one."""
        out: Tensor = x + self.branch(x)
        return out.relu() if self.rectified else out
