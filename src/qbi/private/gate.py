"""Where a reply leaves a site, free of any framework, and outside the trainer's process: nothing that process says is believed.

The gate knows what the server sent and what the owner allows. Arrays leave if they are as they were sent, or if a receipt says that they were
released (policy `private`), or as the gate itself releases them (policy `update`). Numbers leave by the owner's names, at their price,
in one order. What a framework's module makes of it is built anew: nothing of the reply itself is passed on.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from qbi.private.boundary import Boundary, State, by_position
from qbi.private.goal import Budget
from qbi.private.owner import OwnersSite
from qbi.private.receipts import Receipts
from qbi.private.site import look_at_model, paying_boundary, reason
from qbi.private.update import ReleasedUpdate

MOST_SAID = 5


@dataclass(frozen=True)
class Leaving:
    """What may leave: a state, or none, and numbers in one order."""

    arrays: Mapping[str, Tensor] | None
    numbers: Mapping[str, Any]
    bits: float


@dataclass(frozen=True)
class Gate:
    """A site's way out."""

    site: OwnersSite
    name: str = ""
    """The site's, where several share an owner's file, as simulated ones do."""
    missed: set[str] = field(default_factory=set)
    """Numbers of which the owner's log has said that they stay."""

    def look(self, sent: State) -> None:
        """At what the server sent, before anything is trained on it; raises where it looks crafted and the owner refuses that."""
        look_at_model(sent, self.site.settings.inspect)

    def judge(self, sent: State, arrays: State | None, numbers: Mapping[str, Any]) -> Leaving:
        """What of a reply may leave. It is paid for first; whatever is wrong raises, and then nothing leaves."""
        self.look(sent)
        settings = self.site.settings
        boundary = paying_boundary(settings, sent, settings.named(), family="gate")
        out: Mapping[str, Tensor] | None = None
        if arrays is not None:
            out = self._update(boundary, arrays) if settings.policy == "update" else self._released(boundary, arrays)
        left = self._numbers(boundary, numbers)
        self.site.note(f"left: {boundary.spent:.4g} bits by the gate, policy {settings.policy}")
        return Leaving(out, left, boundary.spent)

    def _update(self, boundary: Boundary, arrays: State) -> dict[str, Tensor]:
        settings, sent = self.site.settings, boundary.sent
        budget = Budget.for_goal(bits=settings.bits, clip=settings.clip)
        named = by_position(arrays, sent)
        boundary.charge(budget.bits(1))
        out = ReleasedUpdate(budget).release(sent, named)
        return {name: out[name] for name in sent}

    def _released(self, boundary: Boundary, arrays: State) -> dict[str, Tensor]:
        if {*arrays} <= {*boundary.sent} and Receipts.of(self.site, self.name).redeem(boundary.sent, arrays):
            return {n: arrays[n] for n in boundary.sent if n in arrays}
        boundary.check_arrays(arrays)
        return dict(boundary.sent)

    def _numbers(self, boundary: Boundary, numbers: Mapping[str, Any]) -> dict[str, Any]:
        said = 0

        def stays(name: str) -> None:
            nonlocal said
            if name not in self.missed and said < MOST_SAID:
                said += 1
                self.missed.add(name)
                self.site.note(f'“{name}” stays here; to let it out at its price, name it: metrics = ["{name}:8:10"]')

        return boundary.check_numbers(numbers, always=True, stays=stays)

    def refuse(self, problem: BaseException) -> None:
        """Why a reply did not leave, for the owner's log alone."""
        self.site.note(f"not answered: {reason(problem)}")
