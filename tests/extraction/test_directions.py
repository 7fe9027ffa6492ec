"""Directions of samples in the space of backprops: what the head tells beyond the silent rows, and what must not be taken for a sample."""

import pytest
import torch
from torch import nn

from qbi import client_step, mount
from qbi.attacks import Passive, Reading
from qbi.attacks.behind import NEXT_TO_ZERO, Behind
from qbi.data.images import normalised
from qbi.extraction.directions import by_head, by_pattern, units
from qbi.extraction.independent import contrasts
from qbi.metrics import EXACT, match
from qbi.randomness import generator

ROWS, OUTPUTS = 120, 6


def batch(samples, seed=0, pre=None):
    """A head, a space of backprops, what spans it, and the pre-activations behind it."""
    draws = torch.Generator().manual_seed(seed)
    head = torch.randn(OUTPUTS, ROWS, generator=draws, dtype=torch.float64)
    z = torch.randn(samples, ROWS, generator=draws, dtype=torch.float64) if pre is None else pre
    sent = torch.randn(samples, OUTPUTS, generator=draws, dtype=torch.float64) @ head * (z > 0)
    return head, torch.linalg.qr(sent.T).Q, units(sent.T), z


def rough(z, part, seed=1):
    """As an estimate has them: some rows that are nearly silent fire, and the other way round."""
    return z + part * torch.randn(z.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def along(found, basis, sent):
    """How near each direction is to the sample that it is meant to be."""
    return ((basis @ found.units) * sent).sum(0).abs()


@pytest.mark.parametrize(("samples", "part"), [(40, 0.15), (70, 0.15), (90, 0.03)])
def test_the_head_determines_samples_that_their_silent_rows_do_not(samples, part):
    """Fewer rows to spare forgive fewer mistakes."""
    head, basis, sent, z = batch(samples)
    given = rough(z, part)
    found = by_head(basis, head.expand(samples, -1, -1), given, trusted=0.8)
    assert found.proven.double().mean() > 0.9
    assert (along(found, basis, sent)[found.proven] > 1 - 1e-9).all()
    if samples >= 70:  # more than half as many as rows
        assert not by_pattern(basis, given).proven.any()


def test_a_head_that_was_not_sent_proves_nothing():
    _, basis, _, z = batch(70)
    other = batch(70, seed=5)[0]
    assert not by_head(basis, other.expand(70, -1, -1), z, trusted=0.8).proven.any()


def test_rough_samples_of_another_batch_prove_nothing():
    head, basis, _, _ = batch(70)
    other = torch.randn(70, ROWS, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    assert not by_head(basis, head.expand(70, -1, -1), other, trusted=0.8).proven.any()


def test_samples_that_fire_in_the_same_rows_are_not_told_apart():
    """Every mixture of the two is explained by some output gradient."""
    z = batch(20)[3]
    z[1] = z[0]
    head, basis, _, z = batch(20, pre=z)
    found = by_head(basis, head.expand(20, -1, -1), z, trusted=0.8)
    assert found.proven.tolist() == [False, False, *[True] * 18]


def test_without_rows_to_spare_nothing_is_proven():
    head, basis, _, z = batch(ROWS - OUTPUTS)
    assert not by_head(basis, head.expand(len(z), -1, -1), z, trusted=1.0).proven.any()


@pytest.mark.parametrize(
    ("neurons", "size"),
    [(200, 100), *(pytest.param(*case, marks=pytest.mark.long) for case in ((200, 150), (500, 200)))],
)
def test_an_honest_model_gives_more_than_half_as_many_images_as_it_has_neurons(cifar, neurons, size):
    torch.manual_seed(neurons + size)
    model = nn.Sequential(nn.Flatten(), nn.Linear(3072, neurons), nn.ReLU(), nn.Linear(neurons, 10))
    chosen = torch.randperm(len(cifar), generator=torch.Generator().manual_seed(0))[: 2 * size]
    x, y = normalised(cifar, chosen), cifar.labels[chosen]
    sent = mount(model, Passive(), x[:2], generator(0, "rows"), layer="1")
    read = sent.read(client_step(model, x[:size], y[:size]), Reading(largest=float(x.abs().max())))
    assert match(read.samples, x[:size].flatten(1))[EXACT].recall == 1
    assert match(read.samples, x[size:].flatten(1))[EXACT].recall == 0
    assert read.certified is not None
    assert 0.8 * size < int(read.certified.sum()) <= size
    assert match(read.samples[read.certified], x[:size].flatten(1))[EXACT].recovered.sum() == read.certified.sum()


def test_slopes_of_rows_that_fire_are_the_models_and_soft_ones_have_none():
    torch.manual_seed(0)
    behind = Behind(mount(_net(nn.ReLU()), Passive(), torch.rand(2, 7), generator(0, "rows"), layer="0"))
    z, kept = torch.randn(4, 12, dtype=torch.float64), torch.arange(12)
    slopes = behind.slopes_if_firing(kept)(z)
    assert slopes is not None
    fires = (z > NEXT_TO_ZERO)[:, None].expand_as(slopes)
    assert torch.equal(slopes[fires], behind.jacobian(z)[fires])
    assert (slopes != 0).any(2).all()
    lifted, silent = z.clone(), z[:, 4] < 0
    assert silent.any()
    lifted[:, 4] = 1e-9  # just above zero: nothing behind changes
    torch.testing.assert_close(slopes[silent, :, 4], behind.jacobian(lifted)[silent, :, 4])
    soft = mount(_net(nn.LeakyReLU()), Passive(), torch.rand(2, 7), generator(0, "rows"), layer="0", strict=False)
    assert Behind(soft).slopes_if_firing(kept)(z) is None


def _net(rectifier):
    return nn.Sequential(nn.Linear(7, 12), rectifier, nn.Linear(12, 9), nn.ReLU(), nn.Linear(9, 3))


def test_contrasts_are_of_one_size_for_colours_and_take_any_shape():
    images = torch.rand(5, 3 * 8 * 8, generator=torch.Generator().manual_seed(0))
    second, third = (contrasts(images, (3, 8, 8), kind) for kind in (0, 1))
    assert third.shape[1] > second.shape[1] > images.shape[1]
    torch.testing.assert_close(second[:, : 8 * 7].square().mean(), torch.tensor(1.0))
    assert contrasts(images, (), 0) is images
    assert contrasts(images[:, :64], (1, 8, 8), 1).isfinite().all()
