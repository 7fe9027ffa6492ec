"""Stages of a decoder: what they add to the linear one, and that they look at the layers that were sent."""

import pytest
import torch
from torch import nn

from qbi.pictures import Prefix, learn_decoder
from qbi.pictures.decoder import Decoder
from qbi.pictures.learning import varied
from qbi.pictures.prefix import features_of
from qbi.pictures.stages import Stage


def bent(seed=0, side=8):
    """Half as many features as values, behind a rectifier and pooling: what a linear decoder does badly."""
    torch.manual_seed(seed)
    body = [nn.Conv2d(3, 24, 3, padding=1), nn.ReLU(), nn.MaxPool2d(4), nn.Flatten()]
    return Prefix(nn.Sequential(*body, nn.Linear(24 * (side // 4) ** 2, 5)), "4")


@pytest.fixture(scope="module")
def images():
    rough = torch.rand(900, 3, 3, 3, generator=torch.Generator().manual_seed(0))
    return nn.functional.interpolate(rough, 8, mode="bilinear")


@pytest.fixture(scope="module")
def learned(images):
    return learn_decoder(bent(), images[:800], steps=120, width=16, stages=2)


def error(pictures, truth):
    return float((pictures - truth).square().mean())


def test_each_stage_comes_nearer_to_images_that_nobody_learned_from(learned, images):
    held = images[800:]
    with torch.no_grad():
        linear, first, second = learned.pictures(features_of(bent(), held), bent())
    assert error(first, held) < 0.85 * error(linear, held)
    assert error(second, held) < error(first, held)


def test_stages_are_lost_without_the_layers_that_were_sent(learned, images):
    """They look at how features of their picture are off: layers of other weights tell them nothing."""
    held = images[800:]
    features = features_of(bent(), held)
    with torch.no_grad():
        right, wrong = (learned(features, prefix) for prefix in (bent(), bent(9)))
    assert error(wrong, held) > 2 * error(right, held)


def test_as_they_start_stages_change_nothing():
    torch.manual_seed(0)
    decoder = Decoder(96, (3, 8, 8), 8, stages=3, directions=0)
    decoder.weights.normal_(0, 0.01)
    decoder.low.fill_(-9)
    decoder.high.fill_(9)
    with torch.no_grad():
        made = decoder.pictures(torch.rand(2, 96), bent())
    assert all(torch.equal(made[0], one) for one in made[1:])


@pytest.mark.parametrize("sides", [(8, 8), (9, 7), (4, 12)])
def test_a_stage_takes_images_of_any_size(sides):
    stage = Stage(10, (3, *sides), 8)
    assert stage(torch.rand(2, 9, *sides), torch.rand(2, 20)).shape == (2, 3, *sides)


def test_a_pictures_stages_do_not_depend_on_the_others(learned, images):
    features = features_of(bent(), images[800:804])
    with torch.no_grad():
        torch.testing.assert_close(learned(features, bent())[2:3], learned(features[2:3], bent()), atol=1e-5, rtol=0)


def test_images_are_varied_within_their_range_and_by_the_draws(images):
    def drawn(seed):
        return varied(images, 64, torch.Generator().manual_seed(seed))

    assert torch.equal(drawn(0), drawn(0))
    assert not torch.equal(drawn(0), drawn(1))
    assert drawn(0).amin() >= images.amin()
    assert drawn(0).amax() <= images.amax()
    nearest = torch.cdist(drawn(0).flatten(1), images.flatten(1)).amin(1)
    assert (nearest > 0.05).double().mean() > 0.9  # none of them is an image as it was


def test_the_same_seed_learns_the_same(images):
    def made(seed):
        decoder = learn_decoder(bent(), images[:200], steps=3, width=8, stages=1, seed=seed)
        return torch.cat([p.flatten() for p in decoder.parameters()])

    assert torch.equal(made(0), made(0))
    assert not torch.equal(made(0), made(1))
