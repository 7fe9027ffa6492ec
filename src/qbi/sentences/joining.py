"""Sequences of a model that looks both ways: tokens whose backprops resemble each other are put together, tested whole, and mended."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor

from qbi.errors import CannotRead
from qbi.sentences.arrivals import Arrivals, MapGroup
from qbi.sentences.candidates import AT_ONCE, Found
from qbi.sentences.pairing import TokenPlaces, backprops_of, likely_places_of
from qbi.sentences.span import TIMES, Span

WIDER = 4
"""Batches of tokens that are tried at a position at last."""

AGAIN, MISSING = 4, 2.0
"""Further tries for samples that are missing, and how much nearer a token counts there that stands in no proven sequence: before all others."""

ROUNDS, SWEEPS, TRIED = 6, 16, 3
"""Rounds of putting tokens together; sweeps of mending; other tokens that are tried at a position first, and all of them where none helps."""


@dataclass(frozen=True)
class Joined:
    """Sequences, and which of them lie in the span of the second layer at every position."""

    ids: Int[Tensor, "k t"]
    proven: Tensor
    far: Float[Tensor, " k"] = field(repr=False)


def join_tokens(
    arrivals: Arrivals,
    groups: tuple[MapGroup, MapGroup],
    span: Span,
    found: Found,
    gradients: Mapping[str, Tensor],
    positions: int,
    batch_size: int,
) -> Joined:
    """Whole sequences; those that are proven first. Each weight of the first layer proposes its own."""
    first, second = groups
    pairs = likely_places_of(found, positions, 2 * batch_size)
    best: Joined | None = None
    for weight, turned in zip(first.weights, first.turned, strict=True):
        rows = gradients[weight].T if turned else gradients[weight]
        backs = backprops_of(arrivals, first, pairs, rows, positions)
        proposed = _clusters(backs, pairs, positions)
        judged = _judge(arrivals, second, span, proposed)
        if best is None or float(judged.far.mean()) < float(best.far.mean()):
            best, kept = judged, backs
        if bool(judged.proven.all()):
            break
    assert best is not None
    wide = likely_places_of(found, positions, WIDER * batch_size, cut=False)
    mended = _mend(arrivals, second, span, best, kept, pairs, wide)
    for _ in range(AGAIN):
        spare = _unused(mended, pairs)
        if not len(spare) or not bool(mended.proven.any()):
            break
        # Tokens in no proven sequence belong to the samples that are missing.
        places = pairs.place[spare]
        seeds = spare[places == places.mode().values][:batch_size]
        more = _judge(arrivals, second, span, _clusters(kept, pairs, positions, seeds, spare))
        again = _mend(arrivals, second, span, more, kept, pairs, wide)
        before = int(mended.proven.sum())
        mended = _best(Joined(*(torch.cat([getattr(mended, n), getattr(again, n)]) for n in ("ids", "proven", "far"))))
        if int(mended.proven.sum()) == before:
            break
    return mended


def _unused(joined: Joined, pairs: TokenPlaces) -> Int[Tensor, " u"]:
    """Tokens at places that stand in no proven sequence."""
    used = torch.zeros(len(pairs.token), dtype=torch.bool, device=pairs.token.device)
    for row in joined.ids[joined.proven]:
        used |= row[pairs.place] == pairs.token
    return (~used).nonzero()[:, 0]


def _clusters(
    backs: Float[Tensor, "u n"],
    pairs: TokenPlaces,
    positions: int,
    seeds: Tensor | None = None,
    spare: Tensor | None = None,
) -> Int[Tensor, "k t"]:
    """A sequence for each token of the position that has most: everywhere the token whose backprop is nearest to the sequence's own."""
    where = [pairs.at(p) for p in range(positions)]
    if not all(len(own) for own in where):
        raise CannotRead("at some position no token of the vocabulary lies in the span.")
    if seeds is None:
        seeds = max(where, key=len)
    centres = backs[seeds]
    chosen = seeds[:, None].expand(-1, positions)
    for _ in range(ROUNDS):
        nearness = centres @ backs.T
        if spare is not None:
            nearness[:, spare] += MISSING
        chosen = torch.stack([own[nearness[:, own].argmax(1)] for own in where], 1)
        chosen[torch.arange(len(seeds), device=seeds.device), pairs.place[seeds]] = seeds
        centres = torch.nn.functional.normalize(backs[chosen].sum(1), dim=1)
    return pairs.token[chosen]


def _judge(arrivals: Arrivals, group: MapGroup, span: Span, ids: Int[Tensor, "k t"]) -> Joined:
    proven, far = [], []
    for part in ids.split(max(1, AT_ONCE // ids.shape[1])):
        arrived = arrivals.at(group, part)
        proven.append((span.misses(arrived) <= TIMES).all(1))
        far.append(span.distances(arrived).square().mean(1).sqrt())
    return Joined(ids, torch.cat(proven), torch.cat(far))


def _mend(
    arrivals: Arrivals,
    group: MapGroup,
    span: Span,
    start: Joined,
    backs: Float[Tensor, "u n"],
    pairs: TokenPlaces,
    wide: TokenPlaces,
) -> Joined:
    """Change tokens one by one, where that brings a sequence nearer to the span: the likeliest others, all of them, then unlikely ones too."""
    ids, proven, far = start.ids.clone(), start.proven.clone(), start.far.clone()
    ways: list[Callable[[Tensor], Tensor]] = [
        lambda row: _changes(row, pairs, _nearness(row, pairs, backs), TRIED),
        lambda row: torch.cat([_changes(row, pairs), _swaps(row, pairs)]),
        lambda row: _changes(row, wide),
    ]
    for _ in range(SWEEPS):
        open_rows = (~proven).nonzero()[:, 0]
        if not len(open_rows):
            break
        changes = [ways[0](ids[row]) for row in open_rows]
        owner = torch.cat([row.repeat(len(c)) for row, c in zip(open_rows, changes, strict=True)])
        tried = _judge(arrivals, group, span, torch.cat(changes))
        moved = False
        for row in open_rows.tolist():
            own = (owner == row).nonzero()[:, 0]
            better = own[tried.far[own] < far[row]]
            if not len(better):
                continue
            ids[row], moved = _combined(arrivals, group, span, ids[row], tried, better), True
        now = _judge(arrivals, group, span, ids)
        proven, far = now.proven, now.far
        if not moved:
            ways = ways[1:]
        if not ways:
            break
    return _best(Joined(ids, proven, far))


def _nearness(row: Tensor, pairs: TokenPlaces, backs: Float[Tensor, "u n"]) -> Float[Tensor, " u"]:
    """How much the backprop of each token is like those of a sequence."""
    return backs @ backs[row[pairs.place] == pairs.token].sum(0)


def _changes(
    row: Tensor, pairs: TokenPlaces, nearness: Tensor | None = None, most: int | None = None
) -> Int[Tensor, "c t"]:
    """The sequence as it is, and with another token at one position, the nearest ones."""
    others = (pairs.token != row[pairs.place]).nonzero()[:, 0]
    if nearness is not None:
        others = others[nearness[others].argsort(descending=True)]
        same = pairs.place[others]
        before = torch.stack([(same == p).cumsum(0) for p in range(len(row))])
        others = others[before[same, torch.arange(len(same), device=row.device)] <= (most or len(others))]
    changed = row.repeat(1 + len(others), 1)
    changed[torch.arange(1, len(changed), device=row.device), pairs.place[others]] = pairs.token[others]
    return changed


def _swaps(row: Tensor, pairs: TokenPlaces) -> Int[Tensor, "c t"]:
    """The sequence with two of its tokens in each other's place, where both may stand there: either change alone would lead away."""
    may = torch.stack([torch.isin(row, pairs.token[pairs.at(p)]) for p in range(len(row))])  # may[p, q]: token q at p
    one, other = (may & may.T & (row[:, None] != row[None])).triu(1).nonzero().T
    changed = row.repeat(len(one), 1)
    numbers = torch.arange(len(one), device=row.device)
    changed[numbers, one], changed[numbers, other] = row[other], row[one]
    return changed


def _combined(
    arrivals: Arrivals, group: MapGroup, span: Span, row: Tensor, tried: Joined, better: Tensor
) -> Int[Tensor, " t"]:
    """The best change alone, or the best ones of all positions together, whichever is nearer to the span."""
    order = better[tried.far[better].argsort(descending=True)]
    best = tried.ids[order[-1]]
    options = [best]
    for most in (2, 4, 8, len(order)):
        together = row.clone()
        for change in tried.ids[order[-most:]]:
            together = torch.where(change != row, change, together)
        options.append(together)
    judged = _judge(arrivals, group, span, torch.stack(options))
    return judged.ids[judged.far.argmin()]


def _best(joined: Joined) -> Joined:
    """Each sequence once, proven ones first, then those nearest to the span."""
    order = (joined.far + 10.0 * ~joined.proven).argsort()
    seen: dict[tuple[int, ...], int] = {}
    for index in order.tolist():
        seen.setdefault(tuple(joined.ids[index].tolist()), index)
    kept = torch.tensor(list(seen.values()), device=joined.ids.device)
    return Joined(joined.ids[kept], joined.proven[kept], joined.far[kept])
