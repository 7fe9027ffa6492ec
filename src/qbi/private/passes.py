"""Which batches were drawn, and what that promises: only drawn samples are taken, and each drawn batch is for one step."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from qbi.errors import BadValue
from qbi.private import drawing
from qbi.private.goal import Budget
from qbi.theory import guarantees


@dataclass
class Passes:
    """Passes over data sets, one after the other."""

    draws: list[tuple[str, float, int]] = field(default_factory=list)
    """For each pass: how it was drawn, the share of the data in a batch, the number of batches. For each step on samples that were not
    drawn here: `given`, all of the data, how often a sample may be in it."""
    left: int | None = None
    """Samples of the last batch that were not used yet; none where batches are not drawn here."""
    _now: object = None
    _process: int = field(default_factory=os.getpid)

    def draw(
        self,
        data: Any,
        batch_size: int,
        epochs: int,
        sampling: drawing.Sampling,
        workers: int,
        *,
        spend: Callable[[float], None],
        pending: Callable[[], int],
    ) -> Iterator[Any]:
        """Batches of so many passes; `spend` counts participations before each, `pending` says whether samples wait for their release."""
        own = self._now = object()
        for _ in range(epochs):
            self._refuse_leftovers("pass", own, pending())
            spend(drawing.participations(len(data), batch_size, sampling))
            chosen = drawing.draws(len(data), batch_size, sampling)
            self.draws.append((sampling, batch_size / len(data), len(chosen)))
            for numbers, batch in zip(chosen, drawing.load(data, chosen, workers), strict=True):
                if sampling == "poisson":
                    self._refuse_leftovers("batch", own, pending())
                self.left = len(numbers)
                yield batch
                if self._now is not own:
                    raise BadValue("private: another pass began before this one ended; draw one after the other.")
        self.left = 0

    def _refuse_leftovers(self, what: str, own: object, pending: int) -> None:
        """A sample may come again in the next pass, or the next Poisson batch: what was added before is released first."""
        if pending or self._now is not own:
            raise BadValue(
                f"private: samples were added and not released before the next {what}; they could come again in the same sum. "
                f"Call step(optimiser) at the end of each {what}, and draw one pass after the other."
            )

    def take(self, count: int) -> None:
        """So many samples are about to be used."""
        self._refuse_fork()
        if self.left is None:
            return
        if count > self.left:
            raise BadValue(
                f"private: {count} samples, and {self.left} were drawn and not yet used; each drawn batch is for one step. "
                "Augmentations of a sample go into Private(augment=...)."
            )
        self.left -= count

    def give(self, times: int) -> None:
        """A step on samples that were not drawn here: each may be in it so many times."""
        self.draws.append(("given", 1.0, times))

    def release(self) -> None:
        """A step is made: what is left of its batch is not for the next one."""
        self._refuse_fork()
        self.left = None if self.left is None else 0

    def _refuse_fork(self) -> None:
        if os.getpid() != self._process:
            raise BadValue(
                "private: this is a fork of the process that began the training, and one payment is for one release; create Private in the "
                "process that trains."
            )

    @property
    def poisson(self) -> tuple[float, int] | None:
        """Rate and number of steps, where all batches were Poisson samples of one rate."""
        kinds = {(kind, rate) for kind, rate, _ in self.draws}
        if len(kinds) != 1 or self.draws[0][0] != "poisson":
            return None
        return self.draws[0][1], sum(steps for _, _, steps in self.draws)

    def epsilon(self, budget: Budget, delta: float) -> float:
        """ε of all passes and steps; by an accountant where all batches were Poisson samples of one rate."""
        if self.poisson is not None:
            return guarantees.poisson_epsilon(delta, budget.noise, *self.poisson)
        return guarantees.epsilon(delta, budget.noise, self.times) if self.times else 0.0

    @property
    def steps(self) -> int:
        """Batches of all passes that began."""
        return sum(steps for _, _, steps in self.draws)

    @property
    def times(self) -> int:
        """How often a sample may have been there: Poisson samples of several rates, or mixed with others, as if each step had every sample."""
        return sum(1 if kind == "passes" else steps for kind, _, steps in self.draws)
