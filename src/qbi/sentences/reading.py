"""Sentences out of the gradient of an honest transformer: tokens by the first layer's span, sequences by a later one's."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from qbi.errors import CannotRead
from qbi.sentences.arrivals import Arrivals, Feed, MapGroup
from qbi.sentences.candidates import Found, likely_places, sees_single_tokens, tokens_allowed
from qbi.sentences.joining import Joined, join_tokens
from qbi.sentences.pairing import likely_places_of
from qbi.sentences.prefixes import PrefixSearch
from qbi.sentences.span import ROUNDING, Span, span_of
from qbi.sentences.witnesses import Witness, find_witness, witness_of

LATER = 12
"""Groups of maps that are looked at, in the order of a pass."""

EARLY = 4
"""Of a decoder, those behind the first attention that are looked at: a later one would only take longer."""

WIDE = 1024
"""Tokens at places up to which unlikely ones are taken in where a sequence is missing; beyond, where more than half of them are."""

ROOM = 64
"""Dimensions outside a span with which distances tell places."""

ROWS = 48
"""Sequences on which these are compared."""


@dataclass(frozen=True)
class ReadSentences:
    """What was read of a batch."""

    sequences: tuple[tuple[int, ...], ...]
    proven: tuple[bool, ...]
    """Which of them lie in both spans at every position."""
    tokens: tuple[int, ...]
    """Every token that the first layer's gradient has, whether it found its place or not."""
    layers: tuple[str, ...]
    """The layers whose gradients were used."""
    rank: int
    width: int
    causal: bool
    seconds: float = field(compare=False)


def read_sentences(
    model: nn.Module,
    gradients: Mapping[str, Tensor],
    *,
    vocabulary: int,
    length: int,
    batch_size: int,
    feed: Feed | None = None,
    padding: int | None = None,
    seed: int = 0,
    rounding: float = ROUNDING,
) -> ReadSentences:
    """Read the batch of an honest client, as DAGER (Petrov et al., arXiv 2405.15586) does, with tests of our own.

    Args:
        model: as the server sent it; it is run, never changed.
        gradients: what the client sent, by the names of parameters.
        vocabulary: how many tokens there are.
        length: positions of a sequence.
        batch_size: sequences in the batch.
        feed: how ids become the model's inputs; the ids alone, if nothing is said.
        padding: the token that stands behind the end of shorter sequences, and that the feed's mask hides; none, if all are as long.
        seed: of random directions.
        rounding: the relative error of what was sent.

    Raises CannotRead where the gradient does not decide: its span is everything, or values are dropped at random before it.
    """
    started = time.perf_counter()
    arrivals = Arrivals(model, feed or (lambda ids: (ids,)))
    device = next(iter(gradients.values())).device
    draws = torch.Generator().manual_seed(seed)
    probe = torch.randint(vocabulary, (2 if length != 2 else 3, length), generator=draws).to(device)
    if padding is not None:
        probe[probe == padding] = (padding + 1) % vocabulary
    groups = [g for g in arrivals.groups(probe) if all(w in gradients for w in g.weights)]
    if not groups:
        raise CannotRead("no trained linear map sees the positions of this model one by one.")
    alone = [sees_single_tokens(arrivals, group, probe) for group in groups[:LATER]]
    firsts = _deciding([g for g, own in zip(groups, alone, strict=False) if own], gradients, rounding)
    first, span = max(firsts, key=lambda pair: pair[1].rank)
    allowed = tokens_allowed(arrivals, *firsts[0], vocabulary, length, draws)
    for group, own in firsts[1:]:
        allowed |= tokens_allowed(arrivals, group, own, vocabulary, length, draws)
    tokens = allowed.any(1).nonzero()[:, 0]
    if not len(tokens):
        return ReadSentences((), (), (), (first.name,), span.rank, span.width, False, time.perf_counter() - started)
    if len(tokens) > batch_size * length:
        raise CannotRead(
            f"{first.name}: more tokens lie in its gradient's span than a batch can have; nothing can be told by it."
        )
    mixing = [g for g, own in zip(groups, alone, strict=False) if not own]
    causal = bool(mixing) and _looks_back_only(arrivals, mixing[0], probe)
    spans = _later(mixing[: EARLY if causal else None], gradients, batch_size, rounding)
    if causal:
        # Behind a layer that bends, and with most room outside the span.
        second, later = max(spans, key=lambda pair: pair[1].width - pair[1].rank)
        search = PrefixSearch(arrivals, second, later, tokens, allowed[tokens], draws)
        sequences = [tuple(row.tolist()) for row in search.grow(length, batch_size)]
        # Where lengths differ, a sequence ends where nothing continues it.
        proven = [padding is not None or len(row) == len(sequences[0]) for row in sequences]
        used: tuple[str, ...] = (first.name, second.name)
    else:
        second, later = _telling(arrivals, spans, tokens, length, batch_size)
        likely = likely_places(arrivals, second, later, tokens, length, draws)
        found = Found(tokens, allowed[tokens], likely, span.rank)
        behind = [*mixing, *groups[LATER:]]
        witness = find_witness(arrivals, behind, gradients, probe, batch_size, rounding, draws)
        witness = witness or witness_of(second, later, torch.arange(length, device=device), draws)
        witness = replace(witness, padding=padding)
        joined = _joined(arrivals, witness, found, length, batch_size, draws)
        sequences, proven = [tuple(row) for row in joined.ids.tolist()], joined.proven.tolist()
        used = tuple(dict.fromkeys((first.name, second.name, witness.group.name)))
    return ReadSentences(
        tuple(sequences),
        tuple(proven),
        tuple(tokens.tolist()),
        used,
        span.rank,
        span.width,
        causal,
        time.perf_counter() - started,
    )


def _joined(
    arrivals: Arrivals, witness: Witness, found: Found, length: int, batch_size: int, draws: torch.Generator
) -> Joined:
    """Sequences of an encoder, from the likeliest tokens of each position; from more of them where some are missing."""
    wanted = min(batch_size, witness.sequences or batch_size)
    likely = likely_places_of(found, length, 2 * batch_size).padded(witness.padding, length)
    joined = join_tokens(arrivals, witness, likely, length, batch_size, draws)
    wide = likely_places_of(found, length, 2 * batch_size, cut=False).padded(witness.padding, length)
    proven, few = int(joined.proven.sum()), len(wide.token) <= WIDE
    if len(wide.token) > len(likely.token) and proven < (wanted if few else wanted / 2):
        joined = joined.with_more(join_tokens(arrivals, witness, wide, length, batch_size, draws))
    return Joined(joined.ids[:batch_size], joined.proven[:batch_size], joined.far[:batch_size])


def _deciding(groups: list[MapGroup], gradients: Mapping[str, Tensor], rounding: float) -> list[tuple[MapGroup, Span]]:
    """The maps that decide, of those that see single tokens: one as a rule; of adapters, those of its maps that got a gradient."""
    found, reason = [], CannotRead("no trained linear map sees single tokens before they are mixed.")
    for group in groups:
        try:
            found.append((group, _span(group, gradients, rounding)))
        except CannotRead as problem:
            reason = problem
    if not found:
        raise reason
    return found


def _span(group: MapGroup, gradients: Mapping[str, Tensor], rounding: float) -> Span:
    try:
        return span_of(group.gradient(gradients), rounding)
    except CannotRead as problem:
        raise CannotRead(f"{group.name}: {problem}") from problem


def _later(
    groups: list[MapGroup], gradients: Mapping[str, Tensor], batch_size: int, rounding: float
) -> list[tuple[MapGroup, Span]]:
    """The spans of layers behind the first that hold what arrived at all positions."""
    spans: list[tuple[MapGroup, Span]] = []
    reason = "there is no layer behind the first that sees positions together."
    for group in groups:
        try:
            spans.append((group, _span(group, gradients, rounding)))
        except CannotRead as problem:
            reason = str(problem)
    if not spans:
        raise CannotRead(f"tokens are read, sentences are not: {reason}")
    # A map that got nothing back from some positions (queries of a decoder's first) spans less than the others.
    full = max(span.rank for _, span in spans) - batch_size / 2
    return [pair for pair in spans if pair[1].rank >= full]


def _telling(
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


def _looks_back_only(arrivals: Arrivals, group: MapGroup, ids: Tensor) -> bool:
    changed = ids.clone()
    changed[:, -1] = ids[:, -1].roll(1)
    before, after = arrivals.at(group, ids)[:, :-1], arrivals.at(group, changed)[:, :-1]
    return bool((before - after).abs().max() <= 1e-5 * before.abs().max())
