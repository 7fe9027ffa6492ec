"""What a guarded client does in a round, free of any framework: look at the model, watch the training, look at what leaves.

A framework's own module turns its messages into states and this module's errors into its replies; nothing else.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar

from torch import Tensor

from qbi.defences.ambient import AmbientGuard, Tally
from qbi.defences.guard import is_finite
from qbi.defences.policy import POLICIES, PolicyName
from qbi.detection import Sign, inspect_parameters
from qbi.errors import BadValue
from qbi.extraction import weight_difference

log = logging.getLogger("qbi.guard")

Inspection = Literal["refuse", "warn", "off"]
INSPECTIONS: tuple[Inspection, ...] = ("refuse", "warn", "off")
State = Mapping[str, Tensor]
Reply = TypeVar("Reply")

PREFIX = "qbi-"


@dataclass(frozen=True)
class RoundSettings:
    """How a round is guarded."""

    policy: PolicyName = "auto"
    inspect: Inspection = "refuse"
    fewest: int = 16

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The settings as they are written in a configuration."""
        return tuple(f"{PREFIX}{name}" for name in ("policy", "inspect", "fewest"))

    @classmethod
    def of(cls, config: Mapping[str, object]) -> "RoundSettings":
        """From a configuration, in which other things may stand too."""
        found = {name.removeprefix(PREFIX): value for name, value in config.items() if name in cls.names()}
        policy, inspection = str(found.get("policy", cls.policy)), str(found.get("inspect", cls.inspect))
        for known_policy in POLICIES:
            for known in INSPECTIONS:
                if (policy, inspection) == (known_policy, known):
                    return cls(known_policy, known, int(str(found.get("fewest", cls.fewest))))
        if policy not in POLICIES:
            raise BadValue(f"qbi-policy: {policy!r}; there are {', '.join(POLICIES)}.")
        raise BadValue(f"qbi-inspect: {inspection!r}; there are {', '.join(INSPECTIONS)}.")


@dataclass(frozen=True)
class RoundReport:
    """What was seen of a round."""

    tally: Tally
    signs: tuple[Sign, ...]
    settings: RoundSettings

    def __str__(self) -> str:
        return f"{self.tally}; {len(self.signs)} signs in the model; policy {self.settings.policy}"


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
    with AmbientGuard(settings.policy, fewest=settings.fewest) as guard:
        reply = train()
    if is_answer(reply):
        if guard.tally.steps == 0:
            raise BadValue("no optimiser step was seen; a training that cannot be watched is not answered.")
        for state in states_in(reply):
            look_after(sent, state)
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


def look_after(sent: State, returned: State) -> None:
    """The outgoing update: of the same model, and finite."""
    for name, value in weight_difference(sent, returned).items():
        if not is_finite(value):
            raise BadValue(f"{name} would leave with NaN or infinite values.")
