"""R by gradients equals R by activations, sample by sample, on real data through the paper's models."""

import pytest
import torch

from qbi.attacks import PAIRS, QBI, mount
from qbi.carrier import flat
from qbi.data.images import normalised, unit_pixels
from qbi.exposure import isolated_samples, observe
from qbi.extraction import extract, nearest_tokens
from qbi.federation import client_step
from qbi.metrics import EXACT, match
from qbi.models import image_cnn, text_model
from qbi.randomness import generator


def check(mounted, inputs, targets, truth, atleast):
    isolated = isolated_samples(observe(mounted.model, mounted.layer, inputs).fired)
    update = client_step(mounted.model, inputs, targets)
    found = extract(mounted.model, mounted.layer, mounted.carrier, update)
    exact = match(found.samples, truth)[EXACT]
    assert torch.equal(exact.recovered, isolated)
    assert isolated.sum() >= atleast
    return found, exact


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize(("neurons", "batch_size"), [(200, 20), (500, 100)])
def test_cifar10_through_the_cnn(cifar, neurons, batch_size, seed):
    torch.manual_seed(seed)
    chosen = torch.randperm(len(cifar))[:batch_size]
    x = normalised(cifar, chosen)
    mounted = mount(image_cnn(cifar.shape, neurons), QBI(batch_size), x[:2], generator(seed))
    check(mounted, x, cifar.labels[chosen], flat(x), batch_size // 5)


@pytest.mark.long
def test_cifar10_with_pairs(cifar):
    torch.manual_seed(0)
    x = normalised(cifar, slice(0, 50))
    attack = PAIRS(50, normalised(cifar, slice(1000, 1200)))
    mounted = mount(image_cnn(cifar.shape, 200), attack, x[:2], generator(1))
    check(mounted, x, cifar.labels[:50], flat(x), 10)


@pytest.mark.long
def test_cifar10_with_batch_norm_undone(cifar):
    torch.manual_seed(0)
    x = unit_pixels(cifar, slice(0, 50))
    mounted = mount(image_cnn(cifar.shape, 200, norm="batch"), QBI(50), x[:2], generator(2))
    check(mounted, x, cifar.labels[:50], flat(x), 10)


@pytest.mark.long
def test_imagenet_through_the_cnn(imagenet):
    torch.manual_seed(0)
    x = normalised(imagenet, slice(0, 6))
    mounted = mount(image_cnn(imagenet.shape, 60), QBI(6), x[:2], generator(3))
    check(mounted, x, imagenet.labels[:6], flat(x), 3)


@pytest.mark.long
def test_imagenet_with_batch_norm_undone(imagenet):
    torch.manual_seed(0)
    x = unit_pixels(imagenet, slice(8, 14))
    mounted = mount(image_cnn(imagenet.shape, 60, norm="batch"), QBI(6), x[:2], generator(4))
    check(mounted, x, imagenet.labels[8:14], flat(x), 3)


def test_imagenet_at_the_layer(imagenet):
    """The full batch of a table's cell, fed to the layer directly: the identity prefix is shown above."""
    from torch import nn

    torch.manual_seed(0)
    x = normalised(imagenet, slice(0, 50))
    model = nn.Sequential(nn.Flatten(), nn.Linear(150_528, 200), nn.ReLU(), nn.Linear(200, 10))
    check(mount(model, QBI(50), x[:2], generator(5)), x, imagenet.labels[:50], flat(x), 15)


@pytest.mark.parametrize("norm", [None, "batch"])
def test_imdb_through_the_text_model(imdb, norm):
    """With BatchNorm over a batch where a position holds one token only, that feature has no variance to undo."""
    torch.manual_seed(0)
    tokens = imdb.tokens[:50]
    model = text_model(len(imdb.vocabulary), neurons=300, norm=norm)
    mounted = mount(model, QBI(50), tokens[:2], generator(6))
    embedded = mounted.model.embedding(tokens).flatten(1).detach()
    found, exact = check(mounted, tokens, imdb.labels[:50], embedded, 35)
    read = nearest_tokens(found.samples[exact.candidate[exact.recovered]], mounted.model.embedding.weight.detach())
    assert torch.equal(read, tokens[exact.recovered])
