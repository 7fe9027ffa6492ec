"""One decision for every policy: what was exposed goes in, what leaves comes out.

The policies are the defences themselves, and what to do with a step that gives samples away.
"""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from qbi.defences.aggp import AGGP
from qbi.defences.base import Defence
from qbi.defences.registry import DEFENCES, NO_DEFENCE
from qbi.defences.rules import DropSparse
from qbi.errors import BadValue
from qbi.exposure import Leak
from qbi.federation.exposed import ClientStep
from qbi.private.boundary import THREE_LINES
from qbi.randomness import Draws

Act = Literal["send", "clear", "refuse"]

POLICIES: dict[str, tuple[str, Act]] = {
    "report": (NO_DEFENCE, "send"),
    "auto": ("auto", "send"),
    "noise": ("row-noise-3", "send"),
    "aggp": ("aggp", "send"),
    "drop": ("drop-sparse", "send"),
    "skip": (NO_DEFENCE, "clear"),
    "refuse": (NO_DEFENCE, "refuse"),
}
"""A defence of the registry for every step, and what becomes of a step in which somebody is readable.

All heuristic, measured against known servers; what holds against every server is `qbi.Private`."""


@dataclass(frozen=True)
class Policy:
    """A defence for every step, and what becomes of a step in which somebody is readable."""

    name: str
    defence: Defence
    if_readable: Act = "send"


def policy_named(name: str, place: str, *, settings: AGGP | None = None, fewest: int = 16) -> Policy:
    """A heuristic policy by its name; `fewest` is the smallest number of samples in a row that `drop` lets pass."""
    if name == "budget":
        raise BadValue(f"{place}: the policy budget is now a step of its own:\n{THREE_LINES}")
    if name not in POLICIES:
        raise BadValue(f"{place}: no policy is called {name!r}; there are {', '.join(POLICIES)}.")
    key, act = POLICIES[name]
    defence = DEFENCES[key]
    if name == "aggp" and settings is not None:
        defence = settings
    elif name == "drop":
        defence = DropSparse(fewest - 1)
    assert isinstance(defence, Defence)
    return Policy(name, defence, act)


@dataclass(frozen=True)
class Decision:
    """What a step would have given away, what was changed, and what is to be done."""

    leaks: tuple[Leak, ...]
    readable: tuple[int, ...]
    """Samples readable in each layer, from a row or a difference of two."""
    by_differences: int
    gradients: dict[str, Tensor]
    rows_changed: int
    act: Act


def decide(policy: Policy, step: ClientStep, draws: Draws) -> Decision:
    """Count what a step exposes, and protect it as the policy says."""
    readable = tuple(int(e.readable.sum()) for e in step.exposures)
    after = policy.defence.apply(step, draws).update.gradients
    before = step.update.gradients
    changed = 0
    for exposure in step.exposures:
        name = f"{exposure.layer}.weight"
        if after[name] is not before[name]:
            changed += int((after[name] != before[name]).any(1).sum())
    return Decision(
        leaks=tuple(e.leak for e in step.exposures),
        readable=readable,
        by_differences=max((int(e.by_differences.sum()) for e in step.exposures), default=0),
        gradients=dict(after),
        rows_changed=changed,
        act=policy.if_readable if any(readable) else "send",
    )
