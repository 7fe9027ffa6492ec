"""Spans and tokens where a gradient is not exact: it came in half precision, or with noise on it, or has more tokens than dimensions.

What a token gives can no longer be tested to rounding. But a trained table says which tokens stand in a batch, by the rows that got a gradient, and
a map that gets one vector back for each sample stands high above any noise: both are enough to solve for whole sequences.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from qbi.errors import CannotRead
from qbi.sentences.above_noise import Whitened, nearest_tokens_at, rough_span, tokens_of_tables
from qbi.sentences.arrivals import MapGroup
from qbi.sentences.batch import ReadSentences, SentBatch
from qbi.sentences.candidates import AT_ONCE, Found
from qbi.sentences.joining import Joined, join_tokens
from qbi.sentences.pairing import TokenPlaces, likely_places_of
from qbi.sentences.relaxing import choices_of
from qbi.sentences.span import Span, span_of
from qbi.sentences.witnesses import Witness, find_witness

WIDER = ((0.0, 3), (0.97, 5))
"""Which maps tell places, by their contrast against the best one's, and how many tokens are taken for each position and sample: first all
maps, then, where sequences are missing, the best one with more tokens."""

MOST_PAIRS = 2048
"""Tokens at places that are solved for: four bytes for every two of them."""

SWEEPS, TRIED, FAR_OFF = 4, 16, 3.0
"""Sweeps in which tokens are left out; sequences that are run for every token of a position; and how many times farther than with
another token of its position a sequence lies with one that is left out."""

CONTEXTS = 4
"""Contexts in which each token is tried at each place."""

RIVALS = 2
"""Tokens in the place of each token of a sequence, the most alike, with which it must fail."""

LARGEST = 0.75
"""Share of a map's dimensions above which its span tells nothing."""


def read_roughly(batch: SentBatch) -> ReadSentences:
    """Sequences of an encoder, solved for by the one vector that comes back of each, from the tokens that are likely to stand in the batch.

    That is a descent on the distance to the span, as TIGER's (Kalikman et al., arXiv 2606.18312), over shares of tokens instead of embeddings.
    """
    if batch.causal:
        raise CannotRead("the prefixes of a decoder are tested one by one.")
    witness = find_witness(
        batch.arrivals, batch.behind, batch.gradients, batch.probe, batch.batch_size, _one_each(batch), batch.draws
    )
    if witness is None:
        raise CannotRead("no map speaks of one position of each sample.")
    witness = replace(witness, padding=batch.padding)
    tokens = tokens_of_tables(batch.gradients, batch.vocabulary, batch.batch_size * batch.length)
    if tokens is None:
        tokens = _nearest(batch)
    joined, names = _solved(batch, witness, tokens)
    joined = _without_rivals(batch, witness, joined, tokens)
    if not bool(joined.proven.any()):
        raise CannotRead("no sequence lies as near to the span as noise explains.")
    return ReadSentences(
        tuple(tuple(row) for row in joined.ids.tolist()),
        tuple(joined.proven.tolist()),
        tuple(tokens.tolist()),
        tuple(dict.fromkeys((*names, witness.group.name))),
        witness.span.rank,
        witness.span.width,
        False,
        0.0,
    )


def _solved(batch: SentBatch, witness: Witness, tokens: Int[Tensor, " v"]) -> tuple[Joined, list[str]]:
    """Sequences, by all maps together and then by the one that tells places best, with more tokens; and the names of the maps."""
    told = _told(batch, tokens, witness)
    best = max((own.contrast for own in told), default=0.0)
    joined: Joined | None = None
    for share, likely in WIDER if told else ((0.0, 0),):
        chosen = [own for own in told if own.contrast >= share * best]
        far = sum((own.far for own in chosen), torch.zeros(len(tokens), batch.length, device=tokens.device))
        most = min(likely * batch.batch_size, MOST_PAIRS // batch.length) or len(tokens)
        found = Found(tokens, torch.ones_like(far, dtype=torch.bool), far)
        pairs = likely_places_of(found, batch.length, most, cut=False).padded(batch.padding, batch.length)
        if len(pairs.token) > MOST_PAIRS:
            raise CannotRead("too many tokens may stand at too many places.")
        pairs = _fitting(batch, witness, pairs)
        now = join_tokens(batch.arrivals, witness, pairs, batch.length, batch.batch_size, batch.draws)
        joined = now if joined is None else joined.with_more(now)
        if int(joined.proven.sum()) >= witness.span.rank:
            break
    assert joined is not None
    few = slice(0, batch.batch_size)
    return Joined(joined.ids[few], joined.proven[few], joined.far[few]), [own.name for own in told]


@dataclass(frozen=True)
class Told:
    """What one map tells of tokens at places."""

    name: str
    contrast: float
    """How much nearer the few that may stand at a place are than most."""
    far: Float[Tensor, "v t"] = field(repr=False)
    """Of each token at each place, logarithms of distances."""


def _told(batch: SentBatch, tokens: Int[Tensor, " v"], witness: Witness) -> list[Told]:
    """How far each token is at each place, in contexts made of the others, by every map up to the witness: behind it nothing comes back to most
    positions.

    Directions count by how little they stand above the noise: which of them are there at all is not decided.
    """
    groups = [*batch.singles, *batch.mixing]
    last = next((i for i, g in enumerate(groups) if witness.group.weights[0] in g.weights), len(groups))
    wholes = [(g, Whitened.of(g.gradient(batch.gradients))) for g in groups[: last + 1]]
    most = max((own.rank for _, own in wholes), default=0)
    out = []
    for group, own in wholes:
        if max(batch.batch_size, most / 2) < own.rank <= LARGEST * group.width:
            far = _apart(batch, group, own, tokens).log()
            near = far.quantile(min(0.5, 0.5 * batch.batch_size / len(tokens)), dim=0)
            out.append(Told(group.name, float((far.median(0).values - near).mean()), far))
    return out


def _apart(batch: SentBatch, group: MapGroup, whole: Whitened, tokens: Int[Tensor, " v"]) -> Float[Tensor, "v t"]:
    """The mean over contexts: every token once at every position, each time among others."""
    rows = torch.arange(len(tokens), device=tokens.device)
    steps = torch.arange(batch.length, device=tokens.device)
    far = torch.zeros(len(tokens), batch.length, device=tokens.device)
    for turn in range(CONTEXTS):
        places = (rows[:, None] + (2 * turn + 1) * steps[None] + turn) % len(tokens)
        parts = places.split(max(1, AT_ONCE // batch.length))
        apart = torch.cat([whole.distances(batch.arrivals.at(group, tokens[part])) for part in parts])
        far.scatter_add_(0, places, apart / CONTEXTS)
    return far.clamp_min(1e-30)


def _fitting(batch: SentBatch, witness: Witness, pairs: TokenPlaces) -> TokenPlaces:
    """Without tokens that throw every sequence far off, wherever the others stand: the sum over tokens is too rough for them.

    What stands at the first position of an encoder moves what the last layer sees there a hundred times as much as any other token.
    """
    for _ in range(SWEEPS):
        choices = choices_of(pairs, batch.length)
        if not bool(choices.open.any(1).all()):
            raise CannotRead("at some position no token is likely.")
        chosen = choices.drawn(TRIED * int(choices.counts.max()), batch.draws)
        _, passed, far = witness.rest(batch.arrivals, choices.of(chosen))
        if bool(passed.any()):
            raise CannotRead(f"{witness.group.name}: random sequences lie as near to its span as noise allows.")
        shares = choices.shares(chosen)
        times = shares.sum(0)
        mean = (shares * far.clamp_min(1e-30).log()[:, None, None]).sum(0) / times.clamp_min(1)
        mean = mean.masked_fill(times == 0, -torch.inf)
        tried = mean.masked_fill(~choices.open | (times == 0), torch.inf).amin(1, keepdim=True)
        off = choices.open & (mean > tried + math.log(FAR_OFF))
        if not bool(off.any()):
            break
        place, slot = (choices.open & ~off).nonzero().T
        pairs = TokenPlaces(choices.tokens[place, slot], place)
    return pairs


def _without_rivals(batch: SentBatch, witness: Witness, joined: Joined, tokens: Int[Tensor, " v"]) -> Joined:
    """Nothing is proven of a sequence that passes with another token too, of those most like one of its own."""
    group = batch.singles[0] if batch.singles else witness.group
    alone = batch.arrivals.at(group, tokens[:, None].expand(-1, batch.length))[:, batch.length // 2]
    apart = torch.cdist(alone, alone).fill_diagonal_(torch.inf)
    alike = tokens[apart.topk(min(RIVALS, len(tokens) - 1), largest=False).indices] if len(tokens) > 1 else None
    proven = joined.proven.clone()
    for number in joined.proven.nonzero()[:, 0].tolist() if alike is not None else ():
        row = joined.ids[number]
        known = (tokens[None] == row[:, None]).int().argmax(1)
        others = row.repeat(alike.shape[1] * len(row), 1)  # type: ignore[union-attr]
        place = torch.arange(len(row), device=row.device).repeat_interleave(alike.shape[1])  # type: ignore[union-attr]
        others[torch.arange(len(place), device=row.device), place] = alike[known].flatten()  # type: ignore[index]
        # Padding is nothing's rival: it would end the sequence.
        kept = torch.ones_like(place, dtype=torch.bool) if batch.padding is None else row[place] != batch.padding
        proven[number] = not bool(witness.rest(batch.arrivals, others[kept])[1].any())
    return Joined(joined.ids, proven, joined.far)


def _one_each(batch: SentBatch) -> Callable[[Tensor], Span]:
    """To the rounding that is known of, where there are as few directions as samples, else above the noise."""

    def spanned(gradient: Tensor) -> Span:
        with suppress(CannotRead):
            exact = span_of(gradient, batch.rounding)
            if exact.rank <= batch.batch_size:
                return exact
        return rough_span(gradient, batch.batch_size)

    return spanned


def _spans(batch: SentBatch, groups: list[MapGroup]) -> Iterator[tuple[MapGroup, Span]]:
    for group in groups:
        with suppress(CannotRead):
            yield group, rough_span(group.gradient(batch.gradients))


def _nearest(batch: SentBatch) -> Int[Tensor, " v"]:
    """Of a table that is frozen: those nearest to what the first map's gradient spans above its noise."""
    for group, span in _spans(batch, batch.singles):
        near = nearest_tokens_at(batch.arrivals, group, span, batch.vocabulary, batch.length, 2 * batch.batch_size)
        return near.any(1).nonzero()[:, 0]
    raise CannotRead("nothing says which tokens stand in the batch.")
