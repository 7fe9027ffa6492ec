"""Sequences of a model that looks both ways: what stands outside a span is nearly a sum over tokens, so tokens are solved for together."""

from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor

from qbi.errors import CannotRead
from qbi.sentences.arrivals import Arrivals
from qbi.sentences.candidates import Found
from qbi.sentences.pairing import TokenPlaces, likely_places_of
from qbi.sentences.relaxing import Choices, LinearGuess, choices_of, fit_linear, guess_of
from qbi.sentences.witnesses import Witness

DRAWN = 1.5
"""Random sequences that are run for every token at a place."""

ROUNDS, SEEDINGS = 6, 8
"""Rounds in which a sequence is solved for again from where it stands, and sets of tokens that sequences are started from."""

MENDED, SWEEPS, RUN = 8, 3, 4096
"""Sequences that are mended at last, each by running all its neighbours in some sweeps; and sequences that may be run for it."""


WIDE = 1024
"""Tokens at places up to which unlikely ones are taken in where a sequence is missing; beyond, where more than half of them are."""


@dataclass(frozen=True)
class Joined:
    """Sequences, and which of them lie in the span of a later layer."""

    ids: Int[Tensor, "k t"]
    proven: Tensor
    far: Float[Tensor, " k"] = field(repr=False)

    def with_more(self, other: "Joined") -> "Joined":
        """Each sequence once, proven ones first, then those nearest to the span."""
        ids, proven = torch.cat([self.ids, other.ids]), torch.cat([self.proven, other.proven])
        far = torch.cat([self.far, other.far])
        order = (far + 10.0 * ~proven).argsort()
        kept = dict.fromkeys(map(tuple, ids[order].tolist()))
        first = {row: index for index, row in reversed(list(enumerate(map(tuple, ids.tolist()))))}
        chosen = torch.tensor([first[row] for row in kept], dtype=torch.long, device=ids.device)
        return Joined(ids[chosen], proven[chosen], far[chosen])


def join_tokens(
    arrivals: Arrivals, witness: Witness, pairs: TokenPlaces, positions: int, batch_size: int, draws: torch.Generator
) -> Joined:
    """Whole sequences; those that are proven first, as many as the batch has.

    With r(s) the part of a sequence's vector outside the span, and r(s) ≈ r̄ + Σ_t φ(token, t), the sequences of the batch are those with
    r = 0. Sums of whole sequences have r ≈ 0 too, so one token is given, which stands in one sequence of the batch as a rule; the others are
    solved for as shares, and the likeliest of each position are taken. r is then computed for that sequence, and the rest solved again from
    there: the sum has to be right for what changes only.
    """
    choices = choices_of(pairs, positions)
    if not bool(choices.open.any(1).all()):
        raise CannotRead("at some position no token of the vocabulary lies in the span.")
    guess = fit_linear(*_tried(arrivals, witness, choices, round(DRAWN * len(pairs.token)), draws), choices)
    wanted = min(batch_size, witness.sequences or batch_size)
    found = Joined(choices.tokens.new_empty(0, positions), choices.open.new_empty(0), guess.mean.new_empty(0))
    seeded = torch.zeros_like(choices.open)
    # Many sequences have ended at a position: that one has says nothing of which it is.
    told = choices.open if witness.padding is None else choices.open & (choices.tokens != witness.padding)
    for _ in range(SEEDINGS):
        used = told & (found.ids[found.proven].T[:, None, :] == choices.tokens[:, :, None]).any(2)
        spare = told & ~used
        place, slots = _seeds(spare & ~seeded)
        if not len(slots):
            break
        seeded[place, slots] = True
        # Tokens of proven sequences are left out at first, where others are left.
        found = found.with_more(
            _solved(arrivals, witness, choices, guess, place, slots, used & spare.any(1, keepdim=True))
        )
        if int(found.proven.sum()) >= wanted:
            break
    missing = wanted - int(found.proven.sum())
    if missing > 0:
        nearest = found.ids[~found.proven][: min(missing, MENDED, RUN // (SWEEPS * len(pairs.token)))]
        for row in nearest:
            found = found.with_more(_mended(arrivals, witness, choices, row))
    return Joined(found.ids[:batch_size], found.proven[:batch_size], found.far[:batch_size])


def join_likely(
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


def _tried(
    arrivals: Arrivals, witness: Witness, choices: Choices, rows: int, draws: torch.Generator
) -> tuple[Tensor, Tensor]:
    """What random sequences leave outside the span, and their choices."""
    chosen = choices.drawn(rows, draws)
    return witness.rest(arrivals, choices.of(chosen))[0], chosen


def _seeds(spare: Tensor) -> tuple[int, Int[Tensor, " s"]]:
    """The position with most tokens that are left, and these tokens."""
    place = int(spare.sum(1).argmax())
    return place, spare[place].nonzero()[:, 0]


def _solved(
    arrivals: Arrivals,
    witness: Witness,
    choices: Choices,
    guess: LinearGuess,
    place: int,
    slots: Int[Tensor, " s"],
    shut: Tensor,
) -> Joined:
    """A sequence for each of some tokens at a place; some tokens are shut out at first."""
    closed = torch.zeros(len(slots), *choices.open.shape, dtype=torch.bool, device=slots.device)
    closed[:, place] = True
    closed[torch.arange(len(slots), device=slots.device), place, slots] = False
    even = (choices.open / choices.counts[:, None]).expand(len(slots), -1, -1)
    shares = guess.relax(guess.mean.expand(len(slots), -1), choices, closed | shut, even)
    joined: Joined | None = None
    for _ in range(ROUNDS):
        chosen = shares.argmax(2)
        ids = choices.of(chosen)
        rest, proven, far = witness.rest(arrivals, ids)
        now = Joined(ids, proven, far)
        joined = now if joined is None else joined.with_more(now)
        left = ~proven
        if not bool(left.any()):
            break
        closed, start = closed[left], choices.shares(chosen[left])
        shares = guess.relax(rest[left] - start.flatten(1) @ guess.slopes, choices, closed, start)
    assert joined is not None
    return joined


def _mended(arrivals: Arrivals, witness: Witness, choices: Choices, row: Int[Tensor, " t"]) -> Joined:
    """From a sequence that fails, by what each change of one token does to it: all together as shares, or the best of them alone."""
    place, slot = choices.open.nonzero().T
    numbers = torch.arange(len(place), device=row.device)
    steps = []
    for _ in range(SWEEPS):
        changed = row.repeat(len(place), 1)
        changed[numbers, place] = choices.tokens[place, slot]
        rests, proven, far = witness.rest(arrivals, torch.cat([changed, row[None]]))
        steps.append(Joined(changed[[best := int(far[:-1].argmin())]], proven[[best]], far[[best]]))
        if bool(steps[-1].proven):
            break
        slopes = rests.new_zeros(choices.open.numel(), rests.shape[1])
        slopes[place * choices.open.shape[1] + slot] = rests[:-1] - rests[-1]
        chosen = ((choices.tokens == row[:, None]) & choices.open).int().argmax(1)[None]
        start = choices.shares(chosen)
        shares = guess_of(rests[-1], slopes).relax(
            rests[-1:] - start.flatten(1) @ slopes, choices, torch.zeros_like(start, dtype=torch.bool), start
        )
        ids = choices.of(shares.argmax(2))
        _, passed, left = witness.rest(arrivals, ids)
        steps.append(Joined(ids, passed, left))
        nearer = min(steps[-2:], key=lambda step: float(step.far))
        if bool(passed) or torch.equal(nearer.ids[0], row):
            break
        row = nearer.ids[0]
    for step in steps[1:]:
        steps[0] = steps[0].with_more(step)
    return steps[0]
