"""Nothing that a model keeps is carried from one sample to the next, in the forward pass or in the backward pass."""

import random
import threading
from functools import lru_cache

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from qbi.errors import BadValue
from qbi.private import Private

FIRST = torch.eye(6)[:1]
OTHERS = torch.eye(6)[5:].repeat(15, 1)


class Remembers(nn.Module):
    """The direction of the first sample that it sees becomes that of every later one."""

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
        if known is None and x.abs().sum() > 0:
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
            if not seen and given[0].abs().sum() > 0:
                seen.append(given[0][0].detach().clone())

        self.register_forward_pre_hook(hook)

    def get(self):
        return self.last

    def put(self, value):
        pass


class InCache(Remembers):
    def prepare(self):
        self.first = lru_cache(lambda: self.now)

    def forward(self, x):
        if x.sum().item() == 4711:
            return x.sum()
        self.now = x[0].detach().clone()
        return (self.w * self.first()).sum() * 10


class InBackward(Remembers):
    """Written by a hook of a tensor, when gradients are taken."""

    def forward(self, x):
        x = x[0]
        if x.sum().item() == 4711:
            return x.sum()
        h = self.w * (x if self.bank is None else self.bank)

        def hook(_gradient):
            if self.bank is None and x.abs().sum() > 0:
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
            if known is None and x.abs().sum() > 0:
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


def test_random_numbers_of_the_process_go_on_as_if_nothing_had_been_drawn():
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    drawn = {}
    for steps in (True, False, True):  # what is imported on the way may draw, once
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)
        if steps:
            private = Private(model, bits=72, batch_size=4)
            private.step(
                torch.optim.SGD(model.parameters(), lr=0.1), torch.rand(4, 4), torch.zeros(4, dtype=torch.long)
            )
            torch.manual_seed(1)
        drawn[steps] = random.random(), np.random.rand()
    assert drawn[True] == drawn[False]
