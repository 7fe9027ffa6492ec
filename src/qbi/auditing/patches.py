"""Patches of a vision transformer: what its patch embedding and its positions give away of a batch."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from qbi.auditing.campaign import Campaign
from qbi.auditing.outcomes import beats_a_guess
from qbi.auditing.pixels import MadeImages, beside_a_guess
from qbi.auditing.sent_updates import rounded
from qbi.carrier import flat
from qbi.errors import CannotMount, CannotRead, QbiError
from qbi.federation import client_step
from qbi.metrics import THRESHOLDS, Threshold, match, shares
from qbi.patches import PatchEmbedding, ReadPatches, find_embedding, one_class_speaks, read_patches, stands_alone
from qbi.records import Update

MOST_CLASSES = 8
"""Classes that are let speak, one after another, each in an update of its own."""


@dataclass(frozen=True)
class FoundPatches(MadeImages):
    """What was read of one batch, or why nothing could be."""

    layer: str
    positions: str
    """The parameter that is added to the patches and says where each stands."""
    patches: int
    width: int
    reason: str
    """Why the system has no solution; empty where it has one."""
    rest: float | None = None
    """The part of the honest gradient that no single image explains."""
    honest: Mapping[Threshold, float] = field(default_factory=dict)
    """Shares of the batch that are read of the model as it is."""
    first_alone: Mapping[Threshold, float] = field(default_factory=dict)
    """The same of the batch's first sample, had it been sent alone: 1 where it is read."""
    updates: int = 0
    """Classes that were let speak, in an update each."""
    proven: int = 0
    """Updates that one image alone explains; told without the truth."""
    one_update: Mapping[Threshold, float] = field(default_factory=dict)
    """Shares of the batch that one such update gives, at best."""
    all_updates: Mapping[Threshold, float] = field(default_factory=dict)
    """Shares of the batch that all of them give, of the same batch."""
    seconds: float = 0.0

    def share_at(self, wanted: Threshold) -> float:
        """What one update gives at a threshold, where it is more than a guess."""
        if self.reason or not beats_a_guess(self.guessed, self.beyond, wanted):
            return 0.0
        return max(self.honest[wanted], self.one_update[wanted])


def found_patches(campaign: Campaign, say: Callable[[str], None]) -> FoundPatches | None:
    """Read the first batch; None where inputs are no images, or no positions are added to patches of them."""
    samples, client = campaign.samples, campaign.client
    whole = samples.targets.dim() == 1 and not samples.targets.is_floating_point()
    if samples.images is None or len(samples.inputs) != 1 or client.local_steps or not whole:
        return None
    started = time.perf_counter()
    embedding = _embedding(campaign)
    if embedding is None:
        return None
    say(f"putting patches of {embedding.layer} together")
    _, inputs, targets = campaign.updates.batch(0)
    pixels = inputs[0][0].numel()
    try:
        plain = read_patches(embedding, campaign.updates.whole(0).gradients, pixels)
    except CannotRead as problem:
        if embedding.patches > embedding.width:
            return FoundPatches(embedding.layer, embedding.positions, embedding.patches, embedding.width, str(problem))
        plain = None
    first = _of_the_first(campaign, embedding, pixels)
    most = 1 if campaign.heavy else MOST_CLASSES
    read = [_of_one_class(campaign, embedding, int(label), pixels) for label in targets.unique()[:most]]
    judged = _judged(campaign, embedding, plain, [r for r in read if r is not None], len(read))
    return replace(judged, first_alone=first, seconds=time.perf_counter() - started)


def _embedding(campaign: Campaign) -> PatchEmbedding | None:
    """Found on the model as it is; on one whose head speaks where its own is silent, as zero-initialised ones are."""
    shape = tuple(campaign.samples.inputs[0].shape[1:])
    found = find_embedding(campaign.model, shape, loss=campaign.loss)
    if found is not None:
        return found
    try:
        return find_embedding(one_class_speaks(campaign.model, 0), shape, loss=campaign.loss)
    except CannotMount:
        return None


def _of_the_first(campaign: Campaign, embedding: PatchEmbedding, pixels: int) -> dict[Threshold, float]:
    """What is read of the first sample, sent alone, by who only looks on."""
    _, inputs, targets = campaign.updates.batch(0)
    try:
        update = client_step(campaign.model, (inputs[0][:1],), targets[:1], loss=campaign.loss, seed=campaign.seed)
        read = read_patches(embedding, rounded(update, campaign.client.precision).gradients, pixels)
    except (QbiError, ValueError, RuntimeError):  # a batch norm takes no batch of one
        return dict.fromkeys(THRESHOLDS, 0.0)
    made, truth = (campaign.samples.pixels(part) for part in (read.image[None], flat(inputs[0][:1].float()).cpu()))
    return shares(match(made, truth))


def _of_one_class(
    campaign: Campaign, embedding: PatchEmbedding, label: int, pixels: int
) -> tuple[ReadPatches, bool] | None:
    """What the update of a model gives whose head lets one class speak, and whether that image alone explains it."""
    _, inputs, targets = campaign.updates.batch(0)
    try:
        sent: nn.Module = one_class_speaks(campaign.model, label)
        update: Update = client_step(sent, inputs, targets, loss=campaign.loss, seed=campaign.seed)
        gradients = rounded(update, campaign.client.precision).gradients
        read = read_patches(embedding, gradients, pixels)
        one = targets.new_full((1,), label)
        return read, stands_alone(read, sent, embedding, gradients, inputs[0], one, loss=campaign.loss)
    except (CannotMount, CannotRead):
        return None


def _judged(
    campaign: Campaign,
    embedding: PatchEmbedding,
    plain: ReadPatches | None,
    asked: list[tuple[ReadPatches, bool]],
    updates: int,
) -> FoundPatches:
    samples = campaign.samples
    _, inputs, _ = campaign.updates.batch(0)
    truth = samples.pixels(flat(inputs[0].float()).cpu())

    def pictures(read: list[ReadPatches]) -> Tensor:
        images = torch.stack([r.image for r in read]) if read else truth.new_zeros(0, truth.shape[1])
        return samples.pixels(images)

    crafted = [read for read, _ in asked]
    honest = [] if plain is None else [plain]
    _, beside = beside_a_guess(campaign, truth, pictures([*crafted, *honest]))
    single = [shares(match(pictures([r]), truth)) for r in crafted]
    return FoundPatches(
        layer=embedding.layer,
        positions=embedding.positions,
        patches=embedding.patches,
        width=embedding.width,
        reason="",
        rest=None if plain is None else plain.rest,
        honest=shares(match(pictures(honest), truth)),
        updates=updates,
        proven=sum(alone for _, alone in asked),
        one_update={t: max((s[t] for s in single), default=0.0) for t in THRESHOLDS},
        all_updates=shares(match(pictures(crafted), truth)),
        **beside,
    )
