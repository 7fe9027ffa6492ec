"""The private step beside a plain step and Opacus' two ways (hooks, ghost), on four models, in one run."""

import gc
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qbi.lab.benchmarks.timing import seconds
from qbi.lab.networks import Quickstart, Transformer, resnet18, two_layers
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


@dataclass(frozen=True)
class TimedModel:
    """A model to time, its batch size and how a batch is made."""

    name: str
    make: Callable[[], nn.Module]
    batch_size: int
    classes: int = 10
    tokens: int = 0


TASKS = (
    TimedModel("two layers", two_layers, 64),
    TimedModel("quickstart", Quickstart, 64),
    TimedModel("ResNet-18-GN", resnet18, 128),
    TimedModel("transformer", Transformer, 64, classes=2, tokens=128),
)


def bench_private(task: TimedModel, device: str, *, seed: int = 0, repeats: int = 30) -> PrivateCost:
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
