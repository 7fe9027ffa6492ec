"""Images as the model takes them, and what of their range is known: shared by those who make pictures."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from qbi.auditing.domain import Domain
from qbi.auditing.samples import Samples
from qbi.carrier import flat
from qbi.errors import BadValue
from qbi.metrics import THRESHOLDS, Guess, Recoveries, Threshold, match, nearest_shown


def pixel_range(samples: Samples) -> tuple[Tensor, Tensor]:
    """Black and white, as the model takes them."""
    if samples.images is None:
        raise BadValue(f"{samples.name}: it holds no images, so nobody knows what is black and what is white in it.")
    black, white = torch.zeros(1, 1, 1, 1), torch.ones(1, 1, 1, 1)
    if samples.raw:
        return black, white
    mean, std = (torch.tensor(v).view(1, -1, 1, 1) for v in (samples.images.mean, samples.images.std))
    return (black - mean) / std, (white - mean) / std


@dataclass(frozen=True, kw_only=True)
class MadeImages:
    """Images that were made of a batch, and what somebody who read nothing would hit."""

    guessed: Mapping[Threshold, float] = field(default_factory=dict)
    """Shares of the batch that the mean of other images hits, or the nearest of them."""
    beyond: Mapping[Threshold, float] = field(default_factory=dict)
    """Of what such a guess would miss, the share that was read."""
    truth: Tensor | None = field(default=None, repr=False)
    seen: Tensor | None = field(default=None, repr=False)
    """The batch, in [0, 1], and for each image what was made of it; what counts for none of them is grey."""

    def share_at(self, wanted: Threshold) -> float:
        """What is seen at a threshold, where it is more than a guess."""
        raise NotImplementedError

    @property
    def says_more(self) -> bool:
        """Whether images are seen that a guess would not give."""
        return self.share_at(THRESHOLDS[-1]) > 0


def beside_a_guess(domain: Domain, truth: Tensor, made: Tensor) -> tuple[Recoveries, dict[str, Any]]:
    """What of the first batch stands among images that were made, both as flat pixels; and the fields of `MadeImages`."""
    samples = domain.samples
    assert samples.images is not None
    source, order = domain.others()
    others = samples.pixels(flat(source.inputs[0][order].float())) if len(order) else None
    recoveries = match(made, truth)
    guess = Guess.of(truth, recoveries, others, samples.data_range)
    seen = nearest_shown(recoveries, made, torch.full_like(truth, 0.5))
    truth, seen = (part.reshape(-1, *samples.images.shape).clamp(0, 1) for part in (truth, seen))
    return recoveries, {"guessed": guess.share, "beyond": guess.beyond, "truth": truth, "seen": seen}
