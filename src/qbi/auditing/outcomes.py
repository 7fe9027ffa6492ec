"""What came of single attacks, layers and defences: the records that an audit's result is made of."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from qbi.metrics import EXACT, FAITHFUL, THRESHOLDS, Threshold
from qbi.records import Interval, Leakage

CLEARLY = 0.1
"""By how much a loose match must be more frequent than by guessing."""


def beats_a_guess(guessed: Mapping[Threshold, float], beyond: Mapping[Threshold, float], wanted: Threshold) -> bool:
    """Whether something is read that well, or better, and a guess would miss it: anything where a match is close, clearly much else."""
    for threshold in THRESHOLDS[: THRESHOLDS.index(wanted) + 1]:
        sharp = threshold in (EXACT, FAITHFUL) or guessed.get(threshold, 0.0) == 0
        if beyond.get(threshold, 0.0) > (0.0 if sharp else CLEARLY):
            return True
    return False


@dataclass(frozen=True)
class AttackOutcome:
    """One attack on one layer, over all batches."""

    attack: str
    action: str
    """What its server does: "a server that …"."""
    crafted: bool
    """Whether the server changed the model; else it only looked on."""
    layer: str
    whole_samples: bool
    """Whether what is read are the client's samples; else it is what arrives at the layer."""
    unit: str
    """What is counted: samples, or positions where the layer sees them one by one."""
    measured: Leakage
    recovered: Mapping[Threshold, Interval]
    predicted: Leakage | None
    limit: Leakage | None
    gain: float
    gains: Mapping[float, float]
    recovered_samples: tuple[tuple[int, ...], ...]
    guessed: Mapping[Threshold, float] = field(default_factory=dict)
    """The share that somebody who read nothing would hit, at each threshold."""
    beyond: Mapping[Threshold, float] = field(default_factory=dict)
    """Of what such a guess would miss, the share that was read."""
    up_to_factor: bool = False
    """Whether the layer has no bias, and what is read is known up to one number each."""
    centred: bool = False
    """Whether a norm behind the layer takes the mean off what comes back: quotients of rows mean nothing there."""
    repeats: bool = False
    """Whether some sample stood in a batch more than once."""
    certified: float | None = None
    """Candidates that the reader proved without the truth, per batch; None where its attack proves none."""

    @property
    def recall(self) -> float:
        """R by gradients at the exact threshold: what the server holds in its hands."""
        return self.recovered[EXACT].mean

    @property
    def reads(self) -> bool:
        """Whether something is read that a guess would miss."""
        return self.reads_at(THRESHOLDS[-1])

    def reads_at(self, wanted: Threshold) -> bool:
        """Whether something is read that well, or better, and a guess would miss it: anything where a match is close, clearly much else."""
        return beats_a_guess(self.guessed, self.beyond, wanted)

    def badness(self, wanted: Threshold) -> tuple[bool, float, float, float, bool, bool]:
        """The one order of outcomes: whether anything is read, what at a threshold, what exactly, what at any; whole samples, then servers that change nothing."""
        exact = self.recall if self.reads else 0.0
        every = sum(interval.mean for interval in self.recovered.values())
        return self.reads, self.share_at(wanted), exact, round(every, 6), self.whole_samples, not self.crafted

    def share_at(self, wanted: Threshold) -> float:
        """What is read at a threshold, where it is more than a guess."""
        if self.reads_at(wanted):
            return self.recovered[wanted].mean
        return self.beyond.get(wanted, 0.0) * (1 - self.guessed.get(wanted, 0.0))


Status = Literal["leaks", "not tested"]


@dataclass(frozen=True)
class LayerOutcome:
    """What is known of one layer after the audit."""

    layer: str
    status: Status
    share: float
    """What the attack that reads most reads there, at the audit's threshold."""
    attacks: tuple[str, ...]
    """Those that were tried there."""
    reason: str
    """Why not, where it was not tested."""
    parameters: tuple[str, ...] = ()
    """The trained parameters that this speaks of."""


@dataclass(frozen=True)
class SideReading:
    """Something that is read beside the samples: what, through which layer, how much of it, and what that means."""

    what: str
    layer: str
    share: float
    note: str


@dataclass(frozen=True)
class DefenceOutcome:
    """What is left of the strongest attack with a defence in place."""

    name: str
    kind: str
    recall: Mapping[Threshold, float]
    is_baseline: bool = False
    """Whether this is the attack without any."""


@dataclass(frozen=True)
class Curve:
    """Predicted R of an attack on this data for other batch sizes and layer widths."""

    attack: str
    batch_sizes: tuple[int, ...]
    neurons: tuple[int, ...]
    recall: tuple[tuple[float, ...], ...]

    def at(self, batch_size: int, neurons: int) -> float:
        """R at one of the settings."""
        return self.recall[self.batch_sizes.index(batch_size)][self.neurons.index(neurons)]


@dataclass(frozen=True)
class Gallery:
    """One batch to look at: what the client holds, what the server reads; as pictures or as words."""

    truth: Tensor | None = field(default=None, repr=False)
    read: Tensor | None = field(default=None, repr=False)
    exact: tuple[bool, ...] = ()
    seen: tuple[bool, ...] = ()
    words: tuple[tuple[tuple[str, bool], ...], ...] = field(default=(), repr=False)
    """For each text its words, and whether each was read right; texts that were not read have none right."""
