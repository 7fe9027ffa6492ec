"""The training step that is ours: each sample's loss alone, clipped over all trained weights, released on a grid.

private = qbi.Private(model, loss=F.cross_entropy, bits=72)
for x, y in private.batches(dataset, batch_size=64):
    private.step(optimiser, x, y)
private.state_dict()        # what may leave
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Unpack
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from qbi.errors import BadValue
from qbi.private import boundary, drawing
from qbi.private.account import Account
from qbi.private.clipping import Seen
from qbi.private.goal import Budget, Goal
from qbi.private.graphs import Graphed
from qbi.private.keystream import Keys, repeated_keys, system_key
from qbi.private.ledger import Ledger
from qbi.private.noise import noise_slack
from qbi.private.release import Grid, release
from qbi.private.samples import Augment, Evaluator, Loss, Plan, refuse_mixing
from qbi.theory import guarantees

log = logging.getLogger("qbi.private")

AT_ONCE = 64
"""Samples that are evaluated at once, where memory allows."""


class StepReport:
    """What the owner sees of a step. It depends on data: it is for the owner's own log, and does not leave."""

    def __init__(self, totals: Tensor) -> None:
        self._totals = totals

    @property
    def samples(self) -> int:
        """In the batch."""
        return int(self._totals[0])

    @property
    def loss(self) -> float:
        """Mean over the batch, as it was before the step."""
        return self._mean(1)

    @property
    def clipped(self) -> float:
        """Share of samples whose gradient was shortened."""
        return self._mean(2)

    @property
    def shortened(self) -> float:
        """Mean factor by which gradients were shortened: steps are about so much as long as plain ones."""
        return self._mean(3)

    @property
    def left_out(self) -> int:
        """Samples with values that no arithmetic can hold."""
        return int(self._totals[4])

    def _mean(self, number: int) -> float:
        return float(self._totals[number] / self._totals[0]) if self.samples else float("nan")

    def __repr__(self) -> str:
        return f"StepReport(samples={self.samples}, loss={self.loss:.4g}, clipped={self.clipped:.2g}, left_out={self.left_out})"


def _totals(seen: Seen, losses: Tensor, used: Tensor, clip: float) -> Tensor:
    """Numbers of a report, of part of a batch: samples, losses, clipped ones, factors, those left out."""
    factors = torch.where(seen.fine, clip / seen.norms.clamp_min(clip), 0.0)
    rows = torch.stack(
        [torch.ones_like(factors), losses.double().nan_to_num(), (factors < 1).double(), factors, (~seen.fine).double()]
    )
    return (rows * used).sum(1)


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
            raise BadValue(
                f"private: at_once is {at_once}, average {average}; at_once is at least 1, average lies in (0, 1)."
            )
        self.model, self.penalty, self.average, self.at_once = model, penalty, average, at_once
        self.budget, self._goal, self._graphs = Budget.for_goal(**goal), goal, graphs
        book = Ledger(ledger) if isinstance(ledger, str) else ledger
        self.account = Account(self.budget, book, data, total)
        self.evaluator = Evaluator(model, loss, augment)
        self.batch_size = batch_size
        values = sum(s.numel() for s in self.evaluator.shapes.values())
        self.grid = Grid.of(self.budget.clip, self.budget.noise, values)
        self.steps = 0
        device = next(iter(self.evaluator.parameters.values())).device
        self._sum = torch.zeros(values, dtype=torch.float64, device=device)
        shapes = self.evaluator.shapes
        parts = self._sum.split([s.numel() for s in shapes.values()])
        self._sums = {n: part.view(s) for (n, s), part in zip(shapes.items(), parts, strict=True)}
        self._seen = torch.zeros(5, dtype=torch.float64, device=device)
        self._keys: Keys = system_key
        self._seeds: Keys = system_key
        self._graphed = Graphed(model)
        self._plan: Plan | None = None
        self._mode: Any = None
        self._form: Any = None
        self._drawn: int | None = None
        self._draws: list[tuple[str, float, int]] = []
        self._added = 0
        self._pass: object = None
        self._optimisers: WeakKeyDictionary[torch.optim.Optimizer, Any] = WeakKeyDictionary()
        self._history: list[StepReport] = []
        self._mean: dict[str, Tensor] | None = None
        self._gradients: Tensor | None = None
        self._begin()

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
        data = drawing.as_dataset(dataset)
        drawing.check(len(data), batch_size)
        self._refuse_goal(sampling)
        self.batch_size = batch_size
        own = self._pass = object()
        for _ in range(epochs):
            self._refuse_leftovers("pass", own)
            self._spend(drawing.participations(len(data), batch_size, sampling))
            chosen = drawing.draws(len(data), batch_size, sampling)
            self._draws.append((sampling, batch_size / len(data), len(chosen)))
            for numbers, batch in zip(chosen, drawing.load(data, chosen, workers), strict=True):
                if sampling == "poisson":
                    self._refuse_leftovers("batch", own)
                self._drawn = len(numbers)
                yield batch
                if self._pass is not own:
                    raise BadValue("private: another pass began before this one ended; draw one after the other.")
        self._drawn = 0

    def _refuse_leftovers(self, what: str, own: object) -> None:
        """A sample may come again in the next pass, or the next Poisson batch: what was added before is released first."""
        if self._added or self._pass is not own:
            raise BadValue(
                f"private: samples were added and not released before the next {what}; they could come again in the same sum. "
                f"Call step(optimiser) at the end of each {what}, and draw one pass after the other."
            )

    def add(self, inputs: Any, targets: Any) -> None:
        """Add samples to the step that is being made: parts of a batch that is too large to be held. `step` releases their sum."""
        count = _count(inputs, targets)
        self._admit(inputs, targets, count)
        self._check_weights()
        self._restore()
        self._versions = {n: p._version for n, p in self.evaluator.parameters.items()}
        try:
            self._add_all(inputs, targets, count)
        except BaseException:
            # Part of a batch must not be released, nor come twice.
            self._start_sums()
            raise
        self._added += 1

    def _add_all(self, inputs: Any, targets: Any, count: int) -> None:
        device = next(iter(self.evaluator.parameters.values())).device
        inputs, targets = tree_map(lambda v: v.to(device), (inputs, targets))
        assert self.batch_size is not None
        mode = _mode(self.model, device)
        if self._plan is None or self._mode != mode:
            refuse_mixing(self.model)
            self._mode = mode
            self._plan = self.evaluator.plan(inputs, targets, min(self.at_once, self.batch_size))
            if not self._plan.mapped:
                log.warning("samples go one by one, which is slow: %s", self._plan.reason)
        size = self._plan.at_once
        with torch.random.fork_rng(devices=[]):
            self._seed(device)
            self._add_parts(inputs, targets, count, size, device)

    def _seed(self, device: torch.device) -> None:
        """Dropout and samplers draw from a secret seed: what one sample draws tells nothing of how much others drew."""
        secret = int.from_bytes(self._seeds()[:8], "little") >> 1
        torch.default_generator.manual_seed(secret)
        if device.type == "cuda":
            torch.cuda.manual_seed(secret)

    def _add_parts(self, inputs: Any, targets: Any, count: int, size: int, device: torch.device) -> None:
        assert self._plan is not None
        for start in range(0, count, size):
            x, y = tree_map(lambda v, start=start: _filled(v[start : start + size], size), (inputs, targets))
            used = torch.arange(size, device=device) < count - start
            if self._graphs and device.type == "cuda" and self._plan.mapped:
                self._graphed(self._add, x, y, used)
            else:
                self._add(x, y, used)

    def _add(self, inputs: Any, targets: Any, used: Tensor) -> None:
        """Add one part of a batch to the sums."""
        assert self._plan is not None
        seen, losses = self.evaluator.add(self._sums, inputs, targets, used, self.budget.clip, self._plan)
        self._seen += _totals(seen, losses, used, self.budget.clip)

    # What comes out

    def step(self, optimiser: torch.optim.Optimizer, inputs: Any = None, targets: Any = None) -> StepReport:
        """Release the clipped sum of a batch with noise, put it in the place of all gradients, and let the optimiser step.

        Without inputs, the sum of what was given to `add`. Returns what the owner may want to know; that is not for others.
        """
        if isinstance(optimiser, torch.optim.LBFGS):
            raise BadValue("private: LBFGS steers by the loss, which is not released; use SGD or Adam.")
        if inputs is not None:
            self.add(inputs, targets)
        if self.batch_size is None:
            raise BadValue("private: nothing was given to this step; call step(optimiser, x, y).")
        self._check_optimiser(optimiser)
        if self._drawn is None:
            # Not drawn here: the same samples may be in every step, and in every part that was added to it.
            self._spend(float(max(1, self._added) ** 2))
        self._drawn = None if self._drawn is None else 0
        try:
            self._restore()
            self._release()
            self._clear_others(optimiser)
            optimiser.step()
        except BaseException:
            self._restore()
            self._clear()
            raise
        self.steps += 1
        self._keep()
        self._optimisers[optimiser] = _mark(optimiser)
        report = StepReport(self._seen.clone())
        self._history = [*self._history[-99:], report]
        self._start_sums()
        return report

    def state_dict(self, *, averaged: bool = False) -> dict[str, Tensor]:
        """The model's state as it may leave: released weights, everything else as it was when training began."""
        if averaged and self._mean is None:
            raise BadValue("private: no average is kept; create Private with average=0.99, say.")
        weights = self._mean if averaged and self._mean is not None else self._kept
        return {
            name: weights[self._trained[name]].clone() if name in self._trained else self._fixed[name].clone()
            for name in self.model.state_dict()
        }

    def load_state_dict(self, state: boundary.State) -> None:
        """Go on from weights that are public, such as a new round's."""
        self.model.load_state_dict(dict(state))
        self._begin()

    def released(self) -> Sequence[boundary.State]:
        """Trained weights as they may leave now, by every name they have: the last ones, their average, the last gradient."""
        sources = [self._kept, *([self._mean] if self._mean is not None else [])]
        if self._gradients is not None:
            sources.append(self._by_name(self._gradients))
        return [{name: values[own].clone() for name, own in self._trained.items()} for values in sources]

    def _by_name(self, values: Tensor) -> dict[str, Tensor]:
        """A flat tensor over all trained weights, by weight."""
        parameters = self.evaluator.parameters
        parts = values.split([p.numel() for p in parameters.values()])
        return {n: part.reshape(p.shape).to(p.dtype) for (n, p), part in zip(parameters.items(), parts, strict=True)}

    def meaning(self) -> str:
        """What was promised so far, in every unit, and what the sampler's inexactness adds."""
        if self._is_poisson():
            steps = sum(steps for _, _, steps in self._draws)
            chance = guarantees.poisson_reconstruction(0.01, self.budget.noise, self._draws[0][1], steps)
            said = (
                f"at most {self.account.bits:.3g} bits about one sample on average over the draws; a guess of 1 % becomes {100 * chance:.3g} % at most; "
                f"ε = {self.epsilon():.3g} at δ = {self.budget.delta:g} (Poisson samples; noise {self.budget.noise:.3g}, clip {self.budget.clip:g})"
            )
        else:
            slack = noise_slack(self._sum.numel(), self.grid.spread) * max(1, self.steps)
            said = f"{self.budget.meaning(self.account.participations or 1.0)}; ε is exact to {slack:.2g}"
        return f"{said}. {self.account}."

    def _is_poisson(self) -> bool:
        """Whether all batches were Poisson samples of one rate."""
        kinds = {(kind, rate) for kind, rate, _ in self._draws}
        return len(kinds) == 1 and self._draws[0][0] == "poisson"

    def epsilon(self, delta: float | None = None) -> float:
        """ε of what was trained so far, the sampler's slack included; by an accountant where all batches were Poisson samples of one rate."""
        at = self.budget.delta if delta is None else delta
        slack = noise_slack(self._sum.numel(), self.grid.spread) * self.steps
        if self._is_poisson():
            steps = sum(steps for _, _, steps in self._draws)
            return guarantees.poisson_epsilon(at, self.budget.noise, self._draws[0][1], steps) + slack
        # Poisson samples of several rates, or mixed with passes: as if each step had every sample.
        times = sum(steps if kind == "poisson" else 1 for kind, _, steps in self._draws) or self.account.participations
        return guarantees.epsilon(at, self.budget.noise, times) + slack

    def advice(self) -> str:
        """Whether the learning rate looks too small: clipping shortens gradients, and rates for plain training do not make up for it."""
        if not self._history:
            return "Nothing was trained yet."
        clipped = sum(r.clipped for r in self._history) / len(self._history)
        shortened = sum(r.shortened for r in self._history) / len(self._history)
        said = f"{100 * clipped:.0f} % of samples were clipped; steps are about {shortened:.2g} times as long as plain ones."
        if shortened < 0.5:
            said += f" A learning rate about {1 / shortened:.2g} times that of plain training makes up for it; qbi.find_rate searches one on public data."
        return said

    # Inside

    def _repeat(self, seed: int) -> None:
        """Draw noise and dropout from a seed: for experiments whose results are to be repeated. Nothing is private then."""
        self._keys, self._seeds = repeated_keys(seed), repeated_keys(seed + 1)

    def _begin(self) -> None:
        """Take the weights as they are for public."""
        self._mean = None
        parameters = self.evaluator.parameters
        state = self.model.state_dict(keep_vars=True)
        own = {id(p): n for n, p in parameters.items()}
        self._trained = {name: own[id(v)] for name, v in state.items() if id(v) in own}
        here = boundary.current()
        if here is not None:
            public = {n: v.detach() for n, v in state.items() if n in self._trained or here.was_sent(n, list(state))}
            here.admit(self, public, list(state))
            # Threads have no context of their own: what is released is charged where it was admitted.
            self.account.admitted = ref(here)
        self._fixed = {n: v.detach().clone() for n, v in state.items() if n not in self._trained}
        tensors = (*self.model.named_parameters(), *self.model.named_buffers())
        self._others = {n: (v, v.detach().clone()) for n, v in tensors if n not in parameters}
        self._gradients = None
        self._kept = {n: p.detach().clone() for n, p in parameters.items()}
        self._versions = {n: p._version for n, p in parameters.items()}
        self._history = []
        self._start_sums()

    def _start_sums(self) -> None:
        self._sum.zero_()
        self._seen.zero_()
        self._added = 0

    def _spend(self, participations: float) -> None:
        self.account.spend(participations, self.evaluator.parameters.values())

    def _admit(self, inputs: Any, targets: Any, count: int) -> None:
        """Only samples that were drawn, in the shapes of the first batch."""
        if self._drawn is not None:
            if count > self._drawn:
                raise BadValue(
                    f"private: {count} samples, and {self._drawn} were drawn and not yet used; each drawn batch is for one step. "
                    "Augmentations of a sample go into Private(augment=...)."
                )
            self._drawn -= count
        elif self.batch_size is None:
            raise BadValue(
                "private: say how many samples make a batch: Private(..., batch_size=64), or draw them with private.batches."
            )
        leaves, form = tree_flatten((inputs, targets))
        found = (form, tuple((v.shape[1:], v.dtype) for v in leaves))
        if self._form is None:
            self._form = found
        elif self._form != found:
            raise BadValue(
                f"private: this batch has samples of shape {tuple(leaves[0].shape[1:])}, the first had {tuple(self._form[1][0][0])}; shapes would "
                "tell of the data. Pad or cut every sample to one shape."
            )

    def _refuse_goal(self, sampling: str) -> None:
        """Goals that hold for so many participations do not hold for so many on average."""
        fixed = "max_reconstruction" in self._goal or ("epsilon" in self._goal and "sampled" not in self._goal)
        if sampling == "poisson" and fixed:
            raise BadValue(
                "private: this goal was stated for a number of participations, and Poisson samples have a random one. State epsilon= with "
                "sampled=(rate, steps), or bits=."
            )

    def _check_optimiser(self, optimiser: torch.optim.Optimizer) -> None:
        """Momentum and the like may only hold what was released."""
        known = self._optimisers.get(optimiser)
        if (known is None and _mark(optimiser)) or (known is not None and known != _mark(optimiser)):
            raise BadValue(
                "private: the optimiser holds a state (momentum, say) that did not come from this private training; it would leave with the weights. "
                "Create the optimiser anew, and let private.step alone step it."
            )

    def __deepcopy__(self, memo: Any) -> "Private":
        raise BadValue("private: a copy would be counted apart; create a Private of its own, with a ledger for both.")

    def __reduce__(self) -> Any:
        raise BadValue("private: it cannot be stored or sent; store private.state_dict(), and keep a ledger.")

    def _check_weights(self) -> None:
        """The weights that are trained stay the same ones, and only released steps move them."""
        now = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        if now.keys() != self.evaluator.parameters.keys() or any(
            now[n] is not p for n, p in self.evaluator.parameters.items()
        ):
            raise BadValue(
                "private: weights were added, replaced, frozen or freed since Private was created; create it anew."
            )
        for name, parameter in self.evaluator.parameters.items():
            if parameter._backward_hooks:
                raise BadValue(f"private: “{name}” has a hook on its gradient, which the step does not run; remove it.")
            if parameter._version != self._versions[name] and not torch.equal(parameter.detach(), self._kept[name]):
                raise BadValue(
                    f"private: “{name}” was changed outside of private.step; what moved it is not bounded. Load public weights with "
                    "private.load_state_dict, and put penalties on weights into Private(penalty=...)."
                )

    def _release(self) -> None:
        parameters = self.evaluator.parameters
        whole = release(self._sum, self.grid, keys=self._keys)
        assert self.batch_size is not None
        self._gradients = (whole * (self.grid.step / self.batch_size)).float()
        for name, part in self._by_name(self._gradients.clone()).items():
            parameters[name].grad = part
        if self.penalty is not None:
            with torch.enable_grad():
                term = self.penalty(self.model)
            more = torch.autograd.grad(term, list(parameters.values()), allow_unused=True)
            for parameter, gradient in zip(parameters.values(), more, strict=True):
                if gradient is not None:
                    assert parameter.grad is not None
                    parameter.grad += gradient

    def _restore(self) -> None:
        """The weights of the last release, and all else as it was at the beginning: whatever was done to them is undone."""
        with torch.no_grad():
            for now, before in self._others.values():
                now.copy_(before)
            torch._foreach_copy_(list(self.evaluator.parameters.values()), list(self._kept.values()))

    def _clear_others(self, optimiser: torch.optim.Optimizer) -> None:
        """Raw gradients of frozen weights, or of anything else the optimiser knows, move nothing."""
        own = {id(p) for p in self.evaluator.parameters.values()}
        for group in optimiser.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in own:
                    parameter.grad = None

    def _clear(self) -> None:
        for parameter in self.evaluator.parameters.values():
            parameter.grad = None
        self._versions = {n: p._version for n, p in self.evaluator.parameters.items()}
        self._start_sums()

    def _keep(self) -> None:
        parameters = self.evaluator.parameters
        torch._foreach_copy_(list(self._kept.values()), [p.detach() for p in parameters.values()])
        self._versions = {n: p._version for n, p in parameters.items()}
        if self.average is None:
            return
        if self._mean is None:
            self._mean = {n: v.clone() for n, v in self._kept.items()}
        for name, value in self._mean.items():
            value.lerp_(self._kept[name], 1 - self.average)


def _mode(model: nn.Module, device: torch.device) -> Any:
    """What a model's code may go by beside its data: training or not, autocast, switches that its modules carry."""
    switches = tuple(
        (name, value)
        for m in model.modules()
        for name, value in vars(m).items()
        if isinstance(value, bool | int | str) and not name.startswith("_")
    )
    return switches, torch.is_autocast_enabled(device.type)


def _mark(optimiser: torch.optim.Optimizer) -> tuple[tuple[int, int], ...]:
    """Which tensors an optimiser keeps, and how often each was written."""
    kept = tree_leaves([dict(state) for state in optimiser.state.values()])
    return tuple((id(v), v._version) for v in kept if isinstance(v, Tensor))


def _count(inputs: Any, targets: Any) -> int:
    leaves = tree_leaves((inputs, targets))
    if not leaves or not all(isinstance(v, Tensor) and v.dim() for v in leaves):
        raise BadValue(
            "private: inputs and targets are tensors with one row for each sample, alone or in tuples and dictionaries."
        )
    counts = {len(v) for v in leaves}
    if len(counts) != 1:
        raise BadValue(
            f"private: inputs and targets have {sorted(counts)} samples; every tensor has one row for each sample."
        )
    return counts.pop()


def _filled(values: Tensor, size: int) -> Tensor:
    """Up to `size` samples with zeros: shapes, and so the order of every sum, do not depend on how many there are."""
    missing = size - len(values)
    return torch.cat([values, values.new_zeros((missing, *values.shape[1:]))]) if missing else values
