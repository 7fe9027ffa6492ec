"""Shares of tokens as a quadratic problem, and the maps that speak of whole sequences."""

import torch
from test_reading import LENGTH, VOCABULARY, batch, sent, small

from qbi.sentences.arrivals import Arrivals
from qbi.sentences.joining import join_tokens
from qbi.sentences.pairing import TokenPlaces
from qbi.sentences.relaxing import choices_of, fit_linear, guess_of, onto_simplex
from qbi.sentences.span import span_of
from qbi.sentences.witnesses import find_witness


def test_the_nearest_shares_are_shares_and_none_is_nearer():
    draws = torch.Generator().manual_seed(0)
    values = torch.randn(5, 7, generator=draws)
    nearest = onto_simplex(values)
    assert float(nearest.min()) >= 0
    assert torch.allclose(nearest.sum(1), torch.ones(5))
    others = torch.rand(1000, 7, generator=draws)
    others = others / others.sum(1, keepdim=True)
    far = torch.cdist(values, others).amin(1)
    assert bool(((values - nearest).norm(dim=1) <= far).all())
    assert torch.allclose(onto_simplex(nearest), nearest, atol=1e-6)


def grid():
    """Three positions with two, three and one tokens."""
    places = TokenPlaces(torch.tensor([9, 4, 5, 6, 7, 8]), torch.tensor([2, 0, 0, 1, 1, 1]))
    return choices_of(places, 3)


def test_a_grid_of_choices_keeps_tokens_at_their_places():
    choices = grid()
    assert choices.counts.tolist() == [2, 3, 1]
    assert choices.of(torch.tensor([[1, 2, 0]])).tolist() == [[5, 8, 9]]
    drawn = choices.drawn(50, torch.Generator().manual_seed(0))
    assert bool(torch.gather(choices.open.expand(50, -1, -1), 2, drawn[..., None]).all())


def test_a_sum_is_solved_exactly():
    """Where what is left is a sum over tokens, the one sequence at which it is nothing is found, and the fit finds the sum."""
    choices, draws = grid(), torch.Generator().manual_seed(1)
    slopes = torch.randn(9, 20, generator=draws) * choices.open.flatten()[:, None]
    right = torch.tensor([[1, 0, 0]])
    mean = -(choices.shares(right).flatten(1) @ slopes)[0]
    nothing_shut = torch.zeros(1, 3, 3, dtype=torch.bool)
    even = (choices.open / choices.counts[:, None])[None]
    found = guess_of(mean, slopes).relax(mean[None], choices, nothing_shut, even)
    assert torch.equal(found.argmax(2), right)
    assert float(found.max(2).values.min()) > 0.99
    chosen = choices.drawn(400, draws)
    rests = mean + choices.shares(chosen).flatten(1) @ slopes
    fitted = fit_linear(rests, chosen, choices)
    guessed = fitted.mean + choices.shares(chosen).flatten(1) @ fitted.slopes
    assert float((guessed - rests).norm() / rests.norm()) < 0.05


def witnessed(gradients, size=4):
    arrivals = Arrivals(small(False), lambda ids: (ids,))
    probe = batch(2, seed=5)
    behind = arrivals.groups(probe)[1:]
    draws = torch.Generator().manual_seed(0)
    return arrivals, find_witness(arrivals, behind, gradients, probe, size, span_of, draws)


def test_the_last_layer_speaks_of_the_first_position_only():
    """One vector for each sequence; the batch passes, and a sequence with one other token does not."""
    ids = batch(4)
    arrivals, witness = witnessed(sent(small(False), ids))
    assert witness.places.tolist() == [0]
    assert witness.sequences == 4
    assert bool(witness.rest(arrivals, ids)[1].all())
    wrong = ids.clone()
    wrong[:, 3] = (ids[:, 3] + 1) % VOCABULARY
    assert not bool(witness.rest(arrivals, wrong)[1].any())
    assert not bool(witness.rest(arrivals, ids.roll(1, 1))[1].any())
    assert not bool(witness.rest(arrivals, batch(50, seed=8))[1].any())


def test_a_shuffled_gradient_speaks_of_nothing():
    ids = batch(4)
    gradients = sent(small(False), ids)
    arrivals, witness = witnessed({n: g.roll(1, -1) if g.dim() == 2 else g for n, g in gradients.items()})
    assert not bool(witness.rest(arrivals, ids)[1].any())


def test_tokens_of_this_batch_are_not_joined_by_the_gradient_of_another():
    """The right tokens at the right places, and a gradient that does not know them: no sequence passes."""
    ids = batch(4)
    arrivals, witness = witnessed(sent(small(False), batch(4, seed=9)))
    pairs = TokenPlaces(ids.T.flatten(), torch.arange(LENGTH).repeat_interleave(4))
    joined = join_tokens(arrivals, witness, pairs, LENGTH, 4, torch.Generator().manual_seed(0))
    assert not bool(joined.proven.any())
    arrivals, witness = witnessed(sent(small(False), ids))
    joined = join_tokens(arrivals, witness, pairs, LENGTH, 4, torch.Generator().manual_seed(0))
    assert sorted(joined.ids.tolist()) == sorted(ids.tolist())
    assert bool(joined.proven.all())
