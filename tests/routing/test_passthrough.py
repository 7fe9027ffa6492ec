"""Every way to carry a sample, confirmed by recovering it from real gradients; every way it fails, by name."""

from collections import OrderedDict

import pytest
import torch
from torch import nn

from qbi.attacks import QBI, mount
from qbi.errors import BadValue, CannotMount, QbiError
from qbi.exposure import isolated_samples, observe
from qbi.extraction import extract
from qbi.extraction.normalisation import PublicStatistics
from qbi.federation import client_step
from qbi.metrics import EXACT, RECOGNISABLE, match
from qbi.models import Residual
from qbi.randomness import generator

BATCH, NEURONS = 10, 120


def images(channels=3, side=6):
    return torch.randn(BATCH, channels, side, side, generator=generator(0, "images"))


def head(features):
    return [("fc", nn.Linear(features, NEURONS)), ("act", nn.ReLU()), ("out", nn.Linear(NEURONS, 4))]


def build(*layers):
    return nn.Sequential(OrderedDict(layers))


def conv(i, o, k=3, **more):
    return nn.Conv2d(i, o, k, padding=k // 2, **more)


PREFIXES = {
    "nothing": lambda: build(("flatten", nn.Flatten()), *head(108)),
    "kernel 5, extra filters": lambda: build(("c", conv(3, 9, 5)), ("flatten", nn.Flatten()), *head(9 * 36)),
    "kernel 1": lambda: build(("c", conv(3, 3, 1, bias=False)), ("flatten", nn.Flatten()), *head(108)),
    "dilated": lambda: build(
        ("c", nn.Conv2d(3, 4, 3, padding=2, dilation=2)), ("flatten", nn.Flatten()), *head(4 * 36)
    ),
    "same padding": lambda: build(("c", nn.Conv2d(3, 4, 3, padding="same")), ("flatten", nn.Flatten()), *head(144)),
    "relu by pairs": lambda: build(
        ("c1", conv(3, 8, bias=False)),
        ("r", nn.ReLU()),
        ("c2", conv(8, 5)),
        ("flatten", nn.Flatten()),
        *head(180),
    ),
    "relu by pairs up to the layer": lambda: build(
        ("c1", conv(3, 7, bias=False)), ("r", nn.ReLU()), ("flatten", nn.Flatten()), *head(7 * 36)
    ),
    "two relus by pairs": lambda: build(
        ("c1", conv(3, 6, bias=False)),
        ("r1", nn.ReLU(inplace=True)),
        ("c2", conv(6, 6, bias=False)),
        ("r2", nn.ReLU()),
        ("flatten", nn.Flatten()),
        *head(216),
    ),
    "relu by shift": lambda: build(
        ("c1", conv(3, 3)),
        ("r1", nn.ReLU()),
        ("c2", conv(3, 3)),
        ("r2", nn.ReLU()),
        ("flatten", nn.Flatten()),
        *head(108),
    ),
    "pairs, then shift": lambda: build(
        ("c1", conv(3, 6)),
        ("r1", nn.ReLU()),
        ("c2", conv(6, 4)),
        ("r2", nn.ReLU()),
        ("flatten", nn.Flatten()),
        *head(144),
    ),
    "linear": lambda: build(("flatten", nn.Flatten()), ("l", nn.Linear(108, 130)), *head(130)),
    "linear with relu": lambda: build(
        ("flatten", nn.Flatten()), ("l", nn.Linear(108, 130)), ("r", nn.ReLU()), *head(130)
    ),
    "linear with relu by pairs": lambda: build(
        ("flatten", nn.Flatten()), ("l", nn.Linear(108, 216, bias=False)), ("r", nn.ReLU()), *head(216)
    ),
    "leaky relu": lambda: build(("c1", conv(3, 3)), ("r", nn.LeakyReLU()), ("flatten", nn.Flatten()), *head(108)),
    "stride": lambda: build(("c", nn.Conv2d(3, 12, 3, stride=2, padding=1)), ("flatten", nn.Flatten()), *head(108)),
    "stride and relu by pairs": lambda: build(
        ("c", nn.Conv2d(3, 24, 2, stride=2, bias=False)), ("r", nn.ReLU()), ("flatten", nn.Flatten()), *head(216)
    ),
    "no padding": lambda: build(("c", nn.Conv2d(3, 12, 3)), ("flatten", nn.Flatten()), *head(192)),
    "groups": lambda: build(("c", conv(3, 6, groups=3)), ("flatten", nn.Flatten()), *head(216)),
    "gelu by a larger shift": lambda: build(("c", conv(3, 3)), ("g", nn.GELU()), ("flatten", nn.Flatten()), *head(108)),
    "relu6 by a smaller shift": lambda: build(
        ("c", conv(3, 3)), ("r", nn.ReLU6()), ("flatten", nn.Flatten()), *head(108)
    ),
    "a shortcut that halves": lambda: build(("b", _Projected()), ("flatten", nn.Flatten()), *head(108)),
    "residual": lambda: build(
        ("block", Residual(nn.Sequential(conv(3, 5), nn.ReLU(), conv(5, 3)))),
        ("flatten", nn.Flatten()),
        *head(108),
    ),
    "rectified residual behind a convolution": lambda: build(
        ("stem", conv(3, 6)),
        ("block", Residual(nn.Sequential(conv(6, 6), nn.BatchNorm2d(6)), rectified=True)),
        ("flatten", nn.Flatten()),
        *head(216),
    ),
    "nested": lambda: build(
        ("body", nn.Sequential(conv(3, 4), nn.Identity(), nn.Dropout(0.0))),
        ("pool", nn.AdaptiveAvgPool2d(6)),
        ("flatten", nn.Flatten()),
        *head(144),
    ),
}


def recovered_and_isolated(model, x, **undo):
    mounted = mount(model, QBI(BATCH), x, generator(1), layer="fc")
    isolated = isolated_samples(observe(mounted.model, mounted.layer, x).fired)
    update = client_step(mounted.model, x, torch.arange(BATCH) % 4)
    found = extract(mounted.model, mounted.layer, mounted.carrier, update, **undo)
    return match(found.samples, x.flatten(1)), isolated


@pytest.mark.parametrize("make", PREFIXES.values(), ids=PREFIXES.keys())
def test_samples_come_back_exactly_through_every_prefix(make):
    torch.manual_seed(0)
    recoveries, isolated = recovered_and_isolated(make(), images())
    assert torch.equal(recoveries[EXACT].recovered, isolated)
    assert isolated.sum() >= 7


BATCH_NORMS = {
    "plain": lambda: nn.BatchNorm2d(3),
    "momentum": lambda: nn.BatchNorm2d(3, momentum=0.37),
    "cumulative": lambda: nn.BatchNorm2d(3, momentum=None),
    "no affine": lambda: nn.BatchNorm2d(3, affine=False),
}


def used(norm, shape=(64, 3, 6, 6)):
    """Statistics that are no longer the default ones, as after earlier rounds."""
    norm.train()
    norm(0.3 + 0.6 * torch.randn(shape, generator=generator(2)))
    return norm


@pytest.mark.parametrize("fresh", [True, False], ids=["fresh", "used"])
@pytest.mark.parametrize("make", BATCH_NORMS.values(), ids=BATCH_NORMS.keys())
def test_batch_norm_is_undone_exactly(make, fresh):
    torch.manual_seed(0)
    norm = make() if fresh else used(make())
    model = build(("c", conv(3, 3, bias=False)), ("norm", norm), ("flatten", nn.Flatten()), *head(108))
    recoveries, isolated = recovered_and_isolated(model, 0.4 + 0.25 * images())
    assert torch.equal(recoveries[EXACT].recovered, isolated)
    assert isolated.sum() >= 7


def test_batch_norm_of_flattened_samples_is_undone():
    torch.manual_seed(0)
    model = build(("flatten", nn.Flatten()), ("norm", nn.BatchNorm1d(108)), *head(108))
    recoveries, isolated = recovered_and_isolated(model, 0.4 + 0.25 * images())
    assert torch.equal(recoveries[EXACT].recovered, isolated)
    assert isolated.any()


def test_batch_norm_with_relu_behind_it_is_carried_by_its_own_offset():
    torch.manual_seed(0)
    layers = [
        ("c1", conv(3, 3)),
        ("n1", nn.BatchNorm2d(3)),
        ("r1", nn.ReLU()),
        ("c2", conv(3, 3)),
        ("n2", nn.BatchNorm2d(3)),
    ]
    model = build(*layers, ("r2", nn.ReLU()), ("flatten", nn.Flatten()), *head(108))
    recoveries, isolated = recovered_and_isolated(model, 0.4 + 0.25 * images())
    assert torch.equal(recoveries[EXACT].recovered, isolated)
    assert isolated.sum() >= 7


def test_batch_norm_scale_and_offset_are_taken_out():
    """γ and β other than 1 and 0, set after mounting, as a server may choose."""
    torch.manual_seed(0)
    x = 0.4 + 0.25 * images()
    model = build(("norm", nn.BatchNorm2d(3)), ("flatten", nn.Flatten()), *head(108))
    mounted = mount(model, QBI(BATCH), x, generator(1))
    norm = mounted.model.get_submodule("norm")
    with torch.no_grad():
        norm.weight.copy_(torch.tensor([1.2, 0.9, -1.1]))
        norm.bias.copy_(torch.tensor([0.01, -0.02, 0.03]))
    isolated = isolated_samples(observe(mounted.model, mounted.layer, x).fired)
    update = client_step(mounted.model, x, torch.arange(BATCH) % 4)
    found = extract(mounted.model, mounted.layer, mounted.carrier, update)
    assert torch.equal(match(found.samples, x.flatten(1))[EXACT].recovered, isolated)
    assert isolated.any()


def test_layer_norm_comes_back_up_to_each_samples_own_statistics():
    torch.manual_seed(0)
    x = images()
    model = build(("flatten", nn.Flatten()), ("norm", nn.LayerNorm(108)), *head(108))
    mounted = mount(model, QBI(BATCH), x, generator(1))
    isolated = isolated_samples(observe(mounted.model, mounted.layer, x).fired)
    update = client_step(mounted.model, x, torch.arange(BATCH) % 4)
    seen = extract(mounted.model, mounted.layer, mounted.carrier, update, keep_normalised=True)
    flat = x.flatten(1)
    standard = (flat - flat.mean(1, keepdim=True)) / (flat.var(1, correction=0, keepdim=True) + 1e-5).sqrt()
    assert torch.equal(match(seen.samples, standard)[EXACT].recovered, isolated)
    # With the domain's statistics in place of the sample's own, the result is close but not exact.
    public = PublicStatistics((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
    close = extract(mounted.model, mounted.layer, mounted.carrier, update, public=public)
    found = match(close.samples, flat, data_range=6.0)
    assert not found[EXACT].recovered.any()
    assert torch.equal(found[RECOGNISABLE].recovered & isolated, isolated)


@pytest.mark.parametrize(
    "prefix",
    [
        lambda: [("norm", nn.LayerNorm([3, 6, 6])), ("flatten", nn.Flatten())],
        lambda: [("flatten", nn.Flatten()), ("norm", nn.LayerNorm(108, bias=False))],
        lambda: [("flatten", nn.Flatten()), ("norm", nn.LayerNorm(108, elementwise_affine=False))],
    ],
    ids=["unflattened", "no offset", "no affine"],
)
def test_every_form_of_layer_norm_is_undone(prefix):
    torch.manual_seed(0)
    x = images()
    mounted = mount(build(*prefix(), *head(108)), QBI(BATCH), x, generator(1), layer="fc")
    isolated = isolated_samples(observe(mounted.model, mounted.layer, x).fired)
    update = client_step(mounted.model, x, torch.arange(BATCH) % 4)
    public = PublicStatistics((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
    found = extract(mounted.model, mounted.layer, mounted.carrier, update, public=public)
    near = match(found.samples, x.flatten(1), data_range=6.0)[RECOGNISABLE].recovered
    assert torch.equal(near & isolated, isolated)
    assert isolated.any()


FAILURES = {
    "stride": (
        lambda: build(("c", nn.Conv2d(3, 8, 3, stride=2, padding=1)), ("flatten", nn.Flatten()), *head(72)),
        "c .Conv2d. has 8 outputs; the sample needs 12",
    ),
    "even kernel": (
        lambda: build(("c", nn.Conv2d(3, 8, 2)), ("flatten", nn.Flatten()), *head(200)),
        "c .Conv2d. has 8 outputs; the sample needs 12",
    ),
    "no padding": (
        lambda: build(("c", nn.Conv2d(3, 8, 3)), ("flatten", nn.Flatten()), *head(128)),
        "c .Conv2d. has 8 outputs; the sample needs 12",
    ),
    "groups": (
        lambda: build(("c", nn.Conv2d(3, 6, 3, groups=3)), ("flatten", nn.Flatten()), *head(96)),
        "c .Conv2d. has 6 outputs in 3 groups; the sample needs 12",
    ),
    "pooling": (lambda: build(("p", nn.MaxPool2d(2)), ("flatten", nn.Flatten()), *head(27)), "p .MaxPool2d. reduces"),
    "dropout": (
        lambda: build(("d", nn.Dropout(0.1)), ("flatten", nn.Flatten()), *head(108)),
        "d .Dropout. drops values",
    ),
    "few channels": (
        lambda: build(("c", conv(3, 2)), ("flatten", nn.Flatten()), *head(72)),
        "c .Conv2d. has 2 outputs",
    ),
    "narrow linear": (
        lambda: build(("flatten", nn.Flatten()), ("l", nn.Linear(108, 50)), *head(50)),
        "l .Linear. has 50 outputs",
    ),
    "relu without room": (
        lambda: build(("c", conv(3, 4, bias=False)), ("r", nn.ReLU()), ("flatten", nn.Flatten()), *head(144)),
        "c .Conv2d. has 4 outputs and no bias",
    ),
    "relu first": (lambda: build(("r", nn.ReLU()), ("flatten", nn.Flatten()), *head(108)), "r .ReLU. cuts values"),
    "squashing": (
        lambda: build(("t", nn.Tanh()), ("flatten", nn.Flatten()), *head(108)),
        "t .Tanh. changes the values",
    ),
    "no bias": (
        lambda: build(("flatten", nn.Flatten()), ("fc", nn.Linear(108, 9, bias=False)), ("act", nn.ReLU())),
        "bias is None",
    ),
    "no relu": (lambda: build(("flatten", nn.Flatten()), ("fc", nn.Linear(108, 9))), "no linear layer with a ReLU"),
    "wrong width": (
        lambda: build(("flatten", nn.Flatten()), ("l", nn.Linear(7, 200)), *head(200)),
        "its forward pass fails",
    ),
}


class _Projected(nn.Module):
    """A residual block whose shortcut halves the input."""

    def __init__(self):
        super().__init__()
        self.branch = conv(3, 3)

    def forward(self, x):
        return x / 2 + self.branch(x)


@pytest.mark.parametrize(("make", "message"), FAILURES.values(), ids=FAILURES.keys())
def test_the_layer_that_cannot_carry_is_named(make, message):
    layer = "fc" if message.startswith("l ") else None
    with pytest.raises(QbiError, match=message):
        mount(make(), QBI(BATCH), images(), generator(0), layer=layer)


def test_the_first_linear_layer_with_a_bias_is_chosen():
    model = PREFIXES["linear with relu by pairs"]()
    assert mount(model, QBI(BATCH), images(), generator(0)).layer == "fc"


def test_values_below_the_shift_are_noticed():
    x = images()
    x[0, 0, 0, 0] = -50
    with pytest.raises(CannotMount, match="probe arrives with an error"):
        mount(PREFIXES["relu by shift"](), QBI(BATCH), x, generator(0))


def test_asking_for_a_layer_by_name():
    model = build(("flatten", nn.Flatten()), *head(108))
    assert mount(model, QBI(BATCH), images(), generator(0), layer="fc").layer == "fc"
    with pytest.raises(CannotMount, match="no layer 'fc9'"):
        mount(model, QBI(BATCH), images(), generator(0), layer="fc9")
    with pytest.raises(CannotMount, match="not a linear layer"):
        mount(model, QBI(BATCH), images(), generator(0), layer="act")
    with pytest.raises(CannotMount, match="nothing follows instead of a ReLU"):
        mount(model, QBI(BATCH), images(), generator(0), layer="out")


def test_non_finite_samples_are_refused():
    with pytest.raises(BadValue, match="NaN or infinite"):
        mount(PREFIXES["nothing"](), QBI(BATCH), images() * torch.nan, generator(0))
