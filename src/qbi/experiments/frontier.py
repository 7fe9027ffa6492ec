"""What the budget costs: accuracy against bits, and what makes it cheaper.

Every cell trains a small network with every gradient clipped by sample and noise on the sum, exactly as `LeakGuard` does, and
measures the accuracy on images it has not seen. Noise is seeded here, since results are to be repeated; guards never are.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qbi.data.images import normalised
from qbi.defences.budget import Clipping
from qbi.errors import BadValue
from qbi.metrics import mean_interval
from qbi.models import image_cnn
from qbi.randomness import derive_seed, generator, normal_like
from qbi.records import ImageData

Network = Literal["two-layer", "paper-cnn", "quickstart"]
NETWORKS: tuple[Network, ...] = ("two-layer", "paper-cnn", "quickstart")
Remedy = Literal["", "averaged", "narrow", "frozen", "low-rank", "low-frequency", "pretrained", "accumulated"]
REMEDIES: tuple[Remedy, ...] = (
    "",
    "averaged",
    "narrow",
    "frozen",
    "low-rank",
    "low-frequency",
    "pretrained",
    "accumulated",
)
RATES = {"adam": (3e-4, 1e-3, 3e-3), "sgd": (0.01, 0.03, 0.1)}
PUBLIC = 0.33
"""Share of the images that anybody may know, where a network is trained on them first."""
RANK = 64
SIDE = 8
"""Low frequencies kept along each side of an image."""
ACCUMULATED = 8


@dataclass(frozen=True)
class Cell:
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


class Quickstart(nn.Module):
    """The network of Flower's first tutorial, which is PyTorch's own: 62,006 weights, one pooling layer used twice."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.conv1, self.pool, self.conv2 = nn.Conv2d(3, 6, 5), nn.MaxPool2d(2, 2), nn.Conv2d(6, 16, 5)
        self.fc1, self.fc2, self.fc3 = nn.Linear(400, 120), nn.Linear(120, 84), nn.Linear(84, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of images of 32×32."""
        x = self.pool(F.relu(self.conv2(self.pool(F.relu(self.conv1(x))))))
        return self.fc3(F.relu(self.fc2(F.relu(self.fc1(x.flatten(1))))))  # type: ignore[no-any-return]


def make(cell: Cell, classes: int = 10) -> nn.Module:
    """The network of a cell, its weights seeded."""
    torch.manual_seed(derive_seed(cell.seed, "weights") % 2**31)
    if cell.network == "quickstart":
        model: nn.Module = Quickstart(classes)
    elif cell.network == "paper-cnn":
        model = image_cnn((3, 32, 32), classes=classes)
    else:
        hidden = 50 if cell.remedy == "narrow" else 200
        model = nn.Sequential(nn.Flatten(), nn.Linear(3072, hidden), nn.ReLU(), nn.Linear(hidden, classes))
    if cell.remedy == "frozen":
        first = next(m for m in model.modules() if isinstance(m, nn.Linear))
        first.requires_grad_(False)
    return model


def accuracy(cell: Cell, data: ImageData, device: str = "cpu") -> float:
    """Train one cell and give its accuracy on the fifth of the images that it has not seen."""
    order = torch.randperm(len(data), generator=generator(cell.seed, "split"))
    held_out, rest = order[: len(data) // 5], order[len(data) // 5 :]
    x, y = normalised(data, slice(None)).to(device), data.labels.to(device)
    model = make(cell).to(device)
    if cell.remedy == "pretrained":
        public, rest = rest[: int(PUBLIC * len(data))], rest[int(PUBLIC * len(data)) :]
        _train(model, x, y, public, cell, noise=-1.0, rate=1e-3, optimiser="adam", epochs=8)
    averaged = _train(
        model, x, y, rest, cell, noise=cell.noise, rate=cell.rate, optimiser=cell.optimiser, epochs=cell.epochs
    )
    if cell.remedy == "averaged":
        model.load_state_dict(averaged)
    model.eval()
    with torch.no_grad():
        return float((model(x[held_out]).argmax(1) == y[held_out]).double().mean())


def _train(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    chosen: Tensor,
    cell: Cell,
    *,
    noise: float,
    rate: float,
    optimiser: str,
    epochs: int,
) -> dict[str, Tensor]:
    """Train in place; the running mean of the weights over the second half."""
    weights = [p for p in model.parameters() if p.requires_grad]
    moves: torch.optim.Optimizer
    if optimiser == "adam":
        moves = torch.optim.Adam(weights, lr=rate)
    else:
        moves = torch.optim.SGD(weights, lr=rate, momentum=0.9)
    passes = ACCUMULATED if cell.remedy == "accumulated" else 1
    shuffle, draws = generator(cell.seed, "order"), generator(cell.seed, "noise", device=x.device)
    steps = epochs * math.ceil(len(chosen) / cell.batch_size)
    mean = {n: torch.zeros_like(p) for n, p in model.state_dict().items()}
    done = counted = 0
    with _clipped(model, cell, noise, passes, draws) as shape:
        for _ in range(epochs):
            for batch in chosen[torch.randperm(len(chosen), generator=shuffle)].split(cell.batch_size):
                batch = batch.to(x.device)
                (F.cross_entropy(model(x[batch]), y[batch]) / passes).backward()
                done += 1
                if done % passes == 0 or done == steps:
                    shape(len(batch))
                    moves.step()
                    moves.zero_grad()
                if done > steps // 2:
                    counted += 1
                    for name, value in model.state_dict().items():
                        mean[name] += (value - mean[name]) / counted
    return mean


@contextmanager
def _clipped(model: nn.Module, cell: Cell, noise: float, passes: int, draws: torch.Generator) -> Iterator[Any]:
    """Protect gradients as a cell says; what is yielded shapes them further before a step."""
    if noise < 0:
        yield lambda _samples: None
        return
    projected = cell.remedy in ("low-rank", "low-frequency")
    clipping = Clipping(cell.clip, 0.0 if projected else noise, draws, accumulate=passes, model=model)
    first = next(m for m in model.modules() if isinstance(m, nn.Linear))
    basis = _basis(cell, first.in_features).to(first.weight.device) if projected else None

    def shape(samples: int) -> None:
        """Noise in fewer values: the first layer only moves inside a small space that has nothing to do with the data."""
        if basis is None:
            return
        for parameter in model.parameters():
            if parameter.grad is None:
                continue
            size = noise * cell.clip / samples
            if parameter is first.weight:
                inside = parameter.grad @ basis
                parameter.grad = (inside + size * normal_like(inside, draws)) @ basis.T
            else:
                parameter.grad = parameter.grad + size * normal_like(parameter.grad, draws)

    with clipping.seeing:
        yield shape


def _basis(cell: Cell, width: int) -> Tensor:
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


def compute(cells: Sequence[Cell], data: ImageData, *, device: str = "cpu", jobs: int = 1) -> Iterator[dict[str, Any]]:
    """Train cells, in processes of their own where `jobs` is more than one; each as it is done, with its accuracy."""
    if jobs < 1:
        raise BadValue(f"frontier: {jobs} jobs; at least one is needed.")
    if jobs == 1:
        for cell in cells:
            yield {**asdict(cell), "accuracy": accuracy(cell, data, device)}
        return
    from concurrent.futures import ProcessPoolExecutor, as_completed
    from multiprocessing import get_context

    with ProcessPoolExecutor(
        jobs, mp_context=get_context("spawn"), initializer=_prepare, initargs=(data, device)
    ) as pool:
        running = {pool.submit(_one, cell): cell for cell in cells}
        for future in as_completed(running):
            yield {**asdict(running[future]), "accuracy": future.result()}


_HERE: dict[str, Any] = {}


def _prepare(data: ImageData, device: str) -> None:
    torch.set_num_threads(1)
    _HERE.update(data=data, device=device)


def _one(cell: Cell) -> float:
    return accuracy(cell, _HERE["data"], _HERE["device"])


def best_rates(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each network, remedy, optimiser, batch size and noise: the rate that did best, with mean and spread over seeds."""
    keys = ("network", "remedy", "optimiser", "batch_size", "noise", "epochs")
    by_rate: dict[tuple[Any, ...], dict[int, float]] = {}
    for row in rows:
        by_rate.setdefault((*(row[k] for k in keys), row["rate"]), {})[row["seed"]] = 100 * row["accuracy"]
    best: dict[tuple[Any, ...], dict[str, Any]] = {}
    for key, seeds in by_rate.items():
        found = mean_interval(list(seeds.values()))
        entry = dict(zip(keys, key[:-1], strict=True)) | {
            "rate": key[-1],
            "accuracy": round(found.mean, 2),
            "half_width": None if math.isnan(found.half_width) else round(found.half_width, 2),
            "seeds": len(seeds),
        }
        if key[:-1] not in best or entry["accuracy"] > best[key[:-1]]["accuracy"]:
            best[key[:-1]] = entry
    return sorted(best.values(), key=lambda e: tuple(str(e[k]) if k != "noise" else f"{e[k] + 2:08.4f}" for k in keys))


def curves(cells: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Accuracy by noise for each network without a remedy: the best optimiser and batch size at each level."""
    out = []
    for network in NETWORKS:
        own = [c for c in cells if c["network"] == network and not c["remedy"]]
        plain = max((c["accuracy"] for c in own if c["noise"] < 0), default=None)
        noises = sorted({c["noise"] for c in own if c["noise"] > 0})
        if plain is None or not noises:
            continue
        points = [{"noise": n, "accuracy": max(c["accuracy"] for c in own if c["noise"] == n)} for n in noises]
        out.append({"name": network, "plain": plain, "points": points})
    return out
