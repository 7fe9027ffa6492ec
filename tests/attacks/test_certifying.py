"""Certificates are never false: over precisions, losses and batches that invite mistakes."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from certificates import LOSSES, PRECISIONS, Tally, drawn, sent
from qbi import client_step, mount
from qbi.attacks import Knowledge, Passive, Reading, certifying, joint, states
from qbi.attacks.behind import Behind
from qbi.attacks.certifying import certify
from qbi.attacks.registry import ATTACKS
from qbi.attacks.weighing import is_cross_entropy
from qbi.auditing import Client, audit
from qbi.errors import CannotRead
from qbi.extraction import directions, unmixing
from qbi.extraction.normalisation import PublicStatistics
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
    tally = tallied(drawn(number, sure=number % 3 == 0) for number in range(19, 36))
    assert tally.certified > 8
    assert tally.wrong == 0, tally.cases
    assert tally.too_many == 0, tally.cases


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(5))
def test_no_certificate_of_thousands_is_wrong(part):
    """Each part certifies at least 1,250 samples, and looks at cases in which nothing may be certified."""
    tally = tallied(drawn(10_000 * part + number, sure=number % 4 > 0) for number in range(150))
    assert tally.certified >= 1250
    assert tally.wrong == 0, tally.cases
    assert tally.too_many == 0, tally.cases


@pytest.mark.parametrize("what", ["weighted", "scaled gradients", "unknown size"])
def test_what_a_server_knows_it_uses(what):
    """One factor that is the same for a whole batch does not end reading. It ends proving: it may be samples of a kind in every row."""
    case = replace(drawn(1, sure=True), loss="weighted" if what == "weighted" else "cross-entropy", twist="none")
    case = replace(case, batch=32, neurons=200, features=120)
    x, mounted, update, how = sent(case)
    if what == "scaled gradients":
        update = replace(update, gradients={n: 0.37 * g for n, g in update.gradients.items()})
    if what == "unknown size":
        update = replace(update, batch_size=0)
    found = mounted.read(update, how)
    assert match(found.samples, x)[EXACT].recall == 1
    assert not found.certified.any()


@pytest.mark.parametrize("what", ["told", "unknown size", "scaled gradients"])
def test_means_of_near_duplicates_are_not_certified(what):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(200, 120), nn.ReLU(), nn.Linear(120, 10))
    with torch.no_grad():
        model[0].bias -= 0.6
    base, y = torch.randn(8, 200), torch.randint(10, (8,)).repeat(2)
    x = torch.cat([base, base + 3e-3 * torch.randn(8, 200)])
    update = client_step(model, x, y)
    if what == "scaled gradients":
        update = replace(update, gradients={n: 0.37 * g for n, g in update.gradients.items()})
    if what == "unknown size":
        update = replace(update, batch_size=0)
    assert not mount(model, Passive(), x[:2], generator(0, "rows"), layer="0").read(update).certified.any()


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
        assert not mounted.read(client_step(mounted.model, x, y), Reading(largest=float(x.abs().max()))).certified.any()


@pytest.mark.parametrize("seed", [2, 61])
def test_a_saturated_loss_certifies_no_mixture(seed):
    """Large positive inputs: every sample of a label sends the same, and 1·x − 1.03·y + 1.03·z passed for a sample."""
    torch.manual_seed(seed)
    x, y = (torch.rand(20) + 1 + 0.3 * torch.randn(8, 20)) * 255, torch.randint(0, 3, (8,))
    model = nn.Sequential(nn.Linear(20, 60), nn.ReLU(), nn.Linear(60, 3))
    mounted = mount(model, ATTACKS["passive"](), x[:2], generator(seed, "rows"), layer="0")
    found = mounted.read(client_step(mounted.model, x, y), Reading(seed=seed, largest=float(x.abs().max())))
    own = found.samples[found.certified].double()
    assert (torch.cdist(own, x.double()) / (x.std() * 20**0.5)).amin(1).le(0.03).all()


@pytest.fixture(scope="module")
def judged():
    """What was handed to the judge of certificates for a batch of which every sample is proven."""
    case = replace(drawn(1, sure=True), loss="cross-entropy", twist="none", batch=32, neurons=200, features=120)
    _, mounted, update, how = sent(case)
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(joint, "certify", lambda *asked: seen.append(asked) or certify(*asked))
        mounted.read(update, how)
    assert int(certify(*seen[-1]).isfinite().sum()) >= 30
    return seen[-1]


def test_coarse_gradients_prove_nothing(judged):
    system, tail, found, size = judged
    assert not certify(replace(system, rounding=2.0**-18), tail, found, size).isfinite().any()


@pytest.mark.parametrize(("off", "proves"), [(1e-6, True), (5e-5, False)])
def test_a_share_that_misses_its_row_by_more_than_rounding_proves_nothing(judged, off, proves):
    system, tail, found, size = judged
    assert bool(certify(system, replace(tail, scale=tail.scale * (1 + off)), found, size).isfinite().any()) is proves


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
    own = torch.linalg.lstsq(basis, torch.stack([first, second, first + second], 1)).solution
    own = own / own.norm(dim=0)
    found = directions._vanishing(basis, own)
    assert bool((found.rows >= 2 + directions.spare_rows(60)).all())
    assert found.proven.tolist() == [True, True, False]
    exact, rough = unmixing._sort_out(own[:, :0], found)
    assert exact.shape[1] == 2
    assert rough.shape[1] == 0  # it is made of the two


@pytest.mark.parametrize("loss", ["smoothed", "squared", "one minus softmax", "margins"])
def test_losses_under_which_a_mixture_can_be_tuned_to_pass_prove_nothing(loss):
    """Their output gradients may be parallel and add up to a mixture's own; cross-entropy's cannot (attacks/weighing.py)."""
    losses = {
        "smoothed": nn.CrossEntropyLoss(label_smoothing=0.1),
        "squared": lambda out, y: F.mse_loss(out, F.one_hot(y, out.shape[1]).to(out)),
        "one minus softmax": lambda out, y: 1 - out.softmax(1).gather(1, y[:, None]).mean(),
        "margins": nn.MultiMarginLoss(),
    }
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(60, 80), nn.ReLU(), nn.Linear(80, 5))
    x, y = torch.randn(12, 60), torch.arange(12) % 5
    found, _ = certificates(model, x, y, loss=losses[loss])
    assert match(found.samples, x)[EXACT].recall == 1
    assert not found.certified.any()


@pytest.mark.parametrize("behind", ["tanh", "relu", "norm", "narrow", "one map"])
def test_where_more_than_the_layers_own_rectifier_bends_nothing_is_proven(behind):
    """A mixture's outputs are a mixture of outputs behind one map alone; elsewhere pairs were tuned whose mean sends what both do."""
    torch.manual_seed(0)
    tails = {
        "tanh": [nn.Linear(80, 20), nn.Tanh(), nn.Linear(20, 5)],
        "relu": [nn.Linear(80, 20), nn.ReLU(), nn.Linear(20, 5)],
        "norm": [nn.LayerNorm(80), nn.Linear(80, 5)],
        "narrow": [nn.Linear(80, 2), nn.Linear(2, 5)],
        "one map": [nn.Linear(80, 20), nn.Linear(20, 5)],
    }
    model = nn.Sequential(nn.Linear(60, 80), nn.ReLU(), *tails[behind])
    x, y = torch.randn(12, 60), torch.arange(12) % 5
    tail = Behind(mount(model, Passive(), x[:2], generator(0, "rows"), layer="0"))
    assert (tail.affine_map is None) is (behind in ("tanh", "relu", "norm"))
    found, _ = certificates(model, x, y)
    assert match(found.samples, x)[EXACT].recall > 0.8
    assert int(found.certified.sum()) > 6 if behind == "one map" else not found.certified.any()


@pytest.mark.parametrize(("fired", "determined"), [(2, False), (3, False), (4, True), (10, True)])
def test_too_few_rows_tell_no_output_gradients_apart(fired, determined):
    """Of five classes: samples of different labels may send the same through three rows; of two, 1.27·x − 0.27·y passed for a sample."""
    draws = generator(0, "heads")
    heads, z = torch.randn(5, 40, generator=draws, dtype=torch.float64), torch.full((1, 40), -1.0, dtype=torch.float64)
    z[0, :fired] = 1
    pulls = torch.randn(1, 5, generator=draws, dtype=torch.float64).softmax(1)
    pulls[0, 2] -= 1
    backprops = (pulls @ heads) * (z > 0)
    system = system_with(40, backprops.T / backprops.norm())
    assert bool(certifying._determined(heads, system, z, pulls, backprops)) is determined
    assert not certifying._determined(heads, system, z, pulls, 1.001 * backprops)  # not what the one map sends
    others = torch.tensor([[0.1, 0.2, 0.3, 0.4, -1.0]], dtype=torch.float64) @ heads * (z > 0)
    both = torch.linalg.qr(torch.cat([backprops, others]).T).Q
    assert not certifying._determined(
        heads, system_with(40, both), z, pulls, backprops
    )  # a second one fires the same rows


@pytest.mark.parametrize("odd", [0, 7, 9])
def test_every_label_of_a_loss_is_looked_at(odd):
    def loss(out, y):
        usual, other = F.cross_entropy(out, y, reduction="none"), 1 - out.softmax(1).gather(1, y[:, None])[:, 0]
        return torch.where(y == odd, other, usual).mean()

    assert is_cross_entropy(F.cross_entropy, 10, torch.zeros(1).double())
    assert is_cross_entropy(nn.CrossEntropyLoss(reduction="sum"), 100, torch.zeros(1).double())
    assert not is_cross_entropy(loss, 10, torch.zeros(1).double())


def test_a_tuned_pair_that_looks_like_its_mean_is_not_certified():
    """One minus softmax, two samples of a label on both slopes of p(1 - p): parallel, and the mean sends their sum."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(200, 120), nn.ReLU(), nn.Linear(120, 10))
    with torch.no_grad():
        model[0].bias -= 0.6
        model[2].weight *= 10
    weight, bias, head = (p.detach().double() for p in (model[0].weight, model[0].bias, model[2].weight))
    draws = generator(0, "tuned")
    x, y = torch.randn(6, 200, generator=draws), torch.tensor([2, 2, 0, 1, 3, 4])
    fires = (weight @ x[0].double() + bias > 0).double()
    z = torch.where(fires > 0, 1.0, -0.5).double()
    high, step = (1 + 0.5**0.5) / 2, torch.zeros(10, dtype=torch.float64)
    step[2] = torch.tensor(high / (1 - high)).double().log()
    middle = torch.zeros(10, dtype=torch.float64)
    middle[2] = torch.tensor(9.0).double().log()
    with torch.no_grad():
        model[2].bias.copy_((middle - head @ (z * fires)).float())
    aside = fires * (torch.linalg.pinv(head * fires) @ step)
    assert bool(((z + aside > 0) == (fires > 0)).all())
    assert bool(((z - aside > 0) == (fires > 0)).all())
    back = torch.linalg.pinv(weight)
    x[0], x[1] = (back @ (z - bias + aside)).float(), (back @ (z - bias - aside)).float()
    loss = lambda out, y: 1 - out.softmax(1).gather(1, y[:, None]).mean()  # noqa: E731
    _, off = certificates(model, x, y, loss=loss)
    assert len(off) == 0 or off.max() < 1e-4


def certificates(model, x, y, layer="0", loss=None):
    """What an honest server reads, and how far each certified sample is from the nearest one of the batch."""
    how = {} if loss is None else {"loss": loss}
    sent = mount(model, Passive(), x[:2], generator(0, "rows"), layer=layer)
    found = sent.read(client_step(model, x, y, **how), Reading(**how, largest=float(x.abs().max())))
    own = found.samples[found.certified]
    return found, (torch.cdist(own.double(), x.double()).amin(1) / x.double().norm(dim=1).min() if len(own) else own)


@pytest.mark.parametrize(("seed", "classes", "size", "neurons"), [(37, 3, 2, 1000), (5102, 4, 3, 300), (3, 5, 4, 200)])
def test_mixtures_of_samples_that_fire_the_same_rows_are_not_certified(seed, classes, size, neurons):
    """One sample less than classes fill all that can be sent back through those rows, so that the space tests nothing."""
    torch.manual_seed(seed)
    x = 1 + 0.3 * torch.randn(size, 20, generator=generator(seed, "alike"))
    model = nn.Sequential(nn.Linear(20, neurons), nn.ReLU(), nn.Linear(neurons, classes))
    with torch.no_grad():
        model[0].bias += 3
    _, off = certificates(model, x, torch.arange(size))
    assert len(off) == 0


def test_where_rows_differ_the_same_samples_are_certified():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(60, 80), nn.ReLU(), nn.Linear(80, 5))
    x = torch.randn(12, 60)
    _, off = certificates(model, x, torch.arange(12) % 5)
    assert len(off) == 12
    assert off.max() < 1e-6


@pytest.mark.parametrize("copies", [4, 5, 8])
def test_means_of_samples_that_the_layer_cannot_tell_apart_are_not_certified(copies):
    """In every row the same factor: that many samples of a kind, not a client that scales its gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(120, 60), nn.ReLU(), nn.Linear(60, 10))
    unseen = torch.linalg.svd(model[0].weight.detach().double(), full_matrices=True).Vh[60:]
    base = torch.randn(6, 120).repeat_interleave(copies, 0)
    x = base + 0.5 * (torch.randn(6 * copies, 60).double() @ unseen).float()
    _, off = certificates(model, x, torch.arange(6).repeat_interleave(copies))
    assert len(off) == 0


class Meeting(nn.Module):
    """Samples meet behind the layer, in a function that no module shows."""

    def __init__(self, how):
        super().__init__()
        self.fc, self.out, self.how = nn.Linear(40, 80), nn.Linear(80, 5), how

    def forward(self, x):
        hidden = self.fc(x).relu()
        if self.how == "softmax":
            return self.out(hidden).softmax(0)
        if self.how == "mean":
            return self.out(hidden - hidden.mean(0))
        return self.out(nn.functional.dropout(hidden, 0.5))


@pytest.mark.parametrize("how", ["softmax", "mean", "dropout"])
def test_where_samples_meet_or_chance_decides_nothing_is_certified_and_nothing_breaks(how):
    torch.manual_seed(3)
    x, model = torch.relu(torch.randn(8, 40)), Meeting(how)
    torch.manual_seed(7)
    update = client_step(model, x, torch.arange(8) % 5)
    sent = mount(model, Passive(), x[:2], generator(0, "rows"), layer="fc")
    before = torch.get_rng_state()
    found = sent.read(update)
    assert torch.equal(torch.get_rng_state(), before)
    assert not found.certified.any()
    assert found.samples.isfinite().all()


@pytest.mark.parametrize("activation", [nn.GELU, nn.Tanh, nn.Hardswish, nn.ELU, nn.Softplus])
def test_what_saturates_is_not_silent_however_large_a_candidate_is(activation):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 12), activation(), nn.Linear(12, 3))
    sent = mount(model, Passive(), torch.rand(2, 7), generator(0, "rows"), layer="0", strict=False)
    z = torch.randn(8, 12, dtype=torch.float64)
    z[0] *= 1e4
    assert Behind(sent).slopes_if_firing(torch.arange(12))(z) is None


def confident_outlier(seed, ratio, size, live=20, unseen=12, rows=40, classes=4):
    """Two samples of one label that send back the same but for a factor; one of them is huge in inputs that no row weighs."""
    draws = torch.Generator().manual_seed(seed)
    grid = lambda *shape: (torch.randn(*shape, generator=draws) * 8).round() / 16  # noqa: E731
    weight = torch.zeros(rows, live + unseen)
    weight[:, 1:live] = grid(rows, live - 1) / 4
    weight[0], bias = 0.0, torch.where(torch.arange(rows) % 2 == 0, 16.0, -16.0)
    weight[0, 0] = 1.0
    head = torch.zeros(classes, rows)
    sides = torch.where(torch.rand(rows, generator=draws) < 0.5, -0.25, 0.25)
    head[torch.arange(rows) // 2 % classes, torch.arange(rows)] = sides
    head[:, 0], head[0, 0] = 0.0, 1.0
    model = nn.Sequential(nn.Linear(live + unseen, rows), nn.ReLU(), nn.Linear(rows, classes))
    with torch.no_grad():
        for p, value in zip(model.parameters(), (weight, bias, head, -(head @ bias.clamp_min(0))), strict=True):
            p.copy_(value)
    first = grid(live + unseen)
    first[0] = 0.0
    tried = first.repeat(10 * 2**16, 1)
    tried[:, 0] = torch.arange(8 * 2**16, 18 * 2**16) / 2**16
    with torch.no_grad():
        target = F.one_hot(torch.zeros(1, dtype=torch.long), classes)
        own = (model(first[None]).softmax(1) - target).double()
        theirs = (model(tried).softmax(1) - target).double()
    size_of = theirs.norm(dim=1, keepdim=True)
    apart = (theirs / size_of - own / own.norm()).norm(dim=1)
    apart[((size_of[:, 0] / own.norm()) / ratio - 1).abs() > 0.1] = 9.0
    second = tried[int(apart.argmin())].clone()
    second[live:] = size * torch.randn(unseen, generator=draws)
    return model, torch.stack([first, second]), torch.zeros(2, dtype=torch.long)


@pytest.mark.parametrize(("ratio", "size"), [(3e-6, 1e6), (5e-6, 1e5), (8e-6, 1e4)])
def test_a_huge_sample_in_inputs_that_no_row_weighs_is_in_no_certificate(ratio, size):
    """The tests hold to 1e-5, and 1e-5 of a sample that is 1e6 times as large is more than the one that is read."""
    for seed in range(5):
        model, x, y = confident_outlier(seed, ratio, size)
        _, off = certificates(model, x, y)
        assert len(off) == 0 or off.max() < 0.01


def test_nothing_is_certified_where_the_range_of_inputs_is_not_known():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 80), nn.ReLU(), nn.Linear(80, 5))
    x, y = torch.randn(4, 30), torch.arange(4)
    sent = mount(model, Passive(), x[:2], generator(0, "rows"), layer="0")
    update = client_step(model, x, y)
    assert int(sent.read(update, Reading(largest=float(x.abs().max()))).certified.sum()) == 4
    assert not sent.read(update, Reading()).certified.any()


@pytest.mark.parametrize("front", [nn.Dropout(0.3), nn.LayerNorm(40)], ids=["dropout", "layer norm"])
def test_where_the_way_to_a_layer_loses_something_no_sample_is_certified(front):
    """What arrives is proven; the client's sample is another."""
    torch.manual_seed(0)
    x, y = torch.randn(8, 40) * 3 + 2, torch.arange(8) % 5
    model = nn.Sequential(front, nn.Linear(40, 160), nn.ReLU(), nn.Linear(160, 5))
    attack = ATTACKS["cascade"].prepare(Knowledge(8, 160, 40))
    sent = mount(model, attack, x[:2], generator(0, "rows"), layer="1", strict=False)
    how, public = Reading(largest=float(x.abs().max())), PublicStatistics((2.0,), (3.0,))
    update = client_step(sent.model, x, y)
    assert int(sent.read_at_layer(update, how).certified.sum()) > 4
    assert not sent.read(update, how, public=public).certified.any()
