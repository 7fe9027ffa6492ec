"""The audit: look into the model, attack it on the user's data, doubt the result, and say what would help."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from qbi.attacks.registry import BY_DEFAULT, select
from qbi.auditing.assembling import Asked, assemble
from qbi.auditing.attempts import Progress, all_attempts
from qbi.auditing.calling_by_name import by_name, by_place
from qbi.auditing.campaign import Campaign
from qbi.auditing.client import Client
from qbi.auditing.domain import is_heavy, operations_of
from qbi.auditing.losses import OWN, check_value, choose_loss
from qbi.auditing.match import refuse_match
from qbi.auditing.merged_weights import plain
from qbi.auditing.result import AuditResult
from qbi.auditing.samples import Data, Samples, as_samples, with_targets
from qbi.auditing.sent_updates import SentUpdates
from qbi.auditing.survey import probe_of, survey
from qbi.calling import as_client
from qbi.errors import BadValue, DataError, first_line
from qbi.federation.client import Loss, run_model
from qbi.finite import is_finite
from qbi.metrics import RECOGNISABLE, Threshold
from qbi.routing.graph import Traced
from qbi.routing.path import in_outline

SMALL = 1e9
"""Operations of a step below which threads wait for each other longer than they compute, many times over on a busy machine."""


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
    decode: bool | None = False,
    match: bool | None = False,
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
        decode: whether to learn a decoder from features to images, where features are read; None: where that takes less than a minute.
        match: whether to match gradients on the first batch (images only); None: where nothing was read and that takes less than a minute.
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
    _check_model(model)
    wanted = select(attacks, "audit")
    client = client or Client()
    if batches < 1:
        raise BadValue(f"audit: {batches} batches; at least one is needed.")
    samples = as_samples(data) if loss != OWN else with_targets(as_samples(data))
    _check_data(samples, client)
    if match:
        refuse_match(samples, client)
    written = plain(model)
    sent = written.model.to(device).train()
    sent = by_name(sent, samples.names) if samples.names else by_place(sent)
    _check_parameters(sent)
    probe = probe_of(tuple(part.to(device) for part in samples.inputs))
    _check_call(sent, probe)
    say("looking into the model")
    seen = survey(sent, probe)
    traced = seen.traced
    value, samples, loss_name = _prepared_loss(traced, samples, probe, loss, device)
    helper = as_samples(auxiliary) if auxiliary is not None else None
    operations = operations_of(traced)
    # A step of a heavy model is not run whole for the sake of all its layers.
    watched = () if is_heavy(operations, client) else seen.called_by_name
    updates = SentUpdates(samples, client, value, seed, device, sent, watched)
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
        updates,
        operations,
        in_outline(traced),
    )
    asked = Asked(name or type(model).__name__, loss_name, at, defences, decode, match, written.origins, started)
    with _fitting_threads(campaign.operations * client.samples):
        attempts, untested = all_attempts(campaign, wanted, seen.findings, layers, say)
        result = assemble(campaign, seen, attempts, [*seen.untested, *untested], asked, say)
    say("done")
    return result


@contextmanager
def _fitting_threads(operations: float) -> Iterator[None]:
    """One thread for small steps, as many as there were for others."""
    before = torch.get_num_threads()
    try:
        if operations < SMALL:
            torch.set_num_threads(1)
        yield
    finally:
        torch.set_num_threads(before)


def _check_data(samples: Samples, client: Client) -> None:
    for part in samples.inputs:
        if part.is_floating_point() and not is_finite(part):
            raise DataError(f"{samples.name}: it has NaN or infinite values; clean the data first.")
    if len(samples) < client.samples:
        raise DataError(f"data: a batch of {client.samples} is larger than the data; there are {len(samples)} samples.")


def _check_model(model: object) -> None:
    if isinstance(model, torch.jit.ScriptModule):
        raise BadValue(
            "model: it was compiled by torch.jit and cannot be looked into; give the module that it was made of."
        )
    if not isinstance(model, nn.Module):
        raise BadValue(f"model: a {type(model).__name__} is no torch.nn.Module; give the model itself.")
    if any(p.device.type == "meta" for p in model.parameters()):
        raise BadValue("model: it is on the device meta and has no weights; load them first.")


def _check_call(model: nn.Module, probe: tuple[Tensor, ...]) -> None:
    """Whatever a model does with inputs of this form, before anything is made of it."""
    try:
        with as_client(model), torch.no_grad():
            model(*probe)
    except (TypeError, NotImplementedError) as problem:
        raise BadValue(
            f"model: its forward pass fails on {len(probe)} inputs ({first_line(problem)}). Give data with as many as it takes, and their targets."
        ) from problem
    except SystemExit as ended:
        raise BadValue(
            f"model: its forward pass ends the process (exit code {ended.code!r}); take sys.exit out of it."
        ) from None
    except Exception:
        return  # said where the model is followed


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
    with as_client(model), torch.no_grad():
        return run_model(model, probe)


def _like(output: Tensor, count: int) -> Tensor:
    """An output of the whole data's shape, without its values."""
    return output.new_empty(1).expand(count, *output.shape[1:]) if output.dim() else output
