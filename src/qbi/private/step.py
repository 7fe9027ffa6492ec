"""The training step that is ours: each sample's loss alone, clipped over all trained weights, released on a grid.

private = qbi.Private(model, loss=F.cross_entropy, bits=72)
for x, y in private.batches(dataset, batch_size=64):
    private.step(optimiser, x, y)
private.state_dict()        # what may leave
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Unpack
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qbi.errors import BadValue
from qbi.private import boundary, drawing, reporting
from qbi.private.account import Account, family_of
from qbi.private.goal import Budget, Goal
from qbi.private.incoming import count_samples, same_form
from qbi.private.keystream import Keys, repeated_keys, system_key
from qbi.private.ledger import Ledger
from qbi.private.noise import noise_slack
from qbi.private.passes import Passes
from qbi.private.refusals import refuse_average, refuse_nameless, refuse_other_sampling, refuse_repeating
from qbi.private.release import Grid, release
from qbi.private.reporting import StepReport
from qbi.private.samples import Augment, Evaluator, Loss
from qbi.private.summing import Sums, one_at_a_time
from qbi.private.weights import Weights

AT_ONCE = 64
"""Samples that are evaluated at once, where memory allows."""


class Private:
    """Trains a model so that what leaves about each sample is bounded, whatever model the server sent.

    Args:
        model: what is trained; its weights as they are now are taken to be public.
        loss: from what the model returns for *one* sample (a batch of one) and its target to a number, as `F.cross_entropy`.
        ledger: a file (or `Ledger`) that counts over rounds and restarts.
        data: the data set's name in the ledger.
        total: bits about one sample that may leave in all.
        batch_size: what sums are divided by, where batches do not come from `batches`.
        penalty: a term of the weights alone, such as FedProx's: a function from the model to a number. It is not clipped.
        average: keep a running average of the released weights, with this decay; see `state_dict`.
        augment: a function from one sample (x, y) to several in one tensor; their mean loss is the sample's.
        at_once: samples that are evaluated at once; fewer take less memory.
        graphs: on a GPU, record the step as a CUDA graph: several times faster for small models. Numbers that Python code changes from step to
            step (a temperature, a loss's weight) are then those of the first step.
        goal: `bits`, `max_reconstruction=(γ, κ)`, `epsilon` (with `delta`) or `preset`; `participations`, for which the goal is stated;
            `clip`. See `Budget.for_goal`.

    >>> model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> private = Private(model, F.cross_entropy, bits=72)
    >>> optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> data = torch.rand(12, 6), torch.arange(12) % 2
    >>> for x, y in private.batches(data, batch_size=4):
    ...     report = private.step(optimiser, x, y)
    >>> private.account.participations
    1.0
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss = F.cross_entropy,
        *,
        ledger: Ledger | str | None = None,
        data: str = "data",
        total: float | None = None,
        batch_size: int | None = None,
        penalty: Callable[[nn.Module], Tensor] | None = None,
        average: float | None = None,
        augment: Augment | None = None,
        at_once: int = AT_ONCE,
        graphs: bool = False,
        **goal: Unpack[Goal],
    ) -> None:
        if at_once < 1 or (average is not None and not 0 < average < 1):
            raise BadValue(f"private: at_once is {at_once}, average {average}; at least 1, and between 0 and 1.")
        self.model, self.penalty = model, penalty
        self.budget, self._goal = Budget.for_goal(**goal), goal
        book = Ledger(ledger) if isinstance(ledger, str) else ledger
        self.evaluator = Evaluator(model, loss, augment)
        self.account = Account(self.budget, family_of(self.evaluator.parameters.values()), book, data, total)
        self.batch_size, self.steps = batch_size, 0
        self._sums = Sums(self.evaluator, self.budget.clip, at_once, graphs=graphs)
        self.grid = Grid.of(self.budget.clip, self.budget.noise, self._sums.total.numel())
        self._keys: Keys = system_key
        self._repeated, self._lock = False, threading.RLock()
        self._passes = Passes()
        self._form: Any = None
        self._history: list[StepReport] = []
        self._weights = Weights(model, self.evaluator.parameters, average, (loss, augment))
        self._admit_weights()

    # What goes in

    def batches(
        self,
        dataset: Any,
        batch_size: int,
        *,
        epochs: int = 1,
        sampling: drawing.Sampling = "passes",
        workers: int = 0,
    ) -> Iterator[Any]:
        """Draw batches and count participations, before the first batch of each pass.

        A data set is a tuple of tensors, a `TensorDataset`, or anything with a length and samples by number. A pass costs one participation
        of every sample, also when the loop is left early.
        """
        drawing.check(len(data := drawing.as_dataset(dataset)), batch_size)
        refuse_average(self._goal, sampling)
        more = epochs * -(-len(data) // batch_size)
        refuse_other_sampling(self._goal, sampling, batch_size / len(data), self._passes.steps + more)
        self.batch_size = batch_size
        pay, pending = self.account.spend, lambda: self._sums.parts
        drawn = self._passes.draw(data, batch_size, epochs, sampling, workers, spend=pay, pending=pending)
        yield from one_at_a_time(drawn, self._lock, self._sums)

    def add(self, inputs: Any, targets: Any) -> None:
        """Add samples to the step that is being made: parts of a batch that is too large to be held. `step` releases their sum."""
        with self._lock:
            self._sums.refuse_inside()
            count = count_samples(inputs, targets)
            self._passes.take(count)
            if self.batch_size is None:
                raise BadValue(
                    "private: say how many samples make a batch: Private(..., batch_size=64), or draw them with private.batches."
                )
            self._form = same_form(self._form, inputs, targets)
            self._weights.check()
            self._weights.restore()
            self._weights.note()
            self._sums.add(inputs, targets, count, self.batch_size)

    # What comes out

    def step(self, optimiser: torch.optim.Optimizer, inputs: Any = None, targets: Any = None) -> StepReport:
        """Release the clipped sum of a batch with noise, put it in the place of all gradients, and let the optimiser step.

        Without inputs, the sum of what was given to `add`. Returns what the owner may want to know; that is not for others.
        """
        with self._lock:
            return self._step(optimiser, inputs, targets)

    def _step(self, optimiser: torch.optim.Optimizer, inputs: Any, targets: Any) -> StepReport:
        self._sums.refuse_inside()
        self._weights.check_optimiser(optimiser)
        if inputs is not None:
            self.add(inputs, targets)
        if self.batch_size is None:
            raise BadValue("private: nothing was given to this step; call step(optimiser, x, y).")
        if self._passes.left is None:
            # Not drawn here: the same samples may be in every step, and in every part that was added to it.
            refuse_other_sampling(self._goal, "given", 1.0, 1)
            times = max(1, self._sums.parts) ** 2
            self.account.spend(float(times))
            self._passes.give(times)
        self.account.settle()
        self._passes.release()
        try:
            self._weights.restore()
            self._release()
            self._weights.step(optimiser)
            self.account.publish(self, self._weights.released())
        except BaseException:
            self._weights.restore()
            self._weights.clear()
            self._sums.clear()
            raise
        self.steps += 1
        report = StepReport(self._sums.seen.clone())
        self._history = [*self._history[-99:], report]
        self._sums.clear()
        return report

    def state_dict(self, *, averaged: bool = False) -> dict[str, Tensor]:
        """The model's state as it may leave: released weights, everything else as it was when training began."""
        return self._weights.state(averaged=averaged)

    def load_state_dict(self, state: boundary.State) -> None:
        """Go on from weights that are public, such as a new round's."""
        with self._lock:
            self._weights.load(state, self._admit_weights)

    def released(self) -> Sequence[boundary.State]:
        """Trained weights as they may leave now, by every name they have: the last ones, their average, the last gradient."""
        return self._weights.released()

    def meaning(self) -> str:
        """What was promised so far, in every unit, and what the sampler's inexactness adds."""
        times = max(self.account.participations, self._passes.times) or 1.0
        said = reporting.meaning(self.budget, self.account.bits, times, self._passes.poisson, self.epsilon())
        return f"{said}; ε is exact to {self._slack(max(1, self.steps)):.2g}. {self.account}."

    def epsilon(self, delta: float | None = None) -> float:
        """ε of what was trained so far, the sampler's slack included; by an accountant where all batches were Poisson samples of one rate."""
        return self._passes.epsilon(self.budget, self.budget.delta if delta is None else delta) + self._slack(
            self.steps
        )

    def _slack(self, steps: int) -> float:
        """What the sampler's inexactness adds to ε in so many steps."""
        return noise_slack(self._sums.total.numel(), self.grid.spread) * steps

    def advice(self) -> str:
        """Whether the learning rate looks too small."""
        return reporting.advice(self._history)

    def _repeat(self, seed: int) -> None:
        """Draw noise and dropout from a seed: for experiments that are to be repeated. Nothing is private then, and nothing leaves a round."""
        self._repeated = True
        if boundary.current() is not None or self.account.admitted is not None:
            refuse_repeating()
        self._keys, self._sums.seeds = repeated_keys(seed), repeated_keys(seed + 1)

    def _admit_weights(self) -> None:
        """Begin with the weights as they are now; inside a boundary, they must be those that the server sent."""
        # A thread has no context of its own: a training stays at the boundary that let it in.
        here = boundary.current() or (self.account.admitted() if self.account.admitted is not None else None)
        if here is not None and self._repeated:
            refuse_repeating()
        if here is not None:
            state, trained = self._weights.state(averaged=False), self._weights.trained
            refuse_nameless(self._weights.parameters, trained.values())
            start = {n: v for n, v in state.items() if n in trained or here.was_sent(n, list(state))}
            here.admit(self, start, list(state))
            self._weights.forget_optimisers()
            self.account.admitted = ref(here)
        self._history.clear()
        self._sums.clear()

    def __deepcopy__(self, memo: Any) -> "Private":
        raise BadValue("private: a copy would be counted apart; create a Private of its own, with a ledger for both.")

    def __reduce__(self) -> Any:
        raise BadValue("private: it cannot be stored or sent; store private.state_dict(), and keep a ledger.")

    def _release(self) -> None:
        whole = release(self._sums.total, self.grid, keys=self._keys)
        assert self.batch_size is not None
        self._weights.take((whole * (self.grid.step / self.batch_size)).float())
        if self.penalty is not None:
            self._weights.add_gradient_of(self.penalty)
