"""What a guarded client does in a round, free of any framework: look at the model, watch the training, look at what leaves.

A framework's own module turns its messages into states and this module's errors into its replies; nothing else.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from qbi.defences.ambient import AmbientGuard, Tally
from qbi.defences.budget.goal import DEFAULT_BITS, LIFETIME_BITS
from qbi.defences.budget.ledger import Ledger
from qbi.defences.policy import POLICIES, PolicyName
from qbi.detection import Sign, inspect_parameters
from qbi.errors import BadValue
from qbi.finite import is_finite

log = logging.getLogger("qbi.guard")

Inspection = Literal["refuse", "warn", "off"]
INSPECTIONS: tuple[Inspection, ...] = ("off", "warn", "refuse")
"""From the mildest to the strictest."""
Metrics = Literal["drop", "keep"]
METRICS: tuple[Metrics, ...] = ("keep", "drop")
State = Mapping[str, Tensor]
Reply = TypeVar("Reply")

PREFIX = "qbi-"


@dataclass(frozen=True)
class RoundSettings:
    """How a round is guarded. `bits` is for each participation, `limit` for all that a ledger holds; see `Account` and `Budget`."""

    policy: PolicyName = "budget"
    inspect: Inspection = "refuse"
    fewest: int = 16
    bits: float = DEFAULT_BITS
    clip: float = 1.0
    samples: int = 0
    """Size of the client's data set; 0 where it is not stated, and every step counts for every sample."""
    ledger: str = ""
    """Where the ledger lies; none, if empty."""
    data: str = "data"
    limit: float = LIFETIME_BITS
    metrics: Metrics = "drop"
    """Under the budget: whether numbers such as the loss may leave beside the weights. They are not clipped and carry no noise."""

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The settings as they are written in a configuration."""
        return tuple(f"{PREFIX}{f.name}" for f in fields(cls))

    @classmethod
    def of(cls, config: Mapping[str, object]) -> "RoundSettings":
        """From a configuration, in which other things may stand too."""
        settings = cls()
        for f in fields(cls):
            if f"{PREFIX}{f.name}" in config:
                settings = replace(settings, **{f.name: _read(f.name, type(f.default), config[f"{PREFIX}{f.name}"])})
        return settings

    def tightened(self, wishes: Mapping[str, object]) -> "RoundSettings":
        """With what a run asks for, as far as it is stricter than what the owner of the data set: the server writes the run's config."""
        asked = RoundSettings.of({**self._config(), **wishes})
        stricter: PolicyName = (
            asked.policy if asked.policy in ("budget", "refuse") and self.policy != "budget" else self.policy
        )
        allowed = replace(
            self,
            policy=stricter,
            inspect=max(self.inspect, asked.inspect, key=INSPECTIONS.index),
            metrics=max(self.metrics, asked.metrics, key=METRICS.index),
            bits=min(self.bits, asked.bits),
            limit=min(self.limit, asked.limit),
        )
        for f in fields(self):
            if getattr(asked, f.name) != getattr(allowed, f.name):
                log.warning(
                    "the run asks for %s%s = %r; only the node's owner may set that.",
                    PREFIX,
                    f.name,
                    getattr(asked, f.name),
                )
        return allowed

    def _config(self) -> dict[str, object]:
        return {f"{PREFIX}{f.name}": getattr(self, f.name) for f in fields(self)}

    def guard(self) -> AmbientGuard:
        """The guard of one round."""
        if self.policy != "budget":
            return AmbientGuard(self.policy, fewest=self.fewest)
        ledger = Ledger(self.ledger) if self.ledger else None
        return AmbientGuard(
            "budget",
            samples=self.samples or None,
            ledger=ledger,
            data=self.data,
            limit=self.limit if ledger is not None else None,
            bits=self.bits,
            clip=self.clip,
        )


CHOICES: Mapping[str, tuple[str, ...]] = {"policy": POLICIES, "inspect": INSPECTIONS, "metrics": METRICS}


def _read(name: str, kind: type, value: object) -> Any:
    if name in CHOICES and value not in CHOICES[name]:
        raise BadValue(f"{PREFIX}{name}: {str(value)!r}; there are {', '.join(CHOICES[name])}.")
    try:
        return kind(str(value))
    except ValueError as problem:
        raise BadValue(f"{PREFIX}{name}: {value!r} is no number.") from problem


@dataclass(frozen=True)
class RoundReport:
    """What was seen of a round."""

    tally: Tally
    signs: tuple[Sign, ...]
    settings: RoundSettings

    def __str__(self) -> str:
        kind = "" if self.settings.policy == "budget" else " (heuristic, known servers only)"
        return f"{self.tally}; {len(self.signs)} signs in the model; policy {self.settings.policy}{kind}"


def guarded_round(
    sent: State,
    settings: RoundSettings,
    train: Callable[[], Reply],
    states_in: Callable[[Reply], Iterable[State]],
    is_answer: Callable[[Reply], bool] = lambda _reply: True,
) -> tuple[Reply, RoundReport]:
    """Inspect what was sent, guard the training, check what would leave; an error says why nothing may.

    `states_in` finds the models in a reply; `is_answer` says whether there is anything in it at all.
    """
    signs = look_before(sent, settings.inspect)
    guard = settings.guard()
    with guard:
        reply = train()
    if is_answer(reply):
        if guard.tally.steps == 0:
            raise BadValue("no backward pass was seen; a training that cannot be watched is not answered.")
        made = guard.made() if settings.policy == "budget" else None
        for state in states_in(reply):
            look_after(sent, state, made)
    return reply, RoundReport(guard.tally, signs, settings)


def look_before(state: State, inspection: Inspection) -> tuple[Sign, ...]:
    """Detection that needs no data, on what the server sent."""
    for name, value in state.items():
        if value.is_floating_point() and not is_finite(value):
            raise BadValue(f"{name} came with NaN or infinite values.")
    if inspection == "off":
        return ()
    signs = tuple(inspect_parameters(state))
    if signs and inspection == "refuse":
        raise BadValue(
            f"the model looks crafted: {signs[0]}" + (f" (and {len(signs) - 1} more)" if len(signs) > 1 else "")
        )
    for sign in signs:
        log.warning("the model looks crafted: %s", sign)
    return signs


def look_after(sent: State, returned: State, made: Sequence[Tensor] | None = None) -> None:
    """The outgoing update: finite, and, where `made` is given, nothing in it that is neither as it was sent nor a protected weight."""
    for name, value in returned.items():
        if value.is_floating_point() and not is_finite(value):
            raise BadValue(f"{name} would leave with NaN or infinite values.")
        if name in sent and sent[name].shape != value.shape:
            raise BadValue(f"{name} would leave as {tuple(value.shape)}, and was sent as {tuple(sent[name].shape)}.")
        if made is None or (name in sent and torch.equal(sent[name].to(value), value)) or not bool(value.any()):
            continue
        if not any(p.shape == value.shape and torch.equal(p.detach().cpu().to(value), value) for p in made):
            raise BadValue(
                f"{name} changed and is no weight that the guard saw move: statistics, gradients or states of an optimiser are not "
                "covered by the budget. Leave it out of the reply, or send it as it came."
            )
