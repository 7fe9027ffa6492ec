"""Sentences out of the gradient of an honest transformer: tokens by the first layer's span, sequences by a later one's."""

import time
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from qbi.errors import CannotRead
from qbi.sentences.arrivals import Arrivals, Feed, MapGroup
from qbi.sentences.batch import ReadSentences, SentBatch
from qbi.sentences.candidates import Found, likely_places, sees_single_tokens, tokens_allowed
from qbi.sentences.pairing import telling_layer
from qbi.sentences.prefixes import PrefixSearch
from qbi.sentences.rough import read_roughly
from qbi.sentences.span import ROUNDING, Span, span_of
from qbi.sentences.witnesses import find_witness, witness_of

LATER = 12
"""Groups of maps that are looked at, in the order of a pass."""

EARLY = 4
"""Of a decoder, those behind the first attention that are looked at: a later one would only take longer."""


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
    draws = torch.Generator().manual_seed(seed)
    probe = torch.randint(vocabulary, (2 if length != 2 else 3, length), generator=draws)
    probe = probe.to(next(iter(gradients.values())).device)
    if padding is not None:
        probe[probe == padding] = (padding + 1) % vocabulary
    groups = [g for g in arrivals.groups(probe) if all(w in gradients for w in g.weights)]
    if not groups:
        raise CannotRead("no trained linear map sees the positions of this model one by one.")
    alone = [sees_single_tokens(arrivals, group, probe) for group in groups[:LATER]]
    singles = [g for g, own in zip(groups, alone, strict=False) if own]
    mixing = [g for g, own in zip(groups, alone, strict=False) if not own]
    batch = SentBatch(
        arrivals,
        gradients,
        singles,
        mixing,
        [*mixing, *groups[LATER:]],
        probe,
        vocabulary,
        batch_size,
        padding,
        rounding,
        draws,
    )
    try:
        read = _read_exactly(batch)
    except CannotRead as problem:
        try:
            read = read_roughly(batch)
        except CannotRead:
            raise problem from None
    return replace(read, seconds=time.perf_counter() - started)


def _read_exactly(batch: SentBatch) -> ReadSentences:
    """By tests that hold to rounding."""
    arrivals, gradients, length, draws = batch.arrivals, batch.gradients, batch.length, batch.draws
    firsts = _deciding(batch.singles, gradients, batch.rounding)
    first, span = max(firsts, key=lambda pair: pair[1].rank)
    allowed = tokens_allowed(arrivals, *firsts[0], batch.vocabulary, length, draws)
    for group, own in firsts[1:]:
        allowed |= tokens_allowed(arrivals, group, own, batch.vocabulary, length, draws)
    tokens = allowed.any(1).nonzero()[:, 0]
    if not len(tokens):
        return ReadSentences((), (), (), (first.name,), span.rank, span.width, False, 0.0)
    if len(tokens) > batch.batch_size * length:
        raise CannotRead(
            f"{first.name}: more tokens lie in its gradient's span than a batch can have; nothing can be told by it."
        )
    spans = _later(batch.mixing[: EARLY if batch.causal else None], gradients, batch.batch_size, batch.rounding)
    if batch.causal:
        # Behind a layer that bends, and with most room outside the span.
        second, later = max(spans, key=lambda pair: pair[1].width - pair[1].rank)
        search = PrefixSearch(arrivals, second, later, tokens, allowed[tokens], draws)
        sequences = [tuple(row.tolist()) for row in search.grow(length, batch.batch_size)]
        # Where lengths differ, a sequence ends where nothing continues it.
        proven = [batch.padding is not None or len(row) == len(sequences[0]) for row in sequences]
        used: tuple[str, ...] = (first.name, second.name)
    else:
        second, later = telling_layer(arrivals, spans, tokens, length, batch.batch_size)
        likely = likely_places(arrivals, second, later, tokens, length, draws)
        found = Found(tokens, allowed[tokens], likely, span.rank)
        witness = find_witness(
            arrivals,
            batch.behind,
            gradients,
            batch.probe,
            batch.batch_size,
            lambda g: span_of(g, batch.rounding),
            draws,
        )
        joined = batch.joined(
            witness or witness_of(second, later, torch.arange(length, device=tokens.device), draws), found
        )
        sequences, proven = [tuple(row) for row in joined.ids.tolist()], joined.proven.tolist()
        named = (first.name, second.name, *([witness.group.name] if witness else []))
        used = tuple(dict.fromkeys(named))
    return ReadSentences(
        tuple(sequences), tuple(proven), tuple(tokens.tolist()), used, span.rank, span.width, batch.causal, 0.0
    )


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
