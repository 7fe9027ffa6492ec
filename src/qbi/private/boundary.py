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
from typing import Any, Protocol, runtime_checkable

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


@runtime_checkable
class Source(Protocol):
    """What releases states: a private training, or the policy `update`."""

    def released(self) -> Sequence[State]:
        """States as they may leave now: the last weights, their average, the last gradient."""
        ...


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
    ledger: Path | None = None
    """Where `pay` writes: a private training that names the same file is not counted twice."""
    spent: float = 0.0
    sources: list[Source] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.limit >= 0:
            self.limit = 0.0  # no number at all is no leave
        # A copy: what was sent must not change with a model that took it as it was.
        self.sent = {n: v.detach().clone() for n, v in self.sent.items()}

    def was_sent(self, name: str, names: Sequence[str]) -> bool:
        """Whether the server sent an array of that name, or, where it sent none with names, of a model with as many."""
        return name in self.sent or (_unnamed(self.sent) and len(names) == len(self.sent))

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

    def admit(self, source: Source, start: State, names: Sequence[str] = ()) -> None:
        """Take a private training's releases for safe, if it begins with what the server sent or with what was released.

        Arrays that were sent without names get those of the model's state (`names`), in order.
        """
        if _unnamed(self.sent) and len(names) == len(self.sent):
            self.sent = dict(zip(names, self.sent.values(), strict=True))
        public = [self.sent, *(state for s in self.sources for state in s.released())]
        for name, value in start.items():
            if not any(_same(known, name, value) for known in public):
                raise NotReleased(
                    f"boundary: the private training begins with a weight “{name}” that is not what the server sent. Load the weights as they "
                    "came, then create qbi.Private; weights that have seen data may not be the start."
                )
        self.sources.append(source)

    def check_arrays(self, state: State) -> dict[str, Tensor]:
        """The arrays in the order in which they were sent; raises unless all are as sent, or all that were trained are of one release."""
        for name, value in state.items():
            if value.is_floating_point() and not is_finite(value):
                raise NotReleased(f"boundary: “{name}” holds NaN or infinite values.")
        named = by_position(state, self.sent)
        floats = {n for n, v in self.sent.items() if v.is_floating_point()}
        if set(named) not in ({*self.sent}, floats, *({*s} for source in self.sources for s in source.released())):
            raise NotReleased(
                f"boundary: the reply holds {_some(named)}, and neither the model that was sent nor a released state has just these names."
            )
        safe = [self.sent, *self._released()]
        for released in safe:
            # As it was sent is for what was not trained: which arrays come back unmoved must not be chosen.
            if all(_same(released if n in released else self.sent, n, v) for n, v in named.items()):
                places = {n: i for i, n in enumerate(self.sent)}
                pairs = sorted(zip(named, state.items(), strict=True), key=lambda p: places.get(p[0], 0))
                return dict(pair for _, pair in pairs)
        culprit = next((n for n, v in named.items() if not any(_same(s, n, v) for s in safe)), next(iter(named)))
        raise NotReleased(
            f"boundary: “{culprit}” is neither as it was sent nor released. States that may leave come from\n{THREE_LINES}\n"
            "    # then private.state_dict()\nor, for code that stays as it is, from the policy `update`."
        )

    def _released(self) -> Iterator[State]:
        for source in self.sources:
            for state in source.released():
                yield state
                # Differences with what was sent are post-processing.
                both = [n for n in state if n in self.sent and self.sent[n].is_floating_point()]
                mine = {n: state[n].detach().cpu() for n in both}
                theirs = {n: self.sent[n].detach().cpu().to(mine[n].dtype) for n in both}
                yield {n: mine[n] - theirs[n] for n in both}
                yield {n: theirs[n] - mine[n] for n in both}

    def check_numbers(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """What the owner lets out of a record of numbers, in one order; the bits of it, and of what is there at all, are charged."""
        out = {}
        for name, rule in sorted(self.metrics.items()):
            if rule.constant is None:
                self.charge(PRESENCE)
            if name in values:
                out[name], bits = rule.let_out(values[name])
                self.charge(bits)
        for name in values:
            if name not in self.metrics:
                say_once(name)
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
