"""Bounds that hold against every server: closed forms against simulations, each of which would show a bound that is 10 % wrong."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize

from qbi.errors import BadValue
from qbi.theory import guarantees as g
from qbi.theory.guarantees import Prior

RNG = np.random.default_rng(0)
SPECTRUM = tuple((4.0 / (1 + np.arange(40)) ** 1.5).tolist())


def test_capacity_is_that_of_the_gaussian_channel():
    """Power 1 spread evenly over P values with noise σ each: ½·log₂(1 + SNR) a value, measured from samples of the channel."""
    noise, values, count = 0.4, 50, 200_000
    signal = RNG.normal(size=count) / math.sqrt(values)
    received = signal + noise * RNG.normal(size=count)
    correlation = np.corrcoef(signal, received)[0, 1]
    measured = values * -0.5 * math.log2(1 - correlation**2)
    assert measured == pytest.approx(g.bits(noise, 1, values), rel=0.03)
    assert g.bits(noise, 1, values) < g.bits(noise) == pytest.approx(g.bits(noise, 1, 10**9), rel=1e-6)
    assert g.bits(0.1) == pytest.approx(72.13, abs=0.01)
    assert g.bits(0.1, 16) == pytest.approx(16 * g.bits(0.1))
    assert g.bits(0.0) == math.inf


@given(st.floats(0.02, 20), st.integers(1, 500))
@settings(max_examples=50, deadline=None)
def test_every_goal_gives_back_its_noise(noise, times):
    assert g.noise_for_bits(g.bits(noise, times), times) == pytest.approx(noise)
    chance = g.reconstruction(0.01, noise, times)
    if chance < 1 - 1e-9:
        assert g.noise_for_reconstruction(chance, 0.01, times) == pytest.approx(noise, rel=1e-4)
    spent = g.epsilon(1e-5, noise, times)
    if 0.01 < spent < 1e4:
        assert g.noise_for_epsilon(spent, 1e-5, times) == pytest.approx(noise, rel=1e-4)


@pytest.mark.parametrize("noise", [0.5, 1.0, 3.0])
def test_the_best_test_reaches_the_chance_of_a_reconstruction(noise):
    """With and without the sample, answers are Gaussians μ apart: the best decision of false-alarm rate κ is a threshold."""
    chance, count = 0.05, 400_000
    without, with_sample = RNG.normal(size=count), RNG.normal(size=count) + 1 / noise
    measured = float((with_sample > np.quantile(without, 1 - chance)).mean())
    assert measured == pytest.approx(g.reconstruction(chance, noise), rel=0.03)


def test_no_decoder_of_a_uniform_choice_exceeds_it():
    """One of n directions is sent; the maximum-likelihood reader names it less often than the bound, and not by much less."""
    choices, noise, count = 100, 0.4, 20_000
    received = RNG.normal(size=(count, choices))
    received[:, 0] += 1 / noise
    measured = float((received.argmax(1) == 0).mean())
    bound = g.reconstruction(1 / choices, noise)
    assert 0.8 * bound < measured < bound


def test_epsilon_is_opacus_own_within_its_slack():
    from opacus.accountants import PRVAccountant, RDPAccountant

    for noise, times in [(1.0, 1), (2.0, 10), (0.7, 5)]:
        rdp, prv = RDPAccountant(), PRVAccountant()
        rdp.history = prv.history = [(noise, 1.0, times)]
        ours = g.epsilon(1e-5, noise, times)
        assert ours <= float(rdp.get_epsilon(1e-5))
        assert ours == pytest.approx(float(prv.get_epsilon(1e-5)), rel=0.03)
    assert g.delta(g.epsilon(1e-6, 1.3), 1.3) == pytest.approx(1e-6)
    assert g.epsilon(0.5, 10.0) == 0


def test_van_trees_is_reached_by_the_linear_reader():
    """Gaussian samples, sent through the best linear map with power one, read by the Wiener filter: the error is the bound."""
    prior, noise, count = Prior(SPECTRUM, 4.0), 0.2, 20_000
    variances = np.asarray(SPECTRUM)
    bound = g.linear_error(prior, noise)
    level = _level(variances, noise)
    power = noise**2 * np.maximum(np.sqrt(variances) / level - 1, 0)
    assert power.sum() == pytest.approx(1)
    samples = RNG.normal(size=(count, len(variances))) * np.sqrt(variances)
    gains = np.sqrt(power / variances)
    received = samples * gains + noise * RNG.normal(size=samples.shape)
    read = received * gains * variances / (gains**2 * variances + noise**2)
    measured = float(((read - samples) ** 2).mean())
    assert measured == pytest.approx(bound, rel=0.02)
    # Any other way to spend the power does worse.
    for other in (np.full(40, 1 / 40), np.eye(40)[0]):
        assert (variances / (1 + other / noise**2)).mean() > bound


def _level(variances, noise):
    roots = np.sqrt(np.sort(variances)[::-1])
    levels = np.cumsum(roots) / (1 / noise**2 + np.arange(1, len(roots) + 1))
    return levels[(roots > levels).sum() - 1]


def _bits_for(error):
    level = optimize.brentq(lambda water: np.minimum(SPECTRUM, water).mean() - error, 0, max(SPECTRUM), xtol=1e-300)
    return 0.5 * np.log2(np.maximum(np.asarray(SPECTRUM) / level, 1)).sum()


def test_rate_and_distortion():
    """With one variance, D = λ·2^(−2R/M); over all spectra the linear server stays on the right side of the bound."""
    flat = Prior((2.0,) * 8, 1.0)
    assert g.smallest_error(flat, 16) == pytest.approx(2 * 2 ** (-2 * 16 / 8))
    prior = Prior(SPECTRUM, 4.0)
    for noise in (0.05, 0.2, 1.0, 5.0):
        assert g.smallest_error(prior, g.bits(noise)) < g.linear_error(prior, noise)
        # The other way round: the level at which components of these variances have that error takes as many bits.
        assert _bits_for(g.smallest_error(prior, g.bits(noise))) == pytest.approx(g.bits(noise))
    # A quantiser with that many bits cannot beat it either: one bit for the sign of one value.
    values = RNG.normal(size=200_000)
    one_bit = float(((np.sign(values) * math.sqrt(2 / math.pi) - values) ** 2).mean())
    assert g.smallest_error(Prior((1.0,), 1.0), 1.0) < one_bit < 1.6 * g.smallest_error(Prior((1.0,), 1.0), 1.0)


@pytest.mark.long
def test_the_prior_of_real_images_predicts_what_was_measured(cifar):
    """σ = 0.1: 17.1 dB by the Wiener filter on CIFAR-10, before it was measured; 19.1 dB at most were these images Gaussian."""
    prior = Prior.of(cifar.pixels.double().flatten(1).numpy() / (255 if cifar.pixels.dtype == torch.uint8 else 1), 1.0)
    assert prior.psnr(g.linear_error(prior, 0.1)) == pytest.approx(17.1, abs=0.1)
    assert g.largest_psnr(prior, 0.1) == pytest.approx(19.1, abs=0.2)
    assert prior.psnr(float(np.mean(prior.variances))) == pytest.approx(12.1, abs=0.3)


def test_the_chance_of_a_guess_is_never_better_known_than_the_samples_allow():
    assert g.most_likely_guess(0, 1000) == pytest.approx(3 / 1000, rel=0.02)
    assert g.most_likely_guess(5, 5) == 1
    hits = RNG.binomial(200, 0.03, size=2000)
    covered = np.mean([g.most_likely_guess(int(h), 200) >= 0.03 for h in hits])
    assert covered >= 0.94


@pytest.mark.parametrize(
    "call",
    [
        lambda: g.bits(-1.0),
        lambda: g.noise_for_bits(0.0),
        lambda: g.reconstruction(1.5, 1.0),
        lambda: g.noise_for_reconstruction(0.01, 0.5),
        lambda: g.epsilon(0.0, 1.0),
        lambda: Prior.of(np.zeros((1, 4))),
        lambda: g.most_likely_guess(3, 2),
    ],
)
def test_senseless_values_get_a_sentence(call):
    with pytest.raises(BadValue, match="guarantees: "):
        call()
