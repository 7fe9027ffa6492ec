"""Certificates are never false: over precisions, losses and batches that invite mistakes."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from certificates import LOSSES, PRECISIONS, Tally, drawn, sent
from qbi import client_step, mount
from qbi.attacks import Reading
from qbi.attacks.registry import ATTACKS
from qbi.auditing import Client, audit
from qbi.auditing.replay import difference, replay
from qbi.errors import CannotRead
from qbi.federation.local import LocalTraining
from qbi.metrics import EXACT, FAITHFUL, match
from qbi.randomness import generator


def tallied(cases):
    tally = Tally()
    for case in cases:
        try:
            tally.add(case)
        except CannotRead as problem:
            assert "infinite" in str(problem)  # noqa: PT017  (half precision overflowed)
    return tally


def test_no_certificate_is_wrong():
    tally = tallied(drawn(number, sure=number % 3 == 0) for number in range(45))
    assert tally.certified > 20
    assert tally.wrong == 0, tally.cases
    assert tally.too_many == 0, tally.cases


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(8))
def test_no_certificate_of_ten_thousand_is_wrong(part):
    """Each part certifies at least 1,250 samples, and looks at cases in which nothing may be certified."""
    tally = tallied(drawn(10_000 * part + number, sure=number % 4 > 0) for number in range(150))
    assert tally.certified >= 1250
    assert tally.wrong == 0, tally.cases
    assert tally.too_many == 0, tally.cases


@pytest.mark.parametrize("what", ["weighted", "scaled gradients", "unknown size"])
def test_what_a_server_knows_it_uses(what):
    """One factor that is the same for a whole batch does not end reading, nor proving."""
    case = replace(drawn(1, sure=True), loss="weighted" if what == "weighted" else "cross-entropy", twist="none")
    case = replace(case, batch=32, neurons=200, features=120)
    x, mounted, update, how = sent(case)
    if what == "scaled gradients":
        update = replace(update, gradients={n: 0.37 * g for n, g in update.gradients.items()})
    if what == "unknown size":
        update = replace(update, batch_size=0)
    found = mounted.read(update, how)
    assert match(found.samples, x)[EXACT].recall == 1
    assert int(found.certified.sum()) >= 30


def test_weight_decay_is_taken_off():
    x, y = torch.randn(80, 40, generator=generator(3)), torch.arange(80) % 5
    model = nn.Sequential(nn.Linear(40, 120), nn.ReLU(), nn.Linear(120, 5))
    training = LocalTraining("sgd", 0.1, weight_decay=0.01)
    client = Client(8, local_steps=1, training=training)
    result = audit(model, (x, y), client=client, attacks=["qbi"], batches=1, defences=False)
    plain = audit(model, (x, y), client=Client(8, local_steps=1), attacks=["qbi"], batches=1, defences=False)
    assert result.worst.recovered[FAITHFUL].mean >= plain.worst.recovered[FAITHFUL].mean - 0.13 > 0.2


def test_every_kind_of_case_is_drawn():
    cases = [drawn(number) for number in range(300)]
    assert {c.precision for c in cases} == set(PRECISIONS)
    assert {c.loss for c in cases} == set(LOSSES)
    assert torch.tensor([c.batch for c in cases]).unique().numel() > 3


@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize("batch", [2, 4])
def test_samples_that_send_the_same_are_not_certified(outputs, batch):
    """All fire the same rows, and one number says what each sends back: every row gives one mixture, which agrees with itself."""
    for seed in range(4):
        x = 1 + 0.3 * torch.randn(batch, 20, generator=generator(seed, "alike"))
        y = torch.arange(batch) % 2
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, outputs))
        model[0].bias.data += 3
        mounted = mount(model, ATTACKS["passive"](), x[:2], generator(seed, "rows"), layer="0")
        assert not mounted.read(client_step(mounted.model, x, y), Reading()).certified.any()


@pytest.mark.parametrize("seed", [2, 61])
def test_a_saturated_loss_certifies_no_mixture(seed):
    """Large positive inputs: every sample of a label sends the same, and 1·x − 1.03·y + 1.03·z passed for a sample."""
    torch.manual_seed(seed)
    x, y = (torch.rand(20) + 1 + 0.3 * torch.randn(8, 20)) * 255, torch.randint(0, 3, (8,))
    model = nn.Sequential(nn.Linear(20, 60), nn.ReLU(), nn.Linear(60, 3))
    mounted = mount(model, ATTACKS["passive"](), x[:2], generator(seed, "rows"), layer="0")
    found = mounted.read(client_step(mounted.model, x, y), Reading(seed=seed))
    own = found.samples[found.certified].double()
    assert (torch.cdist(own, x.double()) / (x.std() * 20**0.5)).amin(1).le(0.03).all()


def test_what_came_apart_is_not_proven_where_the_batch_may_be_larger():
    """Two clusters of two come apart as two samples, which are mixtures."""
    draws = torch.Generator().manual_seed(2)
    x = torch.randn(4, 40, generator=draws)
    x, y = x[torch.arange(4) % 2] + 0.01 * x, torch.tensor([0, 1, 2, 0])
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(40, 60), nn.ReLU(), nn.Linear(60, 3))
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    update = client_step(model, x, y).gradients
    after = {n: p - 0.1 * update[n] for n, p in before.items()}
    assert all(layer.proven == 0 for layer in replay(difference(before, after), before))
