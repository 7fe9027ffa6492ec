"""An audit as plain data, for JSON and everything that is made of it; the schema is `docs/report.schema.json`."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from qbi.auditing.client import Client
from qbi.auditing.decode import DecodedPictures
from qbi.auditing.finding import Finding
from qbi.auditing.match import MatchedBatch
from qbi.auditing.outcomes import AttackOutcome
from qbi.auditing.patches import FoundPatches
from qbi.auditing.result import AuditResult
from qbi.auditing.sentences import FoundSentences
from qbi.metrics import THRESHOLDS, Threshold
from qbi.report.saved import SCHEMA


def to_document(result: AuditResult) -> dict[str, Any]:
    """The result without the samples themselves."""
    worst = result.worst
    return {
        "schema": SCHEMA,
        "date": datetime.now(UTC).date().isoformat(),
        "thresholds": [{"key": t.key, "words": t.words} for t in THRESHOLDS],
        "verdict": {
            "text": result.verdict,
            "status": result.status,
            "recall": result.recall,
            "share": result.share,
            "threshold": result.threshold.key,
            "attack": None if worst is None else worst.attack,
            "layer": None if worst is None else worst.layer,
        },
        "model": {
            "name": result.model,
            **_fields(result, "parameters", "traced_by"),
            "note": result.trace_note,
        },
        "data": {
            "name": result.data,
            "kind": result.kind,
            "samples": result.samples,
            "shape": _plain(result.shape),
        },
        "client": _client(result.client) | {"loss": result.loss},
        "layers": [_layer(f) for f in result.layers],
        "outcomes": [
            _fields(o, "layer", "status", "share", "attacks", "reason", "parameters") for o in result.outcomes
        ],
        "accounts": dict(result.accounts),
        "path": list(result.path),
        "attacks": [_attack(a, result.threshold) for a in result.attacks],
        "side_information": [_fields(s, "what", "layer", "share", "note") for s in result.side_information],
        "untested": [_fields(u, "attack", "layer", "reason") for u in result.untested],
        "defences": [
            _fields(d, "name", "kind") | {"baseline": d.is_baseline, "recall": _plain(d.recall)}
            for d in result.defences
        ],
        "prediction": None
        if result.curve is None
        else _fields(result.curve, "attack", "batch_sizes", "neurons", "recall"),
        "budgets": [point.document() for point in result.budgets],
        "advice": list(result.advice),
        "doubts": list(result.doubts),
        "decoded": None if result.decoded is None else _decoded(result.decoded),
        "matched": None if result.matched is None else _matched(result.matched, result.threshold),
        "patches": None if result.patches is None else _patches(result.patches, result.threshold),
        "sentences": None if result.sentences is None else _sentences(result.sentences),
        "batches": result.batches,
        "seed": result.seed,
        "versions": dict(result.versions),
        "seconds": round(result.seconds, 3),
    }


def _decoded(found: DecodedPictures) -> dict[str, Any]:
    names = ("attack", "layer", "learned_on", "features", "recovered", "guessed", "nearest")
    return _fields(found, *names) | {"seconds": round(found.seconds, 3)}


def _matched(found: MatchedBatch, threshold: Threshold) -> dict[str, Any]:
    return {
        **_fields(found, "tried", "reason"),
        **_fields(found.effort, "steps", "restarts"),
        "labels_certain": found.certain,
        "distance": None if found.distance is None else _number(found.distance, largest=2.0),
        "share": found.share_at(threshold),
        **_fields(found, "recovered", "guessed", "beyond"),
        "announced_seconds": None if found.announced is None else round(found.announced, 3),
        "seconds": round(found.seconds, 3),
    }


def _patches(found: FoundPatches, threshold: Threshold) -> dict[str, Any]:
    return {
        **_fields(found, "layer", "positions", "patches", "width", "reason", "rest"),
        "share": found.share_at(threshold),
        **_fields(found, "honest", "first_alone", "updates", "proven", "one_update", "all_updates", "guessed"),
        "seconds": round(found.seconds, 3),
    }


def _sentences(found: FoundSentences) -> dict[str, Any]:
    read = ("exact", "rouge_1", "rouge_2", "words", "tokens", "proven", "guessed")
    return _fields(found, "decided", "reason", "layers", "rank", "width", *read) | {"seconds": round(found.seconds, 3)}


def _client(client: Client) -> dict[str, Any]:
    return {
        **_fields(client, "batch_size", "local_steps"),
        **_fields(client.training, "optimiser", "learning_rate"),
        "precision": client.precision,
    }


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
        "losses": []
        if carrier is None
        else [{"at": s.label, "cause": s.cause.value, "reason": s.reason} for s in carrier.shortfalls],
    }


def _attack(outcome: AttackOutcome, threshold: Threshold) -> dict[str, Any]:
    return {
        **_fields(outcome, "attack", "crafted", "layer", "whole_samples", "unit"),
        "share": outcome.share_at(threshold),
        **_fields(outcome, "up_to_factor", "beyond"),
        "measured": outcome.measured.document(),
        "recovered_from_gradients": {
            t.key: {"mean": i.mean, "low": _number(i.low), "high": _number(i.high), "batches": i.count}
            for t, i in outcome.recovered.items()
        },
        "guessed": _plain(outcome.guessed),
        "predicted": None if outcome.predicted is None else outcome.predicted.document(),
        "limit": None if outcome.limit is None else outcome.limit.document(),
        **_fields(outcome, "certified", "gain"),
        "gains": {f"{g:g}": r for g, r in outcome.gains.items()},
        "recovered_samples": _plain(outcome.recovered_samples),
    }


def _fields(record: object, *names: str) -> dict[str, Any]:
    """Fields of a record that are written under their own names; named one by one, so that no sample is among them."""
    return {name: _plain(getattr(record, name)) for name in names}


def _plain(value: Any) -> Any:
    """Lists for tuples, and thresholds by their keys."""
    if isinstance(value, tuple):
        return [_plain(part) for part in value]
    if isinstance(value, Mapping):
        return {key.key if isinstance(key, Threshold) else key: part for key, part in value.items()}
    return value


def _number(value: float, largest: float = float("inf")) -> float | None:
    """JSON has no NaN and no infinity: a single batch has no interval, a descent may end nowhere."""
    return value if value == value and value <= largest else None
