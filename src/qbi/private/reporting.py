"""What the owner sees of private steps: for the owner's own log, not for others."""

import contextlib
import logging
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from qbi.private.clipping import Seen
from qbi.private.goal import Budget
from qbi.theory import guarantees


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


def totals(seen: Seen, losses: Tensor, used: Tensor, clip: float) -> Tensor:
    """Numbers of a report, of part of a batch: samples, losses, clipped ones, factors, those left out."""
    factors = torch.where(seen.fine, clip / seen.norms.clamp_min(clip), 0.0)
    rows = torch.stack(
        [torch.ones_like(factors), losses.double().nan_to_num(), (factors < 1).double(), factors, (~seen.fine).double()]
    )
    return (rows * used).sum(1)


def advice(history: Sequence[StepReport]) -> str:
    """Whether the learning rate looks too small: clipping shortens gradients, and rates for plain training do not make up for it."""
    if not history:
        return "Nothing was trained yet."
    clipped = sum(r.clipped for r in history) / len(history)
    shortened = sum(r.shortened for r in history) / len(history)
    said = (
        f"{100 * clipped:.0f} % of samples were clipped; steps are about {shortened:.2g} times as long as plain ones."
    )
    if shortened < 0.5:
        said += f" A learning rate about {1 / shortened:.2g} times that of plain training makes up for it; qbi.find_rate searches one on public data."
    return said


@contextlib.contextmanager
def quiet_step() -> Iterator[None]:
    """That samples go one by one is no news to who asked for an audit."""
    log = logging.getLogger("qbi.private")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


def meaning(
    budget: Budget, bits: float, participations: float, poisson: tuple[float, int] | None, epsilon: float
) -> str:
    """What a training promises, in every unit; on average over the draws, where all its batches were Poisson samples of one rate."""
    if poisson is None:
        return budget.meaning(participations)
    chance = guarantees.poisson_reconstruction(0.01, budget.noise, *poisson)
    return (
        f"at most {bits:.3g} bits about one sample on average over the draws; a guess of 1 % becomes {100 * chance:.3g} % at most; "
        f"ε = {epsilon:.3g} at δ = {budget.delta:g} (Poisson samples; noise {budget.noise:.3g}, clip {budget.clip:g})"
    )
