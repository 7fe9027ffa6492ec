"""What an audit found, as records: for people, for JSON, for notebooks."""

import html
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from qbi.audit.survey import Finding
from qbi.audit.trials import Client
from qbi.records import Interval

SCHEMA = "qbi-audit/1"


@dataclass(frozen=True)
class AttackOutcome:
    """One attack on one layer, over all batches."""

    attack: str
    layer: str
    whole_samples: bool
    """Whether what is read are the client's samples; else it is what arrives at the layer."""
    unit: str
    """What is counted: samples, or positions where the layer sees them one by one."""
    measured: Mapping[str, float]
    recovered: Mapping[str, Interval]
    predicted: Mapping[str, float] | None
    limit: Mapping[str, float] | None
    gain: float
    gains: Mapping[float, float]
    recovered_samples: tuple[tuple[int, ...], ...]

    @property
    def recall(self) -> float:
        """R by gradients at the exact threshold: what the server holds in its hands."""
        return self.recovered["mse<1e-10"].mean


@dataclass(frozen=True)
class DefenceOutcome:
    """What is left of the strongest attack with a defence in place."""

    name: str
    kind: str
    recall: Mapping[str, float]


@dataclass(frozen=True)
class Curve:
    """Predicted R of QBI on this data for other batch sizes and layer widths."""

    batch_sizes: tuple[int, ...]
    neurons: tuple[int, ...]
    recall: tuple[tuple[float, ...], ...]


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
    defences: tuple[DefenceOutcome, ...]
    curve: Curve | None
    advice: tuple[str, ...]
    doubts: tuple[str, ...]
    gallery: Gallery
    seed: int
    versions: Mapping[str, str]
    seconds: float

    @property
    def worst(self) -> AttackOutcome | None:
        """The attack that reads most."""
        return max(self.attacks, key=lambda a: a.recall, default=None)

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
        who = {
            "passive": "a server that only looks on, the model as it is,",
            "QBI": "a server that prepares the model with QBI",
            "PAIRS": "a server that prepares the model with PAIRS",
            "trap weights": "a server that prepares the model with trap weights",
        }.get(worst.attack, f"a server with {worst.attack}")
        count = worst.recall * self.client.samples
        if worst.unit != "samples":
            what = f"{100 * worst.recall:.0f} % of the single positions (not whole samples)"
        elif worst.whole_samples:
            what = f"{count:.1f} of {self.client.samples} samples, exactly"
        else:
            what = f"what is left of {count:.1f} of {self.client.samples} samples at this layer"
        return f"From one answer, {who} reads {what} (R = {100 * worst.recall:.0f} %), through {worst.layer}."

    def document(self) -> dict[str, Any]:
        """The result as plain data, for JSON; the samples themselves stay out. See `docs/report.schema.json`."""
        worst = self.worst
        return {
            "schema": SCHEMA,
            "verdict": {
                "text": self.verdict,
                "recall": self.recall,
                "attack": None if worst is None else worst.attack,
                "layer": None if worst is None else worst.layer,
            },
            "model": {
                "name": self.model,
                "parameters": self.parameters,
                "traced_by": self.traced_by,
                "note": self.trace_note,
            },
            "data": {
                "name": self.data,
                "kind": self.kind,
                "samples": self.samples,
                "shape": [list(s) for s in self.shape],
            },
            "client": {
                "batch_size": self.client.batch_size,
                "local_steps": self.client.local_steps,
                "optimiser": self.client.training.optimiser,
                "learning_rate": self.client.training.learning_rate,
                "precision": self.client.precision,
                "loss": self.loss,
            },
            "layers": [_layer(f) for f in self.layers],
            "path": list(self.path),
            "attacks": [_attack(a) for a in self.attacks],
            "defences": [{"name": d.name, "kind": d.kind, "recall": dict(d.recall)} for d in self.defences],
            "prediction": None
            if self.curve is None
            else {
                "batch_sizes": list(self.curve.batch_sizes),
                "neurons": list(self.curve.neurons),
                "recall": [list(row) for row in self.curve.recall],
            },
            "advice": list(self.advice),
            "doubts": list(self.doubts),
            "batches": self.batches,
            "seed": self.seed,
            "versions": dict(self.versions),
            "seconds": round(self.seconds, 3),
        }

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


def _layer(finding: Finding) -> dict[str, Any]:
    carrier = finding.carrier
    return {
        "name": finding.name,
        "neurons": finding.target.neurons,
        "width": finding.target.width,
        "bias": finding.target.has_bias,
        "activation": finding.target.activation,
        "slope_below_zero": finding.target.slope_below,
        "reach": finding.reach,
        "reason": finding.reason,
        "decided_by": finding.decided_by,
        "values": 0 if carrier is None else carrier.features,
        "positions": 1 if carrier is None else carrier.tokens,
        "losses": [] if carrier is None else [str(loss) for loss in carrier.losses],
    }


def _attack(outcome: AttackOutcome) -> dict[str, Any]:
    return {
        "attack": outcome.attack,
        "layer": outcome.layer,
        "whole_samples": outcome.whole_samples,
        "unit": outcome.unit,
        "measured": dict(outcome.measured),
        "recovered_from_gradients": {
            name: {"mean": i.mean, "low": _number(i.low), "high": _number(i.high), "batches": i.count}
            for name, i in outcome.recovered.items()
        },
        "predicted": None if outcome.predicted is None else dict(outcome.predicted),
        "limit": None if outcome.limit is None else dict(outcome.limit),
        "gain": outcome.gain,
        "gains": {f"{g:g}": r for g, r in outcome.gains.items()},
        "recovered_samples": [list(s) for s in outcome.recovered_samples],
    }


def _number(value: float) -> float | None:
    """JSON has no NaN: a single batch has no interval."""
    return value if value == value else None
