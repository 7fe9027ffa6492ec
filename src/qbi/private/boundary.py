"""Decides what may leave a client, whatever framework carries it: released states, what was sent, and numbers that the owner named.

A client's round runs inside a `Boundary`, which knows what the server sent. A private training that begins inside it must begin with
those very weights; what it releases is known to the boundary from then on. Everything else, in every kind of reply, stays here.
"""

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qbi.finite import is_finite
from qbi.private.allowed import AllowedNumber, NotReleased
from qbi.private.ledger import BudgetSpent

log = logging.getLogger("qbi.private")

State = Mapping[str, Tensor]

THREE_LINES = """private = qbi.Private(model, loss, bits=72)
for x, y in private.batches(dataset, batch_size=64):
    private.step(optimiser, x, y)"""
"""What training code looks like whose states may leave."""

PRESENCE = 1.0
"""Bits that it tells whether a named value is there at all."""

REFUSED = "This client does not answer."
"""What a server is told, whatever the reason: a reason would depend on data."""


@dataclass(eq=False)
class Boundary:
    """One client's round.

    Args:
        sent: what the server sent, by name; it may leave again as it came.
        metrics: numbers that the owner lets out, by name.
        limit: bits that may still leave in this run, where no ledger counts them.
        pay: writes bits down, before they leave; raises where that is more than may.
    """

    sent: State
    metrics: Mapping[str, AllowedNumber] = field(default_factory=dict)
    limit: float = math.inf
    pay: Callable[[float], None] | None = None
    ledger: tuple[Path, str] | None = None
    """Where `pay` writes, and under which name: a private training that names the same file and data is not counted twice."""
    spent: float = 0.0
    training: object = None
    """The private training that was let in last."""
    released: list[State] = field(default_factory=list)
    """What it released last, as it told: its weights, their average, the last gradient."""
    known: State = field(default_factory=dict)
    """What was sent, by the names of the model's state where it came without any."""

    def __post_init__(self) -> None:
        if not self.limit >= 0:
            self.limit = 0.0  # no number at all is no leave
        # A copy: what was sent must not change with a model that took it as it was.
        self.sent = {n: v.detach().clone() for n, v in self.sent.items()}
        self.known = self.sent

    def was_sent(self, name: str, names: Sequence[str]) -> bool:
        """Whether the server sent an array of that name, or, where it sent none with names, of a model with as many."""
        return name in self.known or (_unnamed(self.sent) and len(names) == len(self.sent))

    def charge(self, bits: float) -> None:
        """So many bits are about to leave; raises where that is more than may."""
        if self.spent + bits > self.limit * (1 + 1e-9):
            raise BudgetSpent(
                f"the budget of this run is used up: {bits:.4g} bits more, and {self.limit - self.spent:.4g} of {self.limit:.4g} may still "
                "leave. Give the client a ledger and a larger total, or stop here."
            )
        if self.pay is not None:
            self.pay(bits)
        self.spent += bits

    def admit(self, training: object, start: State, names: Sequence[str] = ()) -> None:
        """Let a private training in, if it begins with what the server sent or with one state that was released.

        Arrays that were sent without names get those of the first model's state (`names`), in order, for comparison; they leave as they came. From
        then on its states may leave, and those of trainings before it no longer do: which of several comes, or of which each array is, would say
        something that nobody paid for.
        """
        known = self.known
        if known is self.sent and _unnamed(self.sent) and len(names) == len(self.sent):
            known = dict(zip(names, self.sent.values(), strict=True))
        public = [known, *self.released]
        if not start or not any(all(_same(k if n in k else known, n, v) for n, v in start.items()) for k in public):
            new = (n for n, v in start.items() if not any(_same(state, n, v) for state in public))
            raise NotReleased(
                f"boundary: the private training begins with a weight “{next(new, next(iter(start), ''))}” that is not what the server sent, or "
                "not of the same state as the others. Load the weights as they came, then create qbi.Private; weights that have seen "
                "data may not be the start."
            )
        self.known, self.training = known, training
        self.released = [{n: v.detach().clone() for n, v in start.items()}]

    def publish(self, training: object, states: Sequence[State]) -> None:
        """What a training has just released, after it was paid for; of one that was not let in last it is not taken."""
        if training is self.training:
            self.released = list(states)

    def check_arrays(self, state: State) -> dict[str, Tensor]:
        """The arrays under the names and in the order in which they were sent, or without names; raises unless all are as sent, or all that were trained are of
        one release."""
        for name, value in state.items():
            if value.is_floating_point() and not is_finite(value):
                raise NotReleased(f"boundary: “{name}” holds NaN or infinite values.")
        named = by_position(state, self.known)
        floats = {n for n, v in self.known.items() if v.is_floating_point()}
        if set(named) not in ({*self.known}, floats, *({*s} for s in self.released)) or not {*named} <= {*self.known}:
            raise NotReleased(
                f"boundary: the reply holds {_some(named)}, and neither the model that was sent nor a released state has just these names."
            )
        for name, value in named.items():
            like = self.known[name]
            if value.shape != like.shape or value.dtype != like.dtype:
                raise NotReleased(f"boundary: “{name}” has another shape or type than what was sent.")
        safe = [self.known, *self._safe()]
        for released in safe:
            # As it was sent is for what was not trained: which arrays come back unmoved must not be chosen.
            if all(_same(released if n in released else self.known, n, v) for n, v in named.items()):
                # Our own copies: the client's code may still write into its tensors.
                own = {
                    n: (released if n in released else self.known)[n].detach().clone().to(v.device)
                    for n, v in named.items()
                }
                out = {theirs: own[n] for theirs, n in zip(self.sent, self.known, strict=True) if n in own}
                return out if {*named} == {*state} else {str(i): v for i, v in enumerate(out.values())}
        culprit = next((n for n, v in named.items() if not any(_same(s, n, v) for s in safe)), next(iter(named)))
        raise NotReleased(
            f"boundary: “{culprit}” is neither as it was sent nor released. States that may leave come from\n{THREE_LINES}\n"
            "    # then private.state_dict()\nor, for code that stays as it is, from the policy `update`."
        )

    def _safe(self) -> Iterator[State]:
        for state in self.released:
            yield state
            # Differences with what was sent are post-processing.
            both = [n for n in state if n in self.known and self.known[n].is_floating_point()]
            mine = {n: state[n].detach().cpu() for n in both}
            theirs = {n: self.known[n].detach().cpu().to(mine[n].dtype) for n in both}
            yield {n: mine[n] - theirs[n] for n in both}
            yield {n: theirs[n] - mine[n] for n in both}

    def check_numbers(
        self, values: Mapping[str, Any], *, always: bool = False, stays: Callable[[str], None] | None = None
    ) -> dict[str, Any]:
        """What the owner lets out of a record of numbers, in one order; the bits of it, and of what is there at all, are charged.

        Args:
            values: what the client's code gave.
            always: constants are there whatever it gave; else where it gave some value.
            stays: hears the name of each number that does not leave.
        """
        out: dict[str, Any] = {}
        for name, rule in sorted(self.metrics.items()):
            if rule.constant is not None:
                if always or name in values:
                    out[name] = rule.constant
                continue
            self.charge(PRESENCE)
            if name in values:
                out[name], bits = rule.let_out(values[name])
                self.charge(bits)
        for name in sorted(set(map(str, values)) - set(self.metrics)):
            (stays or say_once)(name)
        return out


@lru_cache(maxsize=256)
def say_once(name: str) -> None:
    """A number that does not arrive is missed at the server, where nobody knows why: the owner's log says it, once."""
    log.warning(
        '“%s” stays here. To let it out at its price, name it: metrics = ["%s:8:10"] in qbi-site.toml, or qbi-metrics="%s:8:10" for '
        "8 bits of a number from 0 to 10.",
        *(name, name, name),
    )


_current: ContextVar[Boundary | None] = ContextVar("qbi boundary", default=None)


@contextmanager
def inside(boundary: Boundary) -> Iterator[Boundary]:
    """Run a client's round inside a boundary."""
    token = _current.set(boundary)
    try:
        yield boundary
    finally:
        _current.reset(token)


def current() -> Boundary | None:
    """The boundary of the round that runs now, if there is one."""
    return _current.get()


def by_position(state: State, names: Mapping[str, Any]) -> dict[str, Tensor]:
    """Arrays without names (0, 1, 2 …) under the names of what was sent."""
    if _unnamed(state) and len(state) == len(names) and set(state) != set(names):
        return dict(zip(names, state.values(), strict=True))
    return dict(state)


def _unnamed(state: Mapping[str, Any]) -> bool:
    return bool(state) and list(state) == [str(i) for i in range(len(state))]


def _same(known: State, name: str, value: Tensor) -> bool:
    """Bit for bit."""
    other = known.get(name)
    if other is None or other.shape != value.shape or other.dtype != value.dtype:
        return False
    a, b = other.detach().cpu().contiguous(), value.detach().cpu().contiguous()
    return bool(torch.equal(a.view(-1).view(torch.uint8), b.view(-1).view(torch.uint8))) if a.numel() else True


def _some(names: Mapping[str, Any]) -> str:
    shown = ", ".join(list(names)[:3]) or "nothing"
    return shown + (f" and {len(names) - 3} more" if len(names) > 3 else "")
