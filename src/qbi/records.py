"""The frozen records that travel between the stations. They hold results; they do nothing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor


@dataclass(frozen=True)
class CraftedRows:
    """What a server writes into a linear layer."""

    weight: Float[Tensor, "n m"]
    bias: Float[Tensor, " n"]


@dataclass(frozen=True)
class Update:
    """What one client sends after one local step, or several: gradients by parameter name, buffers, and its batch size."""

    gradients: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    batch_size: int
    """Samples of one step, by which its loss is divided; 0 where that is not known."""
    loss: float
    steps: int = 1
    """Local steps that are in it."""
    batches: int = 1
    """Different batches that these steps were made of."""

    @property
    def samples(self) -> int:
        """Different samples in it, at most."""
        return self.batch_size * self.batches


@dataclass(frozen=True)
class Candidates:
    """Samples read out of an update, best first, each with the row it came from.

    `support` is the number of rows that gave the same sample. The order is made without knowing the truth; for readers that
    work in steps it is the order in which samples were found.
    """

    samples: Float[Tensor, "k m"]
    rows: Int[Tensor, " k"]
    support: Int[Tensor, " k"]
    certified: Bool[Tensor, " k"] | None = None
    """Which of them the sent model proves: run through it, each explains its own part of the update. None: not asked."""
    labels: Int[Tensor, " k"] | None = None
    """The label that explains each; −1 where none does."""
    error: Float[Tensor, " k"] | None = None
    """How far each value may be off, by the rounding of the update (root mean square); infinite where that is not known."""


@dataclass(frozen=True)
class Leakage:
    """A, P and R, as shares of one: of one batch, the mean over several, or what a law expects."""

    active: float
    precision: float
    recall: float
    precision_among_active: float
    """N_u / N_A: the share that the published trap-weights column reports as P (erratum 5)."""

    @classmethod
    def of(cls, active: float, precision: float, recall: float) -> "Leakage":
        """Of one batch or law, where the share among active neurons follows."""
        return cls(active, precision, recall, precision / active if active else 0.0)

    @classmethod
    def mean(cls, each: "Sequence[Leakage]") -> "Leakage":
        """The mean over several batches, each share by itself."""
        values = [(e.active, e.precision, e.recall, e.precision_among_active) for e in each]
        return cls(*(sum(column) / len(values) for column in zip(*values, strict=True)))

    def document(self) -> dict[str, float]:
        """A, P, R as plain data."""
        return {"active": self.active, "precision": self.precision, "recall": self.recall}


@dataclass(frozen=True)
class Recovery:
    """Which samples of a batch were recovered from an update, at one threshold, matched one to one.

    `candidate[i]` is the index of the candidate that gave sample i, or −1.
    """

    recovered: Bool[Tensor, " b"]
    candidate: Int[Tensor, " b"]

    @property
    def recall(self) -> float:
        """The share of samples recovered."""
        return float(self.recovered.double().mean())


@dataclass(frozen=True)
class Interval:
    """A mean with its 95 % interval."""

    mean: float
    low: float
    high: float
    count: int

    @property
    def half_width(self) -> float:
        """Half of the interval's width, as the paper prints it after ±."""
        return (self.high - self.low) / 2


@dataclass(frozen=True)
class ImageData:
    """Images as they are stored, with the public statistics used to normalise them."""

    name: str
    pixels: UInt8[Tensor, "n c h w"]
    labels: Int[Tensor, " n"]
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __len__(self) -> int:
        return self.pixels.shape[0]

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height, width."""
        _, c, h, w = self.pixels.shape
        return c, h, w


@dataclass(frozen=True)
class TextData:
    """Texts as token ids of one length, with the vocabulary that turns them back into words."""

    name: str
    tokens: Int[Tensor, "n t"]
    labels: Int[Tensor, " n"]
    classes: tuple[str, ...]
    vocabulary: tuple[str, ...] = field(repr=False)

    def __len__(self) -> int:
        return self.tokens.shape[0]
