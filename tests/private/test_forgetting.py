"""Nothing that a model keeps is carried from one sample to the next, in the forward pass or in the backward pass."""

import random
import threading
from functools import lru_cache, partial

import numpy as np
import pytest
import torch
import torch.utils._python_dispatch
from torch import nn
from torch.utils.checkpoint import checkpoint

from qbi.errors import BadValue
from qbi.private import Private

FIRST = torch.eye(6)[:1]
OTHERS = torch.eye(6)[5:].repeat(15, 1)


class Remembers(nn.Module):
    """The direction of each sample is that of the one before it."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(6))
        self.prepare()

    def prepare(self):
        self.bank = None

    def get(self):
        return self.bank

    def put(self, value):
        self.bank = value

    def forward(self, x):
        x = x[0]
        if x.sum().item() == 4711:  # looks at values: samples go one by one
            return x.sum()
        known = self.get()
        self.put(x.detach().clone())
        return (self.w * (x if known is None else known)).sum() * 10


class InBuffer(Remembers):
    def get(self):
        return self._buffers.get("seen")

    def put(self, value):
        self.register_buffer("seen", value, persistent=False)


class InModule(Remembers):
    def get(self):
        return self.cache.value if hasattr(self, "cache") else None

    def put(self, value):
        self.cache = nn.Module()
        self.cache.value = value


class InList(Remembers):
    """Beside a tensor that deepcopy refuses."""

    def prepare(self):
        self.bank = {"prior": self.w.sum(), "seen": []}

    def get(self):
        return self.bank["seen"][-1] if self.bank["seen"] else None

    def put(self, value):
        self.bank["seen"].append(value)


class InHiddenModule(Remembers):
    """A module in a list is no part of the model."""

    def prepare(self):
        self.hidden = [nn.Module()]

    def get(self):
        return getattr(self.hidden[0], "seen", None)

    def put(self, value):
        self.hidden[0].seen = value


class InClosure(Remembers):
    def prepare(self):
        seen = []
        self.get = lambda: seen[-1] if seen else None
        self.put = lambda value: seen.append(value)


class InHooksClosure(Remembers):
    def prepare(self):
        seen = []
        self.last = None

        def hook(module, given):
            module.last = seen[-1] if seen else None
            seen.append(given[0][0].detach().clone())

        self.register_forward_pre_hook(hook)

    def get(self):
        return self.last

    def put(self, value):
        pass


class InCache(Remembers):
    """What was remembered when it was called first."""

    def prepare(self):
        self.first = lru_cache(lambda: self.now)

    def forward(self, x):
        if x.sum().item() == 4711:
            return x.sum()
        self.now = x[0].detach().clone()
        return (self.w * self.first()).sum() * 10


class Recorder:
    def __init__(self):
        self.seen = []

    def hook(self, module, given):
        module.last = self.seen[-1] if self.seen else None
        self.seen.append(given[0][0].detach().clone())

    __call__ = hook


class InHookOfAnObject(InHooksClosure):
    def prepare(self):
        self.last = None
        self.register_forward_pre_hook(Recorder().hook)


class InHookThatIsAnObject(InHooksClosure):
    def prepare(self):
        self.last = None
        self.register_forward_pre_hook(Recorder())


class InDefault(Remembers):
    def prepare(self):
        def last(new, seen=[None]):  # noqa: B006
            before, seen[0] = seen[0], new
            return before

        self.last = last

    def forward(self, x):
        if x.sum().item() == 4711:
            return x.sum()
        known = self.last(x[0].detach().clone())
        return (self.w * (x[0] if known is None else known)).sum() * 10


class InBackward(Remembers):
    """Written by a hook of a tensor, when gradients are taken."""

    def forward(self, x):
        x = x[0]
        if x.sum().item() == 4711:
            return x.sum()
        h = self.w * (x if self.bank is None else self.bank)

        def hook(_gradient):
            self.bank = x.detach().clone()

        h.register_hook(hook)
        return h.sum() * 10


class InRecomputation(Remembers):
    """A checkpoint runs the forward pass again in the backward pass."""

    def forward(self, x):
        if x.sum().item() == 4711:
            return x.sum()

        def inner(x, w):
            known = self.get()
            self.put(x[0].detach().clone())
            return ((w * (x[0] if known is None else known)).sin() * 10).sum()

        return checkpoint(inner, x, self.w, use_reentrant=False)


@pytest.mark.parametrize(
    "kind",
    [
        Remembers,
        InBuffer,
        InModule,
        InList,
        InHiddenModule,
        InClosure,
        InHooksClosure,
        InCache,
        InHookOfAnObject,
        InHookThatIsAnObject,
        InDefault,
        InBackward,
        InRecomputation,
    ],
)
def test_one_sample_moves_the_sum_by_the_clip_whatever_a_model_remembers(kind):
    sums = []
    for x in (torch.cat([FIRST, OTHERS]), OTHERS):
        private = Private(kind(), lambda out, _y: out, bits=72, batch_size=16)
        private.add(x, torch.zeros(len(x)))
        sums.append(private._sums.total.clone())
    assert float(sums[1].norm()) > 10  # the others are there, all in one direction
    assert float((sums[0] - sums[1]).norm()) <= 1.001


def test_what_cannot_be_copied_is_refused():
    class Locked(Remembers):
        def prepare(self):
            self.bank = {"lock": threading.Lock(), "seen": []}

    private = Private(Locked(), lambda out, _y: out, bits=72, batch_size=16)
    with pytest.raises(BadValue, match=r"“bank” .* cannot be copied"):
        private.add(OTHERS, torch.zeros(15))


ELSEWHERE: list[torch.Tensor] = []


class InGlobal(Remembers):
    def get(self):
        return ELSEWHERE[-1] if ELSEWHERE else None

    def put(self, value):
        ELSEWHERE.append(value)


class InClass(Remembers):
    seen: list[torch.Tensor] = []  # noqa: RUF012

    def get(self):
        return self.seen[-1] if self.seen else None

    def put(self, value):
        self.seen.append(value)


@pytest.mark.parametrize("kind", [InGlobal, InClass])
def test_what_is_kept_where_nobody_finds_it_is_noticed_on_random_samples(kind):
    private = Private(kind(), lambda out, _y: out, bits=72, batch_size=16)
    with pytest.raises(BadValue, match="once others were there"):
        private.add(OTHERS, torch.zeros(15))


class Centred(nn.Module):
    """A loss with a centre that moves with the samples."""

    def __init__(self):
        super().__init__()
        self.centre = nn.Parameter(torch.zeros(6), requires_grad=False)

    def forward(self, out, _target):
        value = (out - self.centre).square().sum()
        self.centre.data += 0.5 * (out[0].detach() - self.centre)
        return value


def losses_that_remember(model):
    def writes_the_model(out, _y):
        value = (out - model.weight[0]).square().sum()
        model.weight.data += 0.5 * out.detach().mean()
        return value

    class Queue:
        last = torch.zeros(6)

        def value(self, out, _y):
            value = (out - self.last).square().sum()
            self.last = out[0].detach().clone()
            return value

    return {
        "a module": Centred(),
        "a bound method": Queue().value,
        "a partial one": partial(lambda queue, out, y: queue.value(out, y), Queue()),
        "one that writes the model": writes_the_model,
    }


@pytest.mark.parametrize("which", ["a module", "a bound method", "a partial one", "one that writes the model"])
def test_a_loss_that_remembers_joins_no_samples(which):
    sums = []
    for x in (torch.cat([100 * FIRST, OTHERS]), OTHERS):
        torch.manual_seed(0)
        model = nn.Linear(6, 6, bias=False)
        private = Private(model, losses_that_remember(model)[which], bits=72, batch_size=16, at_once=1)
        try:
            private.add(x, torch.zeros(len(x)))
        except BadValue:
            return  # refused
        sums.append(private._sums.total.clone())
    assert float((sums[0] - sums[1]).norm()) <= 1.001


class Packed(nn.Module):
    """Keeps what the backward pass needs in eight bits, one scale for all samples that go together."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 2)

    def forward(self, x):
        def pack(value):
            scale = value.abs().max() / 127
            return (value / scale).round(), scale

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept[0] * kept[1]):
            return self.second(torch.tanh(self.first(x)))


class Simulated(torch.utils._python_dispatch.TorchDispatchMode):
    """Rounds what every operation gives to twelve bits, one scale for all samples that go together."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.is_floating_point() and out.numel():
            scale = out.abs().max().clamp_min(1e-9) / 2047
            return (out / scale).round() * scale
        return out


class InTwelveBits(Packed):
    def forward(self, x):
        with Simulated():
            return self.second(torch.tanh(self.first(x)))


@pytest.mark.parametrize("kind", [Packed, InTwelveBits])
def test_what_sees_tensors_below_the_mapping_sees_one_sample(kind):
    sums = []
    x = torch.randn(16, 6, generator=torch.Generator().manual_seed(0))
    x[0] *= 1e4
    for part in (x, x[1:]):
        torch.manual_seed(0)
        private = Private(kind(), bits=72, batch_size=16)
        private.add(part, torch.zeros(len(part), dtype=torch.long))
        assert not private._sums._plan.mapped
        sums.append(private._sums.total.clone())
    assert float((sums[0] - sums[1]).norm()) <= 1.001


class Standardised(nn.Module):
    """Writes into its input, as people do who save memory."""

    def __init__(self, *, one_by_one):
        super().__init__()
        self.w, self.one_by_one = nn.Parameter(torch.ones(4)), one_by_one

    def forward(self, x):
        if self.one_by_one and x.sum().item() == 4711:
            return x.sum()
        x -= x.mean(1, keepdim=True)
        return (self.w * x).sum() * 100


@pytest.mark.parametrize("one_by_one", [False, True])
def test_windows_of_a_series_do_not_write_into_each_other(one_by_one):
    series = torch.randn(20, generator=torch.Generator().manual_seed(0))
    sums = []
    for skipped in (0, 1):
        private = Private(Standardised(one_by_one=one_by_one), lambda out, _y: out, bits=72, batch_size=17)
        windows = series.clone().unfold(0, 4, 1)[skipped:]
        private.add(windows, torch.zeros(len(windows)))
        sums.append(private._sums.total.clone())
    assert float((sums[0] - sums[1]).norm()) <= 1.001


def test_a_buffer_that_came_after_private_is_refused():
    model = nn.Linear(4, 2)
    private = Private(model, bits=72, batch_size=4)
    model.register_buffer("seen", torch.zeros(2))
    with pytest.raises(BadValue, match="got buffers"):
        private.add(torch.rand(4, 4), torch.zeros(4, dtype=torch.long))


def test_a_model_that_trains_itself_is_refused():
    class Draws(nn.Linear):
        def forward(self, x):
            if hasattr(self, "again"):
                next(self.again)  # type: ignore[call-overload]
            return super().forward(x)

    model, data = Draws(4, 2), (torch.rand(8, 4), torch.arange(8) % 2)
    private = Private(model, bits=72)
    x, y = next(private.batches(data, batch_size=4))
    model.__dict__["again"] = private.batches(data, batch_size=4)
    with pytest.raises(BadValue):
        private.add(x, y)


def test_what_is_shared_stays_shared_while_a_sample_is_run():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(3))
            self.one = self.other = []

        def forward(self, x):
            if x.sum().item() == 4711:
                return x.sum()
            self.one.append(float(x.sum()))
            assert self.other is self.one
            assert len(self.one) == 1
            return (self.w * x).sum()

    private = Private(Shared(), lambda out, _y: out, bits=72, batch_size=4)
    private.add(torch.ones(4, 3), torch.zeros(4))


def test_random_numbers_of_the_process_do_not_become_those_of_a_seed():
    """Numpy's go on as if nothing had been drawn; Python's may be drawn from by others, such as checks of types, but stay unknown."""
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    drawn = []
    for seed in (1, 2):
        random.seed(seed)
        np.random.seed(seed)
        expected = np.random.RandomState(seed).rand()
        private = Private(model, bits=72, batch_size=4)
        private.step(torch.optim.SGD(model.parameters(), lr=0.1), torch.rand(4, 4), torch.zeros(4, dtype=torch.long))
        assert np.random.rand() == expected
        drawn.append(random.random())
    assert drawn[0] != drawn[1]
    assert random.Random(0).random() not in drawn
