"""A small network, and a site's samples."""

import torch
from torch import nn


class Net(nn.Sequential):
    def __init__(self):
        torch.manual_seed(0)
        super().__init__(nn.Linear(192, 100), nn.ReLU(), nn.Linear(100, 4))


def data(name):
    part = int(name.split("-")[-1])
    return torch.randn(10, 192, generator=torch.Generator().manual_seed(part)), torch.arange(10) % 4
