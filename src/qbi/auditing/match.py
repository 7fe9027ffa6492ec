"""Gradient matching in an audit: what a server that only looks on makes of a small batch where nothing else is read."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from qbi.auditing.campaign import Attempt, Campaign
from qbi.auditing.client import Client
from qbi.auditing.outcomes import beats_a_guess
from qbi.auditing.pixels import MadeImages, beside_a_guess, pixel_range
from qbi.auditing.samples import Samples
from qbi.carrier import flat
from qbi.errors import BadValue, CannotRead
from qbi.extraction.labels import batch_labels, classifier
from qbi.matching import Effort, GradientDistance, MatchedImages, match_images, seconds_needed
from qbi.metrics import Threshold, shares
from qbi.records import Update
from qbi.report.wording import shares_in_words

NAME = "gradient matching"

MOST_SAMPLES = 8
"""Samples of a batch up to which it is tried without being asked for: it is a matter of small batches."""

MOST_SECONDS = 60.0
"""How long it may take without being asked for."""

QUICK, FULL, FULL_ON_GPU = Effort(600, 1), Effort(2400, 2), Effort(4800, 4)
"""Steps and starts: by default, where it was asked for, and on a GPU."""


@dataclass(frozen=True)
class MatchedBatch(MadeImages):
    """What gradient matching made of the first batch, or why it was not tried."""

    tried: bool
    reason: str
    """Why not."""
    effort: Effort
    announced: float | None = None
    """Seconds that it was said to take on this machine; none where no step was taken."""
    seconds: float = 0.0
    certain: bool = False
    """Whether the labels follow from the head's gradient; else they are the likeliest."""
    distance: float | None = None
    """One less the cosine between the gradient of what was found and the one that was sent."""
    recovered: Mapping[Threshold, float] = field(default_factory=dict)
    """Shares of the batch, each image for one sample at the most."""

    def share_at(self, wanted: Threshold) -> float:
        """What is seen at a threshold, where it is more than a guess; nothing where it was not tried."""
        return self.recovered[wanted] if self.tried and beats_a_guess(self.guessed, self.beyond, wanted) else 0.0


def refuse_match(samples: Samples, client: Client) -> None:
    """Gradient matching that was asked for and cannot be: said before anything is computed."""
    if samples.images is None or len(samples.inputs) != 1:
        raise BadValue(
            f"--match: {samples.name} holds no images with a known range; gradient matching is for those. Leave --match out."
        )
    if client.local_steps:
        raise BadValue(
            f"--match: a client with {client.local_steps} local steps sends weights; gradient matching reads the gradient of one "
            "batch. Leave --match or --local-steps out."
        )


def matched(
    campaign: Campaign, attempts: Sequence[Attempt], *, asked: bool | None, say: Callable[[str], None]
) -> MatchedBatch | None:
    """The first batch, where it was asked for, or where nothing was read and it takes less than a minute; None where it was not wanted."""
    samples, client = campaign.samples, campaign.client
    unfit = samples.images is None or len(samples.inputs) != 1 or bool(client.local_steps)
    if asked is False or unfit or (asked is None and any(a.outcome.reads for a in attempts)):
        return None
    effort = QUICK if asked is None else FULL if campaign.device == "cpu" else FULL_ON_GPU
    if asked is None and client.batch_size > MOST_SAMPLES:
        why = f"batches of {client.batch_size}; without being asked for it is tried up to {MOST_SAMPLES}. --match tries it."
        return MatchedBatch(False, why, effort)
    update = campaign.updates.whole(0)
    low, high = pixel_range(samples)
    shape = tuple(samples.inputs[0].shape[1:])
    try:
        labels, certain = _labels(campaign, update)
        sought = GradientDistance(
            campaign.model, update.gradients, labels.to(campaign.device), loss=campaign.loss, seed=campaign.seed + 1
        )
        seconds = seconds_needed(sought, shape, low=low, high=high, effort=effort)
        long = f"{_length(effort)}, about {_duration(seconds)} on this machine"
        if asked is None and seconds > MOST_SECONDS:
            say(f"{NAME} was not tried: {long}; --match runs it")
            return MatchedBatch(False, f"{long}. --match runs it.", effort, seconds)
        say(f"{NAME}: {long}")
        found = match_images(sought, shape, low=low, high=high, effort=effort, seed=campaign.seed)
    except CannotRead as problem:
        say(f"{NAME} was not tried: {problem}")
        return MatchedBatch(False, str(problem), effort)
    return _judged(campaign, found, effort, seconds, certain=certain)


def matching_in_words(found: MatchedBatch) -> str:
    """What came of it, with the time that was said and the time that it took; or why it was not tried."""
    if not found.tried:
        return f"Gradient matching was not tried: {found.reason}"
    read = shares_in_words(found.recovered, "images")
    guess = shares_in_words(found.guessed, "images")
    return (
        f"Gradient matching, {_length(found.effort)} (announced {_duration(found.announced or 0.0)}, took "
        f"{_duration(found.seconds)}), labels {'certain' if found.certain else 'estimated'}: {read}. A guess: {guess}."
    )


def _length(effort: Effort) -> str:
    return f"{effort.steps:,} steps from {effort.restarts} {'start' if effort.restarts == 1 else 'starts'}"


def _labels(campaign: Campaign, update: Update) -> tuple[Tensor, bool]:
    """Labels as the server reads them, and whether they are certain."""
    targets, last = campaign.samples.targets, classifier(campaign.model)
    if targets.is_floating_point() or targets.dim() != 1:
        raise CannotRead("its targets are no classes, and what else they are the server would have to guess too.")
    gradient = None if last is None else update.gradients.get(f"{last[0]}.bias")
    if last is None or gradient is None or last[1].out_features <= int(targets.max()):
        raise CannotRead("no linear head with a bias tells the labels, and the server would have to guess them too.")
    return batch_labels(gradient, campaign.client.batch_size)


def _judged(
    campaign: Campaign, found: MatchedImages, effort: Effort, announced: float, *, certain: bool
) -> MatchedBatch:
    _, inputs, _ = campaign.updates.batch(0)
    truth, made = (campaign.samples.pixels(flat(part.float()).cpu()) for part in (inputs[0], found.images))
    recoveries, beside = beside_a_guess(campaign, truth, made)
    return MatchedBatch(
        tried=True,
        reason="",
        effort=effort,
        announced=announced,
        seconds=found.seconds,
        certain=certain,
        distance=found.distance,
        recovered=shares(recoveries),
        **beside,
    )


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
