"""What may leave about one sample, as its owner states it, and the noise that keeps to it."""

import math
from dataclasses import dataclass
from typing import TypedDict

from qbi.errors import BadValue
from qbi.theory import guarantees

DEFAULT_BITS = 72.0
"""About one sample in one participation. Chosen by measurement: docs/guarantees.md."""

LIFETIME_BITS = 1500.0
"""About one sample over everything, where no total is stated (docs/guarantees.md)."""

DELTA = 1e-5


class Goal(TypedDict, total=False):
    """How a budget is stated: one of the goals, for how many participations, at which clip."""

    bits: float
    max_reconstruction: tuple[float, float]
    epsilon: float
    preset: str
    delta: float
    participations: int
    sampled: tuple[float, int]
    clip: float


PRESETS: dict[str, float] = {"exact": 7200.0, "clear": 288.0, "recognisable": 8.0, "membership": 0.7}
"""Bits about one sample in all participations at which something ends; measured, see docs/guarantees.md."""


@dataclass(frozen=True)
class Budget:
    """Noise σ on the sum of gradients that are each clipped to C, and what it means.

    Args:
        noise: σ, relative to the clip.
        participations: how often a sample may take part for the goal to hold; 1 where the goal is for each time.
        clip: C, for the gradient of a sample's own loss.
        delta: δ at which ε is said.

    >>> round(Budget.for_goal(bits=72).bits(20))
    1440
    """

    noise: float
    participations: int = 1
    clip: float = 1.0
    delta: float = DELTA

    def __post_init__(self) -> None:
        fine = self.noise >= 0 and math.isfinite(self.noise) and self.clip > 0 and self.participations >= 1
        if not fine:
            raise BadValue(
                f"private: noise {self.noise}, clip {self.clip}, {self.participations} participations; noise is not negative, the others "
                "are positive."
            )

    @classmethod
    def for_goal(
        cls,
        *,
        bits: float | None = None,
        max_reconstruction: tuple[float, float] | None = None,
        epsilon: float | None = None,
        preset: str | None = None,
        delta: float = DELTA,
        participations: int = 1,
        sampled: tuple[float, int] | None = None,
        clip: float = 1.0,
    ) -> "Budget":
        """The noise at which a goal holds over that many participations; without a goal, the measured default.

        `sampled=(rate, steps)`, with ε, is for batches that are drawn with `sampling="poisson"`, whose chance an accountant may count on.

        >>> round(Budget.for_goal(bits=72).noise, 3)
        0.1
        """
        goals = {"bits": bits, "max_reconstruction": max_reconstruction, "epsilon": epsilon, "preset": preset}
        stated = [n for n, v in goals.items() if v is not None]
        if len(stated) > 1:
            raise BadValue(f"private: both {stated[0]} and {stated[1]} are stated; one goal sets the noise.")
        if participations < 1:
            raise BadValue(f"private: {participations} participations; there must be at least one.")
        if preset is not None:
            if preset not in PRESETS:
                raise BadValue(f"private: no preset is called {preset!r}; there are {', '.join(PRESETS)}.")
            bits = PRESETS[preset]
        if max_reconstruction is not None:
            noise = guarantees.noise_for_reconstruction(*max_reconstruction, participations)
        elif epsilon is not None and sampled is not None:
            noise = guarantees.noise_for_poisson_epsilon(epsilon, delta, *sampled)
        elif epsilon is not None:
            noise = guarantees.noise_for_epsilon(epsilon, delta, participations)
        else:
            noise = guarantees.noise_for_bits(DEFAULT_BITS if bits is None else bits, participations)
        return cls(noise, participations, clip, delta)

    def bits(self, participations: float | None = None) -> float:
        """Bits about one sample at most, over so many participations."""
        return guarantees.bits(self.noise, self.participations if participations is None else participations)

    def meaning(self, participations: float | None = None) -> str:
        """The budget in every unit."""
        times = self.participations if participations is None else participations
        guess = 0.01
        said = [
            f"at most {self.bits(times):.3g} bits about one sample",
            f"a guess of {100 * guess:.0f} % becomes {100 * guarantees.reconstruction(guess, self.noise, times):.3g} % at most",
            f"ε = {guarantees.epsilon(self.delta, self.noise, times):.3g} at δ = {self.delta:g}",
        ]
        often = "in one participation" if times == 1 else f"over {times:g} participations"
        return f"{'; '.join(said)} ({often}; noise {self.noise:.3g}, clip {self.clip:g})"
