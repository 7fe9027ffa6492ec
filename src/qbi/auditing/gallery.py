"""One batch for the eye: what the client holds beside what was read of it."""

import torch
from torch import Tensor

from qbi.attacks import Mounted
from qbi.auditing.outcomes import Gallery
from qbi.auditing.samples import Samples
from qbi.auditing.trial import Trial
from qbi.data.images import unit_pixels
from qbi.extraction.tokens import nearest_tokens
from qbi.metrics import EXACT, RECOGNISABLE

MOST_SHOWN = 24
"""Samples of the first batch that are shown."""


def make_gallery(trial: Trial, mounted: Mounted, samples: Samples) -> Gallery:
    """The first batch for the eye; nothing where positions are read one by one."""
    carrier = mounted.carrier
    exact = tuple(bool(v) for v in trial.recoveries[EXACT].recovered[:MOST_SHOWN])
    seen = tuple(bool(v) for v in trial.recoveries[RECOGNISABLE].recovered[:MOST_SHOWN])
    if carrier.tokens > 1:
        return Gallery()
    if samples.kind == "images" and samples.images is not None:
        shape = samples.images.shape
        truth = unit_pixels(samples.images, trial.chosen[:MOST_SHOWN])
        if trial.in_sample_space:
            return Gallery(truth, trial.read[:MOST_SHOWN].reshape(-1, *shape).clamp(0, 1), exact, seen)
        if len(carrier.shape) == 3 and carrier.shape[0] == shape[0]:
            small = trial.read[:MOST_SHOWN].reshape(-1, *carrier.shape)
            if not samples.raw:
                mean, std = (torch.tensor(v).view(-1, 1, 1) for v in (samples.images.mean, samples.images.std))
                small = torch.where(small == 0, small, small * std + mean)
            return Gallery(truth, small.clamp(0, 1), exact, seen)
        return Gallery()
    if samples.kind == "text" and carrier.embedding is not None and carrier.places is not None and carrier.exact:
        table = mounted.model.get_submodule(carrier.embedding).weight
        assert isinstance(table, Tensor)
        true = samples.inputs[0][trial.chosen[:MOST_SHOWN]]
        found = nearest_tokens(trial.read[:MOST_SHOWN].to(table), table.detach())
        words = []
        for row in range(len(true)):
            kept = [(int(t), bool(seen[row] and t == f)) for t, f in zip(true[row], found[row], strict=True)]
            words.append(tuple((samples.vocabulary[t], right) for t, right in kept if t != 0))
        return Gallery(exact=exact, seen=seen, words=tuple(words))
    return Gallery()
