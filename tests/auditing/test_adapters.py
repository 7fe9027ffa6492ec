"""Adapters in a frozen model: a server writes the frozen layers too, and reads the samples from the adapter's gradients alone."""

import pytest
import torch
from torch import nn

import qbi
from qbi.metrics import EXACT

DRAWS = torch.Generator().manual_seed(0)
X, Y = torch.rand(400, 3, 8, 8, generator=DRAWS), torch.randint(10, (400,), generator=DRAWS)


class Bottleneck(nn.Module):
    """Down, a rectifier, up, and beside it the way straight through (Houlsby et al., arXiv 1902.00751)."""

    def __init__(self, width, rank):
        super().__init__()
        self.down, self.up = nn.Linear(width, rank), nn.Linear(rank, width)

    def forward(self, x):
        return x + self.up(torch.relu(self.down(x)))


class Frozen(nn.Module):
    """A frozen layer, an adapter, a frozen layer, and a head that is trained with it."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Linear(192, n).requires_grad_(False) for n in (192, 64))
        self.adapter, self.head = Bottleneck(192, 32), nn.Linear(64, 10)

    def forward(self, x):
        return self.head(torch.relu(self.second(self.adapter(self.first(x.flatten(1))))))


class FrozenPatches(nn.Module):
    """A vision transformer's layer, frozen, with an adapter behind its attention."""

    def __init__(self):
        super().__init__()
        self.cut, self.norm = nn.Linear(48, 64).requires_grad_(False), nn.LayerNorm(64).requires_grad_(False)
        self.places = nn.Parameter(0.02 * torch.randn(1, 4, 64), requires_grad=False)
        self.q, self.k, self.v, self.out = (nn.Linear(64, 64).requires_grad_(False) for _ in range(4))
        self.adapter, self.head = Bottleneck(64, 16), nn.Linear(64, 10)

    def forward(self, x):
        patches = x.unfold(2, 4, 4).unfold(3, 4, 4).permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)
        h = self.cut(patches) + self.places
        n = self.norm(h)
        h = h + self.out(torch.softmax(self.q(n) @ self.k(n).transpose(1, 2) / 8, -1) @ self.v(n))
        return self.head(self.adapter(h).mean(1))


@pytest.mark.parametrize(("make", "size", "unit"), [(Frozen, 8, "samples"), (FrozenPatches, 4, "positions")])
def test_a_crafted_model_reads_through_an_adapter_what_is_frozen_before_it(make, size, unit):
    torch.manual_seed(0)
    model = make()
    result = qbi.audit(model, (X, Y), client=qbi.Client(batch_size=size), defences=False)
    read = [a for a in result.attacks if a.layer == "adapter.down" and a.crafted]
    best = max(read, key=lambda a: a.recovered[EXACT].mean)
    assert best.unit == unit
    assert best.reads
    assert best.recovered[EXACT].mean > (0.5 if unit == "samples" else 0.1)
    assert result.accounts["adapter.down.weight"] == "leaks"
    assert set(result.accounts) == {n for n, p in model.named_parameters() if p.requires_grad}


def test_without_an_adapter_in_the_update_there_is_nothing_of_it_to_read():
    torch.manual_seed(0)
    model = Frozen()
    model.adapter.requires_grad_(False)
    result = qbi.audit(model, (X, Y), client=qbi.Client(batch_size=8), defences=False)
    assert not [a for a in result.attacks if a.layer.startswith("adapter")]
    assert set(result.accounts) == {"head.weight", "head.bias"}
