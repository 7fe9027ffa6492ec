"""Spans and tokens where a gradient is not exact: it came in half precision, or with noise on it, or has more tokens than dimensions.

What a token gives can no longer be tested to rounding. But a trained table says which tokens stand in a batch, by the rows that got a gradient, and
a map that gets one vector back for each sample stands high above any noise: both are enough to solve for whole sequences.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from qbi.errors import CannotRead
from qbi.sentences.arrivals import Arrivals, MapGroup
from qbi.sentences.batch import ReadSentences, SentBatch
from qbi.sentences.candidates import AT_ONCE, Found
from qbi.sentences.joining import join_tokens
from qbi.sentences.pairing import TokenPlaces, likely_places_of
from qbi.sentences.relaxing import choices_of
from qbi.sentences.span import Span, right_vectors, span_of
from qbi.sentences.witnesses import Witness, find_witness

GAP = 4.0
"""How many times longer the least gradient of a token that is there must be than the largest of one that is not."""

LIKELY, MOST_PAIRS = 3, 2048
"""Tokens that are taken for each position, for each sample; and tokens at places that are solved for: four bytes for every two of them."""

SWEEPS, TRIED, FAR_OFF = 4, 16, 3.0
"""Sweeps in which tokens are left out; sequences that are run for every token of a position; and how many times farther than with
another token of its position a sequence lies with one that is left out."""

CONTEXTS = 4
"""Contexts in which each token is tried at each place."""

LARGEST = 0.75
"""Share of a map's dimensions above which its span tells nothing."""

CLOSE = 1.5
"""Distances up to this many times what the noise explains are none: it is measured, and spread over hundreds of dimensions."""


def rough_span(gradient: Float[Tensor, "n d"], most: int | None = None) -> Span:
    """The directions of a gradient that stand above its noise, which all its values have alike.

    Args:
        gradient: a row for each neuron.
        most: directions that there can be; with more above the noise, nothing is told.
    """
    count, width = gradient.shape
    values, right = right_vectors(gradient.double())
    rank = int((values > _threshold(values, count, width)).sum())
    if rank == 0:
        raise CannotRead("the gradient is no more than its noise.")
    if rank >= min(count, width) or (most is not None and rank > most):
        raise CannotRead(f"{rank} directions of the gradient stand above its noise, more than tell anything.")
    noise = math.sqrt(float(values[rank:].square().sum()) / ((count - rank) * (width - rank)))
    basis = right[:rank].T.contiguous().float()
    return Span(rank, width, noise, torch.ones_like(basis[:, 0]), basis, (1 / values[:rank]).float(), CLOSE)


@dataclass(frozen=True)
class Whitened:
    """A gradient's directions, each by how little it stands above the noise: one where it does not."""

    rank: int
    directions: Float[Tensor, "d m"] = field(repr=False)

    @classmethod
    def of(cls, gradient: Float[Tensor, "n d"]) -> "Whitened":
        """By its singular values."""
        values, right = right_vectors(gradient.double())
        limit = _threshold(values, *gradient.shape)
        weights = (limit / values.clamp_min(1e-300)).clamp(max=1.0)
        return cls(int((values > limit).sum()), (right.T * weights).float())

    def distances(self, vectors: Float[Tensor, "*k d"]) -> Float[Tensor, "*k"]:
        """Of each vector, were its length one."""
        far: Tensor = (vectors @ self.directions).norm(dim=-1) / vectors.norm(dim=-1).clamp_min(1e-30)
        return far


def _threshold(values: Float[Tensor, " m"], count: int, width: int) -> float:
    """Below it singular values are noise, which all entries have alike (Gavish and Donoho, arXiv 1305.5870: its polynomial for noise of unknown size)."""
    beta = min(count, width) / max(count, width)
    return (0.56 * beta**3 - 0.95 * beta**2 + 1.82 * beta + 1.43) * float(values.median())


def tokens_of_tables(gradients: Mapping[str, Tensor], vocabulary: int, most: int) -> Int[Tensor, " v"] | None:
    """Tokens whose row, or column, of a trained table got a gradient; None where no table says so.

    Adapters of tables say the same, and so does the head of a language model, of the tokens that are foretold.
    """
    for gradient in gradients.values():
        if gradient.dim() != 2 or vocabulary not in gradient.shape:
            continue
        sizes = (gradient if len(gradient) == vocabulary else gradient.T).double().norm(dim=1)
        ranked, order = sizes.sort(descending=True)
        ahead, behind = ranked[:most], ranked[1 : most + 1]
        gaps = ahead[: len(behind)] / behind.clamp_min(1e-300)
        if not len(gaps) or float(ranked[0]) == 0:
            continue
        last = int(gaps.argmax())
        if float(gaps[last]) >= GAP:
            found: Tensor = order[: last + 1].sort().values
            return found
    return None


def nearest_tokens_at(
    arrivals: Arrivals, group: MapGroup, span: Span, vocabulary: int, positions: int, most: int
) -> Bool[Tensor, "v t"]:
    """For every position the tokens whose vectors lie nearest to the span."""
    rows = max(1, AT_ONCE // positions)
    parts = torch.arange(vocabulary, device=span.basis.device).split(rows)
    far = torch.cat([span.distances(arrivals.at(group, part[:, None].expand(-1, positions))) for part in parts])
    nearest = far.topk(min(most, vocabulary), dim=0, largest=False).indices
    return torch.zeros_like(far, dtype=torch.bool).scatter_(0, nearest, True)


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
    found, names = _places(batch, tokens)
    most = LIKELY * batch.batch_size if names else len(tokens)
    pairs = likely_places_of(found, batch.length, most, cut=False).padded(batch.padding, batch.length)
    if len(pairs.token) > MOST_PAIRS:
        raise CannotRead("too many tokens may stand at too many places.")
    pairs = _fitting(batch, witness, pairs)
    joined = join_tokens(batch.arrivals, witness, pairs, batch.length, batch.batch_size, batch.draws)
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


def _places(batch: SentBatch, tokens: Int[Tensor, " v"]) -> tuple[Found, list[str]]:
    """How far each token is at each place, in contexts made of the others, from what maps span whose gradient stands above its noise; and their names.

    Directions count by how little they stand above the noise: which of them are there at all is not decided.
    """
    wholes = {g.name: Whitened.of(g.gradient(batch.gradients)) for g in [*batch.singles, *batch.mixing]}
    most = max((own.rank for own in wholes.values()), default=0)
    far = torch.zeros(len(tokens), batch.length, device=tokens.device)
    names = []
    rows = torch.arange(len(tokens), device=tokens.device)
    steps = torch.arange(batch.length, device=tokens.device)
    for group in [*batch.singles, *batch.mixing]:
        own = wholes[group.name]
        if own.rank <= max(batch.batch_size, most / 2) or own.rank > LARGEST * group.width:
            continue
        names.append(group.name)
        for turn in range(CONTEXTS):
            places = (rows[:, None] + (2 * turn + 1) * steps[None] + turn) % len(tokens)
            parts = places.split(max(1, AT_ONCE // batch.length))
            apart = torch.cat([own.distances(batch.arrivals.at(group, tokens[part])) for part in parts])
            far.scatter_add_(0, places, apart / apart.mean())
    return Found(tokens, torch.ones_like(far, dtype=torch.bool), far), names


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
