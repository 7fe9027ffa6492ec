"""A guarded round, free of any framework: the owner's settings, the model looked at, the boundary around the client's code.

A framework's own module turns its messages into `Reply` records and back; nothing else.
"""

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from torch import Tensor

from qbi.detection import Sign, inspect_parameters
from qbi.errors import BadValue, first_line
from qbi.finite import is_finite
from qbi.private.allowed import AllowedNumber, NotReleased, read_names
from qbi.private.boundary import Boundary, State, inside
from qbi.private.goal import DEFAULT_BITS, LIFETIME_BITS, Budget
from qbi.private.ledger import Ledger
from qbi.private.update import ReleasedUpdate
from qbi.theory import guarantees

log = logging.getLogger("qbi.private")

PREFIX = "qbi-"
Policy = Literal["private", "update"]
Inspection = Literal["refuse", "warn", "off"]
CHOICES: Mapping[str, tuple[str, ...]] = {"policy": ("private", "update"), "inspect": ("refuse", "warn", "off")}
GONE = ("budget", "report", "auto", "noise", "aggp", "drop", "skip", "refuse")
"""Policies that watched training code; see `docs/guarantees.md`."""


@dataclass(frozen=True)
class SiteSettings:
    """What the owner of the data sets. The server's configuration is never asked.

    Args:
        policy: `private` lets through what a private step released; `update` releases the whole update of a round itself.
        inspect: what to do about a model that looks crafted.
        bits, clip: of `update`: bits about everything the client holds, for each round; the length to which updates are clipped.
        total: bits that may leave over a run, or over everything in the ledger.
        ledger: where the ledger lies; none, if empty: then a run's own total is kept.
        data: the data set's name in the ledger.
        metrics: numbers that may leave, as `read_names` reads them, such as `"num-examples=1 accuracy:7"`.
    """

    policy: Policy = "private"
    inspect: Inspection = "refuse"
    bits: float = DEFAULT_BITS
    clip: float = 1.0
    total: float = LIFETIME_BITS
    ledger: str = ""
    data: str = "data"
    metrics: str = ""

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The settings as they are written in a configuration."""
        return tuple(f"{PREFIX}{f.name}" for f in fields(cls))

    @classmethod
    def of(cls, config: Mapping[str, object]) -> "SiteSettings":
        """From the owner's configuration, in which other things may stand too."""
        unknown = [k for k in config if k.startswith(PREFIX) and k not in cls.names()]
        if unknown:
            raise BadValue(f"{unknown[0]}: there is no such setting; there are {', '.join(cls.names())}.")
        settings = cls()
        for f in fields(cls):
            if f"{PREFIX}{f.name}" in config:
                settings = replace(settings, **{f.name: _read(f.name, type(f.default), config[f"{PREFIX}{f.name}"])})
        read_names(settings.metrics)
        return settings

    def named(self) -> dict[str, AllowedNumber]:
        """Numbers that may leave; averages weigh clients alike where the owner says nothing."""
        return {"num-examples": AllowedNumber(constant=1), **read_names(self.metrics)}


def _read(name: str, kind: type, value: object) -> Any:
    if name == "policy" and value in GONE:
        raise BadValue(
            f"qbi-policy: {value!r} is gone; there are private (the training code uses qbi.Private) and update (it stays as it is). "
            "Heuristic policies are applied in the training loop: qbi.defended_step."
        )
    if name in CHOICES and value not in CHOICES[name]:
        raise BadValue(f"{PREFIX}{name}: {str(value)!r}; there are {', '.join(CHOICES[name])}.")
    if kind is str:
        return str(value)
    try:
        number = float(str(value))
    except ValueError as problem:
        raise BadValue(f"{PREFIX}{name}: {value!r} is no number.") from problem
    if not 0 < number < math.inf:
        raise BadValue(f"{PREFIX}{name}: {value!r}; it is a positive number.")
    return number


MOST_RECORDS = 5
"""Records of numbers in a reply: as many as Flower's older clients send."""


@dataclass(frozen=True)
class Reply:
    """What a client's code would answer: states and numbers, by the names of their records."""

    arrays: Mapping[str, State]
    numbers: Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Passed:
    """What may leave, and the bits it cost."""

    reply: Reply
    bits: float
    signs: tuple[Sign, ...]


def guarded_round(
    settings: SiteSettings,
    sent: State,
    work: Callable[[], Reply | None],
    *,
    trains: bool,
    spent: float = 0.0,
    told: Callable[[float], None] = lambda _bits: None,
) -> Passed:
    """Run a client's code inside the boundary; what may leave of its reply. Whatever is wrong raises, and nothing leaves.

    Args:
        settings: the owner's.
        sent: every array of the message.
        work: the client's code; None stands for a reply that is an error.
        trains: whether the message asks for training; only then is an update released.
        spent: bits that left earlier in the run, where no ledger knows them.
        told: hears of every charge as it is made, also in a round that is refused later: what was released may leave with the next.
    """
    signs = look_at_model(sent, settings.inspect)
    with inside(paying_boundary(settings, sent, settings.named(), spent=spent, told=told)) as boundary:
        reply = work()
    if reply is None:
        raise NotReleased("the client's code answered with an error.")
    arrays: dict[str, State] = dict(reply.arrays)
    if (len(arrays) > 1 and settings.policy == "private") or len(reply.numbers) > MOST_RECORDS:
        raise NotReleased(
            f"the reply has {len(arrays)} records of arrays and {len(reply.numbers)} of numbers; one, and {MOST_RECORDS} at most, may leave: "
            "what each of many holds would say more than anybody counts."
        )
    if settings.policy == "update" and trains and arrays:
        budget = Budget.for_goal(bits=settings.bits, clip=settings.clip)
        released = ReleasedUpdate(budget)
        for record, state in arrays.items():
            boundary.charge(budget.bits(1))
            arrays[record] = released.release(sent, state)
    else:
        arrays = {record: boundary.check_arrays(state) for record, state in arrays.items()}
    numbers = {record: boundary.check_numbers(values) for record, values in reply.numbers.items()}
    return Passed(Reply(arrays, numbers), boundary.spent, signs)


def paying_boundary(
    settings: SiteSettings,
    sent: State,
    metrics: Mapping[str, AllowedNumber],
    *,
    family: str = "round",
    spent: float = 0.0,
    told: Callable[[float], None] = lambda _bits: None,
) -> Boundary:
    """A round's boundary: bits are written into the owner's ledger before they leave; without one, a run's own total is kept."""
    ledger = Ledger(settings.ledger) if settings.ledger else None

    def pay(bits: float) -> None:
        told(bits)
        if ledger is not None and bits > 0:
            ledger.spend(settings.data, family, guarantees.noise_for_bits(bits), limit=settings.total)

    if ledger is None:
        return Boundary(sent, metrics, settings.total - spent, pay=pay)
    return Boundary(sent, metrics, math.inf, pay=pay, ledger=(ledger.path.resolve(), settings.data))


def look_at_model(state: State, inspection: Inspection) -> tuple[Sign, ...]:
    """Detection that needs no data, on what the server sent."""
    for name, value in state.items():
        if isinstance(value, Tensor) and value.is_floating_point() and not is_finite(value):
            raise BadValue(f"{name} came with NaN or infinite values.")
    if inspection == "off" or not state:
        return ()
    signs = tuple(inspect_parameters(state))
    if signs and inspection == "refuse":
        raise BadValue(
            f"the model looks crafted: {signs[0]}" + (f" (and {len(signs) - 1} more)" if len(signs) > 1 else "")
        )
    for sign in signs:
        log.warning("the model looks crafted: %s", sign)
    return signs


def reason(problem: BaseException) -> str:
    """Why a round was refused, for the owner's log alone."""
    return (
        f"{type(problem).__name__}: {first_line(problem, most=400)}"
        if not isinstance(problem, NotReleased | BadValue)
        else str(problem)
    )
