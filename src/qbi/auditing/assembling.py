"""What follows from the attempts of an audit: other settings, defences, advice, doubts, pictures; and the result of it all."""

import logging
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import nn

import qbi
from qbi.auditing.attempts import Progress
from qbi.auditing.bounds import BoundPoint, budget_points
from qbi.auditing.campaign import Attempt, Campaign
from qbi.auditing.decode import decoded
from qbi.auditing.doubts import find_doubts, why_nothing
from qbi.auditing.finding import BESIDE, Untested
from qbi.auditing.forecast import forecast
from qbi.auditing.gallery import make_gallery
from qbi.auditing.match import QUICK, MatchedBatch, matched
from qbi.auditing.outcomes import DefenceOutcome, Gallery, SideReading
from qbi.auditing.patches import found_patches
from qbi.auditing.remedies import advise, defended
from qbi.auditing.result import AuditResult
from qbi.auditing.sentences import FoundSentences, found_sentences, undecided
from qbi.auditing.side_information import side_readings
from qbi.auditing.survey import Survey
from qbi.errors import QbiError, first_line
from qbi.metrics import Threshold
from qbi.routing.graph import Traced
from qbi.routing.path import find_path

T = TypeVar("T")
log = logging.getLogger("qbi.audit")


@dataclass(frozen=True)
class Asked:
    """What an audit was asked for, beside its attacks."""

    model: str
    loss: str
    at: Threshold
    defences: bool
    decode: bool | None
    match: bool | None
    origins: Mapping[str, tuple[str, ...]]
    started: float


def assemble(
    campaign: Campaign,
    seen: Survey,
    attempts: Sequence[Attempt],
    untested: Sequence[Untested],
    asked: Asked,
    say: Progress,
) -> AuditResult:
    """Everything that is told of the attempts, in one record."""
    samples, client, traced, findings = campaign.samples, campaign.client, seen.traced, seen.findings
    strongest = _most(attempts, asked.at, crafted=True)
    outcomes = tuple(a.outcome for a in attempts)
    worst = max(outcomes, key=lambda o: o.badness(asked.at), default=None)
    say("predicting other settings")
    failed: list[str] = []
    curve = None if strongest is None else _unless_it_fails(lambda: forecast(campaign, strongest), None, failed)
    after = _defended(campaign, attempts, asked, say, failed)
    pictures = _unless_it_fails(lambda: decoded(campaign, attempts, asked=asked.decode, say=say), None, failed)
    joined = _unless_it_fails(lambda: found_patches(campaign, say), None, failed)
    unpriced: tuple[BoundPoint, ...] = ()
    points = _unless_it_fails(lambda: budget_points(samples, campaign.seed), unpriced, failed)
    aside, left = _side_information(campaign, seen)
    missing = [*untested, *left]
    none: tuple[str, ...] = ()
    advice = _unless_it_fails(lambda: advise(worst, after, curve, client, findings, points), none, failed)
    doubts = _unless_it_fails(lambda: _doubts(campaign, attempts, strongest, seen, missing), none, failed)
    return AuditResult(
        model=asked.model,
        parameters=sum(p.numel() for p in campaign.model.parameters()),
        traced_by=traced.how,
        trace_note=traced.note,
        data=samples.name,
        kind=samples.kind,
        samples=len(samples),
        shape=tuple(tuple(part.shape[1:]) for part in samples.inputs),
        client=client,
        loss=asked.loss,
        batches=campaign.batches,
        layers=tuple(findings),
        path=() if strongest is None else _path(traced, strongest.outcome.layer),
        attacks=outcomes,
        untested=tuple(missing),
        side_information=aside,
        defences=after,
        curve=curve,
        budgets=points,
        advice=advice,
        doubts=doubts + _lost(failed),
        gallery=Gallery() if strongest is None else make_gallery(strongest.trials[0], strongest.mounted, samples),
        decoded=pictures,
        matched=_matched(campaign, attempts, asked, say),
        patches=joined,
        sentences=_sentences(campaign, say),
        trained=seen.uses.trained,
        elsewhere=frozenset(n for n, said in seen.uses.others.items() if said and seen.uses.of(n)),
        origins=asked.origins,
        threshold=asked.at,
        seed=campaign.seed,
        versions={"qbi": qbi.__version__, "torch": torch.__version__, "python": platform.python_version()},
        seconds=time.perf_counter() - asked.started,
    )


def _doubts(
    campaign: Campaign,
    attempts: Sequence[Attempt],
    strongest: Attempt | None,
    seen: Survey,
    missing: Sequence[Untested],
) -> tuple[str, ...]:
    """Of what was tried in full on the layer that gives most away, and by who only looks on."""
    full = [
        a
        for a in attempts
        if a.outcome.crafted
        and strongest is not None
        and a.finding is strongest.finding
        and len(a.trials) == campaign.batches
    ]
    trials = [trial for a in full for trial in a.trials]
    judged = tuple(a.outcome for a in attempts if not a.outcome.crafted or a in full)
    why = why_nothing(seen.findings, tuple(a.outcome for a in attempts), trials)
    others = find_doubts(
        seen.findings, judged, missing, trials, seen.traced, campaign.samples, campaign.client, campaign.batches
    )
    return (*why, *others)


def _defended(
    campaign: Campaign, attempts: Sequence[Attempt], asked: Asked, say: Progress, failed: list[str]
) -> tuple[DefenceOutcome, ...]:
    """Defences against what reads most, crafted and not; against the strongest crafted model where nothing reads."""
    say("trying defences")
    strongest = _most(attempts, asked.at, crafted=True)
    both = [a for a in (strongest, _most(attempts, asked.at, crafted=False)) if a is not None]
    judges = [a for a in both if a.outcome.reads] or [a for a in (strongest,) if a is not None]
    none: tuple[DefenceOutcome, ...] = ()
    if not judges or not asked.defences or campaign.client.local_steps:
        return none
    return _unless_it_fails(lambda: defended(campaign, judges), none, failed)


def _side_information(campaign: Campaign, seen: Survey) -> tuple[tuple[SideReading, ...], list[Untested]]:
    """Labels and tokens; what could not be looked for is said, where there is a table to be looked up."""
    failed: list[str] = []
    none: tuple[SideReading, ...] = ()
    found = _unless_it_fails(lambda: side_readings(campaign, seen.findings), none, failed)
    if campaign.client.local_steps:
        failed.append("they are looked for in the gradient of one batch only, and this client sends weights.")
    has_table = any(isinstance(m, nn.Embedding) for m in campaign.model.modules())
    return found, [Untested(BESIDE, "the model", failed[0])] if failed and has_table else []


def _sentences(campaign: Campaign, say: Progress) -> FoundSentences | None:
    """What is read of sentences; a reading that fails decides nothing, and is not silence."""
    failed: FoundSentences | None = undecided("the reading of sentences failed.")
    return _unless_it_fails(lambda: found_sentences(campaign, say), failed)


def _matched(campaign: Campaign, attempts: Sequence[Attempt], asked: Asked, say: Progress) -> MatchedBatch | None:
    """Gradient matching; one that fails was not tried, and is not silence."""
    failed: list[str] = []
    found = _unless_it_fails(lambda: matched(campaign, attempts, asked=asked.match, say=say), None, failed)
    return MatchedBatch(False, f"it failed on this model ({failed[0]}).", QUICK) if failed else found


def _unless_it_fails(work: Callable[[], T], otherwise: T, failed: list[str] | None = None) -> T:
    """What is told beside the verdict; a model that fails on some batch does not end an audit."""
    try:
        return work()
    except QbiError:
        raise
    except Exception as problem:
        said = f"{type(problem).__name__}: {first_line(problem)}"
        log.warning("left out: %s", said)
        if failed is not None:
            failed.append(said)
        return otherwise


def _lost(failed: Sequence[str]) -> tuple[str, ...]:
    return tuple(f"A part of the audit failed on this model and is left out ({said})." for said in failed)


def _most(attempts: Sequence[Attempt], at: Threshold, *, crafted: bool) -> Attempt | None:
    """The attempt that reads most, among crafted models or among those left as they are."""
    able = (a for a in attempts if a.outcome.crafted is crafted)
    return max(able, key=lambda a: a.outcome.badness(at), default=None)


def _path(traced: Traced, layer: str) -> tuple[str, ...]:
    nodes = traced.nodes_of(layer)
    return tuple(traced.label(node) for node in find_path(traced, nodes[0])[1:]) if nodes else ()
