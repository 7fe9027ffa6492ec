"""The benign models: those the detectors' bounds were set on, and others that were never looked at for it."""

from collections.abc import Callable, Mapping
from itertools import chain

import torch
from torch import Tensor, nn

from qbi.models import Residual, image_cnn

NEURONS = 128
CLASSES = 10
Make = Callable[[], nn.Sequential]
Optimisers = Mapping[str, Callable[[chain[nn.Parameter]], torch.optim.Optimizer]]


def architectures(shape: tuple[int, int, int]) -> dict[str, Make]:
    """The kinds of models: what people train, and what the attacks can be mounted on."""
    c, h, w = shape
    m = c * h * w

    def block(width: int) -> Residual:
        return Residual(
            nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1))
        )

    return {
        "MLP": lambda: nn.Sequential(nn.Flatten(), *_head(m)),
        "deep MLP": lambda: nn.Sequential(nn.Flatten(), nn.Linear(m, 256), nn.ReLU(), *_head(256)),
        "paper's CNN": lambda: image_cnn(shape, NEURONS, CLASSES),
        "paper's CNN, BatchNorm": lambda: image_cnn(shape, NEURONS, CLASSES, norm="batch"),
        "wide CNN": lambda: nn.Sequential(
            nn.Conv2d(c, 8, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(8, 8, 3, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            *_head(8 * h * w),
        ),
        "pooling CNN": lambda: nn.Sequential(
            nn.Conv2d(c, 16, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 5),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(4),
            nn.Flatten(),
            *_head(512),
        ),
        "residual": lambda: nn.Sequential(
            nn.Conv2d(c, 8, 3, padding=1), block(8), nn.ReLU(), nn.Flatten(), *_head(8 * h * w)
        ),
    }


def _head(features: int) -> list[nn.Module]:
    return [nn.Linear(features, NEURONS), nn.ReLU(), nn.Linear(NEURONS, CLASSES)]


class _Patches(nn.Module):
    """Square patches of an image, one after the other."""

    def __init__(self, side: int) -> None:
        super().__init__()
        self.side = side

    def forward(self, x: Tensor) -> Tensor:
        """Patches as (batch, patches, values)."""
        patches: Tensor = nn.functional.unfold(x, self.side, stride=self.side).mT
        return patches


class _Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        """The mean over positions."""
        return x.mean(1)


def held_out_architectures(shape: tuple[int, int, int]) -> dict[str, Make]:
    """Kinds of models that no bound was set on."""
    c, h, w = shape
    m, side = c * h * w, max(2, h // 8)

    def depthwise(width: int, out: int) -> list[nn.Module]:
        return [
            nn.Conv2d(width, width, 3, padding=1, groups=width),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, out, 1),
            nn.BatchNorm2d(out),
            nn.ReLU(),
        ]

    return {
        "MLP with LayerNorm and GELU": lambda: nn.Sequential(
            nn.Flatten(), nn.Linear(m, 192), nn.LayerNorm(192), nn.GELU(), *_head(192)
        ),
        "MLP with BatchNorm and dropout": lambda: nn.Sequential(
            nn.Flatten(),
            nn.BatchNorm1d(m),
            nn.Linear(m, NEURONS),
            nn.ReLU(),
            nn.Dropout(0.3),
            nn.Linear(NEURONS, CLASSES),
        ),
        "quickstart CNN": lambda: nn.Sequential(
            *(nn.Conv2d(c, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.AdaptiveMaxPool2d(5)),
            *(nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, CLASSES)),
        ),
        "depthwise CNN": lambda: nn.Sequential(
            nn.Conv2d(c, 16, 3, stride=2, padding=1),
            *depthwise(16, 32),
            *depthwise(32, 64),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            *_head(256),
        ),
        "transformer": lambda: nn.Sequential(
            _Patches(side),
            nn.Linear(c * side * side, 64),
            nn.TransformerEncoderLayer(64, 4, 128, dropout=0.1, batch_first=True),
            nn.TransformerEncoderLayer(64, 4, 128, dropout=0.1, batch_first=True),
            _Mean(),
            nn.Linear(64, CLASSES),
        ),
    }


OPTIMISERS: Optimisers = {
    "Adam 1e-3": lambda p: torch.optim.Adam(p, lr=1e-3),
    "Adam 1e-2": lambda p: torch.optim.Adam(p, lr=1e-2),
    "AdamW decay 0.1": lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.1),
    "SGD 0.05": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=5e-4),
}

HELD_OUT_OPTIMISERS: Optimisers = {
    "Adam 3e-3": lambda p: torch.optim.Adam(p, lr=3e-3),
    "RMSprop 1e-3": lambda p: torch.optim.RMSprop(p, lr=1e-3),
    "SGD 0.02, no decay": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9),
}
