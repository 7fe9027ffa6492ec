"""Every linear layer of a model: could a sample be brought there, what would arrive, and who decides that."""

import copy
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from qbi.attacks.mount import Mounted
from qbi.carrier import Carrier
from qbi.errors import CannotMount
from qbi.routing.carry import carry_to
from qbi.routing.graph import Traced, trace
from qbi.routing.targets import Target, targets

Reach = Literal["exact", "lossy", "unreachable"]

SHIFTS = (8.0, 32.0)
"""Tried in turn: the second one where values lie below the first."""


@dataclass(frozen=True)
class Finding:
    """One linear layer: what a server could carry to it, and why not more."""

    target: Target
    reach: Reach
    reason: str
    decided_by: str
    carrier: Carrier | None

    @property
    def name(self) -> str:
        """The layer's name in the model."""
        return self.target.name

    @property
    def attackable(self) -> bool:
        """Whether rows can be written and divided at all."""
        return self.carrier is not None and self.target.has_bias

    @property
    def rank(self) -> tuple[bool, bool, bool, int]:
        """Larger is more exposed: silent rows, the whole sample, and then how much of it arrives."""
        values = 0 if self.carrier is None else self.carrier.features
        return self.attackable, self.target.rectified, self.reach == "exact", values


def survey(model: nn.Module, sample: tuple[Tensor, ...]) -> tuple[Traced, list[Finding]]:
    """Look at every linear layer. Never fails on a layer: at worst it is unreachable, with the reason."""
    traced = trace(model, sample)
    return traced, [_look(model, target, sample) for target in targets(traced)]


def _look(model: nn.Module, target: Target, sample: tuple[Tensor, ...]) -> Finding:
    tied = _tied_to(model, target.name)
    if tied:
        return Finding(
            target, "unreachable", f"its weights are also those of {tied}; the gradients add up.", tied, None
        )
    try:
        _, carrier = prepare(model, target.name, sample)
    except CannotMount as problem:
        text = str(problem)
        return Finding(target, "unreachable", text, text.split(" ", 1)[0].rstrip(":"), None)
    except Exception as problem:
        # Whatever a model does when its parts are run on their own, the audit goes on without this layer.
        reason = f"its way could not be followed ({type(problem).__name__}: {str(problem).splitlines()[0][:120]})."
        return Finding(target, "unreachable", reason, target.name, None)
    if carrier.exact:
        return Finding(
            target, "exact", "every value of the sample can be brought here unchanged.", target.name, carrier
        )
    first = carrier.losses[0]
    others = f" (and {len(carrier.losses) - 1} more)" if len(carrier.losses) > 1 else ""
    return Finding(target, "lossy", f"{first}{others}", first.layer.split(" ", 1)[0], carrier)


def prepare(model: nn.Module, layer: str, sample: tuple[Tensor, ...]) -> tuple[nn.Module, Carrier]:
    """A copy of the model that carries samples to the layer, and how they arrive."""
    carrier = None
    crafted = model
    for shift in SHIFTS:
        crafted = copy.deepcopy(model).train()
        carrier = carry_to(crafted, layer, sample, shift=shift, strict=False)
        if not any("sees another value" in loss.reason for loss in carrier.losses):
            break
    assert carrier is not None
    return crafted, carrier


def _tied_to(model: nn.Module, name: str) -> str:
    """Another layer that shares this one's weights."""
    weight = model.get_submodule(name).weight
    for other, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            if parameter is weight and other != name:
                return str(other)
    return ""


def mounted_for(model: nn.Module, layer: str, sample: tuple[Tensor, ...]) -> Mounted:
    """A copy of the model ready for an attack's rows."""
    crafted, carrier = prepare(model, layer, sample)
    return Mounted(crafted, layer, carrier)


def probe_of(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """A probe batch of at least two samples."""
    return tuple(part[: max(2, min(4, len(part)))] if len(part) > 1 else torch.cat([part, part]) for part in inputs)
