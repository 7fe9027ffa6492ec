"""What privacy costs: accuracy against bits, and what makes it cheaper.

Every cell trains a small network with `qbi.Private`, or plainly, and measures the accuracy on images it has not seen. Noise is seeded
here, since results are to be repeated; that of a client never is.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qbi.data.images import normalised
from qbi.lab.networks import Quickstart
from qbi.lab.training import accuracy, optimiser_for, train
from qbi.lab.workers import Workers
from qbi.models import image_cnn
from qbi.private import Private
from qbi.randomness import derive_seed, generator
from qbi.records import ImageData
from qbi.theory import guarantees

Network = Literal["two-layer", "paper-cnn", "quickstart", "flower-example"]
NETWORKS: tuple[Network, ...] = ("two-layer", "paper-cnn", "quickstart", "flower-example")
Remedy = Literal[
    "", "averaged", "narrow", "frozen", "low-rank", "low-frequency", "pretrained", "accumulated", "augmented", "decayed"
]
REMEDIES: tuple[Remedy, ...] = (
    "",
    "averaged",
    "narrow",
    "frozen",
    "low-rank",
    "low-frequency",
    "pretrained",
    "accumulated",
    "augmented",
    "decayed",
)
RATES = {"adam": (3e-4, 1e-3, 3e-3), "sgd": (0.01, 0.03, 0.1, 0.2, 0.3)}
"""Clipping fixes a gradient's length, so with SGD the best rate is several times that of plain training."""
PUBLIC = 0.33
"""Share of the images that anybody may know, where a network is trained on them first."""
RANK = 64
SIDE = 8
"""Low frequencies kept along each side of an image."""
ACCUMULATED = 8
AUGMENTED = 4
"""Versions of an image inside one sample's gradient."""


@dataclass(frozen=True)
class FrontierCell:
    """One training. `noise` below zero: plain; zero: clipped only."""

    network: Network
    optimiser: str
    batch_size: int
    noise: float
    rate: float
    remedy: Remedy = ""
    epochs: int = 5
    seed: int = 0
    clip: float = 1.0


class Projected(nn.Module):
    """Features along fixed directions that everybody knows: fewer weights carry noise."""

    basis: Tensor

    def __init__(self, basis: Tensor) -> None:
        super().__init__()
        self.register_buffer("basis", basis)

    def forward(self, x: Tensor) -> Tensor:
        """(samples, directions)."""
        out: Tensor = x @ self.basis
        return out


def make(cell: FrontierCell, classes: int = 10) -> nn.Module:
    """The network of a cell, its weights seeded."""
    torch.manual_seed(derive_seed(cell.seed, "weights") % 2**31)
    if cell.network == "quickstart":
        model: nn.Module = Quickstart(classes)
    elif cell.network == "paper-cnn":
        model = image_cnn((3, 32, 32), classes=classes)
    else:
        hidden = 50 if cell.remedy == "narrow" else 200
        body: list[nn.Module] = []
        if cell.network == "flower-example":
            body = [nn.Conv2d(3, 64, 3, padding=1), nn.Conv2d(64, 64, 3, padding=1), nn.Conv2d(64, 3, 3, padding=1)]
        body.append(nn.Flatten())
        width = 3072
        if cell.remedy in ("low-rank", "low-frequency"):
            basis = _basis(cell, width)
            width = basis.shape[1]
            body.append(Projected(basis))
        model = nn.Sequential(*body, nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, classes))
    if cell.remedy == "frozen":
        first = next(m for m in model.modules() if isinstance(m, nn.Linear))
        first.requires_grad_(False)
    return model


def held_out_accuracy(cell: FrontierCell, data: ImageData, device: str = "cpu") -> float:
    """Train one cell and give its accuracy on the fifth of the images that it has not seen."""
    order = torch.randperm(len(data), generator=generator(cell.seed, "split"))
    held_out, rest = order[: len(data) // 5], order[len(data) // 5 :]
    x, y = normalised(data, slice(None)).to(device), data.labels.to(device)
    model = make(cell).to(device)
    if cell.remedy == "pretrained":
        public, rest = rest[: int(PUBLIC * len(data))], rest[int(PUBLIC * len(data)) :]
        plain = FrontierCell(cell.network, "adam", cell.batch_size, -1.0, 1e-3, "", 8, cell.seed)
        train_cell(model, x, y, public, plain)
    averaged = train_cell(model, x, y, rest, cell)
    if cell.remedy == "averaged":
        model.load_state_dict(averaged)
    return accuracy(model, x[held_out.to(device)], y[held_out.to(device)])


def train_cell(model: nn.Module, x: Tensor, y: Tensor, chosen: Tensor, cell: FrontierCell) -> dict[str, Tensor]:
    """Train in place as a cell says; the running mean of the weights over the second half."""
    size = cell.batch_size * (ACCUMULATED if cell.remedy == "accumulated" else 1)
    steps = cell.epochs * math.ceil(len(chosen) / size)
    optimiser = optimiser_for(model, cell.optimiser, cell.rate)
    slower = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps) if cell.remedy == "decayed" else None
    private = _private(model, cell, size) if cell.noise >= 0 else None
    mean = {n: torch.zeros_like(p, dtype=torch.float32) for n, p in model.state_dict().items()}
    counted = 0

    def step(batch: Tensor) -> None:
        if private is not None:
            private.step(optimiser, x[batch], y[batch])
            return
        optimiser.zero_grad()
        inputs, targets = _versions(x[batch], y[batch]) if cell.remedy == "augmented" else (x[batch], y[batch])
        F.cross_entropy(model(inputs), targets).backward()
        optimiser.step()

    order = generator(cell.seed, "order")
    for number, _ in enumerate(train(step, chosen.to(x.device), size, cell.epochs, order)):
        if slower is not None:
            slower.step()
        if number >= steps // 2:
            counted += 1
            for name, value in model.state_dict().items():
                mean[name] += (value - mean[name]) / counted
    return mean


def _private(model: nn.Module, cell: FrontierCell, size: int) -> Private:
    bits = guarantees.bits(cell.noise) if cell.noise else 1e12
    augment = _versions if cell.remedy == "augmented" else None
    private = Private(
        model,
        batch_size=size,
        bits=bits,
        clip=cell.clip,
        total=math.inf,
        augment=augment,
        at_once=min(size, 256),
        graphs=True,
    )
    private._repeat(derive_seed(cell.seed, "noise"))
    return private


def _versions(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Images as they are and mirrored, each also moved by two pixels: one sample's gradient is their mean."""
    moved = F.pad(x, (2, 2, 2, 2))[..., :-4, :-4]
    return torch.cat([x, x.flip(-1), moved, moved.flip(-1)]), torch.cat([y] * AUGMENTED)


def _basis(cell: FrontierCell, width: int) -> Tensor:
    """Orthonormal directions, known to everybody: drawn at random, or an image's low frequencies."""
    if cell.remedy == "low-rank":
        drawn: Tensor = torch.linalg.qr(torch.randn(width, RANK, generator=generator(cell.seed, "basis")))[0]
        return drawn
    side = math.isqrt(width // 3)
    places = (torch.arange(side) + 0.5) * math.pi / side
    waves = torch.stack([torch.cos(k * places) for k in range(SIDE)])
    waves /= waves.norm(dim=1, keepdim=True)
    plane = torch.einsum("ax,by->abxy", waves, waves).reshape(SIDE * SIDE, side * side)
    planes: Tensor = torch.block_diag(plane, plane, plane)
    return planes.T.contiguous()


def compute(
    cells: Sequence[FrontierCell], data: ImageData, *, device: str = "cpu", jobs: int = 1
) -> Iterator[dict[str, Any]]:
    """Train cells, in processes of their own where `jobs` is more than one; each as it is done, with its accuracy."""
    for cell, reached in Workers(jobs).map(held_out_accuracy, cells, data, device):
        yield {**asdict(cell), "images": len(data), "accuracy": reached}
