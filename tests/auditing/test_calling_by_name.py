"""How models are called and what they return: by name, several inputs, their own loss, several outputs; and which loss is taken."""

import pytest
import torch
from torch import nn

from qbi import EXACT, audit
from qbi.auditing import Client
from qbi.auditing.losses import choose_loss
from qbi.errors import BadValue
from zoo import Of

DRAWS = torch.Generator().manual_seed(0)
TABLE = torch.randn(60, 10, generator=DRAWS)
WIDE = torch.randn(60, 30, generator=DRAWS)
WORDS = torch.randint(40, (60, 6), generator=DRAWS)
LABELS = torch.arange(60) % 10


def audited(model, data, **more):
    more = {"client": Client(6), "batches": 1, "defences": False, "attacks": ["passive", "measured"], **more}
    return audit(model, data, **more)


def mlp(outputs, width=10):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, 50), nn.ReLU(), nn.Linear(50, outputs))


def test_as_many_classes_as_features_ask_for_the_loss():
    with pytest.raises(BadValue, match=r"classifier or an autoencoder.*--loss cross-entropy or --loss reconstruction"):
        audited(mlp(10), (TABLE, LABELS))
    assert audited(mlp(10), (TABLE, LABELS), loss="cross-entropy").loss == "cross-entropy"
    assert audited(mlp(10), (TABLE, LABELS), loss="reconstruction").loss == "mse (reconstruction)"
    assert audited(mlp(10), TABLE).loss == "mse (reconstruction)"


@pytest.mark.parametrize(
    ("output", "inputs", "targets", "name"),
    [
        ((4, 7), TABLE[:4], LABELS[:4] % 7, "cross-entropy"),
        ((4, 1), TABLE[:4], LABELS[:4] % 2, "bce"),
        ((4,), TABLE[:4], LABELS[:4] % 2, "bce"),
        ((4, 1), TABLE[:4], torch.rand(4), "mse"),
        ((), TABLE[:4], LABELS[:4], "the model's own"),
        ((4, 6, 40), WORDS[:4], WORDS[:4], "cross-entropy (next token)"),
        ((4, 6, 40), WORDS[:4], WORDS[:4].flip(0), "cross-entropy"),
        ((4, 3, 5, 5), torch.rand(4, 1, 5, 5), torch.zeros(4, 5, 5).long(), "cross-entropy"),
    ],
)
def test_the_loss_follows_from_shapes(output, inputs, targets, name):
    values = torch.randn(output, requires_grad=True)
    loss, wanted, found = choose_loss("auto", values, inputs, targets)
    assert found == name
    assert loss(values, wanted).dim() == 0


def test_next_tokens_are_those_of_the_language_models_own_loss():
    """Logits that are sure of the next token cost nothing; those sure of the present one cost much."""
    loss, wanted, _ = choose_loss("auto", torch.zeros(4, 6, 40), WORDS[:4], WORDS[:4])
    ahead = nn.functional.one_hot(WORDS[:4].roll(-1, 1), 40) * 50.0
    assert loss(ahead, wanted) < 1e-6
    assert loss(nn.functional.one_hot(WORDS[:4], 40) * 50.0, wanted) > 1


def test_positions_that_are_not_counted_are_no_labels_below_zero():
    left_out = WORDS[:4].clone()
    left_out[:, 2:] = -100
    assert choose_loss("auto", torch.zeros(4, 6, 40), WORDS[:4], left_out)[2] == "cross-entropy (next token)"
    with pytest.raises(BadValue, match="labels start at -1"):
        choose_loss("auto", torch.zeros(4, 7), TABLE[:4], torch.tensor([-1, 0, 1, 2]))


class ReturnsItsLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(10, 50), nn.Linear(50, 4)

    def forward(self, x, labels=None):
        out = self.head(self.body(x).relu())
        if labels is None:
            return {"logits": out}
        return {"loss": nn.functional.cross_entropy(out, labels), "logits": out}


class IgnoresTargets(ReturnsItsLoss):
    def forward(self, x, labels=None):
        return self.head(self.body(x).relu())


@pytest.mark.parametrize("by_name", [True, False])
def test_a_model_that_returns_its_loss_is_audited_with_it(by_name):
    labels = LABELS % 4
    torch.manual_seed(0)
    model = ReturnsItsLoss()
    data = {"x": TABLE, "labels": labels} if by_name else (TABLE, labels)
    own = audited(model, data, loss="own")
    assert own.loss == "the model's own"
    assert own.recall == audited(model, data).recall > 0
    with pytest.raises(BadValue, match=r"returns .* and no loss"):
        audited(IgnoresTargets(), data, loss="own")


def test_inputs_by_keyword_only_and_of_unlike_width():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.head = nn.Linear(10, 40), nn.Linear(30, 40), nn.Linear(80, 4)

        def forward(self, *, narrow, wide):
            return self.head(torch.cat([self.a(narrow), self.b(wide)], 1).relu())

    torch.manual_seed(0)
    result = audited(Two(), {"wide": WIDE, "narrow": TABLE, "labels": LABELS % 4})
    assert {o.layer for o in result.outcomes if o.status == "leaks"} >= {"a", "b"}
    with pytest.raises(BadValue, match=r"narrow.*by name|by name.*narrow"):
        audited(Two(), (TABLE, WIDE, LABELS % 4))


def test_of_several_outputs_the_first_counts_and_the_others_are_not_tested():
    model = Of(
        lambda m, x: (m.head(m.body(x).relu()), m.aux(x)),
        body=nn.Linear(10, 50),
        head=nn.Linear(50, 4),
        aux=nn.Linear(10, 4),
    )
    result = audited(model, (TABLE, LABELS % 4))
    (left,) = (o for o in result.outcomes if o.layer == "aux")
    assert left.status == "not tested"
    assert "the loss does not depend on it" in left.reason


def test_a_batch_of_one_is_refused_with_what_it_means():
    with pytest.raises(BadValue, match=r"batches of 1.*a single sample is read from"):
        Client(1)


@pytest.mark.skipif(not hasattr(nn.functional, "grouped_mm"), reason="this torch has no products in groups")
def test_experts_in_one_weight_are_maps_of_their_own():
    def mixed(m, x):
        order = (x[:, 0] > 0).long().argsort()
        ends = torch.stack([(x[:, 0] <= 0).sum(), torch.tensor(len(x))]).int()
        out = nn.functional.grouped_mm(x[order], m.experts, offs=ends)
        return m.head(out[order.argsort()].relu())

    torch.manual_seed(0)
    model = Of(mixed, experts=nn.Parameter(torch.randn(2, 32, 40) / 5), head=nn.Linear(40, 4))
    x = torch.randn(60, 32, generator=DRAWS)
    x[:, 0] = x[:, 0].abs() * torch.tensor([1.0, -1.0]).repeat(30)
    result = audited(model, (x, LABELS % 4))
    found = {o.layer: o.status for o in result.outcomes}
    assert {"experts[0]", "experts[1]", "head"} <= set(found)
    assert result.accounts["experts"] == "leaks"


def test_a_model_with_weight_norm_is_left_as_it_was():
    torch.manual_seed(0)
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(10, 40)), nn.ReLU(), nn.Linear(40, 4))
    before = model(TABLE)
    audited(model, (TABLE, LABELS % 4))
    assert torch.equal(model(TABLE), before)
    assert nn.utils.parametrize.is_parametrized(model[0])


def test_defences_are_tried_on_models_that_return_more_than_a_tensor():
    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 3))

        def forward(self, x):
            return {"logits": self.net(x)}

    torch.manual_seed(0)
    data = torch.randn(40, 12), torch.arange(40) % 3
    result = audit(Wrapped(), data, client=Client(4), attacks=["passive"], batches=1)
    left = {d.name: d.recall[EXACT] for d in result.defences}
    assert left["none"] == 1
    assert left["private step, 72 bits"] == 0
    assert "qbi.Private" in result.advice[0]
