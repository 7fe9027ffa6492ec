import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import integrate, special, stats

from qbi import theory
from qbi.errors import BadValue

# Predicted columns of the paper's synthetic table: (N, B): A, P, R in percent.
PUBLISHED = {
    (200, 20): (64.2, 37.7, 97.8),
    (200, 50): (63.6, 37.2, 77.5),
    (200, 100): (63.4, 37.0, 52.3),
    (200, 200): (63.3, 36.9, 30.9),
    (500, 20): (64.2, 37.7, 100),
    (500, 50): (63.6, 37.2, 97.6),
    (500, 100): (63.4, 37.0, 84.3),
    (500, 200): (63.3, 36.9, 60.3),
    (1000, 20): (64.2, 37.7, 100),
    (1000, 50): (63.6, 37.2, 99.9),
    (1000, 100): (63.4, 37.0, 97.5),
    (1000, 200): (63.3, 36.9, 84.2),
}


@pytest.mark.parametrize(("setting", "published"), PUBLISHED.items())
def test_predicted_columns_agree_to_the_printed_digit(setting, published):
    found = theory.expectation(*setting, 3072)
    ours = (found.active, found.precision, found.recall)
    assert tuple(round(100 * value, 1) for value in ours) == published


def test_asymptotic_bias_is_the_normal_quantile():
    assert theory.optimal_bias(20, 3072) == pytest.approx(stats.norm.ppf(0.05) * math.sqrt(3072), rel=1e-12)
    assert theory.optimal_bias(2, 100) == 0


@pytest.mark.parametrize("batch_size", [3, 20, 200, 10**6])
def test_exact_bias_is_laplace_at_two_features(batch_size):
    # (1 + t²)^(-1) is the characteristic function of the Laplace law.
    assert theory.exact_bias(batch_size, 2) == pytest.approx(math.log(2 / batch_size), rel=1e-11)


@pytest.mark.parametrize("features", [1, 3, 10, 50])
def test_exact_law_agrees_with_the_bessel_density(features):
    order = (features - 1) / 2

    def density(s):
        log = order * math.log(s) - special.gammaln(features / 2) - 0.5 * math.log(math.pi) - order * math.log(2)
        return math.exp(log + math.log(special.kve(order, s)) - s)

    bias = theory.exact_bias(200, features)
    tail, _ = integrate.quad(density, -bias, -bias + 60, epsrel=1e-11, limit=500)
    assert tail == pytest.approx(1 / 200, rel=1e-8)


@pytest.mark.parametrize(("features", "factor"), [(10, 1.54), (50, 1.13), (3072, 1.002)])
def test_asymptotic_bias_fires_too_often_at_small_width(features, factor):
    fires = theory.fire_probability(theory.optimal_bias(200, features), features) * 200
    assert fires == pytest.approx(factor, rel=3e-3)


@pytest.mark.parametrize("features", [1, 2, 7, 100, 3072, 150_528, 10**7])
def test_exact_bias_is_stable_at_every_width(features):
    for batch_size in (2, 3, 20, 200, 10**5):
        bias = theory.exact_bias(batch_size, features)
        assert theory.fire_probability(bias, features) == pytest.approx(1 / batch_size, rel=1e-9)


def test_exact_bias_follows_the_first_correction():
    z = stats.norm.ppf(1 / 200)
    for features in (1000, 100_000):
        corrected = math.sqrt(features) * (z + (z**3 - 3 * z) / (4 * features))
        gap = abs(theory.exact_bias(200, features) - corrected)
        assert gap < 0.02 * abs(theory.optimal_bias(200, features) - corrected)


def test_fire_probability_by_monte_carlo():
    rng = np.random.default_rng(0)
    draws, features, bias = 200_000, 12, -4.0
    z = (rng.standard_normal((draws, features)) * rng.standard_normal((draws, features))).sum(1)
    expected = theory.fire_probability(bias, features)
    error = math.sqrt(expected * (1 - expected) / draws)
    assert abs((z + bias > 0).mean() - expected) < 4 * error


def test_limits_as_the_batch_grows():
    assert theory.expected_active(10**8) == pytest.approx(theory.ACTIVE_LIMIT, abs=1e-7)
    assert theory.expected_precision(10**8) == pytest.approx(theory.UNIQUE_LIMIT, abs=1e-7)


@given(st.integers(2, 500), st.floats(0.001, 0.999))
def test_one_over_b_is_the_best_probability_for_precision(batch_size, probability):
    assert theory.expected_precision(batch_size, probability) <= theory.expected_precision(batch_size) + 1e-12


@given(st.floats(0.01, 0.999), st.integers(2, 300))
def test_neurons_needed_is_the_smallest(recall, batch_size):
    neurons = theory.neurons_needed(recall, batch_size)
    assert theory.expected_recall(neurons, batch_size) >= recall
    assert neurons == 1 or theory.expected_recall(neurons - 1, batch_size) < recall


def test_a_batch_of_one_is_defined_where_it_can_be():
    assert theory.expected_active(1) == theory.expected_precision(1) == theory.expected_recall(5, 1) == 1
    with pytest.raises(BadValue, match="batch size is 1"):
        theory.optimal_bias(1, 10)


@pytest.mark.parametrize(
    "call",
    [
        lambda: theory.optimal_bias(0, 10),
        lambda: theory.exact_bias(20, 0),
        lambda: theory.expected_recall(0, 20),
        lambda: theory.expected_active(20, 1.5),
        lambda: theory.neurons_needed(1.0, 20),
        lambda: theory.neurons_needed(0.5, 20, 0.0),
        lambda: theory.bias_for_probability(0.0, 20),
    ],
)
def test_nonsense_is_refused(call):
    with pytest.raises(BadValue):
        call()
