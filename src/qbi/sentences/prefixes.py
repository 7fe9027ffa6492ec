"""Sequences of a model that looks back only: prefix by prefix, each continued by the tokens whose vector lies in the span."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from qbi.sentences.arrivals import Arrivals, MapGroup
from qbi.sentences.candidates import AT_ONCE, DIRECTIONS, Found
from qbi.sentences.pairing import TokenPlaces
from qbi.sentences.span import TIMES, Span

WIDER = 4
"""Prefixes that are followed, in batches."""

NEAREST, BACK, SHARED = 4, 8, 4
"""Tokens that are tried behind a prefix first; how many of a prefix's last tokens say what its backprops look like; and the positions up to
which prefixes are often shared, so that every likely token is tried behind each."""

BEYOND = 8
"""Unlikely tokens that are tried behind a prefix that has no continuation, besides as many as are likely."""


class PrefixSearch:
    """Grows sequences whose vectors all lie in the span of a layer behind the first attention.

    What arrives there at a position depends on the tokens up to it, so each position decides by itself. Behind every prefix those tokens
    are tried first whose backprops resemble the prefix's own; then likely tokens that no prefix took, behind all of them; then, where a
    prefix has no continuation, all likely ones and the next unlikely ones.
    """

    def __init__(
        self,
        arrivals: Arrivals,
        group: MapGroup,
        span: Span,
        found: Found,
        places: TokenPlaces,
        backs: Tensor,
        draws: torch.Generator,
    ) -> None:
        self.arrivals, self.group, self.span, self.found = arrivals, group, span, found
        self.places, self.backs = places, backs
        self.looks = span.looks(min(DIRECTIONS, span.width - span.rank), draws)

    def grow(self, positions: int, batch_size: int) -> list[Int[Tensor, " t"]]:
        """Every sequence, as far as it can be continued."""
        prefixes = torch.empty(1, 0, dtype=torch.long, device=self.found.tokens.device)
        ended: list[Tensor] = []
        for position in range(positions):
            kept, scores, parents = self._continued(prefixes, position)
            without = torch.ones(len(prefixes), dtype=torch.bool, device=prefixes.device)
            without[parents] = False
            ended += [p for p in prefixes[without] if len(p)]
            if not len(kept):
                return ended
            prefixes = kept[scores.argsort()[: WIDER * batch_size]]
        return [*ended, *prefixes]

    def _continued(self, prefixes: Tensor, position: int) -> tuple[Tensor, Tensor, Tensor]:
        """Longer prefixes, how far each is from the span, and what it continues."""
        likely = self.places.token[own := self.places.at(position)]
        more = self.found.at(position, 2 * len(likely) + BEYOND)
        everyone = torch.arange(len(prefixes), device=prefixes.device)
        if position < SHARED or len(likely) <= NEAREST:
            found = self._test(prefixes, *_every(everyone, likely))
            left = everyone[~torch.isin(everyone, found[2])]
            return _both(found, self._test(prefixes, *_every(left, more)))
        near = (self._looks(prefixes) @ self.backs[own].T).topk(NEAREST).indices
        found = self._test(prefixes, everyone.repeat_interleave(NEAREST), likely[near.flatten()])
        unused = likely[~torch.isin(likely, found[0][:, -1])]
        found = _both(found, self._test(prefixes, *_every(everyone, unused)))
        left = everyone[~torch.isin(everyone, found[2])]
        return _both(found, self._test(prefixes, *_every(left, more)))

    def _looks(self, prefixes: Tensor) -> Float[Tensor, "k n"]:
        """What the backprops of each prefix look like."""
        total = torch.zeros(len(prefixes), self.backs.shape[1], device=self.backs.device)
        for place in range(max(0, prefixes.shape[1] - BACK), prefixes.shape[1]):
            own = self.places.at(place)
            same = (prefixes[:, place, None] == self.places.token[own]).to(self.backs.dtype)
            total += same @ self.backs[own]
        return total

    def _test(self, prefixes: Tensor, which: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of prefixes with a token behind each, those that lie in the span."""
        long = torch.cat([prefixes[which], tokens[:, None]], 1)
        rows = max(1, AT_ONCE // long.shape[1])
        parts = [
            self.span.screened(self.arrivals.at(self.group, part)[:, -1], self.looks)
            for part in long.split(rows)
            if len(part)
        ]
        misses = torch.cat(parts) if parts else torch.empty(0, device=long.device)
        inside = misses <= TIMES
        return long[inside], misses[inside], which[inside]


def _every(which: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Each token behind each prefix."""
    return which.repeat_interleave(len(tokens)), tokens.repeat(len(which))


def _both(one: tuple[Tensor, Tensor, Tensor], other: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    return torch.cat([one[0], other[0]]), torch.cat([one[1], other[1]]), torch.cat([one[2], other[2]])
