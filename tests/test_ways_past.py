"""Servers and models that got past the budget, or were turned away by it, when somebody looked for them with our source at hand."""

import contextlib

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from qbi.auditing.shortcut import Shortcuts
from qbi.auditing.slim import sparse_backward
from qbi.defences import LeakGuard
from qbi.defences.budget.clipping import Clipping
from qbi.defences.budget.plan import Plan
from qbi.defences.calls import LeakRefused
from qbi.federation.client import default_loss
from qbi.federation.exposed import exposed_step
from qbi.randomness import SystemEntropy, generator, normal_like
from zoo import Of

B, T = 6, 5
Y = torch.arange(B) % 4
SEQUENCES = torch.randn(B, T, 12, generator=torch.Generator().manual_seed(0))
TOKENS = torch.randint(0, 50, (B, T), generator=torch.Generator().manual_seed(1))


class Taking(nn.Module):
    """Parts, and a function of them and several inputs."""

    def __init__(self, run, **parts):
        super().__init__()
        self.run = [run]
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *given):
        return self.run[0](self, *given)


def size(model):
    return sum(float(p.grad.double().square().sum()) for p in model.parameters() if p.grad is not None) ** 0.5


def clipped(model, run, clip, **how):
    """What leaves, over the clip; nothing where the guard refuses."""
    clipping = Clipping(clip, 0.0, SystemEntropy(), model=model, **how)
    model.zero_grad()
    with contextlib.suppress(LeakRefused), clipping.seeing:
        run().backward()
    return size(model) / clip


@pytest.mark.parametrize(("kind", "length"), [(torch.bfloat16, 1024), (torch.float16, 16384), (torch.float32, 1024)])
def test_a_table_in_half_precision(kind, length):
    """One token many times, pulled one way and then the other: sums in half precision come to a halt on the way back."""
    table = nn.Embedding(4, 8).to(kind)
    pull = torch.ones(1, length, 8)
    pull[:, length // 2 :] = -1
    ids = torch.zeros(1, length, dtype=torch.long)
    assert clipped(table, lambda: (table(ids).float() * pull).sum(), 1e-3, reduction="sum") < 1.01


@pytest.mark.parametrize("scale", torch.linspace(0.5, 2, 16).tolist())
def test_weights_of_samples_are_not_rounded_up(scale):
    layer = nn.Linear(64, 64, bias=False).half()
    nn.init.zeros_(layer.weight)
    x, pull = torch.full((1, 64), 300.0).half(), torch.full((1, 64), 300.0 * scale)
    assert clipped(layer, lambda: (layer(x).float() * pull).sum(), 0.3, reduction="sum") < 1.001


def test_products_that_cancel_in_bfloat16():
    layer = nn.Linear(4, 4, bias=False).bfloat16()
    for steps in range(5):
        x = torch.tensor([[[1.5] * 4, [1.5 * (1 - steps / 128)] * 4]]).bfloat16()
        pull = torch.tensor([[[1.25] * 4, [-1.25 * (1 + steps / 128)] * 4]])
        assert clipped(layer, lambda x=x, pull=pull: (layer(x).float() * pull).sum(), 1e-3, reduction="sum") < 1.01


def test_sums_are_rounded_once_and_after_the_noise():
    """In bfloat16 a sum of 601 is 600 or 604: a sample could move it by four times its clip before any noise is there."""
    layer = nn.Linear(1, 8, bias=False).bfloat16()
    clipping = Clipping(1.0, 3.0, generator(5), model=layer, reduction="sum")
    pull = 1 / 8**0.5
    with clipping.seeing:
        (layer(torch.ones(601, 1).bfloat16()).float() * pull).sum().backward()
    noise = normal_like(torch.zeros(8, 1), generator(5))
    one = float(torch.tensor(pull).bfloat16())  # what comes back to the layer is rounded, and no longer than the clip
    torch.testing.assert_close(layer.weight.grad, (601 * one + 3.0 * noise).bfloat16(), rtol=0, atol=0)


def test_passes_that_share_a_noise_are_added_before_rounding():
    layer = nn.Linear(1, 1, bias=False).bfloat16()
    clipping = Clipping(300.0, 0.0, SystemEntropy(), accumulate=3, model=layer, reduction="sum")
    with clipping.seeing:
        for pull in (256.0, 0.75, 0.75):
            (layer(torch.ones(1, 1).bfloat16()).float() * pull).sum().backward()
    assert float(layer.weight.grad) == 258  # 257.5; one by one, each would be rounded away


def test_backward_inside_autocast():
    draws = torch.Generator().manual_seed(0)
    layer = nn.Linear(8, 8, bias=False)
    for _ in range(20):
        x = torch.rand(1, 1, 8, generator=draws).expand(1, 4, 8) * (1 + 0.01 * torch.rand(1, 4, 1, generator=draws))
        pull = torch.randn(1, 4, 1, generator=draws)
        pull = (pull - pull.mean(1, keepdim=True)).expand(1, 4, 8)
        with torch.autocast("cpu", torch.bfloat16):
            assert clipped(layer, lambda x=x, p=pull: (layer(x).float() * p).sum(), 1e-3, reduction="sum") < 1.01


@pytest.mark.parametrize("clip", [2e-4, 5e-4, 2e-3])
def test_features_at_the_edge_of_float32(clip):
    model = nn.Sequential(nn.Linear(4, 512), nn.ReLU(), nn.Linear(512, 512))
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    nn.init.constant_(model[0].bias, 3e38)
    assert clipped(model, lambda: model(torch.ones(2, 4))[0].sum() * 1e-25, 2 * clip) <= 0.5 + 1e-3


def shares(model, call, y, clip=1e-3, first=None):
    """The largest that leaves when one sample alone has a loss, over its share of the clip."""
    largest = 0.0
    for sample in range(len(y)):
        only = torch.zeros(len(y))
        only[sample] = 1
        clipping = Clipping(clip, 0.0, SystemEntropy(), model=model)
        with clipping.seeing:
            if first is not None:
                model.zero_grad()
                F.cross_entropy(call(first), y).backward()
            model.zero_grad()
            (F.cross_entropy(call(), y, reduction="none") * only).mean().backward()
        largest = max(largest, size(model) / (clip / len(y)))
    return largest


def test_texts_that_begin_alike_are_told_apart_where_time_comes_first():
    model = Of(lambda m, x: m.h(m.e(x.T).relu().mean(0)), e=nn.Embedding(50, 16), h=nn.Linear(16, 4))
    x = torch.randint(0, 50, (2, 10), generator=torch.Generator().manual_seed(2))
    x[1, :5] = x[0, :5]
    assert shares(model, lambda: model(x), torch.tensor([0, 1])) < 1.001


def test_a_first_batch_of_one_step_says_nothing_of_longer_ones():
    def folded(m, x):
        h = m.a(x.transpose(0, 1).reshape(-1, 12)).relu()
        return m.h(h.reshape(x.shape[1], len(x), -1).mean(0))

    model = Of(folded, a=nn.Linear(12, 8), h=nn.Linear(8, 4))
    call = lambda x=SEQUENCES: model(x)  # noqa: E731
    assert shares(model, call, Y, first=SEQUENCES[:, :1]) < 1.001


def test_parts_called_on_other_numbers_of_rows_are_refused():
    class Parts(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(12, 8), nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))

    model = Parts()

    def outputs():
        return model.b(model.a(SEQUENCES).transpose(0, 1).reshape(-1, 8)).reshape(T, B, 4).mean(0)

    with pytest.raises(LeakRefused, match="30 rows for 6 samples"), LeakGuard(model, "budget"):
        F.cross_entropy(outputs(), Y).backward()
    assert all(p.grad is None for p in model.parameters())


def test_samples_in_the_channels_of_a_convolution_are_refused():
    model = Of(
        lambda m, x: m.h(m.c(x.reshape(1, -1, 4, 4)).reshape(len(x), -1)),
        c=nn.Conv2d(B * 3, B * 8, 3, groups=B, bias=False),
        h=nn.Linear(32, 4).requires_grad_(False),
    )
    with pytest.raises(LeakRefused, match="in the channels of “c”"), LeakGuard(model, "budget"):
        F.cross_entropy(model(torch.randn(B, 3, 4, 4)), Y).backward()


POSITIONS = {
    "as they are": lambda m, x: m.p(torch.arange(T)),
    "with an axis": lambda m, x: m.p(torch.arange(T))[None],
    "repeated": lambda m, x: m.p(torch.arange(T)).repeat(len(x), 1, 1),
    "taken out again": lambda m, x: m.p(torch.arange(T)[None])[0],
    "expanded before": lambda m, x: m.p(torch.arange(T)[None].expand(len(x), T)),
    "types of tokens, all zero": lambda m, x: m.p(torch.zeros_like(x)),
}


@pytest.mark.parametrize("name", POSITIONS)
def test_tables_that_are_the_same_for_all_samples(name):
    look_up = POSITIONS[name]
    torch.manual_seed(0)
    model = Of(
        lambda m, x: m.h((m.e(x) + look_up(m, x)).relu().mean(1)),
        e=nn.Embedding(50, 16),
        p=nn.Embedding(T, 16),
        h=nn.Linear(16, 4),
    )
    F.cross_entropy(model(TOKENS), Y).backward()
    expected = {n: p.grad.clone() for n, p in model.named_parameters()}
    clipping = Clipping(1e9, 0.0, SystemEntropy(), model=model)
    model.zero_grad()
    with clipping.seeing:
        F.cross_entropy(model(TOKENS), Y).backward()
    for n, value in expected.items():
        torch.testing.assert_close(model.get_parameter(n).grad, value, rtol=1e-4, atol=1e-6)
    assert shares(model, lambda: model(TOKENS), Y) < 1.001


def test_types_of_tokens_that_are_given_and_all_zero():
    model = Taking(
        lambda m, x, types: m.h((m.e(x) + m.p(types)).mean(1)),
        e=nn.Embedding(50, 16), p=nn.Embedding(2, 16), h=nn.Linear(16, 4),
    )  # fmt: skip
    assert shares(model, lambda: model(TOKENS, torch.zeros_like(TOKENS)), Y) < 1.001


def attended(gate):
    torch.manual_seed(1)
    return Of(
        lambda m, x: m.h((x + m.gate * m.a(x, x, x, need_weights=False)[0]).mean(1)),
        a=nn.MultiheadAttention(12, 2, batch_first=True),
        h=nn.Linear(12, 4),
        gate=nn.Parameter(torch.tensor([gate])),
    )


@pytest.mark.parametrize("gate", [0.0, 1e-9])
def test_passes_that_say_nothing_are_no_check(gate):
    """Behind a gate that opens later: the first gradients are nothing, and agree with anything."""
    model = attended(gate)
    clipping = Clipping(1e9, 0.0, SystemEntropy(), model=model)
    with clipping.seeing:
        for _ in range(3):
            model.zero_grad()
            F.cross_entropy(model(SEQUENCES), Y).backward()
        nn.init.ones_(model.gate)
        model.zero_grad()
        F.cross_entropy(model(SEQUENCES), Y).backward()
    found = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    F.cross_entropy(model(SEQUENCES), Y).backward()
    for n, parameter in model.named_parameters():
        torch.testing.assert_close(found[n], parameter.grad, rtol=1e-4, atol=1e-6)


def test_one_infinite_value_costs_its_sample_and_no_other():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 4))
    x = SEQUENCES[:, 0].clone()
    x[2, 3] = torch.inf
    clipping = Clipping(1e9, 0.0, SystemEntropy(), model=model)
    with clipping.seeing:
        F.cross_entropy(model(x), Y).backward()
    assert all(p.grad.isfinite().all() and p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("fault", [AssertionError("odd"), KeyError("odd"), TypeError("odd"), KeyboardInterrupt()])
def test_whatever_goes_wrong_nothing_raw_stays(fault, monkeypatch):
    model = nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 4))

    def failing(*_given):
        raise fault

    monkeypatch.setattr(Plan, "norms", failing)
    expected = KeyboardInterrupt if isinstance(fault, KeyboardInterrupt) else LeakRefused
    with pytest.raises(expected), LeakGuard(model, "budget"):
        F.cross_entropy(model(SEQUENCES[:, 0]), Y).backward()
    assert all(p.grad is None for p in model.parameters())


def test_masks_that_hide_nothing():
    model = Taking(
        lambda m, x, mask: m.h(m.a(x, x, x, key_padding_mask=mask, need_weights=False)[0].mean(1)),
        a=nn.MultiheadAttention(12, 2, batch_first=True), h=nn.Linear(12, 4),
    )  # fmt: skip
    assert shares(model, lambda: model(SEQUENCES, torch.zeros(B, T, dtype=torch.bool)), Y) < 1.001


def test_a_model_that_works_in_place_on_a_batch_of_one():
    model = Of(lambda m, x: m.h(x.mul_(2)), h=nn.Linear(12, 4))
    clipping = Clipping(1e9, 0.0, SystemEntropy(), model=model)
    with clipping.seeing:
        F.cross_entropy(model(SEQUENCES[:1, 0].clone()), Y[:1]).backward()
    found = model.h.weight.grad.clone()
    model.zero_grad()
    F.cross_entropy(model(SEQUENCES[:1, 0].clone()), Y[:1]).backward()
    torch.testing.assert_close(found, model.h.weight.grad)


class Gated(nn.Module):
    """A weight of its own decides, before the layer, what arrives there."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Parameter(torch.ones(1))
        self.branch, self.layer, self.head = nn.Linear(12, 12), nn.Linear(12, 20), nn.Linear(20, 4)

    def forward(self, x):
        return self.head(self.layer(x + self.gate * self.branch(x).tanh()).relu())


def test_a_step_from_the_layer_on_knows_every_weight_before_it():
    torch.manual_seed(0)
    model, shortcuts, x = Gated(), Shortcuts(), SEQUENCES[:, 0]
    for gate in (1.0, 0.0):
        nn.init.constant_(model.gate, gate)
        found = shortcuts.step(model, "layer", (x,), Y, loss=default_loss, seed=0)
        whole = exposed_step(model, (x,), Y, layers=["layer"], loss=default_loss, seed=0)
        assert torch.equal(found.update.gradients["layer.weight"], whole.update.gradients["layer.weight"])


class Standardised(nn.Conv2d):
    """A convolution that is another one."""

    def forward(self, input):
        return self._conv_forward(input, self.weight - self.weight.mean((1, 2, 3), keepdim=True), self.bias)


def test_convolutions_of_other_kinds_are_left_alone():
    x = torch.randn(B, 3, 8, 8)
    patched = nn.Conv2d(3, 4, 3)
    patched.forward = lambda input: F.conv2d(input, 2 * patched.weight, patched.bias)
    for layer in (Standardised(3, 4, 3), patched):
        before = layer(x)
        with sparse_backward(nn.Sequential(layer)):
            assert torch.equal(layer(x), before)
        assert torch.equal(layer(x), before)
    plain = nn.Conv2d(3, 4, 3)
    with sparse_backward(nn.Sequential(plain)):
        assert torch.equal(plain(input=x), F.conv2d(x, plain.weight, plain.bias))
