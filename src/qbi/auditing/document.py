"""An audit as plain data, for JSON and everything that is made of it; the schema is `docs/report.schema.json`."""

from datetime import UTC, datetime
from typing import Any

from qbi.auditing.client import Client
from qbi.auditing.decode import DecodedPictures
from qbi.auditing.finding import Finding
from qbi.auditing.match import MatchedBatch
from qbi.auditing.outcomes import AttackOutcome, DefenceOutcome, LayerOutcome
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
            "parameters": result.parameters,
            "traced_by": result.traced_by,
            "note": result.trace_note,
        },
        "data": {
            "name": result.data,
            "kind": result.kind,
            "samples": result.samples,
            "shape": [list(s) for s in result.shape],
        },
        "client": _client(result.client) | {"loss": result.loss},
        "layers": [_layer(f) for f in result.layers],
        "outcomes": [_outcome(o) for o in result.outcomes],
        "accounts": dict(result.accounts),
        "path": list(result.path),
        "attacks": [_attack(a, result.threshold) for a in result.attacks],
        "side_information": [
            {"what": s.what, "layer": s.layer, "share": s.share, "note": s.note} for s in result.side_information
        ],
        "untested": [{"attack": u.attack, "layer": u.layer, "reason": u.reason} for u in result.untested],
        "defences": [_defence(d) for d in result.defences],
        "prediction": None
        if result.curve is None
        else {
            "attack": result.curve.attack,
            "batch_sizes": list(result.curve.batch_sizes),
            "neurons": list(result.curve.neurons),
            "recall": [list(row) for row in result.curve.recall],
        },
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
    return {
        "attack": found.attack,
        "layer": found.layer,
        "learned_on": found.learned_on,
        "features": found.features,
        "recovered": {t.key: v for t, v in found.recovered.items()},
        "guessed": {t.key: v for t, v in found.guessed.items()},
        "nearest": {t.key: v for t, v in found.nearest.items()},
        "seconds": round(found.seconds, 3),
    }


def _matched(found: MatchedBatch, threshold: Threshold) -> dict[str, Any]:
    return {
        "tried": found.tried,
        "reason": found.reason,
        "steps": found.effort.steps,
        "restarts": found.effort.restarts,
        "labels_certain": found.certain,
        "distance": None if found.distance is None else _number(found.distance, largest=2.0),
        "share": found.share_at(threshold),
        "recovered": {t.key: v for t, v in found.recovered.items()},
        "guessed": {t.key: v for t, v in found.guessed.items()},
        "beyond": {t.key: v for t, v in found.beyond.items()},
        "announced_seconds": None if found.announced is None else round(found.announced, 3),
        "seconds": round(found.seconds, 3),
    }


def _patches(found: FoundPatches, threshold: Threshold) -> dict[str, Any]:
    return {
        "layer": found.layer,
        "positions": found.positions,
        "patches": found.patches,
        "width": found.width,
        "reason": found.reason,
        "rest": found.rest,
        "share": found.share_at(threshold),
        "honest": {t.key: v for t, v in found.honest.items()},
        "first_alone": {t.key: v for t, v in found.first_alone.items()},
        "updates": found.updates,
        "proven": found.proven,
        "one_update": {t.key: v for t, v in found.one_update.items()},
        "all_updates": {t.key: v for t, v in found.all_updates.items()},
        "guessed": {t.key: v for t, v in found.guessed.items()},
        "seconds": round(found.seconds, 3),
    }


def _sentences(found: FoundSentences) -> dict[str, Any]:
    return {
        "decided": found.decided,
        "reason": found.reason,
        "layers": list(found.layers),
        "rank": found.rank,
        "width": found.width,
        "exact": found.exact,
        "rouge_1": found.rouge_1,
        "rouge_2": found.rouge_2,
        "words": found.words,
        "tokens": found.tokens,
        "proven": found.proven,
        "guessed": found.guessed,
        "seconds": round(found.seconds, 3),
    }


def _client(client: Client) -> dict[str, Any]:
    return {
        "batch_size": client.batch_size,
        "local_steps": client.local_steps,
        "optimiser": client.training.optimiser,
        "learning_rate": client.training.learning_rate,
        "precision": client.precision,
    }


def _outcome(outcome: LayerOutcome) -> dict[str, Any]:
    return {
        "layer": outcome.layer,
        "status": outcome.status,
        "share": outcome.share,
        "attacks": list(outcome.attacks),
        "reason": outcome.reason,
        "parameters": list(outcome.parameters),
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
        "attack": outcome.attack,
        "crafted": outcome.crafted,
        "layer": outcome.layer,
        "whole_samples": outcome.whole_samples,
        "unit": outcome.unit,
        "share": outcome.share_at(threshold),
        "up_to_factor": outcome.up_to_factor,
        "beyond": {t.key: share for t, share in outcome.beyond.items()},
        "measured": outcome.measured.document(),
        "recovered_from_gradients": {
            t.key: {"mean": i.mean, "low": _number(i.low), "high": _number(i.high), "batches": i.count}
            for t, i in outcome.recovered.items()
        },
        "guessed": {t.key: share for t, share in outcome.guessed.items()},
        "predicted": None if outcome.predicted is None else outcome.predicted.document(),
        "limit": None if outcome.limit is None else outcome.limit.document(),
        "certified": outcome.certified,
        "gain": outcome.gain,
        "gains": {f"{g:g}": r for g, r in outcome.gains.items()},
        "recovered_samples": [list(s) for s in outcome.recovered_samples],
    }


def _defence(outcome: DefenceOutcome) -> dict[str, Any]:
    return {
        "name": outcome.name,
        "kind": outcome.kind,
        "baseline": outcome.is_baseline,
        "recall": {t.key: share for t, share in outcome.recall.items()},
    }


def _number(value: float, largest: float = float("inf")) -> float | None:
    """JSON has no NaN and no infinity: a single batch has no interval, a descent may end nowhere."""
    return value if value == value and value <= largest else None
