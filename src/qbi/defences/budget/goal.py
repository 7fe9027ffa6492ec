"""What may leave about one sample, as its owner states it, and the noise that keeps to it."""

import math
from dataclasses import dataclass
from typing import TypedDict

from qbi.errors import BadValue
from qbi.theory import guarantees
from qbi.theory.guarantees import Prior

DEFAULT_BITS = 72.0
"""About one sample in one participation. Chosen by measurement: docs/defences.md."""

LIFETIME_BITS = 1500.0
"""About one sample over everything a ledger holds, where no limit is stated: pictures at 30 dB stay out of reach (docs/guarantees.md)."""

DELTA = 1e-5
ADAPTIVE_SHARE = 0.05
"""Of the budget, for the private count that moves an adaptive clip."""


class Goal(TypedDict, total=False):
    """How a budget is stated: one of the goals, and how the training is done."""

    bits: float
    max_psnr: float
    max_reconstruction: tuple[float, float]
    epsilon: float
    delta: float
    prior: Prior
    participations: int
    clip: float
    adaptive: bool
    reduction: str
    accumulate: int


@dataclass(frozen=True)
class Budget:
    """Noise σ on the sum of gradients that are each clipped to C, and what it means.

    Args:
        noise: σ, relative to the clip.
        participations: how often a sample may take part for the goal to hold; 1 where the goal is for each time.
        clip: C, for the gradient of a sample's own loss; where `adaptive`, the first one.
        adaptive: let C follow the median norm, told by a private count that has its share of the budget.
        reduction, accumulate: how the loss joins samples, and how many backward passes make a step.
        prior: what a server knows of the samples beforehand; PSNR is only promised with one.
        delta: δ at which ε is said.
    """

    noise: float
    participations: int = 1
    clip: float = 1.0
    adaptive: bool = False
    reduction: str = "mean"
    accumulate: int = 1
    prior: Prior | None = None
    delta: float = DELTA

    def __post_init__(self) -> None:
        if not self.noise >= 0 or not self.clip > 0 or self.participations < 1 or self.accumulate < 1:
            raise BadValue(
                f"budget: noise {self.noise}, clip {self.clip}, {self.participations} participations, accumulate {self.accumulate}; "
                "noise is not negative, the others are positive."
            )
        if self.reduction not in ("mean", "sum"):
            raise BadValue(f"budget: reduction is {self.reduction!r}; the loss is a mean or a sum over samples.")

    @classmethod
    def for_goal(
        cls,
        *,
        bits: float | None = None,
        max_psnr: float | None = None,
        max_reconstruction: tuple[float, float] | None = None,
        epsilon: float | None = None,
        delta: float = DELTA,
        prior: Prior | None = None,
        participations: int = 1,
        clip: float = 1.0,
        adaptive: bool = False,
        reduction: str = "mean",
        accumulate: int = 1,
    ) -> "Budget":
        """The noise at which a goal holds over that many participations; without a goal, the measured default.

        >>> round(Budget.for_goal(bits=72).noise, 3)
        0.1
        """
        stated = [n for n, v in _named(bits, max_psnr, max_reconstruction, epsilon).items() if v is not None]
        if len(stated) > 1:
            raise BadValue(f"budget: both {stated[0]} and {stated[1]} are stated; one goal sets the noise.")
        if max_psnr is not None:
            if prior is None:
                raise BadValue(
                    "budget: max_psnr needs a prior, such as Prior.of(samples of the same kind); pass prior=."
                )
            noise = guarantees.noise_for_psnr(max_psnr, prior, participations)
        elif max_reconstruction is not None:
            noise = guarantees.noise_for_reconstruction(*max_reconstruction, participations)
        elif epsilon is not None:
            noise = guarantees.noise_for_epsilon(epsilon, delta, participations)
        else:
            noise = guarantees.noise_for_bits(DEFAULT_BITS if bits is None else bits, participations)
        return cls(noise, participations, clip, adaptive, reduction, accumulate, prior, delta)

    @property
    def shares(self) -> tuple[float, float]:
        """The noise on the gradients and on the count that moves an adaptive clip; together they cost what `noise` alone does.

        A sample changes the count, taken from the middle, by a half: 1/σ² = 1/σ_gradients² + 1/(2·σ_count)².
        """
        if not self.adaptive:
            return self.noise, math.inf
        return self.noise / math.sqrt(1 - ADAPTIVE_SHARE), self.noise / (2 * math.sqrt(ADAPTIVE_SHARE))

    def bits(self, participations: float | None = None) -> float:
        """Bits about one sample at most, over so many participations."""
        return guarantees.bits(self.noise, self.participations if participations is None else participations)

    def meaning(self, participations: int | None = None) -> str:
        """The budget in every unit."""
        times = self.participations if participations is None else participations
        guess = 0.01
        said = [
            f"at most {self.bits(times):.3g} bits about one sample",
            f"a guess of {100 * guess:.0f} % becomes {100 * guarantees.reconstruction(guess, self.noise, times):.3g} % at most",
            f"ε = {guarantees.epsilon(self.delta, self.noise, times):.3g} at δ = {self.delta:g}",
        ]
        if self.prior is not None:
            said.insert(1, f"at most {guarantees.largest_psnr(self.prior, self.noise, times):.1f} dB on average")
        often = "in one participation" if times == 1 else f"over {times} participations"
        return f"{'; '.join(said)} ({often}; noise {self.noise:.3g}, clip {self.clip:g})"


def refuse_goal(policy: str, goal: Goal) -> None:
    """Goals are the budget's alone: under another policy they would promise what nothing keeps."""
    if goal:
        raise BadValue(f"guard: {next(iter(goal))} is a goal of the policy budget, and the policy is {policy}.")


def _named(
    bits: float | None, max_psnr: float | None, rebuilt: tuple[float, float] | None, epsilon: float | None
) -> dict[str, object]:
    return {"bits": bits, "max_psnr": max_psnr, "max_reconstruction": rebuilt, "epsilon": epsilon}
