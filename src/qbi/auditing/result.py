"""What an audit found, as records: for people, for JSON, for notebooks."""

import html
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from qbi.auditing.bounds import BoundPoint
from qbi.auditing.client import Client
from qbi.auditing.finding import Finding, Untested
from qbi.metrics import EXACT, FAITHFUL, Threshold
from qbi.records import Interval

CLEARLY = 0.1
"""By how much a loose match must be more frequent than by guessing."""


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
    guessed: Mapping[Threshold, float] = field(default_factory=dict)
    """The share that somebody who read nothing would hit, at each threshold."""
    certified: float | None = None
    """Candidates that the reader proved without the truth, per batch; None where its attack proves none."""

    @property
    def recall(self) -> float:
        """R by gradients at the exact threshold: what the server holds in its hands."""
        return self.recovered[EXACT].mean

    @property
    def reads(self) -> bool:
        """Whether more is read than a guess would hit: at all where the match is close, clearly so where it is loose."""
        return any(
            interval.mean > self.guessed.get(threshold, 0.0) + (0.0 if threshold in (EXACT, FAITHFUL) else CLEARLY)
            for threshold, interval in self.recovered.items()
        )


Status = Literal["leaks", "nothing read", "not tested"]


@dataclass(frozen=True)
class LayerOutcome:
    """What is known of one layer after the audit."""

    layer: str
    status: Status
    share: float
    """R of the attack that reads most, exact."""
    attacks: tuple[str, ...]
    """Those that were tried there."""
    reason: str
    """Why not, where it was not tested."""


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
        return max(
            self.attacks,
            key=lambda a: (a.recall, a.whole_samples, a.reads, sum(i.mean for i in a.recovered.values())),
            default=None,
        )

    @property
    def recall(self) -> float:
        """R of the strongest attack, exact."""
        return 0.0 if self.worst is None else self.worst.recall

    @property
    def outcomes(self) -> tuple[LayerOutcome, ...]:
        """Every layer: leaks, tested with nothing read, or not tested."""
        names = list(dict.fromkeys([f.name for f in self.layers] + [u.layer for u in self.untested]))
        return tuple(self._outcome(name) for name in names)

    def _outcome(self, layer: str) -> LayerOutcome:
        tried = [a for a in self.attacks if a.layer == layer]
        missing = [u for u in self.untested if u.layer == layer]
        names = tuple(a.attack for a in tried)
        share = max((a.recall for a in tried), default=0.0)
        if any(a.reads for a in tried):
            return LayerOutcome(layer, "leaks", share, names, "")
        finding = next((f for f in self.layers if f.name == layer), None)
        without_bias = (
            finding is not None and not finding.target.has_bias and any(s.layer == layer for s in self.beside)
        )
        if not (any(a.crafted for a in tried) or without_bias) or any(u.attack == "every attack" for u in missing):
            reason = missing[0].reason if missing else "" if finding is None else finding.reason
            if not missing and finding is not None and not finding.target.has_bias:
                reason = "it has no bias to divide by, and what its rows give up to a factor was not looked for here."
            return LayerOutcome(layer, "not tested", 0.0, names, reason or "no crafted model was tried on it.")
        return LayerOutcome(layer, "nothing read", 0.0, names, "")

    @property
    def status(self) -> Status:
        """Of the model: it leaks if a layer does; nothing was read only where every layer was tested."""
        found = self.outcomes
        if any(o.status == "leaks" for o in found):
            return "leaks"
        return "not tested" if not found or any(o.status == "not tested" for o in found) else "nothing read"

    @property
    def verdict(self) -> str:
        """One or two sentences in plain words."""
        worst = self.worst
        if self.status == "not tested":
            left = [o for o in self.outcomes if o.status == "not tested"]
            where = (
                f"“{left[0].layer}” ({left[0].reason})"
                if left
                else "the model (no layer in it is a linear map of its input)"
            )
            more = f" and {len(left) - 1} more" if len(left) > 1 else ""
            return f"Not tested: {where}{more}. Nothing was read from what was, which says nothing of the rest."
        if worst is None or not worst.reads:
            tried = ", ".join(dict.fromkeys(a.attack for a in self.attacks))
            return f"Tested, nothing read: by {tried}. " + (self.doubts[0] if self.doubts else "")
        if worst.recall == 0:
            threshold = next(t for t, i in worst.recovered.items() if i.mean > worst.guessed.get(t, 0.0))
            return (
                f"A server that {worst.deed} reads {100 * worst.recovered[threshold].mean:.0f} % of {worst.unit} {threshold} "
                f"(a guess: {100 * worst.guessed.get(threshold, 0.0):.0f} %), none exactly, through “{worst.layer}”."
            )
        count = worst.recall * self.client.samples
        if worst.unit != "samples":
            what = f"{100 * worst.recall:.0f} % of the single positions (not whole samples)"
        elif worst.whole_samples:
            what = f"{count:.1f} of {self.client.samples} samples, exactly"
        else:
            what = f"what is left of {count:.1f} of {self.client.samples} samples at this layer"
        return f"A server that {worst.deed} reads {what} (R = {100 * worst.recall:.0f} %), through “{worst.layer}”."

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
