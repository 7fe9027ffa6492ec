"""A privacy setting, and what it is worth: records, and when a setting holds."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

GUESS = 0.01
"""The chance of a guess whose growth is said."""

WORTHLESS = 100.0
"""ε over all rounds above which a setting bounds no guess that anybody could make."""

LIKELY = 0.5
"""A setting under which a guess of 1 % may become likelier than this is worth nothing either."""

MOST_DELTA = 1e-3
"""δ above which (ε, δ) says nothing: it is the chance that everything leaves."""

DELTA = 1e-5
UPDATE = "everything a client holds"
SAMPLE = "one sample"
BY_NAN = "a server that sends NaN where no sample comes by (an unused row of an embedding): then nothing is clipped (flwr 1.41)"


@dataclass(frozen=True)
class PrivacySetting:
    """A mechanism and its arguments, as they stand in somebody's files."""

    place: str
    mechanism: str
    arguments: Mapping[str, Any]
    remarks: tuple[str, ...] = ()
    runs: bool = True
    """Whether the framework ever calls it."""


@dataclass(frozen=True)
class Worth:
    """What a setting is worth. None stands for what cannot be said; infinity for no bound at all."""

    setting: PrivacySetting
    scope: str
    noise: float | None
    claimed: float | None
    epsilon: float | None
    epsilon_in_all: float | None
    delta: float
    bits: float | None
    chance: float | None
    rounds: int
    remarks: tuple[str, ...]
    defeated: str = ""
    """What a server does under which the numbers do not hold."""

    @property
    def holds(self) -> bool:
        """Whether it runs, no server defeats it, and anything is bounded that is worth the word, and as far as was claimed."""
        numbers = (self.epsilon, self.epsilon_in_all, self.chance)
        if not self.setting.runs or self.defeated or any(n is None for n in numbers):
            return False
        assert self.epsilon is not None
        assert self.epsilon_in_all is not None
        assert self.chance is not None
        if not max(self.epsilon, self.epsilon_in_all) <= WORTHLESS or not self.chance <= LIKELY:
            return False
        return self.delta <= MOST_DELTA and (self.claimed is None or self.epsilon <= self.claimed * (1 + 1e-6))

    def document(self) -> dict[str, Any]:
        """As plain data; infinity is written as a word."""
        numbers = {
            "noise relative to the clip": self.noise,
            "ε claimed": self.claimed,
            "ε a round": self.epsilon,
            "ε in all": self.epsilon_in_all,
            "bits in all": self.bits,
            "a guess of 1 % becomes": self.chance,
        }
        said = {n: ("unbounded" if v == math.inf else v) for n, v in numbers.items()}
        return {
            "place": self.setting.place,
            "mechanism": self.setting.mechanism,
            "about": self.scope,
            "rounds": self.rounds,
            "δ": self.delta,
            **said,
            "defeated by": self.defeated or None,
            "remarks": list(self.remarks),
        }


@dataclass(frozen=True)
class Circumstances:
    """What the files do not say: how many rounds, how many parameters."""

    rounds: int = 1
    parameters: int | None = None
