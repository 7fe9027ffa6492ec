"""What else a server reads of an honest model's update without any effort: labels, tokens."""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from qbi.auditing.campaign import Campaign
from qbi.auditing.finding import Finding
from qbi.auditing.outcomes import SideReading
from qbi.calling import as_client, hooked
from qbi.errors import BadValue, CannotRead
from qbi.extraction.labels import classifier, label_counts, shared
from qbi.extraction.tokens import tokens_moved, tokens_spanned
from qbi.federation import client_step
from qbi.records import Update


def side_readings(campaign: Campaign, findings: list[Finding]) -> tuple[SideReading, ...]:
    """All of them, on the first batch."""
    if campaign.client.local_steps:
        return ()
    _, inputs, targets = campaign.updates.batch(0)
    update = _update(campaign, inputs, targets, findings)
    if update is None:
        return ()
    return (*_labels(campaign, update, targets), *_tokens(campaign.model, update, inputs))


def _update(campaign: Campaign, inputs: tuple[Tensor, ...], targets: Tensor, findings: list[Finding]) -> Update | None:
    """What is looked at below of the client's update: gradients of linear layers and tables, or of the head where that is all."""
    model, loss, seed = campaign.model, campaign.loss, campaign.seed
    parts = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear | nn.Embedding)}
    looked_at = {f"{n}.{kind}" for n, m in parts.items() for kind, _ in m.named_parameters(recurse=False)}
    if not looked_at:
        return None
    heads = [n for n, m in parts.items() if isinstance(m, nn.Linear) and m.bias is not None]
    if heads and len(heads) == len(parts) and all(f.target.has_bias for f in findings):
        with contextlib.suppress(BadValue, CannotRead):
            return campaign.updates.of(model, heads[-1], 0).step.update
    whole = campaign.updates.of_the_model_as_it_is(0)
    if whole is not None:
        return whole
    others = [n for n, _ in model.named_parameters() if n not in looked_at]
    try:
        return client_step(model, inputs, targets, loss=loss, seed=seed, fixed=others)
    except (RuntimeError, BadValue):  # none of them takes part
        return client_step(model, inputs, targets, loss=loss, seed=seed)


def _labels(campaign: Campaign, update: Update, targets: Tensor) -> Iterator[SideReading]:
    if targets.is_floating_point() or targets.dim() != 1 or len(campaign.samples.targets.unique()) < 2:
        return
    last = classifier(campaign.model)
    if last is None or f"{last[0]}.bias" not in update.gradients:
        return
    name, head = last
    if head.out_features < 2 or int(targets.max()) >= head.out_features:
        return
    counts = label_counts(update.gradients[f"{name}.bias"].cpu(), len(targets))
    truth = torch.bincount(targets.cpu(), minlength=head.out_features)
    note = "how often each class stands in the batch, from the head's bias gradient; whose label is whose comes with the sample"
    yield SideReading("labels", name, shared(counts, truth), note)


def _tokens(model: nn.Module, update: Update, inputs: tuple[Tensor, ...]) -> Iterator[SideReading]:
    for name, ids in _looked_up(model, inputs).items():
        module = model.get_submodule(name)
        assert isinstance(module, nn.Embedding)
        if all(torch.equal(own.unique(), ids[0].unique()) for own in ids):
            continue  # positions and the like: the same for every sample, and known
        present = torch.zeros(module.num_embeddings, dtype=torch.bool, device=ids.device)
        present[ids.flatten()] = True
        gradient = update.gradients.get(f"{name}.weight")
        if gradient is not None and gradient.shape == module.weight.shape:
            read, how = tokens_moved(gradient), "rows of the embedding that got a gradient"
        else:
            spanned = _first_layer_span(model, update, module)
            if spanned is None:
                continue
            read, how = spanned, "frozen embedding: tokens in the span of the first layer's gradient"
        right = int((read & present).sum()) / max(1, int(present.sum()))
        extra = int((read & ~present).sum())
        yield SideReading(
            "tokens", name, right, f"{how}; {int(present.sum())} different ones in the batch, {extra} named wrongly"
        )


def _looked_up(model: nn.Module, inputs: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """What each table was asked for, one row for each sample."""
    caught: dict[str, Tensor] = {}
    tables = {m: n for n, m in model.named_modules() if isinstance(m, nn.Embedding)}
    keep = lambda m, given: caught.update({tables[m]: given[0].detach()})  # noqa: E731
    with hooked(before=dict.fromkeys(tables, keep)), as_client(model), torch.no_grad():
        model(*inputs)
    return {n: ids for n, ids in caught.items() if ids.dim() and len(ids) == len(inputs[0])}


def _first_layer_span(model: nn.Module, update: Update, embedding: nn.Embedding) -> Tensor | None:
    for name, module in model.named_modules():
        gradient = update.gradients.get(f"{name}.weight")
        if isinstance(module, nn.Linear) and module.in_features == embedding.embedding_dim and gradient is not None:
            return tokens_spanned(gradient, embedding.weight.detach())
    return None
