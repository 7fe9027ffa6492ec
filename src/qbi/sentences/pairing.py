"""Tokens at places: which may stand where."""

from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from qbi.sentences.arrivals import Arrivals, MapGroup
from qbi.sentences.candidates import Found
from qbi.sentences.span import Span

ROOM = 64
"""Dimensions outside a span with which distances tell places."""

ROWS = 48
"""Sequences on which these are compared."""


@dataclass(frozen=True)
class TokenPlaces:
    """Tokens at positions."""

    token: Int[Tensor, " u"]
    place: Int[Tensor, " u"]

    def at(self, position: int) -> Int[Tensor, " k"]:
        """Which of them stand there."""
        return (self.place == position).nonzero()[:, 0]

    def padded(self, padding: int | None, positions: int) -> "TokenPlaces":
        """With the token that stands behind the end of a sequence, at every position but the first."""
        if padding is None:
            return self
        place = torch.arange(1, positions, device=self.place.device)
        own = self.token != padding
        return TokenPlaces(
            torch.cat([self.token[own], torch.full_like(place, padding)]), torch.cat([self.place[own], place])
        )


def likely_places_of(found: Found, positions: int, most: int, *, cut: bool = True) -> TokenPlaces:
    """The likeliest tokens of each position, so many at the most; of all of them, those before the widest gap of distances."""
    tokens, places, far = [], [], []
    for position in range(positions):
        able = found.allowed[:, position].nonzero()[:, 0]
        own = found.likely[able, position]
        order = own.argsort()[:most]
        tokens.append(found.tokens[able[order]])
        far.append(own[order])
        places.append(torch.full_like(tokens[-1], position))
    token, place, distance = torch.cat(tokens), torch.cat(places), torch.cat(far)
    ranked = distance.sort().values.clamp_min(1e-12).log()
    few = min(max(positions, found.least), len(ranked) - 1)
    gaps = ranked.diff()[few - 1 :]
    limit = torch.inf
    if len(gaps) and cut:
        widest = int(gaps.argmax())
        if float(gaps[widest]) > 10 * float(gaps.mean()):
            limit = float(ranked[few - 1 + widest].exp())
    # The nearest of each position stays, however far it is.
    nearest = torch.cat([torch.arange(len(own), device=token.device) == 0 for own in tokens])
    keep = (distance <= limit) | nearest
    return TokenPlaces(token[keep], place[keep])


def telling_layer(
    arrivals: Arrivals, spans: list[tuple[MapGroup, Span]], tokens: Tensor, length: int, batch_size: int
) -> tuple[MapGroup, Span]:
    """The layer whose span tells tokens at their places best from tokens elsewhere.

    What arrives directly behind an attention is nearly a sum of what a token and its place give, and sums of known parts lie in the span
    whatever they belong to; behind a layer that bends, they do not.
    """
    rows = torch.arange(min(ROWS, len(tokens)), device=tokens.device)
    steps = torch.arange(length, device=tokens.device)
    ids = tokens[(rows[:, None] * max(1, len(tokens) // len(rows)) + 7 * steps[None]) % len(tokens)]
    share = min(0.5, 0.5 * batch_size / len(tokens))

    def contrast(pair: tuple[MapGroup, Span]) -> float:
        far = pair[1].distances(arrivals.at(pair[0], ids)).flatten()
        return float(far.median() / far.quantile(share).clamp_min(1e-12))

    # With few dimensions outside, distances scatter by orders of magnitude, whatever stands where.
    roomy = [pair for pair in spans if pair[1].width - pair[1].rank >= ROOM]
    return max(roomy or spans, key=contrast)
