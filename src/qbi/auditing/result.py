"""What an audit found, as records: for people, for JSON, for notebooks."""

import html
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from qbi.auditing.bounds import BoundPoint
from qbi.auditing.client import Client
from qbi.auditing.survey import Finding
from qbi.metrics import EXACT, Threshold
from qbi.records import Interval


@dataclass(frozen=True)
class AttackOutcome:
    """One attack on one layer, over all batches."""

    attack: str
    deed: str
    """What its server does: "a server that …"."""
    crafted: bool
    """Whether the server changed the model; else it only looked on."""
    layer: str
    whole_samples: bool
    """Whether what is read are the client's samples; else it is what arrives at the layer."""
    unit: str
    """What is counted: samples, or positions where the layer sees them one by one."""
    measured: Mapping[str, float]
    recovered: Mapping[Threshold, Interval]
    predicted: Mapping[str, float] | None
    limit: Mapping[str, float] | None
    gain: float
    gains: Mapping[float, float]
    recovered_samples: tuple[tuple[int, ...], ...]
    certified: float | None = None
    """Candidates that the reader proved without the truth, per batch; None where its attack proves none."""

    @property
    def recall(self) -> float:
        """R by gradients at the exact threshold: what the server holds in its hands."""
        return self.recovered[EXACT].mean


@dataclass(frozen=True)
class Untested:
    """An attack that could not be tried on a layer, and why."""

    attack: str
    layer: str
    reason: str

    def __str__(self) -> str:
        return f"{self.attack} on {self.layer}: not tested ({self.reason})"


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


@dataclass(frozen=True)
class AuditResult:
    """The whole audit."""

    model: str
    parameters: int
    traced_by: str
    trace_note: str
    data: str
    kind: str
    samples: int
    shape: tuple[tuple[int, ...], ...]
    client: Client
    loss: str
    batches: int
    layers: tuple[Finding, ...]
    path: tuple[str, ...]
    attacks: tuple[AttackOutcome, ...]
    untested: tuple[Untested, ...]
    beside: tuple[SideReading, ...]
    defences: tuple[DefenceOutcome, ...]
    curve: Curve | None
    budgets: tuple[BoundPoint, ...]
    advice: tuple[str, ...]
    doubts: tuple[str, ...]
    gallery: Gallery
    seed: int
    versions: Mapping[str, str]
    seconds: float

    @property
    def worst(self) -> AttackOutcome | None:
        """The attack that reads most; of equals one that reads whole samples."""
        return max(self.attacks, key=lambda a: (a.recall, a.whole_samples), default=None)

    @property
    def recall(self) -> float:
        """R of the strongest attack, exact."""
        return 0.0 if self.worst is None else self.worst.recall

    @property
    def verdict(self) -> str:
        """One or two sentences in plain words."""
        worst = self.worst
        if worst is None or worst.recall == 0:
            return "Nothing was read exactly. " + (self.doubts[0] if self.doubts else "")
        count = worst.recall * self.client.samples
        if worst.unit != "samples":
            what = f"{100 * worst.recall:.0f} % of the single positions (not whole samples)"
        elif worst.whole_samples:
            what = f"{count:.1f} of {self.client.samples} samples, exactly"
        else:
            what = f"what is left of {count:.1f} of {self.client.samples} samples at this layer"
        return f"A server that {worst.deed} reads {what} (R = {100 * worst.recall:.0f} %), through {worst.layer}."

    def document(self) -> dict[str, Any]:
        """The result as plain data, for JSON; the samples themselves stay out. See `docs/report.schema.json`."""
        from qbi.auditing.document import to_document

        return to_document(self)

    def __str__(self) -> str:
        return self.verdict

    def _repr_html_(self) -> str:
        """For notebooks."""
        rows = "".join(
            f"<tr><td>{html.escape(a.attack)}</td><td>{html.escape(a.layer)}</td><td>{100 * a.recall:.1f} %</td></tr>"
            for a in self.attacks
        )
        doubts = "".join(f"<li>{html.escape(d)}</li>" for d in self.doubts)
        return (
            f"<p><b>{html.escape(self.verdict)}</b></p><table><tr><th>attack</th><th>layer</th><th>R</th></tr>{rows}</table>"
            f"<ul>{doubts}</ul>"
        )
