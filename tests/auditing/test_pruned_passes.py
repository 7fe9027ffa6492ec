"""Channels that a crafted model multiplies by zero are left out, and nothing else: values and gradients stay what they are."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from qbi.attacks import QBI, mount
from qbi.auditing.domain import HEAVY, operations_of
from qbi.auditing.pruned_passes import checked_live, live_channels, slimmed, sparse_backward
from qbi.auditing.shortcut import Shortcuts
from qbi.exposure import observe
from qbi.federation.client import default_loss
from qbi.federation.exposed import exposed_step
from qbi.models import Residual, image_cnn
from qbi.randomness import generator
from qbi.routing.graph import trace

X, Y = torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(0)), torch.arange(6) % 4


def plain():
    torch.manual_seed(0)
    return image_cnn((3, 8, 8), 30, 4)


def between(*, after=nn.Identity):
    """A convolution of whose eight channels the next one looks at two."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), after(), nn.Conv2d(8, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 4)
    )
    with torch.no_grad():
        model[2].weight[:, 2:] = 0
    return model


def test_a_crafted_model_carries_by_a_few_channels():
    mounted = mount(plain(), QBI(6), X[:2], generator(0))
    live = checked_live(mounted.model, "fc1", (X,), 0)
    assert set(live) == {"conv1", "conv2", "conv3"}
    assert all(int(live[name].sum()) <= 6 for name in ("conv1", "conv2"))
    whole = observe(mounted.model, "fc1", X)
    runs = []
    with slimmed(mounted.model, live):
        hook = mounted.model.get_submodule("conv2").register_forward_hook(lambda _m, _i, out: runs.append(out))
        slim = observe(mounted.model, "fc1", X)
        hook.remove()
    assert torch.equal(whole.features, slim.features)
    assert int(runs[0].flatten(2).any(2).any(0).sum()) == int(live["conv2"].sum())  # the others were left out
    assert all("forward" not in vars(m) for m in mounted.model.modules())


def test_an_honest_model_runs_whole():
    assert live_channels(plain(), (X,)) == {}


@pytest.mark.parametrize("after", [nn.ReLU, nn.Dropout, nn.GELU, lambda: nn.MaxPool2d(3, 1, 1)])
def test_channels_are_followed_through_what_keeps_them_apart(after):
    model = between(after=after)
    assert live_channels(model, (X,))["0"].tolist() == [True] * 2 + [False] * 6
    found = Shortcuts().step(model, "5", (X,), Y, loss=default_loss, seed=0)
    whole = exposed_step(model, (X,), Y, layers=["5"], loss=default_loss, seed=0)
    assert torch.equal(found.update.gradients["5.weight"], whole.update.gradients["5.weight"])


def test_statistics_and_ways_around_keep_channels_alive():
    normalised = between(after=lambda: nn.BatchNorm2d(8))
    assert "0" not in live_channels(normalised, (X,))
    found = Shortcuts().step(normalised, "5", (X,), Y, loss=default_loss, seed=0)
    whole = exposed_step(normalised, (X,), Y, layers=["5"], loss=default_loss, seed=0)
    assert all(torch.equal(found.update.buffers[n], b) for n, b in whole.update.buffers.items())

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = between()

        def forward(self, x):
            h = self.parts[0](x)
            return self.parts[2](h).mean((2, 3)) + h.mean((2, 3))[:, :4]

    assert "parts.0" not in live_channels(Twice(), (X,))
    block = nn.Sequential(between()[0], Residual(nn.Conv2d(8, 8, 3, padding=1)), between()[2], nn.Flatten())
    assert live_channels(block, (X,)) == {"2": torch.ones(4, dtype=torch.bool)} or "0" not in live_channels(block, (X,))


def test_what_zero_does_not_silence_is_not_left_out():
    """Zero times infinity is no number: the trial on two samples finds it."""
    model = between()
    with torch.no_grad():
        model[0].weight[5] = torch.inf
    assert live_channels(model, (X,))
    assert checked_live(model, "5", (X,), 0) == {}


CONVOLUTIONS = {
    "the paper's CNN": (plain, X),
    "crafted": (lambda: mount(plain(), QBI(6), X[:2], generator(0)).model, X),
    "strides, dilation, bias": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2, padding=2, dilation=2), nn.ReLU(), nn.Conv2d(8, 4, 1), nn.Flatten(), nn.Linear(64, 4)
        ), X
    ),
    "one dimension": (lambda: nn.Sequential(nn.Conv1d(3, 8, 5, padding=2), nn.ReLU(), nn.Flatten(), nn.Linear(512, 4)), X.flatten(2)),
}  # fmt: skip


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_gradients_come_back_as_they_would(name):
    make, x = CONVOLUTIONS[name]
    torch.manual_seed(0)
    model = make().train()
    F.cross_entropy(model(x), Y).backward()
    expected = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    with sparse_backward(model):
        own = copy.deepcopy(model)
        F.cross_entropy(own(x), Y).backward()
    assert all(p.grad is None for p in model.parameters())
    assert all("forward" not in vars(m) for m in model.modules())
    for n, value in expected.items():
        torch.testing.assert_close(own.get_parameter(n).grad, value, rtol=1e-5, atol=1e-7)


def test_filters_that_nothing_comes_back_to_cost_nothing(monkeypatch):
    """Of the crafted model's convolution, the backward pass works on a few of 256 filters."""
    sizes = []
    real = torch.ops.aten.convolution_backward
    monkeypatch.setattr(
        torch.ops.aten, "convolution_backward", lambda back, *rest: sizes.append(back.shape[1]) or real(back, *rest)
    )
    model = mount(plain(), QBI(6), X[:2], generator(0)).model
    with sparse_backward(model):
        F.cross_entropy(model(X), Y).backward()
    assert sorted(sizes)[-1] <= 6


def test_operations_are_those_that_torch_counts():
    from torch.utils.flop_counter import FlopCounterMode

    for model in (plain(), between()):
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(X[:1])
        assert operations_of(trace(model, X[:2])) == counter.get_total_flops()
    assert operations_of(trace(plain(), X[:2])) < HEAVY
