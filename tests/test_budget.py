"""The budget policy: each sample's gradient clipped whatever the model, and no way around it."""

import contextlib
import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from qbi.defences import AmbientGuard, LeakGuard, with_group_norm
from qbi.defences.budget import products
from qbi.defences.budget.clipping import Clipping
from qbi.defences.budget.goal import Budget
from qbi.defences.calls import LeakRefused
from qbi.errors import BadValue
from qbi.randomness import SystemEntropy, generator
from qbi.theory.guarantees import Prior
from zoo import Conv1D, Of

B, CLASSES = 6, 4
IMAGES = torch.randn(B, 3, 8, 8, generator=torch.Generator().manual_seed(0))
TOKENS = torch.randint(0, 50, (B, 10), generator=torch.Generator().manual_seed(1))
LABELS = torch.arange(B) % CLASSES


def windows(m, x):
    """Folds four quarters of every image into the batch, as Swin does."""
    parts = x.unfold(2, 4, 4).unfold(3, 4, 4).permute(0, 2, 3, 1, 4, 5).reshape(-1, 48)
    return m.b(torch.relu(m.a(parts)).reshape(len(x), 4, -1).mean(1))


def time_first(m, x):
    h = m.e(x).transpose(0, 1)
    return m.h(m.t(h).mean(0))


def embedded(**parts):
    return {"e": nn.Embedding(50, 16), "h": nn.Linear(16, CLASSES), **parts}


MODELS = {
    "two layers": (lambda: nn.Sequential(nn.Flatten(), nn.Linear(192, 20), nn.ReLU(), nn.Linear(20, CLASSES)), IMAGES),
    "convolutions, groups, strides": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3, padding="same"),
            nn.GroupNorm(2, 8),
            nn.ReLU(inplace=True),
            nn.Conv2d(8, 8, 3, stride=2, groups=4, dilation=2, padding=2, bias=False),
            nn.Flatten(),
            nn.Linear(128, CLASSES),
        ),
        IMAGES,
    ),
    "one value wide": (
        lambda: nn.Sequential(
            nn.Flatten(),
            nn.Linear(192, 1),
            nn.Linear(1, 6),
            nn.ReLU(),
            nn.Linear(6, 1, bias=False),
            nn.Linear(1, CLASSES),
        ),
        IMAGES,
    ),
    "a convolution as wide as the image": (
        lambda: nn.Sequential(nn.Conv2d(3, 20, 8), nn.Flatten(), nn.ReLU(), nn.Linear(20, CLASSES)),
        IMAGES,
    ),
    "one and three dimensions": (
        lambda: nn.Sequential(
            nn.Conv1d(3, 4, 5, padding=2),
            nn.Unflatten(2, (4, 4, 4)),
            nn.Conv3d(4, 2, 2),
            nn.Flatten(),
            nn.Linear(54, CLASSES),
        ),
        IMAGES.flatten(2),
    ),
    "attention": (
        lambda: Of(
            lambda m, x: m.h(m.t(m.e(x)).mean(1)),
            **embedded(t=nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)),
        ),
        TOKENS,
    ),
    "attention, time first": (
        lambda: Of(time_first, **embedded(t=nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0))),
        TOKENS,
    ),
    "a tied head, positions, a class token": (
        lambda: Of(
            lambda m, x: F.linear(
                m.n(torch.cat([m.cls.expand(len(x), -1, -1), m.e(x) + m.p(torch.arange(x.shape[1]))], 1))
                .relu()
                .mean(1),
                m.e.weight,
            )[:, :CLASSES],
            e=nn.Embedding(50, 16, padding_idx=0),
            p=nn.Embedding(10, 16),
            n=nn.LayerNorm(16),
            cls=nn.Parameter(torch.randn(1, 1, 16)),
        ),
        TOKENS,
    ),
    "a layer used twice": (
        lambda: Of(lambda m, x: m.h(m.a(m.a(m.e(x)).relu()).mean(1)), **embedded(a=nn.Linear(16, 16))),
        TOKENS,
    ),
    "an LSTM": (
        lambda: Of(lambda m, x: m.h(m.r(m.e(x))[1][0][-1]), **embedded(r=nn.LSTM(16, 16, batch_first=True))),
        TOKENS,
    ),
    "a GRU, time first": (
        lambda: Of(lambda m, x: m.h(m.r(m.e(x).transpose(0, 1))[0][-1]), **embedded(r=nn.GRU(16, 16))),
        TOKENS,
    ),
    "weights the other way round": (
        lambda: Of(lambda m, x: m.h(m.a(m.e(x)).relu().mean(1)), **embedded(a=Conv1D(16, 16))),
        TOKENS,
    ),
    "normalised weights": (
        lambda: nn.Sequential(nn.Flatten(), weight_norm(nn.Linear(192, 20)), nn.ReLU(), nn.Linear(20, CLASSES)),
        IMAGES,
    ),
    "bilinear": (
        lambda: Of(lambda m, x: m.h(m.a(m.e(x).mean(1), m.e(x)[:, 0])), **embedded(a=nn.Bilinear(16, 16, 16))),
        TOKENS,
    ),
    "weights used by a function": (
        lambda: Of(
            lambda m, x: m.b(F.linear(x.flatten(1), m.a.weight, m.a.bias).relu()) * m.scale,
            a=nn.Linear(192, 20),
            b=nn.Linear(20, CLASSES),
            scale=nn.Parameter(torch.ones(CLASSES)),
        ),
        IMAGES,
    ),
    "windows in the batch": (lambda: Of(windows, a=nn.Linear(48, 20), b=nn.Linear(20, CLASSES)), IMAGES),
    "checkpointed, again in the backward pass": (
        lambda: Of(
            lambda m, x: m.b(checkpoint(m.a, x.flatten(1).requires_grad_(), use_reentrant=True)),
            a=nn.Sequential(nn.Linear(192, 20), nn.ReLU()),
            b=nn.Linear(20, CLASSES),
        ),
        IMAGES,
    ),
    "checkpointed": (
        lambda: Of(
            lambda m, x: m.b(checkpoint(m.a, x.flatten(1), use_reentrant=False)),
            a=nn.Sequential(nn.Linear(192, 20), nn.ReLU()),
            b=nn.Linear(20, CLASSES),
        ),
        IMAGES,
    ),
    "an unused head and a frozen layer": (
        lambda: Of(
            lambda m, x: m.b(m.a(x.flatten(1)).relu()),
            a=nn.Linear(192, 20).requires_grad_(False),
            b=nn.Linear(20, CLASSES),
            other=nn.Linear(20, 2),
        ),
        IMAGES,
    ),
}


def naive(model, x, clip):
    """One sample at a time: the oracle."""
    sums = {n: torch.zeros_like(p) for n, p in model.named_parameters() if p.requires_grad}
    norms = []
    for i in range(len(x)):
        model.zero_grad()
        F.cross_entropy(model(x[i : i + 1]), LABELS[i : i + 1]).backward()
        found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        norms.append(torch.sqrt(sum(g.square().sum() for g in found.values())))
        for name, gradient in found.items():
            sums[name] += gradient * min(1.0, float(clip / norms[-1])) / len(x)
    model.zero_grad()
    return sums, torch.stack(norms)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("ignore:There is a performance drop", "ignore:dropout option")
def test_clipped_sums_equal_a_loop_over_samples(name):
    make, x = MODELS[name]
    torch.manual_seed(0)
    model = make()
    _, norms = naive(model, x, 1.0)
    clip = float(norms.sort().values[2:4].mean())
    expected, _ = naive(model, x, clip)
    clipping = Clipping(clip, 0.0, SystemEntropy(), model=model)
    with clipping.seeing:
        for _ in range(3):  # checked passes, and one that relies on them
            model.zero_grad()
            F.cross_entropy(model(x), LABELS).backward()
            for n, value in expected.items():
                torch.testing.assert_close(model.get_parameter(n).grad, value, rtol=1e-4, atol=1e-6)
    assert [p.clipped for p in clipping.passes] == [int((norms > clip).sum())] * 3


@pytest.mark.parametrize("most", [1, 3000])
@pytest.mark.parametrize("name", ["convolutions, groups, strides", "one and three dimensions", "windows in the batch"])
def test_sums_do_not_depend_on_how_much_is_held_at_once(name, most, monkeypatch):
    """Patches of one sample that do not fit are not formed; whether its gradient is kept is another matter."""
    make, x = MODELS[name]
    torch.manual_seed(0)
    model = make()
    _, norms = naive(model, x, 1.0)
    clip = float(norms.sort().values[2:4].mean())
    expected, _ = naive(model, x, clip)
    monkeypatch.setattr(products, "MOST_VALUES", most)
    clipping = Clipping(clip, 0.0, SystemEntropy(), model=model)
    with clipping.seeing:
        F.cross_entropy(model(x), LABELS).backward()
    # Norms that are not taken from the sums themselves are raised by what rounding may hide: weights are lower by as much.
    for n, value in expected.items():
        assert (model.get_parameter(n).grad - value).norm() < 1e-3 * value.norm()


def plain():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 40), nn.ReLU(), nn.Linear(40, CLASSES))


def raw_gradient(model):
    model.zero_grad()
    F.cross_entropy(model(IMAGES), LABELS).backward()
    gradient = model[1].weight.grad.clone()
    model.zero_grad()
    return gradient


def is_hidden(found, raw):
    """Clipped to a small share and under noise: nothing of the raw direction stands out."""
    if found is None:
        return True
    cosine = F.cosine_similarity(found.flatten(), raw.flatten(), dim=0)
    return abs(float(cosine)) < 0.5


def by_step(model, optimiser):
    F.cross_entropy(model(IMAGES), LABELS).backward()
    optimiser.step()


def by_closure(model, optimiser):
    def closure():
        optimiser.zero_grad()
        loss = F.cross_entropy(model(IMAGES), LABELS)
        loss.backward()
        return loss

    optimiser.step(closure)


def by_two_optimisers(model, _optimiser):
    F.cross_entropy(model(IMAGES), LABELS).backward()
    for part in (model[3], model[1]):
        torch.optim.SGD(part.parameters(), lr=1.0).step()


def after_a_discarded_batch(model, optimiser):
    F.cross_entropy(model(IMAGES.flip(0)), LABELS).backward()
    optimiser.zero_grad()
    by_step(model, optimiser)


def by_hand(model, _optimiser):
    F.cross_entropy(model(IMAGES), LABELS).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= parameter.grad


def by_data(model, _optimiser):
    F.cross_entropy(model(IMAGES), LABELS).backward()
    for parameter in model.parameters():
        parameter.data.sub_(parameter.grad)


def by_autograd_grad(model, _optimiser):
    found = torch.autograd.grad(F.cross_entropy(model(IMAGES), LABELS), list(model.parameters()))
    with torch.no_grad():
        for parameter, gradient in zip(model.parameters(), found, strict=True):
            parameter -= gradient


def by_functional_call(model, _optimiser):
    weights = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
    F.cross_entropy(functional_call(model, weights, (IMAGES,)), LABELS).backward()
    with torch.no_grad():
        for n, parameter in model.named_parameters():
            parameter -= weights[n].grad


def in_backward_hooks(model, _optimiser):
    for parameter in model.parameters():
        single = torch.optim.SGD([parameter], lr=1.0)
        parameter.register_post_accumulate_grad_hook(lambda _p, single=single: single.step())
    F.cross_entropy(model(IMAGES), LABELS).backward()


def by_lbfgs(model, _optimiser):
    optimiser = torch.optim.LBFGS(model.parameters(), max_iter=2)
    by_closure(model, optimiser)


def scaled(model, optimiser):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    scaler.scale(F.cross_entropy(model(IMAGES), LABELS)).backward()
    scaler.step(optimiser)


def by_function(model, optimiser):
    hidden = F.linear(IMAGES.flatten(1), model[1].weight, model[1].bias).relu()
    F.cross_entropy(model[3](hidden), LABELS).backward()
    optimiser.step()


def by_parts(model, optimiser):
    hidden = model[1](IMAGES.flatten(1)).relu()
    F.cross_entropy(model[3](hidden), LABELS).backward()
    optimiser.step()


def scripted(model, optimiser):
    F.cross_entropy(torch.jit.script(model)(IMAGES), LABELS).backward()
    optimiser.step()


def compiled(model, optimiser):
    F.cross_entropy(torch.compile(model, backend="eager")(IMAGES), LABELS).backward()
    optimiser.step()


def compiled_in_place(model, optimiser):
    model.compile(backend="eager")
    F.cross_entropy(model(IMAGES), LABELS).backward()
    optimiser.step()


def replicated(model, optimiser):
    F.cross_entropy(nn.DataParallel(model)(IMAGES), LABELS).backward()
    optimiser.step()


def accumulated(model, optimiser):
    for half in (slice(0, 3), slice(3, 6)):
        (F.cross_entropy(model(IMAGES[half]), LABELS[half]) / 2).backward()
    optimiser.step()


def two_backwards(model, optimiser):
    loss = F.cross_entropy(model(IMAGES), LABELS)
    loss.backward(retain_graph=True)
    loss.backward()
    optimiser.step()


def two_batches_in_one(model, optimiser):
    (F.cross_entropy(model(IMAGES), LABELS) + F.cross_entropy(model(IMAGES.flip(0)), LABELS)).backward()
    optimiser.step()


def late(model, optimiser):
    first, second = F.cross_entropy(model(IMAGES[:3]), LABELS[:3]), F.cross_entropy(model(IMAGES[3:]), LABELS[3:])
    first.backward()
    second.backward()
    optimiser.step()


def placed_by_hand(model, optimiser):
    for parameter, gradient in zip(model.parameters(), raw_by_hand(model), strict=True):
        parameter.grad = gradient
    optimiser.step()


def raw_by_hand(model):
    """Gradients nobody can see arise: worked out without torch's help, here by a copy outside any module."""
    w1, b1, w2, b2 = (p.detach().clone().requires_grad_() for p in model.parameters())
    hidden = F.linear(IMAGES.flatten(1), w1, b1).relu()
    F.cross_entropy(F.linear(hidden, w2, b2), LABELS).backward()
    return [p.grad for p in (w1, b1, w2, b2)]


WAYS = {
    f.__name__: f
    for f in (
        by_step,
        by_closure,
        by_two_optimisers,
        after_a_discarded_batch,
        by_hand,
        by_data,
        by_autograd_grad,
        by_functional_call,
        in_backward_hooks,
        by_lbfgs,
        scaled,
        by_function,
        by_parts,
        scripted,
        compiled,
        compiled_in_place,
        replicated,
        accumulated,
        two_backwards,
        two_batches_in_one,
        late,
        placed_by_hand,
    )
}
REFUSED = {
    "by_autograd_grad",
    "by_functional_call",
    "in_backward_hooks",
    "by_lbfgs",
    "by_function",
    "scripted",
    "compiled",
    "compiled_in_place",
    "two_batches_in_one",
    "placed_by_hand",
    "replicated",
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.filterwarnings("ignore")
def test_no_way_of_training_gets_around_it(way):
    """Everything that client code does is seen and bounded, or refused before a weight moves."""
    model = plain()
    raw = raw_gradient(model)
    before = copy.deepcopy(model.state_dict())
    optimiser = torch.optim.SGD(model.parameters(), lr=1.0)
    refused = False
    with contextlib.suppress(LeakRefused):
        refused = True
        with AmbientGuard("budget", bits=0.5):
            WAYS[way](model, optimiser)
        refused = False
    moved = before["1.weight"] - model[1].weight.detach()
    assert is_hidden(moved if moved.any() else None, raw)
    assert refused == (way in REFUSED) or way == "replicated"
    if refused:
        assert all(torch.equal(v, before[n]) for n, v in model.state_dict().items())


def test_the_same_test_sees_a_guard_without_noise():
    model = plain()
    raw, before = raw_gradient(model), model[1].weight.detach().clone()
    with AmbientGuard("report"):
        by_step(model, torch.optim.SGD(model.parameters(), lr=1.0))
    assert not is_hidden(before - model[1].weight.detach(), raw)


def test_gradients_are_protected_when_backward_returns():
    """Copies of `.grad` that are taken before any optimiser moves hold protected values."""
    model = plain()
    raw = raw_gradient(model)
    with LeakGuard(model, "budget", bits=0.5) as guard:
        F.cross_entropy(model(IMAGES), LABELS).backward()
        assert is_hidden(model[1].weight.grad.clone(), raw)
    assert "at most 0.5 bits" in str(guard.report)


def test_noise_has_the_promised_size_and_covers_every_weight():
    model = Of(
        lambda m, x: m.b(m.a(x.flatten(1)).relu()),
        a=nn.Linear(192, 40),
        b=nn.Linear(40, CLASSES),
        unused=nn.Linear(30, 30),
    )
    clean, noisy = {}, {}
    for noise, into in ((0.0, clean), (0.7, noisy)):
        clipping = Clipping(2.0, noise, generator(1), model=model)
        with clipping.seeing:
            model.zero_grad()
            F.cross_entropy(model(IMAGES), LABELS).backward()
        into.update({n: p.grad.clone() for n, p in model.named_parameters()})
    difference = torch.cat([(noisy[n] - clean[n]).flatten() for n in clean])
    assert float(difference.std()) == pytest.approx(0.7 * 2.0 / B, rel=0.03)
    assert not clean["unused.weight"].any()
    assert noisy["unused.weight"].all()


def test_accumulated_batches_share_one_noise():
    model = plain()
    for passes, expected in ((1, 0.5), (3, 0.5 / 3)):
        clipping = Clipping(1.0, 0.5, generator(0), accumulate=passes, model=model)
        with clipping.seeing:
            model.zero_grad()
            clean = 0
            for _ in range(passes):
                (F.cross_entropy(model(IMAGES), LABELS) / passes).backward()
        quiet = Clipping(1.0, 0.0, generator(0), accumulate=passes, model=model)
        noisy = model[1].weight.grad.clone()
        with quiet.seeing:
            model.zero_grad()
            for _ in range(passes):
                (F.cross_entropy(model(IMAGES), LABELS) / passes).backward()
        clean = model[1].weight.grad
        assert float((noisy - clean).std()) == pytest.approx(expected / B, rel=0.05)


def test_an_adaptive_clip_finds_the_median_and_costs_what_was_stated():
    budget = Budget.for_goal(bits=0.5, adaptive=True, clip=100.0)
    gradients, count = budget.shares
    assert 1 / gradients**2 + 1 / (2 * count) ** 2 == pytest.approx(1 / budget.noise**2)
    model = plain()
    _, norms = naive(model, IMAGES, 1.0)
    clipping = Clipping(100.0, 0.0, generator(0), model=model, count_noise=0.3)
    with clipping.seeing:
        for _ in range(120):
            model.zero_grad()
            F.cross_entropy(model(IMAGES), LABELS).backward()
    assert float(norms.min()) < clipping.clip < float(norms.max())


def test_samples_that_mix_are_refused_with_the_remedy():
    mixing = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, CLASSES))
    for make in (lambda: mixing, lambda: nn.Sequential(nn.BatchNorm1d(192, affine=False), nn.Linear(192, CLASSES))):
        model = make()
        x = IMAGES if model is mixing else IMAGES.flatten(1)
        with pytest.raises(LeakRefused, match=r"GroupNorm.*eval\(\)"), LeakGuard(model, "budget"):
            F.cross_entropy(model(x), LABELS).backward()
    own = Of(lambda m, x: m.a(x.flatten(1) - x.flatten(1).mean(0)), a=nn.Linear(192, CLASSES))
    with pytest.raises(LeakRefused, match="mix"), LeakGuard(own, "budget"):
        F.cross_entropy(own(IMAGES), LABELS).backward()
    assert all(p.grad is None for p in own.parameters())
    mixing[1].eval()
    with LeakGuard(mixing, "budget"):
        F.cross_entropy(mixing(IMAGES), LABELS).backward()
    converted = with_group_norm(mixing)
    with LeakGuard(converted, "budget"):
        F.cross_entropy(converted(IMAGES), LABELS).backward()


def test_samples_whose_gradient_is_not_finite_are_left_out():
    model = plain()
    x = IMAGES.clone()
    x[2] *= torch.inf
    clipping = Clipping(1.0, 0.0, generator(0), model=model)
    with clipping.seeing:
        F.cross_entropy(model(x), LABELS).backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())
    model.zero_grad()
    with pytest.raises(LeakRefused, match="finite"), LeakGuard(model, "budget"):
        F.cross_entropy(model(x * torch.inf), LABELS).backward()


def test_keywords_and_dictionaries():
    model = Of(lambda m, x, scale: {"logits": m.h(m.e(x).mean(1)) * scale}, **embedded())
    with AmbientGuard("budget") as guard:
        F.cross_entropy(model(x=TOKENS, scale=2.0)["logits"], LABELS).backward()
    assert guard.tally.samples == B


@pytest.mark.parametrize(
    "goal",
    [
        {"bits": 72, "epsilon": 3.0},
        {"max_psnr": 19.0},
        {"bits": 0},
        {"bits": 5, "clip": 0.0},
        {"participations": 0},
        {"reduction": "median"},
        {"max_reconstruction": (0.1, 0.5)},
    ],
)
def test_senseless_goals_get_a_sentence(goal):
    with pytest.raises(BadValue, match=r"budget|guarantees"):
        LeakGuard(plain(), "budget", **goal)


def test_goals_say_what_they_mean_in_every_unit():
    prior = Prior((0.05,) * 10, 1.0)
    said = Budget.for_goal(max_psnr=20.0, prior=prior).meaning()
    assert "at most 20.0 dB" in said
    assert Budget.for_goal(epsilon=8.0, participations=4).meaning().startswith("at most")
    assert Budget.for_goal(max_reconstruction=(0.05, 0.01), participations=4).bits() < 1
    with pytest.raises(BadValue, match="goal of the policy budget"):
        LeakGuard(plain(), "auto", bits=72)


def test_dropout_inside_attention_is_off_in_the_block_and_back_after_it(caplog):
    model = Of(
        lambda m, x: m.h(m.t(m.e(x)).mean(1)), **embedded(t=nn.TransformerEncoderLayer(16, 2, 32, batch_first=True))
    )
    guard = LeakGuard(model, "budget")
    for _ in range(2):
        model.zero_grad()
        with guard:
            F.cross_entropy(model(TOKENS), LABELS).backward()
            assert model.t.self_attn.dropout == 0
        assert model.t.self_attn.dropout == 0.1
    assert caplog.text.count("is switched off") == 1


class Cancelling(nn.Module):
    """What a server that has read the ghost norms would like: large products of tokens that cancel in the gradient."""

    def __init__(self, gain, part):
        super().__init__()
        self.part, self.gain = part, gain

    def forward(self, x):
        out = self.part(x)
        return self.gain * (out[:, 0] - out[:, 1])


def released(model, x):
    clipping = Clipping(1.0, 0.0, SystemEntropy(), model=model)
    with clipping.seeing:
        model(x).sum().backward()
    return float(torch.sqrt(sum(p.grad.double().square().sum() for p in model.parameters())))


@pytest.mark.parametrize("gap", [1e-2, 1e-3, 1e-4, 1e-5, 0.0])
@pytest.mark.parametrize("kind", ["linear", "embedding", "twice", "transposed"])
def test_products_that_cancel_do_not_slip_past_the_clip(kind, gap):
    """Rounding once hid norms of fifty thousand times the clip; one sample alone, no noise: what leaves is never longer than C."""
    parts = {
        "linear": lambda: nn.Linear(64, 64),
        "embedding": lambda: nn.Embedding(4, 64),
        "twice": lambda: nn.Sequential(layer := nn.Linear(64, 64), layer),
        "transposed": lambda: Conv1D(64, 64),
    }
    for seed in range(12):
        for gain in (1.0, 1e4, 1e8):
            torch.manual_seed(seed)
            model = Cancelling(gain, parts[kind]())
            first = torch.randn(1, 1, 64) * 10.0 ** (seed % 5 - 2)
            x = (
                torch.tensor([[1, 1]])
                if kind == "embedding"
                else torch.cat([first, first * (1 + gap * torch.randn(64))], 1)
            )
            with contextlib.suppress(LeakRefused):
                assert released(model, x) < 1.001


def step_twice(model):
    for _ in range(2):
        F.cross_entropy(model(IMAGES), LABELS).backward()
        for parameter in model.parameters():
            parameter.data.sub_(parameter.grad)


def test_weights_may_not_move_between_passes_that_share_a_noise():
    model = plain()
    with pytest.raises(LeakRefused, match="weights moved"), AmbientGuard("budget", accumulate=3):
        step_twice(model)


def test_a_layer_held_under_two_names_keeps_its_weights():
    """A trial run lends a model other weights; torch puts those of a part with two names back wrongly."""
    layer = nn.Linear(192, 192)
    model = nn.Sequential(nn.Flatten(), layer, nn.ReLU(), layer, nn.Linear(192, CLASSES))
    before, weight = copy.deepcopy(model.state_dict()), layer.weight
    with AmbientGuard("budget"):
        F.cross_entropy(model(IMAGES), LABELS).backward()
    assert layer.weight is weight
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class Far(nn.Module):
    """Huge features, a tiny pull: the squares of one leave float32 upwards or of the other downwards, their product does neither."""

    def __init__(self, part, up, down):
        super().__init__()
        self.part, self.up, self.down = part, up, down

    def forward(self, x):
        return self.down * self.part(self.up * x).flatten(1)


@pytest.mark.parametrize("kind", ["linear", "tokens", "convolution"])
@pytest.mark.parametrize(("up", "down"), [(1e18, 2e-23), (1e10, 1e-14), (1e-23, 1e18), (1.0, 1.0)])
def test_sizes_that_leave_float32_do_not_slip_past_the_clip(kind, up, down):
    """Squares that vanished once let sixteen times the clip leave; one sample alone, no noise."""
    parts = {
        "linear": (nn.Linear(64, 4096), (1, 64)),
        "tokens": (nn.Linear(64, 4096), (1, 3, 64)),
        "convolution": (nn.Conv2d(4, 4096, 3), (1, 4, 4, 4)),
    }
    torch.manual_seed(0)
    part, shape = parts[kind]
    model = Far(part, up, down)
    clipping = Clipping(1e-3, 0.0, SystemEntropy(), model=model)
    with contextlib.suppress(LeakRefused), clipping.seeing:
        model(torch.randn(shape)).sum().backward()
    left = sum(p.grad.double().square().sum() for p in model.parameters() if p.grad is not None)
    assert left**0.5 < 1.001e-3
