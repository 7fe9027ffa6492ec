"""What a backward pass is told by: calls of modules inside a call from outside, and what came back to each."""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from qbi.defences.layout import Place
from qbi.errors import QbiError

HIDING = (
    "DataParallel",
    "DistributedDataParallel",
    "FullyShardedDataParallel",
    "FSDPModule",
    "ScriptModule",
    "OptimizedModule",
)
"""Wrappers behind which calls are not seen."""


class LeakRefused(QbiError):
    """A step that would give samples away, or that could not be looked at; its gradients were cleared."""


@dataclass
class Root:
    """One call from outside: a model, or a part of one, on a batch."""

    module: nn.Module
    given: Any
    samples: int
    fresh: bool
    """Whether its input is data, not the output of another call."""
    names: dict[nn.Module, str]

    def trainable(self) -> dict[str, Tensor]:
        """Everything a gradient can arise for, each tensor once."""
        return {n: p for n, p in self.module.named_parameters() if p.requires_grad}


@dataclass
class Call:
    """One call of one module inside a root call."""

    root: Root
    module: nn.Module
    key: tuple[str, int]
    given: Any
    gradients: dict[int, Tensor] = field(default_factory=dict)
    """By the number of the output."""
    parts: list["Call"] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)
    """Of the inputs, then of the outputs."""

    @property
    def name(self) -> str:
        """The module's name, for people."""
        return self.key[0] or type(self.module).__name__


def refuse_wrappers(module: nn.Module) -> None:
    """Behind some wrappers calls are not seen."""
    for part in module.modules():
        hides = any(c.__name__ in HIDING for c in type(part).__mro__) or getattr(part, "_compiled_call_impl", None)
        if hides:
            raise LeakRefused(
                f"guard: {type(part).__name__} hides the calls of the modules inside it; train the plain module under the guard."
            )
