"""Which of its tokens each position has, as shares: a quadratic problem over simplexes, for many sequences at once."""

import math
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from qbi.sentences.pairing import TokenPlaces

STEPS = 400
"""Of the accelerated descent."""

RIDGE = 0.02
"""By how much slopes are drawn towards nothing, against how often a token was tried."""


@dataclass(frozen=True)
class Choices:
    """The tokens that each position may have, in a grid; positions with fewer than others have places that are closed."""

    tokens: Int[Tensor, "t c"]
    open: Bool[Tensor, "t c"]

    @property
    def counts(self) -> Int[Tensor, " t"]:
        """How many tokens each position may have."""
        return self.open.sum(1)

    def of(self, chosen: Int[Tensor, "k t"]) -> Int[Tensor, "k t"]:
        """The tokens at chosen places of the grid."""
        return self.tokens[torch.arange(len(self.tokens), device=chosen.device), chosen]

    def shares(self, chosen: Int[Tensor, "k t"]) -> Float[Tensor, "k t c"]:
        """One where it was chosen, zero elsewhere."""
        return torch.nn.functional.one_hot(chosen, self.tokens.shape[1]).float()

    def drawn(self, rows: int, draws: torch.Generator) -> Int[Tensor, "k t"]:
        """Random choices."""
        even = torch.rand(rows, len(self.tokens), generator=draws).to(self.tokens.device)
        return (even * self.counts).long()


def choices_of(pairs: TokenPlaces, positions: int) -> Choices:
    """Tokens at places as a grid."""
    counts = torch.bincount(pairs.place, minlength=positions)
    order = pairs.place.argsort(stable=True)
    place = pairs.place[order]
    slot = torch.arange(len(place), device=place.device) - (counts.cumsum(0) - counts)[place]
    tokens = torch.zeros(positions, int(counts.max()), dtype=torch.long, device=place.device)
    tokens[place, slot] = pairs.token[order]
    return Choices(tokens, torch.arange(tokens.shape[1], device=place.device)[None] < counts[:, None])


@dataclass(frozen=True)
class LinearGuess:
    """What stands outside a span, nearly: the sum of what each token at its place adds to it."""

    mean: Float[Tensor, " n"] = field(repr=False)
    slopes: Float[Tensor, "u n"] = field(repr=False)
    products: Float[Tensor, "u u"] = field(repr=False)
    """Of the slopes with each other: four bytes for every two places of the grid."""
    steep: float

    def relax(
        self, at: Float[Tensor, "k n"], choices: Choices, closed: Bool[Tensor, "k t c"], start: Float[Tensor, "k t c"]
    ) -> Float[Tensor, "k t c"]:
        """Shares of tokens at which the sum that is `at` for no token at all comes nearest to nothing (FISTA, Beck and Teboulle, 2009)."""
        pull = at @ self.slopes.T
        now, ahead, speed = start, start, 1.0
        shut = closed | ~choices.open
        for _ in range(STEPS):
            slope = (ahead.flatten(1) @ self.products + pull).view_as(ahead)
            new = onto_simplex((ahead - slope / self.steep).masked_fill(shut, -1e6))
            faster = (1 + math.sqrt(1 + 4 * speed * speed)) / 2
            ahead = new + (speed - 1) / faster * (new - now)
            now, speed = new, faster
        return now


def fit_linear(rests: Float[Tensor, "k n"], chosen: Int[Tensor, "k t"], choices: Choices) -> LinearGuess:
    """Least squares over sequences of random choices: each token's part, averaged over the others that it stood among."""
    shares = choices.shares(chosen).flatten(1)
    mean = rests.mean(0)
    tried = len(chosen) / int(choices.counts.max())
    square = (shares.T @ shares).double()
    square.diagonal().add_(RIDGE * tried)
    slopes = torch.linalg.solve(square, (shares.T @ (rests - mean)).double()).float()
    return guess_of(mean, slopes * choices.open.flatten()[:, None])


def guess_of(mean: Float[Tensor, " n"], slopes: Float[Tensor, "u n"]) -> LinearGuess:
    """With what the descent needs."""
    products = slopes @ slopes.T
    steep = float(torch.linalg.eigvalsh(products.double())[-1])
    return LinearGuess(mean, slopes, products, max(steep, 1e-30))


def onto_simplex(values: Float[Tensor, "*k c"]) -> Float[Tensor, "*k c"]:
    """The nearest shares that are no less than zero and sum to one (Held et al., 1974)."""
    ranked = values.sort(-1, descending=True).values
    over = ranked.clamp_min(-1e6).cumsum(-1) - 1
    numbers = torch.arange(1, values.shape[-1] + 1, device=values.device)
    kept = (ranked * numbers > over).sum(-1, keepdim=True).clamp_min(1)
    return (values - over.gather(-1, kept - 1) / kept).clamp_min(0)
