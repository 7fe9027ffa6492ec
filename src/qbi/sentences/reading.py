"""Sentences out of the gradient of an honest transformer: tokens by the first layer's span, sequences by a later one's."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from qbi.errors import CannotRead
from qbi.sentences.arrivals import Arrivals, Feed, MapGroup
from qbi.sentences.candidates import Found, check_positions_alone, likely_places, tokens_allowed
from qbi.sentences.joining import join_tokens
from qbi.sentences.pairing import backprops_of, likely_places_of
from qbi.sentences.prefixes import PrefixSearch
from qbi.sentences.span import ROUNDING, Span, span_of

LATER = 6
"""Groups of maps behind the first that are looked at."""

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
        seed: of random directions.
        rounding: the relative error of what was sent.

    Raises CannotRead where the gradient does not decide: its span is everything, or values are dropped at random before it.
    """
    started = time.perf_counter()
    arrivals = Arrivals(model, feed or (lambda ids: (ids,)))
    device = next(iter(gradients.values())).device
    draws = torch.Generator().manual_seed(seed)
    probe = torch.randint(vocabulary, (2 if length != 2 else 3, length), generator=draws).to(device)
    groups = [g for g in arrivals.groups(probe) if all(w in gradients for w in g.weights)]
    if not groups:
        raise CannotRead("no trained linear map sees the positions of this model one by one.")
    first, span = _first(arrivals, groups, gradients, probe, rounding)
    allowed = tokens_allowed(arrivals, first, span, vocabulary, length, draws)
    tokens = allowed.any(1).nonzero()[:, 0]
    nothing = ReadSentences((), (), (), (first.name,), span.rank, span.width, False, time.perf_counter() - started)
    if not len(tokens):
        return nothing
    second, later = _later(arrivals, groups[groups.index(first) + 1 :], first, gradients, tokens, length, batch_size, rounding)
    found = Found(tokens, allowed[tokens], likely_places(arrivals, second, later, tokens, length))
    causal = _looks_back_only(arrivals, second, probe)
    if causal:
        places = likely_places_of(found, length, batch_size)
        rows = first.gradient(gradients)
        backs = backprops_of(arrivals, first, places, rows[: len(rows) // (3 if len(first.weights) == 1 else 1)], length)
        ids = PrefixSearch(arrivals, second, later, found, places, backs).grow(length, batch_size)
        sequences, proven = [tuple(row.tolist()) for row in ids], [True] * len(ids)
    else:
        joined = join_tokens(arrivals, (first, second), later, found, gradients, length, batch_size)
        sequences, proven = [tuple(row.tolist()) for row in joined.ids], joined.proven.tolist()
    return ReadSentences(
        tuple(sequences),
        tuple(proven),
        tuple(tokens.tolist()),
        (first.name, second.name),
        span.rank,
        span.width,
        causal,
        time.perf_counter() - started,
    )


def _first(
    arrivals: Arrivals, groups: list[MapGroup], gradients: Mapping[str, Tensor], probe: Tensor, rounding: float
) -> tuple[MapGroup, Span]:
    """The first maps that decide, of those whose inputs depend on single tokens: of adapters, whichever of the two maps got a gradient."""
    reason: CannotRead | None = None
    for group in groups[:LATER]:
        try:
            check_positions_alone(arrivals, group, probe)
            return group, _span(group, gradients, rounding)
        except CannotRead as problem:
            reason = reason or problem
    assert reason is not None
    raise reason


def _span(group: MapGroup, gradients: Mapping[str, Tensor], rounding: float) -> Span:
    try:
        return span_of(group.gradient(gradients), rounding)
    except CannotRead as problem:
        raise CannotRead(f"{group.name}: {problem}") from problem


def _later(
    arrivals: Arrivals,
    groups: list[MapGroup],
    first: MapGroup,
    gradients: Mapping[str, Tensor],
    tokens: Tensor,
    length: int,
    batch_size: int,
    rounding: float,
) -> tuple[MapGroup, Span]:
    """Of the layers behind the first, the one whose span tells tokens at their places best from tokens elsewhere.

    What arrives directly behind an attention is nearly a sum of what a token and its place give, and sums of known parts lie in the span
    whatever they belong to; behind a layer that bends, they do not.
    """
    rows = torch.arange(min(ROWS, len(tokens)), device=tokens.device)
    steps = torch.arange(length, device=tokens.device)
    ids = tokens[(rows[:, None] * max(1, len(tokens) // len(rows)) + 7 * steps[None]) % len(tokens)]
    share = min(0.5, 0.5 * batch_size / len(tokens))
    best: tuple[float, MapGroup, Span] | None = None
    reason = "there is no layer behind the first that sees positions together."
    for group in groups[:LATER]:
        if group.width > 2 * first.width:
            continue
        try:
            span = _span(group, gradients, rounding)
        except CannotRead as problem:
            reason = str(problem)
            continue
        # The first positions of a decoder have next to no context, and are exact in every layer.
        far = span.distances(arrivals.at(group, ids)[:, length // 4 :]).flatten()
        contrast = float(far.median() / far.quantile(share).clamp_min(1e-12))
        if best is None or contrast > best[0]:
            best = contrast, group, span
    if best is None:
        raise CannotRead(f"tokens are read, sentences are not: {reason}")
    return best[1], best[2]


def _looks_back_only(arrivals: Arrivals, group: MapGroup, ids: Tensor) -> bool:
    changed = ids.clone()
    changed[:, -1] = ids[:, -1].roll(1)
    before, after = arrivals.at(group, ids)[:, :-1], arrivals.at(group, changed)[:, :-1]
    return bool((before - after).abs().max() <= 1e-5 * before.abs().max())
