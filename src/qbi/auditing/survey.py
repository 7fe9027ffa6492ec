"""Every linear layer of a model: could a sample be brought there, what would arrive, and who decides that."""

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from qbi.attacks import Carried, carry
from qbi.carrier import Carrier
from qbi.errors import CannotMount, first_line
from qbi.routing.graph import Traced, trace
from qbi.routing.path import find_path
from qbi.routing.targets import Target, targets

Reach = Literal["exact", "lossy", "unreachable"]


@dataclass(frozen=True)
class Finding:
    """One linear layer: what a server could carry to it, and why not more."""

    target: Target
    reach: Reach
    reason: str
    decided_by: str
    carried: Carried | None = field(default=None, repr=False)
    """The model as a server would send it, its rows not yet written."""
    untouched: bool = False
    """Whether no weights stand between the input and the layer: its input is the sample, even for who only looks."""

    @property
    def name(self) -> str:
        """The layer's name in the model."""
        return self.target.name

    @property
    def carrier(self) -> Carrier | None:
        """How samples arrive, where they do."""
        return None if self.carried is None else self.carried.carrier

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
    return traced, [_look(traced, target, sample) for target in targets(traced)]


def _look(traced: Traced, target: Target, sample: tuple[Tensor, ...]) -> Finding:
    model = traced.model
    tied = _tied_to(model, target.name)
    if tied:
        return Finding(target, "unreachable", f"its weights are also those of {tied}; the gradients add up.", tied)
    try:
        carried = carry(model, target.name, sample)
    except CannotMount as problem:
        return Finding(target, "unreachable", str(problem), problem.at)
    except Exception as problem:
        # Whatever a model does when its parts are run on their own, the audit goes on without this layer.
        reason = f"its way could not be followed ({type(problem).__name__}: {first_line(problem, most=120)})."
        return Finding(target, "unreachable", reason, target.name)
    _share_unchanged(carried.model, model, target.name)
    untouched = _untouched(traced, target.name)
    shortfalls = carried.carrier.shortfalls
    if not shortfalls:
        sentence = "every value of the sample can be brought here unchanged."
        return Finding(target, "exact", sentence, target.name, carried, untouched)
    first, more = shortfalls[0], len(shortfalls) - 1
    sentence = f"{first} (and {more} more)" if more else str(first)
    return Finding(target, "lossy", sentence, first.place or target.name, carried, untouched)


def _share_unchanged(crafted: nn.Module, model: nn.Module, layer: str) -> None:
    """Let a crafted copy use the model's own memory for what was not changed; the attacked layer stays its own."""
    original = dict(model.named_parameters())
    for name, parameter in crafted.named_parameters():
        if not name.startswith(f"{layer}.") and torch.equal(parameter, original[name]):
            parameter.data = original[name].data


def _untouched(traced: Traced, layer: str) -> bool:
    way = find_path(traced, traced.nodes_of(layer)[0])[:-1]
    modules = [m for node in way if (m := traced.module(node)) is not None and not isinstance(m, nn.Embedding)]
    return not any(True for m in modules for _ in m.parameters())


def _tied_to(model: nn.Module, name: str) -> str:
    """Another layer that shares this one's weights."""
    weight = model.get_submodule(name).weight
    for other, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            if parameter is weight and other != name:
                return str(other)
    return ""


def probe_of(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """A probe batch of at least two samples."""
    return tuple(part[: max(2, min(4, len(part)))] if len(part) > 1 else torch.cat([part, part]) for part in inputs)
