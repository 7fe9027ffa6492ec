"""Gram-space layers and real weights leak alike, in distribution, on real data; a wrong law is noticed."""

import pytest
import torch
from scipy import stats

from qbi.attacks import PAIRS, QBI, TrapWeights
from qbi.attacks.in_gram_space import AuxiliaryGroup, pairs_firing, qbi_firing, trap_weights_firing
from qbi.benchmarks.pairs import naive_pairs
from qbi.benchmarks.timing import Shape
from qbi.data.images import normalised, unit_pixels
from qbi.gram import gram
from qbi.metrics import leakage
from qbi.randomness import generator

REJECT = 1e-4
"""Chance of a false alarm per comparison."""


def differ(first, second):
    """The smallest p-value over A, P and R of two sets of layers, by a two-sample t-test on raw values."""
    columns = zip(*[(f.active, f.precision, f.recall) for f in first], strict=True)
    others = zip(*[(f.active, f.precision, f.recall) for f in second], strict=True)
    return min(float(stats.ttest_ind(a, b).pvalue) for a, b in zip(columns, others, strict=True))


def direct(attack, x, neurons, layers, seed):
    found = []
    for layer in range(layers):
        rows = attack.rows(neurons, x.shape[1], generator(0, seed, layer))
        found.append(leakage(rows.weight @ x.T + rows.bias[:, None] > 0))
    return found


def test_qbi_in_law(cifar):
    x, neurons, layers = normalised(cifar, slice(0, 50)).flatten(1), 200, 300
    real = direct(QBI(50), x, neurons, layers, "real")
    bias, matrix = QBI(50).bias(x.shape[1]), gram(x)
    drawn = [leakage(qbi_firing(matrix, bias, neurons, generator(1, i))) for i in range(layers)]
    assert differ(real, drawn) > REJECT
    # The same test on a law without correlation, and on one without the spread of norms, must fail.
    uncorrelated = torch.diag(matrix.diagonal())
    wrong = [leakage(qbi_firing(uncorrelated, bias, neurons, generator(2, i))) for i in range(layers)]
    assert differ(real, wrong) < REJECT
    norms = matrix.diagonal().sqrt()
    equal = matrix / torch.outer(norms, norms) * x.shape[1]
    wrong = [leakage(qbi_firing(equal, bias, neurons, generator(3, i))) for i in range(layers)]
    assert differ(real, wrong) < REJECT


def test_qbi_in_law_on_imagenet(imagenet):
    x, neurons, layers = normalised(imagenet, slice(0, 60)).flatten(1), 100, 40
    real = direct(QBI(60), x, neurons, layers, "imagenet")
    bias, matrix = QBI(60).bias(x.shape[1]), gram(x)
    drawn = [leakage(qbi_firing(matrix, bias, neurons, generator(4, i))) for i in range(400)]
    assert differ(real, drawn) > REJECT


@pytest.fixture(scope="module")
def pairs_setting(cifar):
    neurons, batch_size = 60, 25
    auxiliary = normalised(cifar, slice(100, 160)).flatten(1)
    test = normalised(cifar, slice(0, 25)).flatten(1)
    return neurons, batch_size, auxiliary, test


def test_pairs_in_law(pairs_setting):
    neurons, batch_size, auxiliary, test = pairs_setting
    attack = PAIRS(batch_size, auxiliary)
    real = direct(attack, test, neurons, 120, "pairs")
    bias = QBI(batch_size).bias(test.shape[1])
    groups = [
        AuxiliaryGroup(gram(auxiliary[s : s + batch_size]), gram(test, auxiliary[s : s + batch_size]))
        for s in range(0, neurons, batch_size)
    ]
    budget = attack.budget_factor * batch_size * neurons
    drawn = [
        leakage(
            pairs_firing(gram(test), groups, bias, budget=budget, patience=attack.patience, generator=generator(5, i))
        )
        for i in range(120)
    ]
    assert differ(real, drawn) > REJECT
    plain = [leakage(qbi_firing(gram(test), bias, neurons, generator(6, i))) for i in range(120)]
    assert differ(real, plain) < REJECT


def test_pairs_against_the_algorithm_to_the_letter(pairs_setting):
    neurons, batch_size, auxiliary, test = pairs_setting
    attack = PAIRS(batch_size, auxiliary, patience=300)
    real = direct(attack, test, neurons, 40, "ours")
    bias = QBI(batch_size).bias(test.shape[1])
    shape, naive = Shape("test", neurons, batch_size, test.shape[1]), []
    torch.manual_seed(0)
    for _ in range(40):
        weight = torch.randn(neurons, test.shape[1])
        naive_pairs(weight, auxiliary, shape, bias, attack)
        naive.append(leakage(weight @ test.T > -bias))
    assert differ(real, naive) > REJECT


@pytest.mark.parametrize("scale", [0.97, 0.99])
def test_trap_weights_in_law(cifar, scale):
    x, neurons, layers = unit_pixels(cifar, slice(0, 30)).flatten(1), 100, 150
    real = direct(TrapWeights(scale), x, neurons, layers, "trap")
    drawn = [
        leakage(trap_weights_firing(gram(x), x.double().sum(1), x.shape[1], scale, neurons, generator(7, i)))
        for i in range(layers)
    ]
    assert differ(real, drawn) > REJECT
    other = [
        leakage(trap_weights_firing(gram(x), x.double().sum(1), x.shape[1], scale - 0.01, neurons, generator(8, i)))
        for i in range(layers)
    ]
    assert differ(real, other) < REJECT
