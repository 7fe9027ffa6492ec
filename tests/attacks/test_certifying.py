"""Certificates are never false: over precisions, losses and batches that invite mistakes."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from certificates import LOSSES, PRECISIONS, Tally, drawn, sent
from qbi import client_step, mount
from qbi.attacks import Reading, joint, states
from qbi.attacks.certifying import certify
from qbi.attacks.registry import ATTACKS
from qbi.auditing import Client, audit
from qbi.auditing.replay import difference, replay
from qbi.errors import CannotRead
from qbi.extraction import unmixing
from qbi.extraction.system import System
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
    tally = tallied(drawn(number, sure=number % 3 == 0) for number in range(18))
    assert tally.certified > 8
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


@pytest.mark.parametrize(("batch_size", "proven"), [(2, 2), (4, 0), (None, 0)])
def test_as_many_independent_samples_as_the_batch_has_are_needed_for_a_proof(batch_size, proven):
    """Two samples and two that are alike to below the rounding look like two, whatever stands there."""
    draws = generator(4, "alike")
    x = torch.randn(2, 40, generator=draws)
    x = torch.cat([x, x + 1e-7 * torch.randn(2, 40, generator=draws)]) if batch_size != 2 else x
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(40, 60), nn.ReLU(), nn.Linear(60, 3))
    sent = client_step(model, x, torch.arange(len(x)) % 2).gradients
    layer = model[0]
    read = states.read_states(
        sent["0.weight"], sent["0.bias"], layer.weight.data, layer.bias.data, varied=True, batch_size=batch_size
    )
    assert match(read.samples, x)[FAITHFUL].recall == 1
    assert int(read.certified.sum()) == proven


@pytest.fixture(scope="module")
def judged():
    """What was handed to the judge of certificates for a batch of which every sample is proven."""
    case = replace(drawn(1, sure=True), loss="cross-entropy", twist="none", batch=32, neurons=200, features=120)
    _, mounted, update, how = sent(case)
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(joint, "certify", lambda *asked: seen.append(asked) or certify(*asked))
        mounted.read(update, how)
    assert int(certify(*seen[-1]).sum()) >= 30
    return seen[-1]


def test_coarse_gradients_prove_nothing(judged):
    system, tail, found, size = judged
    assert not certify(replace(system, rounding=2.0**-18), tail, found, size).any()


@pytest.mark.parametrize(("off", "proves"), [(1e-6, True), (5e-5, False)])
def test_a_share_that_misses_its_row_by_more_than_rounding_proves_nothing(judged, off, proves):
    system, tail, found, size = judged
    assert bool(certify(system, replace(tail, scale=tail.scale * (1 + off)), found, size).any()) is proves


def test_a_sample_that_stands_there_twice_is_not_proven(judged):
    """It may be two that are alike. Its twin's gradient is in the update as well."""
    case = replace(drawn(1, sure=True), loss="cross-entropy", twist="repeated", batch=32, neurons=200, features=120)
    x, mounted, update, how = sent(case)
    found = mounted.read(update, how)
    assert match(found.samples, x)[FAITHFUL].recall > 0.5
    assert not found.certified.any()


def test_two_classes_prove_nothing():
    case = replace(drawn(1, sure=True), loss="two classes", twist="none", batch=32, neurons=200, features=120)
    x, mounted, update, how = sent(case)
    found = mounted.read(update, how)
    assert match(found.samples, x)[FAITHFUL].recall > 0.9
    assert not found.certified.any()


def system_with(rows, basis):
    one = torch.ones(rows, dtype=torch.float64)
    return System(torch.arange(rows), torch.diag(one), one, one[:, None], one, basis, 1e6, 2.0**-24)


def test_silent_rows_are_compared_with_the_sample_s_own():
    draws = generator(0, "silence")
    z = torch.randn(3, 40, generator=draws, dtype=torch.float64)
    shares = torch.relu(z).sign() * torch.randn(3, 40, generator=draws, dtype=torch.float64).abs().add(0.1)
    system = system_with(40, torch.eye(40, 3, dtype=torch.float64))
    silent = states._silent_where_it_must_be
    assert silent(system, shares, z).all()
    wrong = shares.clone()
    wrong[1, z[1].abs().argmax()] = 0.0 if z[1, z[1].abs().argmax()] > 0 else 1.0
    assert silent(system, wrong, z).tolist() == [True, False, True]
    on_the_edge = z.clone()
    on_the_edge[2, 5] = -1e-9 if shares[2, 5] > 0 else 1e-9
    assert silent(system, shares, on_the_edge).all()


def test_a_mixture_that_is_silent_where_both_are_is_not_taken_for_a_sample():
    """Two samples, silent together in more rows than any direction must be: the mixture has the zeros, and is not alone."""
    first, second = torch.zeros(2, 60, dtype=torch.float64)
    first[:20], second[15:35] = 1 + torch.rand(20).double(), 1 + torch.rand(20).double()
    basis = torch.linalg.qr(torch.stack([first, second], 1)).Q
    system = system_with(60, basis)
    own = torch.linalg.lstsq(basis, torch.stack([first, second, first + second], 1)).solution
    own = own / own.norm(dim=0)
    zeros = ((basis @ own).abs() < 1e-9).sum(0)
    assert bool((zeros >= unmixing.fewest_zeros(system)).all())
    exact, rough = unmixing._sort_out(own[:, :0], own[:, 2:], zeros[2:], system)
    assert exact.shape[1] == 0
    assert rough.shape[1] == 1
    exact, _ = unmixing._sort_out(own[:, :0], own[:, :2], zeros[:2], system)
    assert exact.shape[1] == 2
