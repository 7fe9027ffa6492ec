"""What somebody who read nothing would hit: the baseline of every verdict, sample by sample."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from qbi.metrics.matching import Recoveries
from qbi.metrics.thresholds import THRESHOLDS, Threshold

MOST_GUESSED = 128
"""Samples from which the share of guesses that hit is taken."""

MOST_OTHERS = 1024
"""Other ones that a guess is taken from."""


SPREADS = 2.0
"""By how many standard deviations more of a batch must be read than the same candidates match of another one."""


@dataclass(frozen=True)
class Guess:
    """A guess is the mean of other samples, or the nearest of them."""

    share: Mapping[Threshold, float]
    """The part of all samples that it would hit."""
    beyond: Mapping[Threshold, float]
    """Of the samples that it would miss, the part that was read."""

    @classmethod
    def of(
        cls,
        truth: Tensor,
        recoveries: Recoveries,
        others: Tensor | None,
        span: float,
        *,
        copies: bool = False,
        control: Recoveries | None = None,
    ) -> "Guess":
        """For one batch. `others` are samples outside of it, or else those of the batch.

        Copies of a sample are no guess, since nobody knows that it is repeated; `copies` of positions (padding, blank sky) are. `control` says
        how many samples of another batch the same candidates match: hundreds of them hit some of any batch whose samples are few of a kind.
        """
        read_at_all = torch.stack([recoveries[t].recovered for t in THRESHOLDS]).any(0)
        some = torch.arange(min(MOST_GUESSED, len(truth)))
        asked = torch.cat([some, read_at_all.nonzero()[:, 0]])
        error = best_guess(truth, asked, others, copies=copies)
        share, beyond = {}, {}
        for threshold in THRESHOLDS:
            hit = error < threshold.largest_error(span)
            share[threshold] = float(hit[: len(some)].double().mean()) if len(some) else 0.0
            read = recoveries[threshold].recovered[asked[len(some) :]] & ~hit[len(some) :]
            missed = max(float(read.sum()), (1 - share[threshold]) * len(truth))
            beyond[threshold] = float(read.sum()) / missed if missed else 0.0
            by_chance = 0.0 if control is None else control[threshold].recall
            if by_chance > 0:
                chance = by_chance + SPREADS * math.sqrt(by_chance * (1 - by_chance) / len(truth))
                most = (recoveries[threshold].recall - chance) / max(1e-9, 1 - by_chance)
                share[threshold] = max(share[threshold], by_chance)
                beyond[threshold] = max(0.0, min(beyond[threshold], most))
        return cls(share, beyond)


def best_guess(truth: Tensor, asked: Tensor, others: Tensor | None, *, copies: bool = False) -> Tensor:
    """Mean squared error of the best guess for each sample that is asked for."""
    values = truth.double()
    mine = values[asked]
    if others is not None and len(others):
        known = others.double()
        known = known[torch.linspace(0, len(known) - 1, min(len(known), MOST_OTHERS)).long()]
        apart = torch.cdist(mine, known, compute_mode="donot_use_mm_for_euclid_dist")
        apart = apart if copies else apart.masked_fill(apart == 0, torch.inf)
        return torch.minimum(apart.amin(1).square() / truth.shape[1], (known.mean(0) - mine).square().mean(1))
    if len(truth) < 2:
        return torch.full((len(asked),), torch.inf, dtype=torch.float64)
    known = torch.unique(values[:MOST_OTHERS], dim=0)
    apart = torch.cdist(mine, known, compute_mode="donot_use_mm_for_euclid_dist")
    apart = apart.masked_fill(apart == 0, torch.inf)
    mean = (values.sum(0) - mine) / (len(truth) - 1)
    return torch.minimum(apart.amin(1).square() / truth.shape[1], (mean - mine).square().mean(1))
