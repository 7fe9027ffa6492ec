"""Uses of parameters: what each kind says of a sample's gradient, and how one is added from outside."""

import torch
from torch import nn
from torch.nn import functional as F

from qbi.private.planning import find_plan
from qbi.private.samples import Evaluator
from qbi.uses import OPERATIONS, operation
from qbi.uses.kinds import Pairs


def plan_of(model, x, y):
    return find_plan(Evaluator(model, F.cross_entropy), x, y, 4)


class Halved(nn.Module):
    """A linear map by an operation that nobody registered."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 6))

    def forward(self, x):
        return torch.inner(x, self.weight)


def test_an_operation_from_outside_is_one_function_and_one_line():
    x, y = torch.randn(4, 6), torch.arange(4) % 3
    model = Halved()
    assert plan_of(model, x, y).whole == {"weight"}
    whole = sums(model, x, y)

    @operation(torch.inner)
    def inner(capture, input, other):
        return capture.use(Pairs(tuple(other.shape)), input, torch.inner(input, other), other, None)

    try:
        assert plan_of(model, x, y).whole == frozenset()
        torch.testing.assert_close(sums(model, x, y), whole)
    finally:
        del OPERATIONS[torch.inner]


def test_a_weight_whose_gradient_is_rounding_alone_does_not_slow_the_others_down():
    """A key's bias moves every score of a row alike, which softmax does not see: its gradient is zero but for rounding."""
    from qbi.lab.networks import Transformer

    torch.manual_seed(0)
    model = Transformer(width=32, heads=2, layers=2, words=50, length=12)
    x, y = torch.randint(50, (4, 12)), torch.arange(4) % 2
    plan = plan_of(model, x, y)
    assert plan.mapped
    assert plan.whole <= {n for n in dict(model.named_parameters()) if "key.bias" in n}


def sums(model, x, y):
    evaluator = Evaluator(model, F.cross_entropy)
    total = {n: torch.zeros(s, dtype=torch.float64) for n, s in evaluator.shapes.items()}
    evaluator.add(total, x, y, torch.ones(len(x), dtype=torch.bool), 0.1, find_plan(evaluator, x, y, len(x)))
    return torch.cat([v.flatten() for v in total.values()])


def test_every_trained_parameter_is_accounted_for():
    """Recognised, or formed sample by sample: nothing that the loss depends on is in neither."""
    import fuzz

    for seed in range(48):
        c = fuzz.case(seed)
        evaluator, plan = fuzz.evaluator_of(c)
        if not plan.mapped:
            continue
        with evaluator.mapped(c.x, c.y, plan) as (uses, unknown, _, _):
            pass
        explained = {n for u in uses for n in u.names} | plan.whole
        assert not unknown
        assert explained <= set(evaluator.parameters)
        assert evaluator.reached(c.x, c.y) <= explained
