"""The private step at work: what it trains, what it refuses, and in which words."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

from qbi.private import BudgetSpent, Private, find_rate, with_group_norm
from qbi.private.keystream import repeated_keys
from qbi.theory import guarantees

X = torch.randn(40, 12, generator=torch.Generator().manual_seed(0))
Y = (X[:, :3]).argmax(1)


def small():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 20), nn.ReLU(), nn.Linear(20, 3))


def free(model, loss=F.cross_entropy, **settings):
    """With next to no noise, so that gradients can be compared."""
    settings = {"bits": 1e20, "clip": 1e3, "total": math.inf, "batch_size": 8, **settings}
    return Private(model, loss, **settings)


def plain_gradients(model, x, y, loss=F.cross_entropy):
    model.zero_grad()
    loss(model(x), y).backward()
    return [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize(
    "make",
    [
        lambda w: torch.optim.SGD(w, lr=0.1, momentum=0.9, weight_decay=0.01),
        lambda w: torch.optim.Adam(w, lr=0.01),
        lambda w: torch.optim.AdamW(w, lr=0.01, weight_decay=0.1),
    ],
)
def test_without_noise_and_clipping_it_is_plain_training(make):
    one, two = small(), small()
    private, a, b = free(one), make(one.parameters()), make(two.parameters())
    slower = [torch.optim.lr_scheduler.StepLR(o, 2, 0.5) for o in (a, b)]
    for start in range(0, 40, 8):
        x, y = X[start : start + 8], Y[start : start + 8]
        private.step(a, x, y)
        b.zero_grad()
        F.cross_entropy(two(x), y).backward()
        b.step()
        for s in slower:
            s.step()
    for p, q in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)


def test_parts_of_a_batch_are_one_step_with_one_noise():
    """Accumulation over parts of unequal size: the sum is the batch's, noise is added once."""
    one, two = small(), small()
    whole, parts = (Private(m, bits=72, batch_size=20) for m in (one, two))
    whole._keys, parts._keys = repeated_keys(1), repeated_keys(1)
    whole.step(torch.optim.SGD(one.parameters(), lr=0.1), X[:20], Y[:20])
    for start, stop in ((0, 1), (1, 4), (4, 15), (15, 20)):
        parts.add(X[start:stop], Y[start:stop])
    parts.step(torch.optim.SGD(two.parameters(), lr=0.1))
    for p, q in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-5)
    # Not drawn: one sample could be in each of the four parts, and would count four times in one sum.
    assert parts.account.participations == 16


def test_noise_is_that_of_one_clip_over_the_nominal_batch_on_every_weight():
    """Also on weights that got no gradient, and on an empty batch."""
    model = nn.Sequential(nn.Linear(50, 60), nn.ReLU(), nn.Linear(60, 3))
    idle = nn.Parameter(torch.zeros(3000))
    model.register_parameter("idle", idle)
    private = Private(model, bits=72, batch_size=10, total=math.inf)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.0)
    private.step(optimiser, torch.randn(10, 50), torch.zeros(10, dtype=torch.long))
    assert float(idle.grad.std()) == pytest.approx(0.1 / 10, rel=0.1)
    private.step(optimiser, torch.zeros(0, 50), torch.zeros(0, dtype=torch.long))
    everything = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert float(everything.std()) == pytest.approx(0.1 / 10, rel=0.05)
    # On the grid: whole numbers of steps over the batch size.
    steps = everything.double() * 10 / private.grid.step
    assert float((steps - steps.round()).abs().max()) < 0.02


def test_penalties_on_weights_are_not_clipped():
    """FedProx: the pull towards the round's weights is added as it is."""
    model = small()
    start = [p.detach().clone() for p in model.parameters()]
    with torch.no_grad():
        for p in model.parameters():
            p += 1000.0
    pull = lambda m: 0.5 * sum((p - q).square().sum() for p, q in zip(m.parameters(), start, strict=True))  # noqa: E731
    private = Private(model, bits=72, batch_size=8, penalty=pull)
    private.step(torch.optim.SGD(model.parameters(), lr=0.0), X[:8], Y[:8])
    assert float(model[0].weight.grad.mean()) == pytest.approx(1000.0, rel=1e-3)


class Many(Dataset):
    def __len__(self):
        return len(X)

    def __getitem__(self, i):
        return X[i], int(Y[i])


@pytest.mark.parametrize("data", [(X, Y), TensorDataset(X, Y), Many()], ids=["tensors", "TensorDataset", "Dataset"])
@pytest.mark.parametrize("sampling", ["passes", "poisson"])
def test_batches_are_drawn_and_counted(data, sampling):
    model = small()
    private = Private(model, bits=10, total=1000)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    for x, y in private.batches(data, 7, epochs=3, sampling=sampling):
        assert len(x) == len(y)
        seen.append(x)
        private.step(optimiser, x, y)
    assert private.account.participations == pytest.approx(3 if sampling == "passes" else 3 * 6 * 7 / 40)
    assert len(seen) == 18
    if sampling == "passes":
        first = torch.cat(seen[:6])
        assert torch.equal(first[first[:, 0].argsort()], X[X[:, 0].argsort()])
    else:
        assert len({len(x) for x in seen}) > 1


def test_poisson_draws_have_their_rate():
    private = Private(small(), bits=1e-3, total=1e9)
    drawn = [len(x) for x, _ in private.batches((X, Y), 10, epochs=500, sampling="poisson")]
    # 2,000 binomials of 40 at 1/4.
    assert sum(drawn) / len(drawn) == pytest.approx(10, abs=5 * math.sqrt(7.5 / len(drawn)))


def test_an_epoch_costs_its_participation_also_when_it_is_left():
    private = Private(small(), bits=72, total=100)
    next(iter(private.batches((X, Y), 8)))
    with pytest.raises(BudgetSpent, match="72"):
        next(iter(private.batches((X, Y), 8)))


def test_a_total_exists_without_a_ledger():
    private = Private(small(), bits=72, batch_size=8)
    optimiser = torch.optim.SGD(private.model.parameters(), lr=0.1)
    for _ in range(20):  # 20 · 72 = 1,440 of 1,500
        private.step(optimiser, X[:8], Y[:8])
    with pytest.raises(BudgetSpent):
        private.step(optimiser, X[:8], Y[:8])


def test_models_of_every_kind_train():
    """Losses fall: text, recurrent, tied, segmentation, regression, dictionaries, autocast, LoRA, dropout, augmentation."""
    from fuzz import Of

    def falls(model, x, y, loss=F.cross_entropy, rate=0.5, **settings):
        private = free(model, loss, batch_size=16, clip=1.0, **settings)
        optimiser = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=rate, momentum=0.5)
        losses = [private.step(optimiser, x, y).loss for _ in range(14)]
        assert losses[-1] < 0.9 * losses[0], losses
        return private

    torch.manual_seed(0)
    tokens, labels = torch.randint(0, 30, (16, 6)), torch.arange(16) % 3
    table = nn.Embedding(30, 12)
    falls(Of(lambda m, t: m.h(m.e(t).mean(1)), e=table, h=nn.Linear(12, 3)), tokens, labels)
    tied = nn.Linear(12, 30, bias=False)
    tied.weight = table.weight
    next_token = lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten(), ignore_index=-1)  # noqa: E731
    targets = torch.where(torch.rand(16, 6) < 0.3, -1, tokens)
    falls(Of(lambda m, t: m.h(m.e(t)), e=table, h=tied), tokens, targets, next_token, rate=1.0)
    lstm = nn.LSTM(12, 10, batch_first=True, dropout=0.1, num_layers=2)
    falls(
        Of(lambda m, t: m.h(m.r(m.e(t))[0][:, -1]), e=nn.Embedding(30, 12), r=lstm, h=nn.Linear(10, 3)),
        tokens,
        labels,
        rate=2.0,
    )
    picture, mask = torch.randn(16, 3, 8, 8), torch.randint(0, 2, (16, 8, 8))
    mask = (picture[:, 0] > 0).long()
    falls(nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 2, 1)), picture, mask)
    falls(nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 1)), X[:16], X[:16, :1] * 2, F.mse_loss)
    named = Of(
        lambda m, *, ids, mask: m.h((m.e(ids) * mask[..., None]).sum(1)), e=nn.Embedding(30, 12), h=nn.Linear(12, 3)
    )
    falls(named, {"ids": tokens, "mask": torch.ones(16, 6)}, labels)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        falls(small(), X[:16], Y[:16])
    base = nn.Linear(12, 3).requires_grad_(False)
    lora = Of(lambda m, x: m.b(x) + m.u(m.d(x)), b=base, d=nn.Linear(12, 2, bias=False), u=nn.Linear(2, 3, bias=False))
    before = base.weight.clone()
    falls(lora, X[:16], Y[:16])
    assert torch.equal(base.weight, before)
    falls(nn.Sequential(nn.Linear(12, 20), nn.Dropout(0.3), nn.ReLU(), nn.Linear(20, 3)), X[:16], Y[:16], rate=1.0)
    noisy = lambda x, y: (torch.cat([x, x + 0.1 * torch.randn_like(x)]), torch.cat([y, y]))  # noqa: E731
    falls(small(), X[:16], Y[:16], augment=noisy)


def test_dropout_is_drawn_for_each_sample():
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(12, 1, bias=False))
    private = free(model, lambda out, _y: out.sum())
    private.add(torch.ones(8, 12), torch.zeros(8))
    kept = private._sums._by_name["1.weight"][0] / 2
    assert len(kept.unique()) > 2  # eight masks, not one


def test_augmented_samples_are_one_sample():
    """Four versions inside one gradient: the clip is one clip, the loss their mean."""
    model = small()
    private = Private(
        model, bits=1e14, clip=1e-3, total=math.inf, batch_size=1, augment=lambda x, y: (x.repeat(4, 1), y.repeat(4))
    )
    private.step(torch.optim.SGD(model.parameters(), lr=0.0), X[:1], Y[:1])
    length = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
    assert float(length) == pytest.approx(1e-3, rel=1e-3)


def test_the_average_is_of_released_weights():
    model = small()
    private = Private(model, bits=72, batch_size=8, average=0.5)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    private.step(optimiser, X[:8], Y[:8])
    first = copy.deepcopy(model.state_dict())
    private.step(optimiser, X[:8], Y[:8])
    mean = private.state_dict(averaged=True)
    torch.testing.assert_close(mean["0.weight"], 0.5 * first["0.weight"] + 0.5 * model[0].weight.detach())


def test_a_step_tells_when_the_rate_looks_too_small():
    model = small()
    private = Private(model, bits=72, clip=0.01, batch_size=8)
    assert "yet" in private.advice()
    report = private.step(torch.optim.SGD(model.parameters(), lr=0.01), X[:8], Y[:8])
    assert report.clipped == 1.0
    assert report.shortened < 0.1
    assert "100 % of samples were clipped" in private.advice()
    assert "find_rate" in private.advice()


def test_a_rate_is_found_on_public_data():
    found = find_rate(small(), F.cross_entropy, (X, Y), batch_size=8, epochs=4, rates=(1e-4, 0.1), bits=72)
    assert found.best == 0.1
    assert found.losses[0.1] < found.losses[1e-4]


BAD = {
    "batch norm": (lambda: Private(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))), "with_group_norm"),
    "nothing trained": (lambda: Private(small().requires_grad_(False)), "requires_grad"),
    "two goals": (lambda: Private(small(), bits=3, epsilon=2), "one goal"),
    "a preset nobody knows": (lambda: Private(small(), preset="safe"), "there are exact"),
    "clip of zero": (lambda: Private(small(), clip=0), "clip"),
    "no batch size": (
        lambda: Private(small()).step(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1), X, Y),
        "batch_size",
    ),
    "LBFGS": (lambda: Private(small(), batch_size=4).step(torch.optim.LBFGS(small().parameters()), X, Y), "LBFGS"),
    "nothing given": (lambda: Private(small()).step(torch.optim.SGD(small().parameters(), lr=1)), "nothing was given"),
    "batch too large": (lambda: list(Private(small()).batches((X, Y), 41)), "from 1 to 40"),
    "an iterator": (lambda: list(Private(small()).batches(iter([]), 4)), "cannot be drawn from"),
    "no average": (lambda: Private(small()).state_dict(averaged=True), "average"),
    "a loss of many numbers": (
        lambda: free(small(), lambda out, y: F.cross_entropy(out, y, reduction="none").repeat(2)).add(X[:8], Y[:8]),
        "one number",
    ),
    "max_norm": (
        lambda: free(nn.Sequential(nn.Embedding(9, 3, max_norm=1.0), nn.Flatten(), nn.Linear(12, 3))).add(
            torch.zeros(8, 4).long(), Y[:8]
        ),
        "max_norm",
    ),
    "other lengths": (lambda: (p := free(small())).add(X[:8], Y[:8]) or p.add(X[:8, :5], Y[:8]), "one shape"),
    "unlike numbers": (lambda: free(small()).add(X[:8], Y[:7]), "one row for each sample"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_done_is_said_in_a_sentence(name):
    from qbi.errors import QbiError

    call, words = BAD[name]
    with pytest.raises(QbiError, match=words):
        call()


def test_group_norm_takes_the_place_of_batch_norm():
    model = with_group_norm(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8 * 36, 3)))
    Private(model, batch_size=2).step(
        torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(2, 3, 8, 8), torch.tensor([0, 1])
    )


def test_epsilon_counts_on_sampling_only_where_batches_were_sampled():
    from opacus.accountants import RDPAccountant

    model = small()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    found = {}
    for sampling in ("passes", "poisson"):
        private = Private(model, bits=0.72, total=1e6)
        for x, y in private.batches((X, Y), 4, epochs=2, sampling=sampling):
            private.step(optimiser, x, y)
        found[sampling] = private.epsilon(1e-5)
        private.load_state_dict(small().state_dict())
    accountant = RDPAccountant()
    accountant.history = [(private.budget.noise, 0.1, 20)]
    assert found["poisson"] == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-3)
    assert found["passes"] > found["poisson"]


@pytest.mark.long
def test_a_goal_in_epsilon_may_count_on_poisson_sampling():
    alone = Private(small(), epsilon=2.0, participations=2)
    sampled = Private(small(), epsilon=2.0, sampled=(0.1, 20))
    assert sampled.budget.noise < alone.budget.noise
    for x, y in sampled.batches((X, Y), 4, epochs=2, sampling="poisson"):
        sampled.step(torch.optim.SGD(sampled.model.parameters(), lr=0.1), x, y)
    assert sampled.epsilon() == pytest.approx(2.0, rel=1e-2)


def test_chances_under_poisson_sampling_lie_between_none_and_all():
    from qbi.theory.guarantees import poisson_reconstruction, reconstruction

    assert poisson_reconstruction(0.01, 0.5, 1.0, 5) == pytest.approx(reconstruction(0.01, 0.5, 5))
    assert 0.01 < poisson_reconstruction(0.01, 0.5, 0.1, 5) < reconstruction(0.01, 0.5, 5)
    one = 0.9 * 0.01 + 0.1 * reconstruction(0.01, 0.5, 1)
    assert poisson_reconstruction(0.01, 0.5, 0.1, 1) == pytest.approx(one)


@pytest.mark.parametrize("sampling", ["passes", "poisson"])
def test_epsilon_counts_steps_on_samples_that_nobody_drew(sampling):
    model = small()
    private = Private(model, bits=1, batch_size=16)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        private.step(optimiser, X[:16], Y[:16])
    before = private.epsilon()
    for x, y in private.batches((X[:16], Y[:16]), batch_size=8, sampling=sampling):
        private.step(optimiser, x, y)
    times = 6 if sampling == "passes" else 7
    assert before == pytest.approx(guarantees.epsilon(1e-5, private.budget.noise, 5), rel=1e-3)
    assert private.epsilon() == pytest.approx(guarantees.epsilon(1e-5, private.budget.noise, times), rel=1e-3)
    assert f"ε = {private.epsilon():.3g}" in private.meaning()
