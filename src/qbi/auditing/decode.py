"""From the features that were read to pictures: what a person would see of the client's images."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from qbi.auditing.campaign import Attempt, Campaign
from qbi.auditing.pixels import pixel_range
from qbi.carrier import flat
from qbi.errors import CannotRead
from qbi.metrics import FAITHFUL, THRESHOLDS, Threshold, match, shares
from qbi.pictures import Decoder, Prefix, decoder_for, fit_pictures
from qbi.pictures.fitting import FEW_DIRECTIONS, FEW_STEPS
from qbi.pictures.prefix import features_of

FEWEST_PUBLIC = 150
"""Images beside the batches below which no decoder is learned."""

MOST_VALUES = 3 * 64 * 64
"""Values of an image up to which a decoder is learned without being asked for: on a core that takes less than a minute."""

QUICK, FULL, FULL_ON_GPU = (0, 0, 0), (600, 16, 2), (1200, 64, 4)
"""Steps, width and number of a decoder's stages: by default (none: the linear decoder), where it was asked for (a minute or two for images of
32×32), and on a GPU (less than a minute)."""


@dataclass(frozen=True)
class DecodedPictures:
    """What is seen of the client's images through one layer."""

    attack: str
    layer: str
    learned_on: int
    """Images that the decoder was learned on."""
    features: float
    """Share of samples whose features were read."""
    recovered: Mapping[Threshold, float]
    """Shares of samples whose picture was made, in the input."""
    guessed: Mapping[Threshold, float]
    """The same with nothing read: what the decoder makes of the mean feature."""
    nearest: Mapping[Threshold, float]
    """The same by the public image whose features are nearest to those that were read."""
    seconds: float
    truth: Tensor | None = field(default=None, repr=False)
    seen: Tensor | None = field(default=None, repr=False)
    """The first batch, in [0, 1]; what was not read is grey."""

    @property
    def says_more(self) -> bool:
        """Whether pictures are seen that neither guess gives."""
        loosest = THRESHOLDS[-1]
        return self.recovered[loosest] > max(self.guessed[loosest], self.nearest[loosest])


def decoded(
    campaign: Campaign, attempts: Sequence[Attempt], *, asked: bool | None, say: Callable[[str], None]
) -> DecodedPictures | None:
    """Pictures from the features of the attempt that reads most of them; None where there are none, or where it was not wanted."""
    samples = campaign.samples
    if asked is False or samples.images is None or campaign.client.local_steps:
        return None
    if asked is None and any(a.outcome.whole_samples and a.outcome.recall > 0 for a in attempts):
        return None  # whole images are read already
    able = [a for a in attempts if _reads_features(a)]
    if not able or (asked is None and samples.inputs[0][0].numel() > MOST_VALUES):
        return None
    source, order = campaign.others()
    public = source.inputs[0][order].to(campaign.device)
    if len(public) < FEWEST_PUBLIC:
        say(
            f"no pictures were made: {len(public)} images beside the batches; a decoder is learned from {FEWEST_PUBLIC} on."
        )
        return None
    chosen = max(able, key=lambda a: (a.outcome.recovered[FAITHFUL].mean, not a.outcome.crafted))
    steps, width, stages = QUICK if asked is None else FULL if campaign.device == "cpu" else FULL_ON_GPU
    started = time.perf_counter()
    how = f"{steps:,} steps" if steps else "in closed form"
    say(f"learning to see through {chosen.outcome.layer} ({how}, on {len(public):,} images)")
    try:
        prefix = Prefix(chosen.mounted.model, chosen.mounted.layer, chosen.mounted.carrier.arrived)
        decoder = decoder_for(prefix, public, steps=steps, width=width, stages=stages, seed=campaign.seed)
        fit = partial(fit_pictures, prefix, decoder=decoder)
        if asked is None:
            fit = partial(fit, steps=FEW_STEPS, directions=FEW_DIRECTIONS)
        return _judged(campaign, chosen, prefix, decoder, public, fit, started)
    except CannotRead as problem:
        say(f"no pictures were made: {problem}")
        return None


def _reads_features(attempt: Attempt) -> bool:
    """Whether features of whole images are read at a layer, as they are: not positions, not up to a factor."""
    carrier = attempt.mounted.carrier
    plain = carrier.tokens == 1 and carrier.reference is None and carrier.norm is None and carrier.embedding is None
    trial = attempt.trials[0]
    same = len(trial.truth) == len(trial.chosen) and not trial.in_sample_space
    return plain and same and attempt.outcome.recovered[FAITHFUL].mean > 0


def _judged(
    campaign: Campaign,
    attempt: Attempt,
    prefix: Prefix,
    decoder: Decoder,
    public: Tensor,
    fit: Callable[..., Tensor],
    started: float,
) -> DecodedPictures:
    samples = campaign.samples
    assert samples.images is not None
    low, high = (part.to(public) for part in pixel_range(samples))
    known = features_of(prefix, public)
    found: dict[str, list[Mapping[Threshold, float]]] = {"made": [], "mean": [], "nearest": []}
    hits: list[float] = []
    first: tuple[Tensor, Tensor] | None = None
    for trial in attempt.trials:
        inputs, _ = samples.batch(trial.chosen, campaign.device)
        hit = trial.recoveries[FAITHFUL].recovered.to(public.device)
        given = trial.read.to(public)[hit]
        made = ((low + high) / 2).expand_as(inputs[0]).clone()
        closest = made.clone()
        if bool(hit.any()):
            made[hit] = fit(given, low=low, high=high)
            apart = torch.cdist(given / decoder.spread, known / decoder.spread)
            closest[hit] = public[apart.argmin(1)]
        with torch.no_grad():
            mean = decoder(decoder.centre[None], prefix).float().clamp(low, high).expand_as(made)
        truth = samples.pixels(flat(inputs[0].float()).cpu())
        for name, images in (("made", made), ("mean", mean), ("nearest", closest)):
            found[name].append(shares(match(samples.pixels(flat(images.float()).cpu()), truth)))
        hits.append(float(hit.double().mean()))
        first = first or (truth, samples.pixels(flat(made).cpu()))
    assert first is not None
    shape = samples.images.shape
    mean_of = {n: {t: sum(row[t] for row in rows) / len(rows) for t in THRESHOLDS} for n, rows in found.items()}
    return DecodedPictures(
        attempt.outcome.attack,
        attempt.outcome.layer,
        len(public),
        sum(hits) / len(hits),
        mean_of["made"],
        mean_of["mean"],
        mean_of["nearest"],
        time.perf_counter() - started,
        *(part.reshape(-1, *shape).clamp(0, 1) for part in first),
    )
