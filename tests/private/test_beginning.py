"""What happens beside the samples of a step: passes of the owner's own, samples on which a model fails, goals that were stated for other batches."""

from collections import OrderedDict, deque

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from qbi.errors import BadValue
from qbi.private import Private
from qbi.private.drawing import draws
from qbi.private.ledger import BudgetSpent

OTHERS = torch.eye(6)[5:].repeat(16, 1)
LABELS = torch.zeros(16, dtype=torch.long)


class Centred(nn.Module):
    """Takes a moving centre off, which every pass in training moves."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.w = kind, nn.Linear(6, 2, bias=False)
        nn.init.zeros_(self.w.weight)
        if kind == "buffer":
            self.register_buffer("centre", torch.zeros(1, 6))
        else:
            self.centre = torch.zeros(1, 6) if kind == "attribute" else [0.0] * 6

    def forward(self, x):
        centre = torch.tensor([self.centre]) if self.kind == "numbers" else self.centre
        out = self.w(10 * (x - centre))
        moved = (0.9 * centre + 0.1 * x.detach().mean(0, keepdim=True)) if self.training else centre
        if not torch._C._functorch.is_batchedtensor(moved):
            self.centre = moved[0].tolist() if self.kind == "numbers" else moved
        return out


@pytest.mark.parametrize("kind", ["attribute", "buffer", "numbers"])
def test_a_pass_between_two_steps_moves_none(kind):
    """A running centre, moved by an evaluation: 38 clips about a sample that is in no private batch."""

    def total(evaluated):
        torch.manual_seed(0)
        model = Centred(kind)
        private = Private(model, bits=72)
        optimiser = torch.optim.SGD(model.parameters(), lr=0.0)
        for x, y in private.batches((OTHERS, LABELS), 16):
            private.step(optimiser, x, y)
        model(evaluated)
        for x, y in private.batches((OTHERS, LABELS), 16):
            private.add(x, y)
            found = private._sums.total.clone()
            private.step(optimiser)
        return found

    there = torch.cat([1000 * torch.eye(6)[:1], OTHERS])
    assert torch.equal(total(there), total(OTHERS))
    assert total(OTHERS).norm() > 1


class Counts(nn.Module):
    """Keeps what it has seen in a container, written in place."""

    def __init__(self, kept):
        super().__init__()
        self.kept, self.w = kept, nn.Linear(6, 2, bias=False)
        nn.init.zeros_(self.w.weight)

    def forward(self, x):
        if not torch._C._functorch.is_batchedtensor(x):
            number = int(x.abs().sum())
            if isinstance(self.kept, dict):
                self.kept[number] = number
            else:
                (self.kept.add if isinstance(self.kept, set) else self.kept.append)(number)
        return self.w(x * (1 + len(self.kept)))


@pytest.mark.parametrize("kept", [set, list, deque, dict, bytearray, OrderedDict], ids=lambda k: k.__name__)
def test_containers_that_a_pass_between_two_steps_wrote_into_are_put_back(kept):
    def total(evaluated):
        model = Counts(kept())
        private = Private(model, bits=72, batch_size=16)
        for row in evaluated:
            model(row[None])
        private.add(0.01 * OTHERS, LABELS)
        assert not model.kept
        return private._sums.total.clone()

    assert torch.equal(total(torch.arange(12.0).reshape(2, 6)), total(OTHERS[:0]))


SEEN: list[torch.Tensor] = []


class Remembers(nn.Module):
    """Keeps the last sample in a global: on numbers, or on tokens, with weights that may overflow."""

    def __init__(self, tokens, scale):
        super().__init__()
        self.table = nn.Embedding(4, 6) if tokens else nn.Identity()
        self.w = nn.Linear(6, 2)
        with torch.no_grad():
            self.w.weight.mul_(scale)

    def forward(self, x):
        z = self.table(x).reshape(len(x), -1, 6).mean(1)
        known = SEEN[-1] if SEEN else torch.zeros(1, 6)
        if not torch._C._functorch.is_batchedtensor(z):
            SEEN.append(z.detach())
        return self.w(z + (known if len(known) == len(z) else 0)) * (1 if bool(x.sum() > -1e9) else 2)


@pytest.mark.parametrize(("tokens", "scale"), [(True, 1.0), (False, 1.0), (False, 3e35)])
def test_what_is_kept_in_a_global_is_found_on_tokens_too_and_whatever_the_weights(tokens, scale):
    """Whole numbers were zeros in every trial, and gradients that are not finite told nothing."""
    SEEN.clear()
    torch.manual_seed(0)
    x = torch.arange(8)[:, None] % 4 if tokens else torch.randn(8, 6)
    private = Private(Remembers(tokens, scale), bits=72, batch_size=8)
    with pytest.raises(BadValue, match="changes once others were there"):
        private.add(x, LABELS[:8])


class Fails(nn.Module):
    """On samples whose first value is large."""

    def __init__(self, *, looks):
        super().__init__()
        self.looks, self.w = looks, nn.Linear(6, 2)

    def forward(self, x):
        if self.looks and float(x.sum()) == 4711:  # looks at values: samples go one by one
            return self.w(x)
        return self.w(x) + torch.linalg.cholesky(torch.diag_embed(9 - x))[:, :2, 0]


def test_a_training_on_which_the_model_failed_is_over():
    """Without the batch on which it failed, what leaves would tell of one sample, and without noise."""
    torch.manual_seed(0)
    model = Fails(looks=False)
    private = Private(model, bits=72, batch_size=16)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    private.step(optimiser, OTHERS, LABELS)
    assert private._sums._plan.mapped
    with pytest.raises(Exception, match="positive-definite"):
        private.step(optimiser, torch.cat([100 * OTHERS[:1], OTHERS[1:]]), LABELS)
    for again in (lambda: private.step(optimiser, OTHERS, LABELS), lambda: private.add(OTHERS, LABELS)):
        with pytest.raises(BadValue, match="this training is over"):
            again()


def test_where_samples_go_one_by_one_a_failing_one_counts_for_nothing():
    torch.manual_seed(0)
    private = Private(Fails(looks=True), bits=72, batch_size=16)
    private.add(OTHERS, LABELS)
    whole = private._sums.total.clone()
    private._sums.clear()
    private.add(torch.cat([100 * OTHERS[:1], OTHERS[1:]]), LABELS)
    assert not private._sums._plan.mapped
    assert 0 < float((whole - private._sums.total).norm()) <= 1.001


@pytest.mark.parametrize(
    ("more", "refusal"),
    [
        ({"sampling": "passes", "batch_size": 2}, "stated for Poisson samples"),
        ({"sampling": "poisson", "batch_size": 16}, "of rate 1"),
        ({"sampling": "poisson", "batch_size": 2, "epochs": 3}, "stated for 20 steps"),
    ],
)
def test_a_goal_for_poisson_samples_holds_for_those_alone(more, refusal):
    private = Private(nn.Linear(6, 2), epsilon=8.0, sampled=(0.125, 20))
    with pytest.raises((BadValue, BudgetSpent), match=refusal):
        next(private.batches((OTHERS, LABELS), **more))
    given = Private(nn.Linear(6, 2), epsilon=8.0, sampled=(0.125, 20), batch_size=16)
    with pytest.raises(BadValue, match="stated for Poisson samples"):
        given.step(torch.optim.SGD(given.model.parameters(), lr=0.1), OTHERS, LABELS)


def test_poisson_samples_of_rate_one_are_everybody():
    assert [batch.tolist() for batch in draws(5, 5, "poisson")] == [[0, 1, 2, 3, 4]]


def test_default_arguments_stay_with_their_functions():
    torch.manual_seed(0)
    model = nn.Linear(6, 2)
    model.made = [lambda x, by=(float(n),): x * by[0] for n in range(20)]
    for number, made in enumerate(model.made):
        setattr(model, f"own_{number}", made)
    private = Private(model, bits=72, batch_size=16)
    private.add(OTHERS, LABELS)
    assert [f.__defaults__[0][0] for f in model.made] == [float(n) for n in range(20)]


def test_layers_dropped_by_numpys_random_numbers_are_not_the_same_in_every_step():
    """By Python's neither; but those the type checker of these tests draws from as well."""
    chosen = []

    class Drops(nn.Linear):
        def forward(self, x):
            chosen.append(np.random.random())
            return super().forward(x)

    private = Private(Drops(6, 2), F.cross_entropy, bits=72, batch_size=16)
    for _ in range(3):
        private.add(OTHERS, LABELS)
    assert len(set(chosen[-3:])) == 3
