"""Layers that attacks read nothing of, and that a server reads by hand which sets what they left alone: none of them is called safe."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import qbi

DRAWS = torch.Generator().manual_seed(0)
X, Y = torch.randn(96, 20, generator=DRAWS), torch.arange(96) % 4
LETTERS = torch.randint(0, 6, (96, 10), generator=DRAWS)


class Gated(nn.Module):
    """A gate that stands at nothing, as ReZero's and LayerScale's do, then a layer and a head that is frozen."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.calls = kind, 0
        if kind == "buffer":
            self.register_buffer("gate", torch.zeros(()))
        elif kind != "calls":
            self.gate = nn.Parameter(torch.zeros(20 if kind == "vector" else 1), requires_grad=kind != "frozen")
        self.layer, self.head = nn.Linear(20, 64), nn.Linear(64, 4).requires_grad_(False)

    def forward(self, x):
        if self.kind == "calls":
            self.calls += 1
            x = x * min(1, self.calls // 1000)
        else:
            x = x * (torch.tanh(self.gate) if self.kind == "tanh" else self.gate)
        return self.head(torch.relu(self.layer(x)))


def by_hand(model, x, y):
    """Samples that single rows give once the gate is open."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        if model.kind == "calls":
            model.calls = 10_000
        else:
            model.gate.fill_(20.0 if model.kind == "tanh" else 1.0)
        rows = torch.randn(64, 20, generator=torch.Generator().manual_seed(5))
        others = torch.randn(256, 20, generator=torch.Generator().manual_seed(9))
        model.layer.weight.copy_(rows)
        model.layer.bias.copy_(-(others @ rows.T).quantile(1 - 1 / 8, dim=0))
    F.cross_entropy(model(x), y).backward()
    read = (model.layer.weight.grad / model.layer.bias.grad[:, None]).nan_to_num(1e9, 1e9, 1e9)
    return int((torch.cdist(x, read).amin(1) < 1e-3).sum())


@pytest.mark.parametrize("kind", ["scalar", "vector", "tanh", "buffer", "frozen", "calls"])
def test_a_layer_behind_a_gate_that_stands_at_nothing_is_not_tested(kind):
    torch.manual_seed(0)
    model = Gated(kind)
    result = qbi.audit(model, (X, Y), client=qbi.Client(batch_size=8), defences=False)
    assert by_hand(model, X[:8], Y[:8]) > 4
    assert set(result.accounts.values()) == {"not tested"}
    assert result.status == "not tested"
    assert all(outcome.reason for outcome in result.outcomes)


class Letters(nn.Module):
    """A layer that sees letters one by one; which letter stands where is what nobody may know."""

    def __init__(self, *, frozen):
        super().__init__()
        self.layer, self.head = nn.Linear(6, 40), nn.Linear(400, 4).requires_grad_(not frozen)

    def forward(self, x):
        return self.head(torch.relu(self.layer(x)).flatten(1))


def sequences_by_hand(model, x, y):
    """Row p passes position p to one class, which is never expected: one label speaks at a time."""
    found = 0
    for label in range(4):
        own = copy.deepcopy(model).requires_grad_(True)
        with torch.no_grad():
            for p in own.parameters():
                p.zero_()
            own.layer.bias.fill_(1.0)
            own.head.bias[label] = -60.0
            for position in range(10):
                own.head.weight[label, position * 40 + position] = 1.0
        F.cross_entropy(own(x), y).backward()
        read = own.layer.weight.grad[:10] / own.layer.bias.grad[:10, None]
        found += int(((x - read).abs().amax((1, 2)) < 1e-3).any())
    return found


@pytest.mark.parametrize("frozen", [False, True])
def test_a_layer_that_sees_a_few_letters_one_by_one_is_not_tested(frozen):
    torch.manual_seed(0)
    model, x = Letters(frozen=frozen), F.one_hot(LETTERS, 6).float()
    result = qbi.audit(model, (x, Y), client=qbi.Client(batch_size=4), defences=False)
    assert sequences_by_hand(model, x[:4], Y[:4]) == 4
    assert result.accounts["layer.weight"] in ("leaks", "not tested")


def test_what_a_large_constant_drowns_is_not_called_safe():
    """A time in milliseconds among the inputs: float32 keeps nothing of the others beside it, unless its weight is zero."""
    torch.manual_seed(0)
    x = X.clone()
    x[:, 3] = 1.7e12
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 4).requires_grad_(False))
    result = qbi.audit(model, (x, Y), client=qbi.Client(batch_size=8), defences=False)
    assert result.status == "not tested"
    assert result.verdict.startswith("Not tested")


@pytest.mark.parametrize(("neurons", "size"), [(16, 512), (2, 256), (3, 256)])
def test_large_batches_have_a_verdict(neurons, size):
    torch.manual_seed(neurons)
    model = nn.Sequential(nn.Linear(20, neurons), nn.ReLU(), nn.Linear(neurons, 4))
    x, y = torch.randn(600, 20), torch.arange(600) % 4
    result = qbi.audit(model, (x, y), client=qbi.Client(batch_size=size), defences=False, batches=1)
    assert result.verdict
    assert result.worst.reads == any(a.reads for a in result.attacks)


class Failing(torch.utils.data.Dataset):
    def __len__(self):
        return 96

    def __getitem__(self, number):
        raise OSError("the disk is gone")


def test_samples_that_want_gradients_are_data_like_others():
    result = qbi.audit(
        nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 4)),
        (X.clone().requires_grad_(), Y),
        client=qbi.Client(batch_size=4),
        defences=False,
        batches=1,
    )
    assert result.status == "leaks"


@pytest.mark.parametrize(
    ("model", "data", "says"),
    [
        (torch.jit.script(nn.Linear(20, 4)), (X, Y), "torch.jit"),
        (lambda x: x, (X, Y), r"no torch\.nn\.Module"),
        (nn.Linear(20, 4), ([[1.0, 2.0], [3.0]], [0, 1]), "tensors of one shape"),
        (nn.Linear(20, 4), (X, ["a"] * 96), "labels as numbers"),
        (nn.Linear(20, 4), {"x": X, "text": ["a"] * 96, "labels": Y}, "words and labels as numbers"),
        (nn.Linear(20, 4), {}, "data"),
        (nn.Linear(20, 4), {"labels": Y}, "data"),
        (nn.Linear(20, 4), (X.to_sparse(), Y), "data"),
        (nn.Linear(20, 4), (X.to("meta"), Y), "data"),
        (nn.Linear(20, 4), (X, Y.to(torch.complex64)), "data"),
        (nn.Linear(20, 4), [(), ()], "data"),
        (nn.Linear(20, 4), Failing(), "data"),
        (nn.Linear(20, 4), (X, X, Y), "model"),
        (nn.Linear(20, 4, device="meta"), (X, Y), "model"),
    ],
)
def test_what_is_no_model_or_no_data_is_said_in_a_sentence(model, data, says):
    with pytest.raises(qbi.QbiError, match=says):
        qbi.audit(model, data, client=qbi.Client(batch_size=4), defences=False)
