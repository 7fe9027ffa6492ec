"""How much work a model is, which decides how often it is run."""

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from qbi.auditing.domain import HEAVY, operations_of
from qbi.models import image_cnn
from qbi.routing.graph import trace

X = torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def test_operations_are_those_that_torch_counts():
    plain = image_cnn((3, 8, 8), 30, 4)
    other = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 4))
    for model in (plain, other):
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(X[:1])
        assert operations_of(trace(model, X[:2])) == counter.get_total_flops()
    assert operations_of(trace(plain, X[:2])) < HEAVY
