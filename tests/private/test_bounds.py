"""Every attack of the registry against the private step: what it measures lies under what is promised, and without noise it does not."""

import functools

import pytest
import torch

from qbi.attacks.best_case import BestCase
from qbi.attacks.input_range import InputRange
from qbi.attacks.registry import ATTACKS
from qbi.carrier import flat
from qbi.data.images import denormalised, normalised, unit_pixels
from qbi.data.photos import synthetic_photos
from qbi.lab.compare.judging import CLASSES, Setting, _mounted, _united
from qbi.private.defence import PrivateStep
from qbi.private.goal import LIFETIME_BITS, Budget
from qbi.randomness import generator
from qbi.theory import guarantees
from qbi.theory.guarantees import Prior, most_likely_guess

BATCH, ROWS, SIDE = 8, 120, 16


@functools.cache
def photos():
    return synthetic_photos(900, SIDE, seed=0)


@functools.cache
def prior():
    return Prior.of(flat(unit_pixels(photos(), slice(100, 900))).double().numpy(), 1.0)


def errors(candidates, truth):
    """Mean squared error of the best candidate for each sample: the choice is the test's, and worth log₂ of their number."""
    candidates = torch.cat([candidates.float(), flat(truth).mean(0, keepdim=True)]).clamp(0, 1).nan_to_num(0.5)
    return torch.cdist(flat(truth).double(), candidates.double()).square().amin(1) / truth[0].numel()


def attacked(key, budget, rounds):
    """What a server reads over rounds on the same batch: errors, and the number of its candidates."""
    data, attack, chosen = photos(), ATTACKS[key], torch.arange(BATCH)
    feed = unit_pixels if attack.domain is InputRange.UNIT else normalised
    x, y = feed(data, chosen), data.labels[chosen] % CLASSES
    sent = _mounted(attack, x, flat(feed(data, torch.arange(100, 400))), Setting(neurons=ROWS), (key, "bounds"))
    draws = generator(0, "bounds", key, rounds)
    step = PrivateStep(budget)
    updates = [step.update(sent.model, x, y, draws) for _ in range(rounds)]
    found = sent.read(_united(updates)).samples
    pixels = found if attack.domain is InputRange.UNIT else flat(denormalised(data, found))
    return errors(pixels, unit_pixels(data, chosen)), len(found) + 1


def is_within(read, budget, rounds):
    found, count = read
    """Whether what was measured could have been read under the budget: on average, and at 19 dB."""
    allowed = budget.bits(rounds) + torch.tensor(float(count)).log2().item()
    near = float((found <= 10 ** (-1.9)).double().mean())
    truth = flat(unit_pixels(photos(), slice(0, 100)))
    guessed = flat(unit_pixels(photos(), slice(100, 100 + count)))
    by_guess = torch.cdist(truth.double(), guessed.double()).square().amin(1) / truth.shape[1] <= 10 ** (-1.9)
    chance = most_likely_guess(int(by_guess.sum()), len(by_guess))
    most = guarantees.reconstruction(chance, budget.noise, rounds) if budget.noise else 1.0
    # Eight samples: three standard errors beside the bound.
    slack = 3 * (most * (1 - most) / len(found)) ** 0.5
    return float(found.mean()) >= guarantees.smallest_error(prior(), allowed) and near <= most + slack


@pytest.mark.parametrize("key", ATTACKS)
def test_no_attack_reads_more_than_was_promised(key):
    for bits, rounds in ((72, 1), (8, 16), (0.7, 1), (0.7, 16)):
        budget = Budget.for_goal(bits=bits)
        found, count = attacked(key, budget, rounds)
        assert is_within((found, count), budget, rounds), (bits, rounds)


def test_without_the_noise_the_same_test_fails():
    """The noise left out, clipping, the grid and the promise kept: attacks that read are then above the bound, so the test above can fail."""
    promised = Budget.for_goal(bits=8)
    broken = Budget(0.0)
    outside = [key for key in ATTACKS if not is_within(attacked(key, broken, 1), promised, 1)]
    assert {"passive", "cascade", "qbi", "measured", "pairs", "trap-weights", "imprint", "mirrored"} <= set(outside)


@pytest.mark.long
def test_the_best_case_lies_between_real_servers_and_the_bound(cifar):
    """One sample alone, everything else known, tuned on other images: near the linear bound, never beyond it or the bits'."""
    values = flat(unit_pixels(cifar, slice(None)))
    others, held_out = values[:5000], values[5000:5600]
    server, known = BestCase.knowing(others), Prior.of(others.double().numpy(), 1.0)
    guess = (server.mean - held_out).square().mean(1) <= 10 ** (-1.9)
    chance = most_likely_guess(int(guess.sum()), len(guess))
    for noise, rounds in ((0.03, 1), (0.1, 1), (0.1, 16), (0.3, 1), (1.0, 1), (1.0, 16)):
        error = (server.read(held_out, noise, generator(0), rounds) - held_out).square().mean(1)
        measured = known.psnr(float(error.mean()))
        assert measured < guarantees.largest_psnr(known, noise, rounds)
        assert measured < known.psnr(guarantees.linear_error(known, noise, rounds)) + 0.1
        assert measured > known.psnr(guarantees.linear_error(known, noise, rounds)) - 2.0
        assert float((error <= 10 ** (-1.9)).double().mean()) <= guarantees.reconstruction(chance, noise, rounds)
    # Ended by default: exact and 30 dB, over everything a ledger lets out.
    error = (server.read(held_out, guarantees.noise_for_bits(LIFETIME_BITS), generator(1)) - held_out).square().mean(1)
    assert float((error <= 1e-3).double().mean()) < 0.01
