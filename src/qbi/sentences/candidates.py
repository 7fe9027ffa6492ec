"""Which tokens stand in a batch, and where: every entry of the vocabulary at every position, tested against what a gradient spans."""

from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from qbi.errors import CannotRead
from qbi.sentences.arrivals import Arrivals, MapGroup
from qbi.sentences.span import TIMES, Span

AT_ONCE = 8192
"""Positions that are run through the model at once: with 768 values each, 25 MB for every value that is kept of them."""

LOOKS = 16
"""Random directions outside the span in which a vector is looked at first."""

CONTEXTS, DIRECTIONS = 2, 256
"""Contexts in which a token is tried at a position, and random directions in which its distance is measured, to about 6 %."""


@dataclass(frozen=True)
class Found:
    """Tokens that may stand at each position, the likeliest first."""

    tokens: Int[Tensor, " v"]
    """All tokens that are in the batch."""
    allowed: Bool[Tensor, "v t"]
    """Where the first layer's span lets each stand."""
    likely: Float[Tensor, "v t"] = field(repr=False)
    """How far each is, at a position, from the span of a layer that sees other positions too; less is likelier."""
    least: int = 1
    """How many tokens at places there are at least: as many as the first layer's gradient has dimensions."""

    def at(self, position: int, most: int | None = None) -> Tensor:
        """Tokens for one position, the likeliest first."""
        able = self.allowed[:, position].nonzero()[:, 0]
        order = self.likely[able, position].argsort()[:most]
        return self.tokens[able[order]]


def sees_single_tokens(arrivals: Arrivals, group: MapGroup, ids: Int[Tensor, "k t"]) -> bool:
    """Whether what arrives at a position depends on its own token only; refused where it depends on chance."""
    first = arrivals.at(group, ids)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        other = arrivals.at(group, ids)
    size = float(first.abs().max()) or 1.0
    if float((first - other).abs().max()) > 1e-4 * size:
        raise CannotRead(f"{group.name}: values are dropped at random before it, so nobody can foretell what arrives.")
    for moved in (0, ids.shape[1] - 1):
        changed = ids.clone()
        changed[:, moved] = ids[:, moved].roll(1)
        apart = (arrivals.at(group, changed) - first).abs().amax(2)
        apart[:, moved] = 0
        if float(apart.max()) > 1e-5 * size:
            return False
    return True


def tokens_allowed(
    arrivals: Arrivals, group: MapGroup, span: Span, vocabulary: int, positions: int, draws: torch.Generator
) -> Bool[Tensor, "v t"]:
    """For every token and position whether its vector lies in the span.

    A few random directions outside the span rule out nearly all of them; the rest are looked at in full.
    """
    device = span.basis.device
    looks = span.looks(LOOKS, draws)
    rows = max(1, AT_ONCE // positions)
    found = []
    for part in torch.arange(vocabulary, device=device).split(rows):
        arrived = arrivals.at(group, part[:, None].expand(-1, positions))
        found.append(span.screened(arrived, looks) <= TIMES)
    return torch.cat(found)


def likely_places(
    arrivals: Arrivals,
    group: MapGroup,
    span: Span,
    tokens: Int[Tensor, " v"],
    positions: int,
    draws: torch.Generator,
) -> Float[Tensor, "v t"]:
    """How far each token is from the span at each position of a layer that mixes positions, in contexts made of the others.

    The vector of a token that stands there is moved by a wrong context; that of one that does not is anywhere.
    """
    count = len(tokens)
    rows = torch.arange(count, device=tokens.device)
    steps = torch.arange(positions, device=tokens.device)
    looks = span.looks(min(DIRECTIONS, span.width - span.rank), draws)
    best: Tensor | None = None
    for turn in range(CONTEXTS):
        # Row r holds token r + (2·turn + 1)·p at position p: every token once at every position, each time among others.
        places = (rows[:, None] + (2 * turn + 1) * steps[None] + turn) % count
        far = torch.cat(
            [span.screen(arrivals.at(group, tokens[part]), looks) for part in places.split(AT_ONCE // positions)]
        )
        own = torch.empty_like(far)
        own.scatter_(0, places, far)
        best = own if best is None else torch.minimum(best, own)
    assert best is not None
    return best
