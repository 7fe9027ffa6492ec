"""Federation physics: what aggregation, sybils, noise and local steps leave to be read; heuristic policies in a client's loop."""

import pytest
import torch
from torch import nn

from qbi.attacks import QBI, mount
from qbi.carrier import flat
from qbi.data.images import normalised
from qbi.defences import LeakRefused, defended_step
from qbi.errors import BadValue
from qbi.extraction import read_rows
from qbi.federation import LocalTraining, client_step, local_update
from qbi.federation.aggregation import (
    clipped,
    noise_share,
    participating,
    secure_sum,
    sybil,
    update_norm,
    weighted_mean,
)
from qbi.lab.reproduce.cells import Cell
from qbi.lab.reproduce.federation_cells import SCENARIOS, federation_cell
from qbi.metrics import EXACT, FAITHFUL, match
from qbi.randomness import generator


def clients(count, batch=10, features=60, neurons=80):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(features, neurons), nn.ReLU(), nn.Linear(neurons, 4))
    data = [torch.randn(batch, features, generator=generator(i)) for i in range(count)]
    sent = mount(model, QBI(batch), data[0][:2], generator(0)).model
    return sent, data, [client_step(sent, x, torch.arange(batch) % 4) for x in data]


def test_the_mean_is_weighted_by_samples_and_the_sum_is_a_sum():
    _, _, (first, second) = clients(2)
    mean = weighted_mean([first, second], [1.0, 3.0])
    total = secure_sum([first, second])
    for name, g in first.gradients.items():
        torch.testing.assert_close(mean.gradients[name], 0.25 * g + 0.75 * second.gradients[name])
        torch.testing.assert_close(total.gradients[name], g + second.gradients[name])
    assert total.batch_size == 20


def test_a_sum_of_gradients_is_that_of_one_large_batch():
    sent, data, updates = clients(3)
    whole = client_step(sent, torch.cat(data), torch.cat([torch.arange(10) % 4] * 3))
    for name, g in weighted_mean(updates).gradients.items():
        torch.testing.assert_close(g, whole.gradients[name], rtol=1e-4, atol=1e-6)


def test_sybils_take_the_cover_away():
    sent, data, updates = clients(4)
    alone = secure_sum([updates[0], *[sybil(updates[0])] * 3])
    for name, g in updates[0].gradients.items():
        assert torch.equal(alone.gradients[name], g)
    read = read_rows(alone.gradients["0.weight"], alone.gradients["0.bias"])
    assert match(read.samples, data[0])[EXACT].recall > 0.5
    assert sent is not None


def test_noise_shares_add_up_and_clipping_bounds():
    _, _, updates = clients(1)
    update = clipped(updates[0], 0.5)
    assert update_norm(update.gradients) == pytest.approx(0.5, rel=1e-5)
    assert update_norm(clipped(updates[0], 1e9).gradients) == pytest.approx(update_norm(updates[0].gradients))
    draws = generator(3)
    zero = sybil(updates[0])
    total = secure_sum([noise_share(zero, 2.0, 16, draws) for _ in range(16)])
    values = torch.cat([g.flatten() for g in total.gradients.values()])
    assert float(values.std()) == pytest.approx(2.0, rel=4 / (2 * len(values)) ** 0.5)


def test_participation_is_a_seeded_share():
    asked = participating(100, 0.1, generator(0))
    assert len(asked) == len(asked.unique()) == 10
    assert torch.equal(asked, participating(100, 0.1, generator(0)))
    assert len(participating(3, 0.01, generator(0))) == 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda u: weighted_mean([]), "0 updates"),
        (lambda u: weighted_mean([u], [0.0]), "weights"),
        (lambda u: secure_sum([]), "nobody"),
        (lambda u: noise_share(u, 1.0, 0, generator(0)), "0 clients"),
        (lambda u: participating(3, 0.0, generator(0)), "no share"),
        (lambda u: LocalTraining(learning_rate=0.0), "learning rate"),
        (lambda u: local_update(nn.Linear(2, 2), [], LocalTraining()), "no batch"),
    ],
)
def test_senseless_settings_are_refused(call, message):
    _, _, (update,) = clients(1)
    with pytest.raises(BadValue, match=message):
        call(update)


@pytest.mark.long
def test_every_scenario_of_the_table(cifar):
    found = federation_cell(Cell("federation", 200, 20, 0), cifar)
    assert list(found) == [s.name for s in SCENARIOS]
    one, ten = found["FedSGD: one gradient"], found["secure sum of 10 clients"]
    assert one["recall"] == pytest.approx(one["predicted"], abs=0.15)
    assert ten["recall"] == pytest.approx(ten["predicted"], abs=0.05)
    assert found["secure sum of 10, of whom 9 are sybils"]["recall"] == one["recall"]
    assert found["weighted mean of 5 clients"]["recall"] == found["secure sum of 5 clients"]["recall"]
    assert found["FedAvg: 10 steps of SGD, rate 0.1"]["recall"] < one["recall"]
    assert found["shared noise 1 of the clip, 10 of 10 honest"]["rough"] < 0.05
    assert found["shared noise 0.001 of the clip, 1 of 10 honest"]["rough"] > 0.3
    again = federation_cell(Cell("federation", 200, 20, 0), cifar)
    assert again == found


def trained(policy, model, x, y):
    """One step of SGD at rate 1, so that the weights move by what the policy left of the gradient."""
    optimiser = torch.optim.SGD(model.parameters(), lr=1.0)
    report = defended_step(model, x, y, policy)
    optimiser.step()
    return report


def crafted_model():
    torch.manual_seed(0)
    x = torch.randn(12, 40, generator=generator(1))
    plain = nn.Sequential(nn.Linear(40, 60), nn.ReLU(), nn.Linear(60, 4))
    return mount(plain, QBI(12), x[:2], generator(0)).model, x, torch.arange(12) % 4


@pytest.mark.parametrize("policy", ["report", "auto", "noise", "aggp", "drop", "skip"])
def test_what_a_policy_leaves_in_the_weights(policy):
    model, x, y = crafted_model()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    report = trained(policy, model, x, y)
    assert max(report.readable) > 5
    moved = {n: before[n] - p.detach() for n, p in model.named_parameters()}
    read = read_rows(moved["0.weight"], moved["0.bias"])
    recall = match(read.samples, x, data_range=4.0)[FAITHFUL].recall
    assert (recall > 0.3) == (policy == "report")
    # A batch of 12 has no row of 16 samples: `drop` takes them all.
    assert any(v.any() for v in moved.values()) == (policy not in ("skip", "drop"))
    after = {n: p.detach().clone() for n, p in model.named_parameters()}
    trained("report", model, x, y)
    assert any(not torch.equal(after[n], p) for n, p in model.named_parameters())


def test_a_policy_refuses_and_fails_closed():
    model, x, y = crafted_model()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    with pytest.raises(LeakRefused, match="alone in a row"):
        trained("refuse", model, x, y)
    with pytest.raises(BadValue, match="the loss is nan"):
        trained("report", model, x * torch.nan, y)
    with pytest.raises(LeakRefused, match="NaN or infinite"):
        # The loss is a number, its gradient is not.
        defended_step(model, x, y, "report", loss=lambda out, _y: (0 * out).sum().abs().sqrt())
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(before[n], p) for n, p in model.named_parameters())


def test_normalised_images_have_the_range_the_table_assumes(cifar):
    values = flat(normalised(cifar, slice(0, 200)))
    assert float(values.max() - values.min()) == pytest.approx(4.0, abs=0.5)
