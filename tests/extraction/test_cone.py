"""Samples by the zeros of a layer's inputs: what comes out is a sample, whatever the layer's own rectifier does; what is not rectified gives nothing."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from qbi.attacks import Passive, Reading, mount
from qbi.data.images import normalised
from qbi.extraction.cone import corners
from qbi.federation import client_step
from qbi.lab.networks import Quickstart
from qbi.metrics import FAITHFUL, match
from qbi.randomness import generator


def mixture(count, width, zeros, seed, kind=torch.float64):
    draws = generator(seed, "mixture")
    samples = torch.rand(count, width, generator=draws, dtype=torch.float64)
    samples *= torch.rand(count, width, generator=draws) > zeros
    mixed = torch.randn(count, count, generator=draws, dtype=torch.float64) @ samples
    return samples, mixed.to(kind)


@pytest.mark.parametrize(
    ("count", "width", "zeros", "fewest"), [(4, 60, 0.4, 4), (12, 200, 0.35, 12), (24, 400, 0.5, 1), (40, 300, 0.3, 0)]
)
def test_corners_are_samples(count, width, zeros, fewest):
    """Of many samples with independent zeros few are found; what is found is one."""
    samples, mixed = mixture(count, width, zeros, seed=1, kind=torch.float32)
    found = corners(mixed, rounding=6e-8) @ mixed.double()
    assert len(found) >= fewest
    cosine = F.normalize(found) @ F.normalize(samples).T
    assert (cosine > 1 - 1e-6).any(1).all()
    assert len(set(cosine.argmax(1).tolist())) == len(found)


def test_what_is_not_rectified_has_no_corners():
    draws = generator(0, "signed")
    mixed = torch.randn(8, 8, generator=draws) @ torch.randn(8, 300, generator=draws)
    assert len(corners(mixed, rounding=6e-8)) == 0
    without_zeros = torch.randn(8, 8, generator=draws) @ torch.rand(8, 300, generator=draws).add(0.1)
    assert len(corners(without_zeros, rounding=6e-8)) == 0


def test_what_is_refused_is_not_returned_and_what_is_known_not_found_again():
    _, mixed = mixture(6, 120, 0.4, seed=2)
    assert len(corners(mixed, rounding=6e-8, accept=lambda _combination: False)) == 0
    all_of_them = corners(mixed, rounding=6e-8)
    rest = corners(mixed, rounding=6e-8, known=all_of_them[:4])
    cosine = F.normalize(rest @ mixed) @ F.normalize(all_of_them @ mixed).T
    assert len(rest) == 2
    assert set(cosine.argmax(1).tolist()) == {4, 5}


@pytest.mark.parametrize("seed", [0, 1])
def test_flowers_quickstart_as_initialised_gives_batches_of_32(cifar, seed):
    """All samples fire nearly the same neurons of its first linear layer: silent rows tell them apart for a quarter only."""
    torch.manual_seed(seed)
    model = Quickstart()
    chosen = torch.randperm(len(cifar), generator=generator(seed, "batch"))[:32]
    x, y = normalised(cifar, chosen), cifar.labels[chosen]
    read = mount(model, Passive(), x[:2], layer="fc1").read_at_layer(client_step(model, x, y), Reading(seed=seed))
    with torch.no_grad():
        truth = model.pool(F.relu(model.conv2(model.pool(F.relu(model.conv1(x)))))).flatten(1)
    spread = truth.std(0).clamp_min(1e-6)
    found = match(read.samples / spread, truth / spread)[FAITHFUL]
    assert found.recall == 1
    assert not read.certified.any()  # a second rectifier stands behind it


def test_another_batchs_update_gives_nothing_of_this_one(cifar):
    torch.manual_seed(0)
    model = Quickstart()
    x = normalised(cifar, slice(0, 16))
    others, labels = normalised(cifar, slice(100, 116)), cifar.labels[100:116]
    read = mount(model, Passive(), x[:2], layer="fc1").read_at_layer(client_step(model, others, labels))
    with torch.no_grad():
        truth = model.pool(F.relu(model.conv2(model.pool(F.relu(model.conv1(x)))))).flatten(1)
    assert not match(read.samples, truth)[FAITHFUL].recovered.any()


def test_a_layer_of_its_own_kind_in_a_perceptron():
    """The second layer of a perceptron: its inputs are rectified, its own outputs are not."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 200), nn.ReLU(), nn.Linear(200, 40), nn.Tanh(), nn.Linear(40, 5))
    x, y = torch.randn(12, 30, generator=generator(0)), torch.arange(12) % 5
    read = mount(model, Passive(), x[:2], layer="2", strict=False).read_at_layer(client_step(model, x, y))
    with torch.no_grad():
        truth = model[:2](x)
    assert match(read.samples, truth)[FAITHFUL].recall > 0.9
