"""The private step beside a plain step and Opacus' two ways (hooks, ghost), on four models, in one run."""

import gc
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qbi.benchmarks.timing import seconds
from qbi.private import Private


@dataclass(frozen=True)
class PrivateCost:
    """Seconds of one training step, and the memory it takes beyond model and data (on a GPU)."""

    model: str
    batch_size: int
    parameters: int
    seconds: dict[str, float]
    """By way: plain, private, opacus-hooks, opacus-ghost."""
    gigabytes: dict[str, float]
    """Of the device, by way; empty on a CPU."""

    def ratio(self, way: str) -> float:
        """To the plain step."""
        return self.seconds[way] / self.seconds["plain"]


class Quickstart(nn.Module):
    """The network of Flower's quickstart for PyTorch: two convolutions, three linear layers, 62,006 weights."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 6, 5), nn.Conv2d(6, 16, 5)
        self.fc1, self.fc2, self.fc3 = nn.Linear(400, 120), nn.Linear(120, 84), nn.Linear(84, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Classes of 32×32 images."""
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        out: Tensor = self.fc3(F.relu(self.fc2(F.relu(self.fc1(x.flatten(1))))))
        return out


class Block(nn.Module):
    """A residual block with GroupNorm."""

    def __init__(self, wide: int, high: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(wide, high, 3, stride, 1, bias=False), nn.GroupNorm(16, high)
        self.conv2, self.norm2 = nn.Conv2d(high, high, 3, 1, 1, bias=False), nn.GroupNorm(16, high)
        same = stride == 1 and wide == high
        short = [nn.Conv2d(wide, high, 1, stride, bias=False), nn.GroupNorm(16, high)]
        self.short = nn.Identity() if same else nn.Sequential(*short)

    def forward(self, x: Tensor) -> Tensor:
        """Two convolutions, and what went in."""
        out = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(out + self.short(x))


def resnet18() -> nn.Module:
    """ResNet-18 for 32×32 images, with GroupNorm."""
    blocks = [
        Block(*sizes)
        for wide, high, stride in ((64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2))
        for sizes in ((wide, high, stride), (high, high, 1))
    ]
    stem = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.GroupNorm(16, 64), nn.ReLU()]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


class Transformer(nn.Module):
    """Four encoder layers of width 256 over 128 tokens; attention in linear layers, which Opacus' ghost mode can follow."""

    def __init__(
        self, width: int = 256, heads: int = 4, layers: int = 4, words: int = 10_000, length: int = 128
    ) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.layers = nn.ModuleList(Encoder(width, heads) for _ in range(layers))
        self.head = nn.Linear(width, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        """Classes of texts."""
        places = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens).contiguous()
        x = self.words(tokens) + self.places(places)
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.head(x.mean(1))
        return out


class Encoder(nn.Module):
    """Attention and a feed-forward network, each with a residual and a norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        """One layer."""
        q, k, v = (m(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for m in (self.query, self.key, self.value))
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = self.norm1(x + self.out(mixed))
        out: Tensor = self.norm2(x + self.down(F.relu(self.up(x))))
        return out


@dataclass(frozen=True)
class Task:
    """A model to time, its batch size and how a batch is made."""

    name: str
    make: Callable[[], nn.Module]
    batch_size: int
    classes: int = 10
    tokens: int = 0


def two_layers() -> nn.Module:
    """3072–200–10."""
    return nn.Sequential(nn.Flatten(), nn.Linear(3072, 200), nn.ReLU(), nn.Linear(200, 10))


TASKS = (
    Task("two layers", two_layers, 64),
    Task("quickstart", Quickstart, 64),
    Task("ResNet-18-GN", resnet18, 128),
    Task("transformer", Transformer, 64, classes=2, tokens=128),
)


def bench_private(task: Task, device: str, *, seed: int = 0, repeats: int = 30) -> PrivateCost:
    """Time one step of each way, SGD, the same model and batch; ways take turns, the median counts."""
    draws = torch.Generator().manual_seed(seed)
    if task.tokens:
        x = torch.randint(10_000, (task.batch_size, task.tokens), generator=draws)
    else:
        x = torch.randn(task.batch_size, 3, 32, 32, generator=draws)
    x, y = x.to(device), torch.randint(task.classes, (task.batch_size,), generator=draws).to(device)
    times: dict[str, float] = {}
    memory: dict[str, float] = {}
    for way, build in WAYS.items():
        torch.manual_seed(seed)
        step = build(task.make().to(device), x, y)
        for _ in range(min(3, repeats)):
            step()
        _forget(device)
        times[way] = seconds(step, device, repeats=repeats)
        if device.startswith("cuda"):
            memory[way] = torch.cuda.max_memory_reserved() / 1e9
        del step
        _forget(device, empty=True)
    parameters = sum(p.numel() for p in task.make().parameters())
    return PrivateCost(task.name, task.batch_size, parameters, times, memory)


def _forget(device: str, *, empty: bool = False) -> None:
    gc.collect()
    if device.startswith("cuda"):
        if empty:
            torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


Step = Callable[[], Any]


def _plain(model: nn.Module, x: Tensor, y: Tensor) -> Step:
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        optimiser.zero_grad(set_to_none=True)
        F.cross_entropy(model(x), y).backward()
        optimiser.step()

    return step


def _private(model: nn.Module, x: Tensor, y: Tensor) -> Step:
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    private = Private(model, F.cross_entropy, bits=72, total=1e12, batch_size=len(x), at_once=len(x), graphs=True)
    return lambda: private.step(optimiser, x, y)


def _opacus(mode: str) -> Callable[[nn.Module, Tensor, Tensor], Step]:
    def build(model: nn.Module, x: Tensor, y: Tensor) -> Step:
        from opacus import PrivacyEngine

        optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=len(x))
        settings = {"poisson_sampling": False, "noise_multiplier": 0.1, "max_grad_norm": 1.0, "grad_sample_mode": mode}
        engine = PrivacyEngine()
        if mode == "ghost":
            wrapped, own, loss, _ = engine.make_private(
                module=model, optimizer=optimiser, data_loader=loader, criterion=nn.CrossEntropyLoss(), **settings
            )
        else:
            wrapped, own, _ = engine.make_private(module=model, optimizer=optimiser, data_loader=loader, **settings)
            loss = F.cross_entropy

        def step() -> None:
            own.zero_grad()
            loss(wrapped(x), y).backward()
            own.step()

        return step

    return build


WAYS: dict[str, Callable[[nn.Module, Tensor, Tensor], Step]] = {
    "plain": _plain,
    "private": _private,
    "opacus-hooks": _opacus("hooks"),
    "opacus-ghost": _opacus("ghost"),
}


def noise_nanoseconds(device: str, values: int = 616_000, *, repeats: int = 20) -> float:
    """What one value of noise costs there; on a CPU, with as many threads as torch has now."""
    from qbi.private.release import Grid, release

    whole, grid = torch.zeros(values, dtype=torch.float64, device=device), Grid.of(1.0, 0.1, values)
    release(whole, grid)
    return median(seconds(lambda: release(whole, grid), device) for _ in range(repeats)) / values * 1e9
