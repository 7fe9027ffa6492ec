"""The audit: look into the model, attack it on the user's data, doubt the result, and say what would help."""

import logging
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

import qbi
from qbi.attacks.registry import BY_DEFAULT, select
from qbi.auditing.attempts import Progress, all_attempts
from qbi.auditing.bounds import budget_points
from qbi.auditing.calling_by_name import by_name, by_place
from qbi.auditing.campaign import Attempt, Campaign
from qbi.auditing.client import Client
from qbi.auditing.domain import operations_of
from qbi.auditing.doubts import find_doubts
from qbi.auditing.effortless import side_readings
from qbi.auditing.finding import Untested
from qbi.auditing.forecast import forecast
from qbi.auditing.gallery import make_gallery
from qbi.auditing.leftovers import MOST_PARTS
from qbi.auditing.losses import OWN, check_value, choose_loss
from qbi.auditing.plain import plain
from qbi.auditing.remedies import advise, defended
from qbi.auditing.result import AuditResult, DefenceOutcome, Gallery
from qbi.auditing.samples import (
    TARGETS,
    Samples,
    as_tensors,
    image_samples,
    mapped_samples,
    tensor_samples,
    text_samples,
    with_targets,
)
from qbi.auditing.survey import Survey, probe_of, survey
from qbi.auditing.threads import fitting_threads
from qbi.calling import untouched
from qbi.errors import BadValue, DataError, QbiError, first_line
from qbi.federation.client import Loss, run_model
from qbi.finite import is_finite
from qbi.metrics import RECOGNISABLE, Threshold
from qbi.records import ImageData, TextData
from qbi.routing.graph import Traced
from qbi.routing.path import find_path, in_outline

T = TypeVar("T")
Data = Samples | ImageData | TextData | Tensor | tuple[Tensor, ...] | Any


def audit(
    model: nn.Module,
    data: Data,
    *,
    attacks: Sequence[str] = BY_DEFAULT,
    layers: str = "most exposed",
    client: Client | None = None,
    loss: str | Loss = "auto",
    batches: int = 3,
    auxiliary: Data | None = None,
    defences: bool = True,
    settings: Mapping[str, float] | None = None,
    at: Threshold = RECOGNISABLE,
    name: str | None = None,
    seed: int = 0,
    device: str = "cpu",
    progress: Progress | None = None,
) -> AuditResult:
    """Attack a copy of a model on data of one's own, and say what a server would read.

    Args:
        model: what clients train; it is not changed.
        data: images or texts of this package, tensors or numpy arrays (x, y), a dictionary of tensors such as a Hugging Face batch (its
            targets under `labels`), a `Dataset` or `DataLoader` of pairs, or prepared `Samples`.
        attacks: keys of the registry, or "all"; `layers`: "most exposed", "all", or one layer's name.
        client: batch size, local steps, precision.
        loss: "auto", a name, a function of outputs and targets, or "own" for a model that takes its targets and returns its loss.
        batches: how many to try, each with fresh rows.
        auxiliary: samples of the domain for attacks that tune their rows; without it, samples of `data` that are in no batch.
        defences: whether to try defences on the strongest attack.
        at: how well a sample must be read to count for `share`, verdict and gates.
        settings: wishes for single attacks, such as `{"trap_scale": 0.97}`.
        name, seed, device: what the report calls the model; same seed, same result; where to compute.
        progress: told what is being done.

    Returns: what was read, through which layer, with which doubts, and what would help.

    >>> model = nn.Sequential(nn.Linear(20, 50), nn.ReLU(), nn.Linear(50, 3))
    >>> data = torch.randn(100, 20), torch.arange(100) % 3
    >>> result = audit(model, data, client=Client(batch_size=4), defences=False)
    >>> result.recall > 0.5
    True
    """
    started = time.perf_counter()
    say = progress or (lambda _what: None)
    wanted = select(attacks, "audit")
    client = client or Client()
    if batches < 1:
        raise BadValue(f"audit: {batches} batches; at least one is needed.")
    samples = as_samples(data) if loss != OWN else with_targets(as_samples(data))
    _check_data(samples, client)
    written = plain(model)
    sent = written.model.to(device).train()
    sent = by_name(sent, samples.names) if samples.names else by_place(sent)
    _check_parameters(sent)
    probe = probe_of(tuple(part.to(device) for part in samples.inputs))
    say("looking into the model")
    seen = survey(sent, probe)
    traced = seen.traced
    value, samples, loss_name = _prepared_loss(traced, samples, probe, loss, device)
    helper = as_samples(auxiliary) if auxiliary is not None else None
    campaign = Campaign(
        sent,
        samples,
        client,
        value,
        batches,
        seed,
        device,
        helper,
        settings or {},
        operations_of(traced),
        in_outline(traced),
    )
    with fitting_threads(campaign.operations * client.samples):
        attempts, untested = all_attempts(campaign, wanted, seen.findings, layers, say)
        result = _assembled(campaign, seen, attempts, [*seen.untested, *untested], say, defences=defences)
    say("done")
    return replace(
        result,
        model=name or type(model).__name__,
        loss=loss_name,
        origins=written.origins,
        threshold=at,
        seconds=time.perf_counter() - started,
    )


def _assembled(
    campaign: Campaign,
    seen: Survey,
    attempts: Sequence[Attempt],
    untested: Sequence[Untested],
    say: Progress,
    *,
    defences: bool,
) -> AuditResult:
    """What follows from the attempts: other settings, defences, advice, doubts, pictures."""
    samples, client, traced, findings = campaign.samples, campaign.client, seen.traced, seen.findings
    crafted = [a for a in attempts if a.outcome.crafted]
    strongest = _most(attempts, crafted=True)
    outcomes = tuple(a.outcome for a in attempts)
    worst = max(outcomes, key=lambda o: o.badness(RECOGNISABLE), default=None)
    say("predicting other settings")
    curve = None if strongest is None else _unless_it_fails(lambda: forecast(campaign, strongest), None)
    say("trying defences")
    judges = [a for a in (strongest, _most(attempts, crafted=False)) if a is not None and a.outcome.reads]
    judges = judges or [a for a in (strongest,) if a is not None]
    wanted = bool(judges) and defences and not client.local_steps
    none: tuple[DefenceOutcome, ...] = ()
    after = _unless_it_fails(lambda: defended(campaign, judges), none) if wanted else none
    points = budget_points(samples, campaign.seed)
    full = [
        a
        for a in crafted
        if strongest is not None and a.finding is strongest.finding and len(a.trials) == campaign.batches
    ]
    trials = [trial for a in full for trial in a.trials]
    judged = tuple(a.outcome for a in attempts if not a.outcome.crafted or a in full)
    return AuditResult(
        model="",
        parameters=sum(p.numel() for p in campaign.model.parameters()),
        traced_by=traced.how,
        trace_note=traced.note,
        data=samples.name,
        kind=samples.kind,
        samples=len(samples),
        shape=tuple(tuple(part.shape[1:]) for part in samples.inputs),
        client=client,
        loss="",
        batches=campaign.batches,
        layers=tuple(findings),
        path=() if strongest is None else _path(traced, strongest.outcome.layer),
        attacks=outcomes,
        untested=tuple(untested),
        beside=_unless_it_fails(lambda: side_readings(campaign, findings), ()),
        defences=after,
        curve=curve,
        budgets=points,
        advice=advise(worst, after, curve, client, findings, points),
        doubts=find_doubts(findings, judged, untested, trials, traced, samples, client, campaign.batches),
        gallery=Gallery() if strongest is None else make_gallery(strongest.trials[0], strongest.mounted, samples),
        trained=seen.uses.trained,
        parts={s.weight: min(s.groups, MOST_PARTS) for s in seen.uses.sites if s.groups > 1},
        elsewhere=frozenset(n for n, said in seen.uses.others.items() if said and seen.uses.of(n)),
        origins={},
        threshold=RECOGNISABLE,
        seed=campaign.seed,
        versions={"qbi": qbi.__version__, "torch": torch.__version__, "python": platform.python_version()},
        seconds=0.0,
    )


def _unless_it_fails(work: Callable[[], T], otherwise: T) -> T:
    """What is told beside the verdict; a model that fails on some batch does not end an audit."""
    try:
        return work()
    except QbiError:
        raise
    except Exception as problem:
        logging.getLogger("qbi.audit").warning("left out: %s: %s", type(problem).__name__, first_line(problem))
        return otherwise


def _most(attempts: Sequence[Attempt], *, crafted: bool) -> Attempt | None:
    """The attempt that reads most, among crafted models or among those left as they are."""
    able = (a for a in attempts if a.outcome.crafted is crafted)
    return max(able, key=lambda a: a.outcome.badness(RECOGNISABLE), default=None)


def as_samples(data: Data) -> Samples:
    """Whatever a user has, as samples."""
    if isinstance(data, Samples):
        return data
    if isinstance(data, ImageData):
        return image_samples(data)
    if isinstance(data, TextData):
        return text_samples(data)
    if isinstance(data, Mapping):
        return mapped_samples(data)
    first = _first_of(data)
    names = () if not isinstance(first, Mapping) else tuple(n for n in first if n not in TARGETS)
    return tensor_samples(*as_tensors(data), names=names)


def _first_of(data: Any) -> Any:
    """The first item of a data set or the first batch of a loader."""
    if isinstance(data, Tensor | tuple | list | Mapping) or not hasattr(data, "__len__"):
        return None
    return next(iter(data), None) if hasattr(data, "dataset") else data[0] if len(data) else None


def _check_data(samples: Samples, client: Client) -> None:
    for part in samples.inputs:
        if part.is_floating_point() and not is_finite(part):
            raise DataError(f"{samples.name}: it has NaN or infinite values; clean the data first.")
    if len(samples) < client.samples:
        raise DataError(f"data: a batch of {client.samples} is larger than the data; there are {len(samples)} samples.")


def _check_parameters(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and not is_finite(parameter):
            raise BadValue(f"model: {name} has NaN or infinite values; load sound weights first.")
    if not any(True for _ in model.parameters()):
        raise BadValue("model: it has no parameters; there is nothing to train and nothing to read.")
    if not any(p.requires_grad for p in model.parameters()):
        raise BadValue(
            "model: all its parameters are frozen; nothing is trained, and no gradient leaves. Free those that are."
        )


def _prepared_loss(
    traced: Traced, samples: Samples, probe: tuple[Tensor, ...], wanted: str | Loss, device: str
) -> tuple[Loss, Samples, str]:
    """The loss, and targets as it takes them, from what the model returns."""
    returned = next((traced.values[n] for n in traced.graph.nodes if n.op == "output"), None)
    output = returned if traced.how == "fx" and isinstance(returned, Tensor) else _run(traced.model, probe)
    value, targets, name = choose_loss(wanted, _like(output, len(samples)), samples.inputs[0], samples.targets)
    check_value(value, output, targets[: len(probe[0])].to(device))
    return value, replace(samples, targets=targets), name


def _run(model: nn.Module, probe: tuple[Tensor, ...]) -> Tensor:
    with untouched(model), torch.no_grad():
        return run_model(model, probe)


def _like(output: Tensor, count: int) -> Tensor:
    """An output of the whole data's shape, without its values."""
    return output.new_empty(1).expand(count, *output.shape[1:]) if output.dim() else output


def _path(traced: Traced, layer: str) -> tuple[str, ...]:
    nodes = traced.nodes_of(layer)
    return tuple(traced.label(node) for node in find_path(traced, nodes[0])[1:]) if nodes else ()
