"""The audit: look into the model, attack it on the user's data, doubt the result, and say what would help."""

import copy
import platform
import time
from collections.abc import Sequence

import torch
from torch import Tensor, nn

import qbi
from qbi.attacks.mount import Mounted
from qbi.audit.advice import advise
from qbi.audit.doubts import find_doubts
from qbi.audit.gallery import make_gallery
from qbi.audit.losses import check_value, choose_loss
from qbi.audit.result import AttackOutcome, AuditResult, Curve, DefenceOutcome, Gallery
from qbi.audit.samples import Samples, image_samples, tensor_samples, text_samples
from qbi.audit.survey import Finding, mounted_for, probe_of, survey
from qbi.audit.trials import (
    TRAP_SCALE,
    Client,
    Trial,
)
from qbi.audit.work import Progress, Work
from qbi.errors import BadValue, DataError
from qbi.federation.client import Loss, run_model
from qbi.records import ImageData, TextData
from qbi.routing.graph import Traced
from qbi.routing.path import find_path

Data = Samples | ImageData | TextData | Tensor | tuple[Tensor, ...]

ATTACKS = ("passive", "qbi", "pairs", "trap-weights")


def audit(
    model: nn.Module,
    data: Data,
    *,
    attacks: Sequence[str] = ("passive", "qbi"),
    layers: str = "most exposed",
    client: Client | None = None,
    loss: str | Loss = "auto",
    batches: int = 3,
    auxiliary: Data | None = None,
    defences: bool = True,
    trap_scale: float = TRAP_SCALE,
    name: str | None = None,
    seed: int = 0,
    device: str = "cpu",
    progress: Progress | None = None,
) -> AuditResult:
    """Audit a model on data of one's own. The model is not changed.

    `data` are images or texts of this package, tensors (x, y), or prepared `Samples`. `layers` is "most exposed",
    "all", or one layer's name. `auxiliary` is what PAIRS tunes its rows with; without it, samples of `data` that are in no
    batch serve.
    """
    started = time.perf_counter()
    client = client or Client()
    unknown = [a for a in attacks if a not in ATTACKS]
    if unknown:
        raise BadValue(f"audit: no attack is called {unknown[0]!r}; there are {', '.join(ATTACKS)}.")
    if batches < 1:
        raise BadValue(f"audit: {batches} batches; at least one is needed.")
    samples = as_samples(data)
    _check_data(samples, client)
    say = progress or (lambda _what: None)
    sent = copy.deepcopy(model).to(device).train()
    _check_parameters(sent)
    probe = probe_of(tuple(part.to(device) for part in samples.inputs))
    say("looking into the model")
    traced, findings = survey(sent, probe)
    value, samples, loss_name = _prepared_loss(sent, samples, probe, loss, device)
    helper = as_samples(auxiliary) if auxiliary is not None else None
    work = Work(sent, samples, client, value, batches, seed, device, helper, trap_scale)
    outcomes: list[AttackOutcome] = []
    first: Trial | None = None
    shown: Mounted | None = None
    strongest: tuple[Mounted, AttackOutcome] | None = None
    all_trials: list[Trial] = []
    if "passive" in attacks:
        say("passive server")
        outcomes += work.passive([f for f in findings if f.target.has_bias], traced)
    for finding in _chosen(findings, layers):
        carried = mounted_for(sent, finding.name, probe)
        for attack in (a for a in attacks if a != "passive"):
            say(f"{attack} on {finding.name}")
            mounted = work.centre(carried, attack)
            outcome, trials = work.attack(mounted, finding, attack)
            outcomes.append(outcome)
            all_trials += trials
            if strongest is None or outcome.recall > strongest[1].recall:
                strongest = (mounted, outcome)
                first, shown = trials[0], mounted
    curve: Curve | None = None
    after: tuple[DefenceOutcome, ...] = ()
    if strongest is not None:
        say("predicting other settings")
        curve = work.curve(strongest[0])
        if defences and not client.local_steps:
            say("trying defences")
            after = work.defended(strongest[0], strongest[1])
    path = _path(traced, strongest[1].layer) if strongest is not None else ()
    result = AuditResult(
        model=name or type(model).__name__,
        parameters=sum(p.numel() for p in model.parameters()),
        traced_by=traced.how,
        trace_note=traced.note,
        data=samples.name,
        kind=samples.kind,
        samples=len(samples),
        shape=tuple(tuple(part.shape[1:]) for part in samples.inputs),
        client=client,
        loss=loss_name,
        batches=batches,
        layers=tuple(findings),
        path=path,
        attacks=tuple(outcomes),
        defences=after,
        curve=curve,
        advice=advise(outcomes, after, curve, client, findings),
        doubts=find_doubts(findings, outcomes, all_trials, traced, samples, client, batches),
        gallery=make_gallery(first, shown, samples) if first is not None and shown is not None else Gallery(),
        seed=seed,
        versions={"qbi": qbi.__version__, "torch": torch.__version__, "python": platform.python_version()},
        seconds=time.perf_counter() - started,
    )
    say("done")
    return result


def as_samples(data: Data) -> Samples:
    """Whatever a user has, as samples."""
    if isinstance(data, Samples):
        return data
    if isinstance(data, ImageData):
        return image_samples(data)
    if isinstance(data, TextData):
        return text_samples(data)
    if isinstance(data, Tensor):
        return tensor_samples(data)
    if len(data) == 2:
        return tensor_samples(data[0], data[1])
    return tensor_samples(data[:-1], data[-1])


def _check_data(samples: Samples, client: Client) -> None:
    for part in samples.inputs:
        if part.is_floating_point() and not bool(torch.isfinite(part).all()):
            raise DataError(f"{samples.name}: it has NaN or infinite values; clean the data first.")
    if len(samples) < client.samples:
        raise DataError(f"data: a batch of {client.samples} is larger than the data; there are {len(samples)} samples.")


def _check_parameters(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and not bool(torch.isfinite(parameter).all()):
            raise BadValue(f"model: {name} has NaN or infinite values; load sound weights first.")
    if not any(True for _ in model.parameters()):
        raise BadValue("model: it has no parameters; there is nothing to train and nothing to read.")


def _prepared_loss(
    model: nn.Module, samples: Samples, probe: tuple[Tensor, ...], wanted: str | Loss, device: str
) -> tuple[Loss, Samples, str]:
    state = {n: b.clone() for n, b in model.named_buffers()}
    with torch.no_grad():
        output = run_model(model, probe)
        for n, b in model.named_buffers():
            b.copy_(state[n])
    value, targets, name = choose_loss(wanted, _like(output, len(samples)), samples.inputs[0], samples.targets)
    check_value(value, output, targets[: len(output)].to(device))
    return (
        value,
        Samples(
            samples.name, samples.inputs, targets, samples.classes, samples.images, samples.raw, samples.vocabulary
        ),
        name,
    )


def _like(output: Tensor, count: int) -> Tensor:
    """An output of the whole data's shape, without its values."""
    return output.new_empty(1).expand(count, *output.shape[1:]) if output.dim() else output


def _chosen(findings: Sequence[Finding], wanted: str) -> list[Finding]:
    able = sorted((f for f in findings if f.attackable), key=lambda f: f.rank, reverse=True)
    if wanted == "all":
        return [f for f in able if f.target.slope_below != 1]
    if wanted == "most exposed":
        return able[:1]
    named = [f for f in findings if f.name == wanted]
    if not named:
        known = ", ".join(f.name for f in findings) or "none"
        raise BadValue(f"--layers: the model has no linear layer {wanted!r}; it has {known}.")
    if not named[0].attackable:
        raise BadValue(f"--layers: {wanted} cannot be attacked: {named[0].reason}")
    return named


def _path(traced: Traced, layer: str) -> tuple[str, ...]:
    nodes = traced.nodes_of(layer)
    return tuple(traced.label(node) for node in find_path(traced, nodes[0])[1:]) if nodes else ()
