"""Clocks and the record of one comparison."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch


@dataclass(frozen=True)
class Shape:
    """A setting to time: neurons, batch size, features."""

    name: str
    neurons: int
    batch_size: int
    features: int


@dataclass(frozen=True)
class Comparison:
    """Seconds of ours and of the naive method; `extrapolated` when the latter was timed in part only."""

    task: str
    shape: Shape
    ours: float
    naive: float
    extrapolated: bool
    note: str

    @property
    def ratio(self) -> float:
        """How many times faster ours is."""
        return self.naive / self.ours


def seconds(work: Callable[[], object], device: str, *, repeats: int = 1) -> float:
    """Median wall time, with the device's queue drained before and after."""
    times = []
    for _ in range(repeats):
        _drain(device)
        started = time.perf_counter()
        work()
        _drain(device)
        times.append(time.perf_counter() - started)
    return median(times)


def _drain(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()
