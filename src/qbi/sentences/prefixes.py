"""Sequences of a model that looks back only: prefix by prefix, each continued by the tokens whose vector lies in the span."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from qbi.sentences.arrivals import Arrivals, MapGroup
from qbi.sentences.candidates import AT_ONCE, DIRECTIONS
from qbi.sentences.span import TIMES, Span

WIDER = 4
"""Prefixes that are followed, in batches."""

REFERENCES = 2
"""Prefixes behind which every token is run, and tokens that are run behind every prefix."""

FEW, NEAREST, NEXT = 1024, 8, 64
"""Prefixes with a token behind them up to which all are run; tokens that are tried behind a prefix first, and then, where none of them
or more than one continues it."""

Continued = tuple[Tensor, Tensor, Tensor]
"""Longer prefixes, how far each is from the span, and what it continues."""


class PrefixSearch:
    """Grows sequences whose vectors all lie in the span of a layer behind the first attention.

    What arrives there at a position depends on the tokens up to it, so each position decides by itself. Every token behind every prefix
    would be many passes. What a prefix and the token behind it do is nearly a sum, so a few tokens behind every prefix and every
    token behind a few prefixes say which are likely; those are run.
    """

    def __init__(
        self,
        arrivals: Arrivals,
        group: MapGroup,
        span: Span,
        tokens: Int[Tensor, " v"],
        allowed: Bool[Tensor, "v t"],
        draws: torch.Generator,
    ) -> None:
        self.arrivals, self.group, self.span = arrivals, group, span
        self.tokens, self.allowed = tokens, allowed
        self.looks = span.looks(min(DIRECTIONS, span.width - span.rank), draws)

    def grow(self, positions: int, batch_size: int) -> list[Int[Tensor, " t"]]:
        """Every sequence, as far as it can be continued; the longest first."""
        prefixes = torch.empty(1, 0, dtype=torch.long, device=self.tokens.device)
        ended: list[Tensor] = []
        for position in range(positions):
            kept, scores, parents = self._continued(prefixes, position)
            without = torch.ones(len(prefixes), dtype=torch.bool, device=prefixes.device)
            without[parents] = False
            ended += [p for p in prefixes[without] if len(p)]
            if not len(kept):
                prefixes = prefixes[:0]
                break
            prefixes = kept[scores.argsort()[: WIDER * batch_size]]
        return sorted([*ended, *prefixes], key=len, reverse=True)

    def _continued(self, prefixes: Tensor, position: int) -> Continued:
        tokens = self.tokens[self.allowed[:, position]]
        everyone = torch.arange(len(prefixes), device=prefixes.device)
        if len(prefixes) * len(tokens) <= FEW or len(tokens) <= NEAREST:
            return self._test(prefixes, everyone.repeat_interleave(len(tokens)), tokens.repeat(len(prefixes)))
        order, references = self._likeliest(prefixes, tokens)
        found = self._ranked(prefixes, everyone, tokens[order[:, :NEAREST]])
        if not len(found[0]) and not bool(references.any()):
            return found  # nothing stands here: no layer sees the last token of a text that is foretold
        times = torch.bincount(found[2], minlength=len(prefixes))
        found = _both(found, self._ranked(prefixes, everyone[times != 1], tokens[order[times != 1, NEAREST:NEXT]]))
        left = everyone[~torch.isin(everyone, found[2])]
        return _both(found, self._ranked(prefixes, left, tokens[order[left, NEXT:]]))

    def _likeliest(self, prefixes: Tensor, tokens: Tensor) -> tuple[Int[Tensor, "k v"], Bool[Tensor, "r v"]]:
        """Tokens behind each prefix, the likeliest first, and which pass behind the prefixes that all were run behind."""
        few = torch.linspace(0, len(prefixes) - 1, REFERENCES).long().unique().to(prefixes.device)
        some = torch.linspace(0, len(tokens) - 1, REFERENCES).long().unique().to(prefixes.device)
        behind_few = self._arrived(prefixes[few].repeat_interleave(len(tokens), 0), tokens.repeat(len(few)))
        references = self.span.screened(behind_few, self.looks) <= TIMES
        behind_all = self._arrived(prefixes.repeat_interleave(len(some), 0), tokens[some].repeat(len(prefixes)))
        columns = (behind_few * self.span.scale @ self.looks).view(len(few), len(tokens), -1)
        rows = (behind_all * self.span.scale @ self.looks).view(len(prefixes), len(some), -1).mean(1)
        sums = torch.cdist(rows - columns[:, some].mean((0, 1)), -columns.mean(0))
        return sums.argsort(1), references.view(len(few), -1)

    def _arrived(self, prefixes: Tensor, tokens: Tensor) -> Float[Tensor, "k d"]:
        """What arrives at the last position of prefixes with a token behind each."""
        long = torch.cat([prefixes, tokens[:, None]], 1)
        rows = max(1, AT_ONCE // long.shape[1])
        return torch.cat([self.arrivals.at(self.group, part)[:, -1] for part in long.split(rows)])

    def _ranked(self, prefixes: Tensor, which: Tensor, tokens: Int[Tensor, "k c"]) -> Continued:
        """Each prefix with each of its own tokens."""
        return self._test(prefixes, which.repeat_interleave(tokens.shape[1]), tokens.flatten())

    def _test(self, prefixes: Tensor, which: Tensor, tokens: Tensor) -> Continued:
        """Of prefixes with a token behind each, those that lie in the span."""
        long = torch.cat([prefixes[which], tokens[:, None]], 1)
        if not len(which):
            return long, torch.empty(0, device=long.device), which
        misses = self.span.screened(self._arrived(prefixes[which], tokens), self.looks)
        inside = misses <= TIMES
        return long[inside], misses[inside], which[inside]


def _both(one: Continued, other: Continued) -> Continued:
    return torch.cat([one[0], other[0]]), torch.cat([one[1], other[1]]), torch.cat([one[2], other[2]])
