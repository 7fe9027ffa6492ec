"""A guard around a training step: it counts exactly which samples a server could read, and acts before they leave.

    guard = LeakGuard(model, policy="auto")
    with guard:
        loss = criterion(model(x), y)
        loss.backward()
    print(guard.report)          # the gradients are already protected
    optimiser.step()

It fails closed: where it cannot look (no pass was seen, gradients are not finite), it clears the gradients and raises.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Literal

import torch
from torch import nn

from qbi.defences.aggp import AGGP, prune_rows_in_place
from qbi.defences.rules import noisy_rows
from qbi.errors import BadValue, QbiError
from qbi.exposure import Exposure, Leak, count_leaks, difference_leaks
from qbi.federation.exposed import Watch, vulnerable_layers

Policy = Literal["report", "auto", "noise", "aggp", "drop", "skip", "refuse"]
POLICIES: tuple[Policy, ...] = ("report", "auto", "noise", "aggp", "drop", "skip", "refuse")

NOISE = 3.0
"""Noise of the policy `noise`, in units of a row's size: see `docs/defences.md`."""

log = logging.getLogger("qbi.guard")


class LeakRefused(QbiError):
    """A step that would give samples away, or that could not be looked at; its gradients were cleared."""


@dataclass(frozen=True)
class GuardReport:
    """What one step would have given away, layer by layer, and what was done about it."""

    leaks: tuple[Leak, ...]
    policy: Policy
    rows_changed: int
    by_differences: int = 0
    """Samples that the difference of two rows would have given away."""

    @property
    def samples(self) -> list[int]:
        """Positions in the batch of the samples at risk."""
        if not self.leaks:
            return []
        return torch.stack([leak.samples for leak in self.leaks]).any(0).nonzero()[:, 0].tolist()

    def __str__(self) -> str:
        where = ", ".join(f"{leak.layer}: {leak.count}" for leak in self.leaks if leak.count) or "none"
        more = f", {self.by_differences} from differences of rows" if self.by_differences else ""
        return f"{len(self.samples)} samples readable ({where}{more}); policy {self.policy}, {self.rows_changed} rows changed"


class LeakGuard:
    """Watches linear layers with a bias during forward and backward passes and protects their gradients.

    Policies: `report` counts only; `noise` hides every row behind noise of three times its size; `auto` does so in the layers and steps in
    which samples can be read, from a row or from the difference of two, and leaves others alone; `aggp` prunes rows as the paper does; `drop` zeroes every row, weight and bias, in
    which fewer than `fewest` samples stand; `skip` clears all gradients of a leaking step; `refuse` raises on one.
    Several backward passes inside one `with` block are one step (gradient accumulation). Scaled losses are fine: the
    shares of a row only matter relative to each other.
    """

    def __init__(
        self,
        model: nn.Module,
        policy: Policy = "report",
        *,
        layers: Sequence[str] | None = None,
        settings: AGGP | None = None,
        fewest: int = 16,
        seed: int = 0,
    ) -> None:
        if policy not in POLICIES:
            raise BadValue(f"LeakGuard: no policy is called {policy!r}; there are {', '.join(POLICIES)}.")
        self.model, self.policy = model, policy
        self.settings = settings or AGGP()
        self.fewest = fewest
        self.names = tuple(layers) if layers is not None else tuple(vulnerable_layers(model))
        if not self.names:
            raise BadValue("LeakGuard: the model has no linear layer with a bias; there is nothing to watch.")
        for name in self.names:
            self._layer(name)
        self.generator = torch.Generator().manual_seed(seed)
        self.watch = Watch()
        self.report: GuardReport | None = None
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []

    def __enter__(self) -> "LeakGuard":
        self.watch.clear()
        self.report = None
        for name in self.names:

            def catch(_m: nn.Module, arrived: tuple[torch.Tensor, ...], out: torch.Tensor, name: str = name) -> None:
                self.watch.catch(name, arrived[0], out)

            self._hooks.append(self._layer(name).register_forward_hook(catch))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _value: BaseException | None, _trace: TracebackType | None
    ) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        if kind is None:
            self.check()

    def check(self) -> GuardReport:
        """Count what the gradients now in place give away, apply the policy, and say what was done."""
        try:
            exposures = [self.watch.exposure(name) for name in self.names]
        except BadValue as problem:
            self._clear()
            raise LeakRefused(f"LeakGuard: it could not look. {problem} The gradients were cleared.") from problem
        if not all(p.grad is None or is_finite(p.grad) for p in self.model.parameters()):
            self._clear()
            raise LeakRefused("LeakGuard: gradients have NaN or infinite values; they were cleared.")
        leaks = tuple(count_leaks(exposure) for exposure in exposures)
        differences = [int(difference_leaks(exposure).sum()) for exposure in exposures]
        unsafe = [leak.count + more > 0 for leak, more in zip(leaks, differences, strict=True)]
        leaking = any(unsafe)
        changed = 0
        if self.policy in ("noise", "aggp", "drop"):
            changed = sum(self._protect(exposure) for exposure in exposures)
        elif self.policy == "auto":
            changed = sum(self._protect(e) for e, leaks_here in zip(exposures, unsafe, strict=True) if leaks_here)
        elif self.policy == "skip" and leaking:
            self._clear()
        self.report = GuardReport(leaks, self.policy, changed, max(differences, default=0))
        log.info("%s", self.report)
        if self.policy == "refuse" and leaking:
            self._clear()
            raise LeakRefused(f"LeakGuard: {self.report}. The gradients were cleared.")
        return self.report

    def _protect(self, exposure: Exposure) -> int:
        return protect(self._layer(exposure.layer), exposure, self.policy, self.settings, self.fewest, self.generator)

    def _clear(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = None

    def _layer(self, name: str) -> nn.Linear:
        layer = self.model.get_submodule(name)
        if not isinstance(layer, nn.Linear) or layer.bias is None:
            raise BadValue(f"LeakGuard: {name} is not a linear layer with a bias; it cannot be watched.")
        return layer


def is_finite(values: torch.Tensor) -> bool:
    """Whether all values are finite: by their sum, which one pass forms, and one by one only where that overflows."""
    return bool(values.sum().isfinite()) or bool(values.isfinite().all())


def protect(
    layer: nn.Linear, exposure: Exposure, policy: Policy, settings: AGGP, fewest: int, generator: torch.Generator
) -> int:
    """Change the gradients that stand in one layer as the policy says, in place; returns how many rows were changed."""
    assert layer.weight.grad is not None
    counts = exposure.counts
    if policy == "aggp":
        prune_rows_in_place(layer.weight.grad, counts, generator, settings)
        return int(((counts > 0) & (counts < settings.cutoff)).sum())
    if policy in ("noise", "auto"):
        assert layer.bias.grad is not None
        layer.weight.grad, layer.bias.grad = noisy_rows(layer.weight.grad, layer.bias.grad, NOISE, generator)
        return int((counts > 0).sum())
    unsafe = (counts > 0) & (counts < fewest)
    layer.weight.grad[unsafe] = 0
    if layer.bias.grad is not None:
        layer.bias.grad[unsafe] = 0
    return int(unsafe.sum())
