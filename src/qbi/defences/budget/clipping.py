"""Puts in the place of every gradient: each sample's share clipped over all trainable weights, their sum, and noise.

What leaves is made anew from the calls that were seen; what torch left in `.grad` is thrown away. So a use of a weight that was not
seen cannot leak: it is missing from the sum, which the check of the first passes finds.
"""

import contextlib
import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from qbi.defences.budget.account import Account
from qbi.defences.budget.goal import Budget
from qbi.defences.budget.ledger import BudgetSpent
from qbi.defences.budget.plan import Plan
from qbi.defences.calls import Call, LeakRefused, Root
from qbi.defences.seeing import Seeing, weakly
from qbi.errors import DataError, first_line
from qbi.randomness import Draws, normal_like

log = logging.getLogger("qbi.guard")

CHECKED = 2
"""Passes of each way through a model on which the sum over samples is compared with torch's own gradient."""

ADAPTING = 0.2
"""How fast an adaptive clip moves, in logarithms for each pass in which all samples lie on one side of it."""


@dataclass
class Clipped:
    """What was done in one backward pass."""

    samples: int
    clipped: int
    noise: float
    """Standard deviation of the noise on every value, in units of the clip's share."""


@dataclass
class Clipping:
    """Listens to backward passes and replaces the gradients they leave.

    Args:
        clip: C, for the gradient of a sample's own loss.
        noise: σ.
        reduction: how the loss joins its samples; of `mean`, each sample's share is C/B. The promise does not depend on it.
        accumulate: backward passes that make up one step; they share one noise.
        draws: where the noise comes from.
    """

    clip: float
    noise: float
    draws: Draws
    reduction: str = "mean"
    accumulate: int = 1
    batch_axis: int = 0
    model: nn.Module | None = None
    count_noise: float = math.inf
    """On the private count by which the clip follows the median norm; without one, the clip stays."""
    before_release: Callable[[int, list[Tensor]], None] = lambda _samples, _parameters: None
    """Told the size of every batch before anything of it is handed over; what it raises keeps the batch in."""
    passes: list[Clipped] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.seeing = Seeing(weakly(self._listen), self.model, batch_axis=self.batch_axis)
        self.seeing.on_root, self.seeing.on_backward = weakly(self._called), weakly(self._remember)
        self.placed: dict[int, Tensor] = {}
        """The gradients that were put in place, by their parameter."""
        self._before: dict[int, Tensor] = {}
        self._since_noise = 0
        self._plans: dict[tuple[int, tuple[tuple[str, int], ...]], Plan] = {}

        self.parameters: dict[int, Tensor] = {}
        self.seeing.on_exit = weakly(self._restore)
        self._held: dict[int, Tensor] = {}
        self._fine: dict[int, Tensor] = {}
        """What was put in place, before it was rounded to half precision."""
        self._silenced: dict[nn.MultiheadAttention, float] = {}
        self._said: set[str] = set()

    @classmethod
    def of(cls, budget: Budget, draws: Draws, account: Account, model: nn.Module | None = None) -> "Clipping":
        """As a budget says, every batch counted by an account."""
        gradients, count = budget.shares
        return cls(
            budget.clip,
            gradients,
            draws,
            budget.reduction,
            budget.accumulate,
            model=model,
            count_noise=count,
            before_release=account.take_part,
        )

    def _called(self, root: Root) -> None:
        _refuse_batch_statistics(root.module)
        self._silence_attention(root.module)

    def _remember(self, root: Root) -> None:
        """What was protected earlier stays: the pass that begins is added to it."""
        trainable = root.trainable().values()
        for parameter in trainable:
            if parameter.grad is not None and bool(parameter.grad.any()):
                if not self.is_placed(parameter):
                    self._refuse(trainable, "a gradient stands there that the guard did not see arise")
                self._before[id(parameter)] = parameter.grad.detach().clone()

    def _silence_attention(self, model: nn.Module) -> None:
        """Dropout inside attention cannot be repeated for one sample; it is off inside the block, and the log says so."""
        for name, module in model.named_modules():
            if isinstance(module, nn.MultiheadAttention) and module.dropout:
                if name not in self._said:
                    log.warning(
                        "“%s”: its dropout of %g is switched off under the budget policy.", name, module.dropout
                    )
                    self._said.add(name)
                self._silenced[module] = module.dropout
                module.dropout = 0.0

    def _restore(self) -> None:
        for module, dropout in self._silenced.items():
            module.dropout = dropout
        self._silenced.clear()

    def is_placed(self, parameter: Tensor) -> bool:
        """Whether the gradient that stands there is one the guard made."""
        return parameter.grad is None or self.placed.get(id(parameter)) is parameter.grad

    def _listen(self, calls: list[Call]) -> None:
        roots = list({id(c.root): c.root for c in calls}.values())
        parameters = {id(p): p for root in roots for p in root.trainable().values()}
        devices = {p.device.type for p in parameters.values()}
        try:
            with torch.no_grad(), contextlib.ExitStack() as stack:
                for device in devices:
                    # Norms and sums are formed in float32, also where the backward pass stands inside autocast.
                    stack.enter_context(torch.autocast(device, enabled=False))
                self._replace(calls, roots, parameters)
        except (LeakRefused, BudgetSpent, DataError):
            _clear(parameters.values())
            raise
        except Exception as problem:
            # Whatever goes wrong, nothing raw stays.
            self._refuse(parameters.values(), f"samples' gradients cannot be told apart: {first_line(problem)}")
        except BaseException:
            _clear(parameters.values())
            raise
        finally:
            self._before = {}

    def _refuse(self, parameters: Iterable[Tensor], why: str) -> None:
        _clear(parameters)
        raise LeakRefused(f"guard: {why.rstrip('.')}. The gradients were cleared.")

    def _replace(self, calls: list[Call], roots: list[Root], parameters: dict[int, Tensor]) -> None:
        fresh = [root for root in roots if root.fresh] or roots[:1]
        if len(fresh) > 1:
            raise LeakRefused(
                f"guard: {len(fresh)} batches went into one backward pass; whose sample is whose cannot be told. Call the model once "
                "for each backward pass."
            )
        if all(p.grad is None for p in parameters.values()):
            raise LeakRefused(
                "guard: gradients were taken by autograd.grad, which passes the guard by; use backward()."
            )
        samples = fresh[0].samples
        if any(root.samples != samples for root in roots):
            raise LeakRefused(
                f"guard: a part of the model was called on {next(r.samples for r in roots if r.samples != samples)} rows for {samples} samples; "
                "whose is whose cannot be told. Call the model as one module."
            )
        if not self._before:
            self._since_noise = 0
        plan, norms = self._measured(calls, parameters, samples)
        norms = norms / self.seeing.scale
        share = self.clip / (samples * self.accumulate if self.reduction == "mean" else 1)
        weights = torch.where(norms.isfinite(), (share / norms.clamp_min(1e-30)).clamp(max=1.0), 0.0)
        if not bool(weights.any()):
            raise LeakRefused("guard: no sample's gradient is finite.")
        if self._since_noise == 0:
            self.before_release(samples * self.accumulate, list(parameters.values()))
        sums = plan.sums(weights)
        noisy = self._since_noise == 0
        self._refuse_moved(parameters, begins=noisy)
        self._since_noise = (self._since_noise + 1) % self.accumulate
        for key, parameter in parameters.items():
            value = sums[key].float() if key in sums else torch.zeros_like(parameter, dtype=torch.float32)
            if noisy and self.noise:
                value = value + self.seeing.scale * self.noise * share * normal_like(value, self.draws)
            if key in self._before:
                value = value + self._fine.get(key, self._before[key])
            # Rounded once, after the noise: rounding what has none could move by more than a sample may.
            placed = value.to(parameter.dtype)
            if placed.dtype != value.dtype:
                self._fine[key] = value
            parameter.grad = placed
            self.placed[key], self.parameters[key] = placed, parameter
        self.passes.append(Clipped(samples, int((weights < 1).sum()), self.noise))
        self._adapt(norms <= share)

    def _refuse_moved(self, parameters: dict[int, Tensor], *, begins: bool) -> None:
        """Passes that share one noise are one step: if weights moved in between, the difference would leave without any."""
        if self.accumulate == 1:
            return
        if begins:
            self._held = {key: p.detach().clone() for key, p in parameters.items()}
        elif not all(torch.equal(p, self._held[key]) for key, p in parameters.items() if key in self._held):
            raise LeakRefused(
                f"guard: weights moved after fewer than the {self.accumulate} backward passes that were stated to make up a step."
            )

    def _adapt(self, below: Tensor) -> None:
        """Let the clip follow the median norm: a noisy count of the samples below it moves it (Andrew and others, 2021)."""
        if math.isinf(self.count_noise):
            return
        noisy = float(
            (below.float() - 0.5).sum()
            + self.count_noise * normal_like(below.new_zeros(1, dtype=torch.float32), self.draws)[0]
        )
        self.clip *= math.exp(-ADAPTING * min(1.0, max(-1.0, noisy / len(below))))

    def _measured(self, calls: list[Call], parameters: dict[int, Tensor], samples: int) -> tuple[Plan, Tensor]:
        """Through which calls each parameter's gradient is told apart, found and checked on the first passes; and samples' norms."""
        key = (id(calls[0].root.module), tuple(sorted(c.key for c in calls)))
        known = self._plans.get(key)
        plan = Plan(self.seeing, calls, parameters, known.above if known else {}, known.checks if known else {})
        pending = [k for k in parameters if plan.checks.get(k, 0) < CHECKED]
        if known is not None and not (pending and plan.told_by(pending, self._before)):
            return plan, plan.norms(samples)
        norms = plan.settled_norms(samples, self._before)
        self._plans[key] = plan.kept()
        return plan, norms


def _clear(parameters: Iterable[Tensor]) -> None:
    for parameter in parameters:
        parameter.grad = None


def _refuse_batch_statistics(model: nn.Module) -> None:
    for name, module in model.named_modules():
        batch = isinstance(module, nn.modules.batchnorm._BatchNorm) and not isinstance(
            module, nn.modules.instancenorm._InstanceNorm
        )
        kept = bool(getattr(module, "track_running_stats", False))
        if module.training and isinstance(module, nn.modules.batchnorm._NormBase) and (batch or kept):
            raise LeakRefused(
                f"guard: “{name}” ({type(module).__name__}) mixes the samples of a batch or keeps statistics of them, and both leave "
                "unclipped. Use GroupNorm (`qbi.defences.with_group_norm(model)` converts a model), or put the layer into eval()."
            )


def with_group_norm(model: nn.Module) -> nn.Module:
    """A copy in which Opacus' fixer has put what keeps samples apart in the place of what mixes them."""
    from opacus.validators import ModuleValidator

    fixed: nn.Module = ModuleValidator.fix(model)
    return fixed
