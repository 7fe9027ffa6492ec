"""The strongest servers: whole batches from one answer, certificates that never lie, and what they need."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import nn
from torch.nn import functional as F

from qbi.attacks import ATTACKS, QBI, Cascade, InGramSpace, Knowledge, Passive, Reading, mount
from qbi.attacks.cascade import Spread, best_spread, peeled
from qbi.attacks.explaining import tail_for
from qbi.attacks.states import read_states
from qbi.auditing import Client, audit
from qbi.carrier import flat
from qbi.data.images import normalised
from qbi.data.photos import synthetic_photos
from qbi.errors import BadValue
from qbi.extraction.decoding import certified, expected_noise, row_bound
from qbi.extraction.labels import label_counts
from qbi.extraction.recovered import nothing
from qbi.extraction.system import build_system
from qbi.extraction.tokens import tokens_moved, tokens_spanned
from qbi.federation import client_step
from qbi.federation.aggregation import secure_sum, weighted_mean
from qbi.federation.local import LocalTraining, local_update
from qbi.gram import gram
from qbi.metrics import EXACT, FAITHFUL, RECOGNISABLE, match
from qbi.metrics.matching import mean_squared_errors
from qbi.models import two_layer
from qbi.randomness import generator
from qbi.records import Update


def batch_of(data, size, seed, spare=0):
    order = torch.randperm(len(data), generator=generator(seed, "strongest", size))
    x, more = normalised(data, order[:size]), normalised(data, order[size : size + spare])
    return x, data.labels[order[:size]] % 10, flat(more)


def image_net(shape, neurons, classes=10, seed=0):
    features = shape[0] * shape[1] * shape[2]
    return nn.Sequential(nn.Flatten(), *two_layer(features, neurons, classes, seed=seed))


def read(attack, model, x, y, *, seed=0, layer="1", loss=None, how=None):
    mounted = mount(model, attack, x[:2], generator(seed, "rows"), layer=layer, strict=attack.crafts)
    update = client_step(mounted.model, x, y, **({} if loss is None else {"loss": loss}))
    return mounted.read(update, replace(how or Reading(), largest=float(x.abs().max())))


def recalls(found, x, data_range=4.0):
    return match(found.samples, flat(x), data_range=data_range)


# Cascade.


@pytest.mark.parametrize(
    ("neurons", "batch", "least"),
    [
        (200, 20, 0.99),
        (500, 100, 0.99),
        (200, 100, 0.9),
        *(pytest.param(*c, marks=pytest.mark.long) for c in ((200, 50, 0.99), (1000, 200, 0.99), (500, 200, 0.9))),
    ],
)
def test_cascade_reads_whole_batches_of_cifar10(cifar, neurons, batch, least):
    exact = []
    for seed in range(3):
        x, y, spare = batch_of(cifar, batch, seed, spare=3 * batch)
        attack = Cascade.prepare(Knowledge(batch, neurons, 3072, spare))
        found = read(attack, image_net(cifar.shape, neurons, seed=seed), x, y, seed=seed)
        exact.append(recalls(found, x)[EXACT].recall)
        errors = mean_squared_errors(found.samples[found.certified], flat(x))
        assert errors.amin(1).max() < 1e-6, "a certificate that lies"
        whose = errors.argmin(1)
        assert torch.equal(found.labels[found.certified], y[whose])
    assert sum(exact) / len(exact) >= least


@pytest.mark.long
def test_cascade_reads_whole_batches_of_imagenet_and_imdb(imagenet, imdb):
    x, y = normalised(imagenet, slice(0, 50)), imagenet.labels[:50]
    found = read(Cascade(50), image_net(imagenet.shape, 200), x, y)
    assert recalls(found, x)[EXACT].recall >= 0.99
    from qbi.models import text_model

    torch.manual_seed(0)
    model = text_model(len(imdb.vocabulary), neurons=400)
    tokens = imdb.tokens[:100]
    mounted = mount(model, Cascade(100), tokens[:2], generator(0))
    found = mounted.read(client_step(mounted.model, tokens, imdb.labels[:100]))
    embedded = mounted.model.embedding(tokens).flatten(1).detach()
    assert match(found.samples, embedded)[EXACT].recall >= 0.99


def test_cascade_beats_the_papers_rows_on_the_same_batch(cifar):
    x, y, _ = batch_of(cifar, 50, 0)
    model = image_net(cifar.shape, 200)
    assert recalls(read(QBI(50), model, x, y), x)[EXACT].recall < 0.7
    assert recalls(read(Cascade(50), model, x, y), x)[EXACT].recall == 1


LOSSES = {
    "sum": (lambda o, t: F.cross_entropy(o, t, reduction="sum"), 10, "classes"),
    "smoothed": (lambda o, t: F.cross_entropy(o, t, label_smoothing=0.1), 10, "classes"),
    "squares": (F.mse_loss, 3, "numbers"),
    "absolute": (F.l1_loss, 3, "numbers"),
}


@pytest.mark.parametrize("name", LOSSES)
def test_any_loss_of_one_sample_will_do(cifar, name):
    loss, outputs, kind = LOSSES[name]
    x, y, _ = batch_of(cifar, 16, 1)
    targets = y if kind == "classes" else torch.randn(16, outputs, generator=generator(3))
    found = read(
        Cascade(16), image_net(cifar.shape, 200, outputs), x, targets, loss=loss, how=Reading(loss=loss, targets=kind)
    )
    assert recalls(found, x)[EXACT].recall >= 0.9
    if kind == "numbers":
        assert not found.certified.any()  # any target would do: samples that fire the same rows look like one
        return
    if name == "sum":
        assert mean_squared_errors(found.samples[found.certified], flat(x)).amin(1).max() < 1e-6
    assert int(found.certified.sum()) >= 14 if name == "sum" else not found.certified.any()


def test_cascade_behind_a_prefix_and_batch_norm(cifar):
    """The CNN's convolutions carry the image; BatchNorm in front is undone by its statistics."""
    from qbi.data.images import unit_pixels
    from qbi.models import image_cnn

    torch.manual_seed(0)
    x = unit_pixels(cifar, slice(0, 30))
    mounted = mount(image_cnn(cifar.shape, 150, norm="batch"), Cascade(30), x[:2], generator(1))
    found = mounted.read(client_step(mounted.model, x, cifar.labels[:30]))
    assert match(found.samples, flat(x))[EXACT].recall >= 0.9


def test_normalisation_behind_the_layer_proves_nothing_but_is_still_read(cifar):
    x, y, _ = batch_of(cifar, 20, 2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(3072, 200), nn.ReLU(), nn.BatchNorm1d(200), nn.Linear(200, 10))
    found = read(Cascade(20), model, x, y)
    assert recalls(found, x)[EXACT].recall > 0.3  # single rows
    tail = mount(model, Cascade(20), x[:2], generator(0), layer="1")
    update = client_step(tail.model, x, y)
    system = build_system(*_layer(tail, update))
    from qbi.errors import CannotRead

    with pytest.raises(CannotRead, match="mixes the samples"):
        tail_for(tail, update, Reading(), system)


def _layer(mounted, update):
    name, target = mounted.layer, mounted.target
    return (
        update.gradients[f"{name}.weight"],
        update.gradients[f"{name}.bias"],
        target.weight.detach(),
        target.bias.detach(),
    )


@pytest.mark.parametrize(("classes", "rounded"), [(2, None), (10, None), (1000, None), (10, torch.bfloat16)])
@pytest.mark.long
def test_no_mixture_is_ever_certified(cifar, classes, rounded):
    """Ten thousand rows in which several samples stand, as the reader meets them in its first step."""
    tried = wrong = 0
    for seed in range(30):
        x, _, _ = batch_of(cifar, 64, seed)
        y = torch.randint(classes, (64,), generator=generator(seed, "labels"))
        mounted = mount(image_net(cifar.shape, 500, classes, seed=seed), Cascade(64), x[:2], generator(seed), layer="1")
        update = client_step(mounted.model, x, y)
        if rounded is not None:
            update = replace(update, gradients={n: g.to(rounded).float() for n, g in update.gradients.items()})
        rounding = None if rounded is None else 2.0**-9
        system = build_system(*_layer(mounted, update), rounding=rounding, most_samples=64)
        tail, outputs = tail_for(mounted, update, Reading(rounding=rounding), system)
        noise = expected_noise(system, nothing(system, outputs))
        error = noise / system.bias.abs()
        z = system.products / system.bias[:, None]
        rows = torch.arange(system.rows)
        _, pulls, miss = tail.explain(z, rows, system.bias, system)
        passed = miss < row_bound(system, error)
        fine = certified(system, tail.backprops(z, pulls), error, torch.ones_like(rows)) & passed
        fired = (flat(x) @ mounted.target.weight.detach().T + mounted.target.bias.detach() > 0).T[system.kept]
        quotient = update.gradients["1.weight"][system.kept] / update.gradients["1.bias"][system.kept, None]
        pure = mean_squared_errors(quotient, flat(x)).amin(1) < (1e-6 if rounded is None else 1e-2)
        mixed = (fired.sum(1) > 1) & ~pure
        tried += int(mixed.sum())
        wrong += int((fine & mixed).sum())
    assert tried >= 10_000
    assert wrong == 0


@pytest.mark.long
def test_the_predicted_share_agrees_in_distribution_with_the_measured_one(cifar):
    """With few rows the cascade stalls at random; the law of activation patterns says how often, a wrong law does not."""
    neurons, batch, layers = 36, 24, 70
    attack = Cascade(batch, Spread(1.0, 0.2, 1.0), unmixing=False)
    x, y, _ = batch_of(cifar, batch, 5)
    model = image_net(cifar.shape, neurons)
    measured = []
    for layer in range(layers):
        found = read(attack, model, x, y, seed=layer)
        measured.append(recalls(found, x)[EXACT].recall)
    space = attack.in_gram_space(flat(x))
    drawn = [float(peeled(attack.firing(space, neurons, generator(9, i))).double().mean()) for i in range(300)]
    assert stats.mannwhitneyu(measured, drawn).pvalue > 1e-4
    norms = space.test.diagonal().sqrt()
    equal = InGramSpace(torch.diag(torch.full_like(norms, 3072.0)), 3072)
    wrong = [float(peeled(attack.firing(equal, neurons, generator(9, i))).double().mean()) for i in range(300)]
    assert stats.mannwhitneyu(measured, wrong).pvalue < 1e-4


def test_the_spread_is_chosen_by_what_it_reads(cifar):
    x = flat(normalised(cifar, slice(0, 300)))
    spread = best_spread([gram(x[:100]), gram(x[100:200])], 150, 3072, 0)
    held_out = InGramSpace(gram(x[200:]), 3072)
    chosen, usual = (
        sum(float(peeled(Cascade(100, s).firing(held_out, 150, generator(i))).double().mean()) for i in range(20)) / 20
        for s in (spread, Spread())
    )
    assert chosen > usual + 0.1


# Unmixing: nothing in the model is changed.


@pytest.mark.parametrize(("neurons", "batch"), [(200, 20), (200, 32), (1000, 64)])
@pytest.mark.long
def test_honest_models_give_whole_batches_away(cifar, neurons, batch):
    for seed in range(10):
        x, y, _ = batch_of(cifar, batch, seed)
        model = image_net(cifar.shape, neurons, seed=seed)
        before = {n: p.clone() for n, p in model.state_dict().items()}
        found = read(Passive(), model, x, y)
        assert recalls(found, x)[EXACT].recall == 1, seed
        assert all(torch.equal(p, before[n]) for n, p in model.state_dict().items())


@pytest.mark.long
def test_a_hundred_samples_of_an_honest_model(cifar):
    x, y, _ = batch_of(cifar, 100, 0)
    assert recalls(read(Passive(), image_net(cifar.shape, 1000), x, y), x)[FAITHFUL].recall >= 0.95


@pytest.mark.long
def test_after_an_epoch_of_training(cifar):
    exact = []
    for seed in range(5):
        model = image_net(cifar.shape, 200, seed=seed)
        optimiser = torch.optim.SGD(model.parameters(), lr=0.05)
        for chosen in torch.randperm(5000, generator=generator(seed)).split(20):
            optimiser.zero_grad()
            F.cross_entropy(model(normalised(cifar, chosen)), cifar.labels[chosen]).backward()
            optimiser.step()
        chosen = torch.arange(5000 + 20 * seed, 5020 + 20 * seed)
        x = normalised(cifar, chosen)
        exact.append(recalls(read(Passive(), model, x, cifar.labels[chosen]), x)[EXACT].recall)
    assert sum(exact) / len(exact) >= 0.9


@pytest.mark.parametrize("kind", ["gaussian", "tabular"])
def test_without_any_knowledge_of_the_data(kind):
    exact = []
    for seed in range(10):
        x = torch.randn(12, 300, generator=generator(seed, kind))
        if kind == "tabular":
            x[:, ::3] = (x[:, ::3] > 0.5).float()
            x[:, 1::3] = x[:, 1::3].exp()
        exact.append(
            recalls(read(Passive(), two_layer(300, 200, 5, seed=seed), x, torch.arange(12) % 5, layer="0"), x)[
                EXACT
            ].recall
        )
    assert sum(exact) / len(exact) >= 0.9


@pytest.mark.parametrize(
    "activation",
    [nn.LeakyReLU(), nn.GELU(), nn.SiLU()],
    ids=lambda a: type(a).__name__,
)
@pytest.mark.long
def test_soft_activations_give_pictures(cifar, activation):
    """Their rows are never silent, so nothing is exact; independent components are recognisable all the same."""
    seen = []
    for seed in range(2):
        x, y, _ = batch_of(cifar, 20, seed)
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Flatten(), nn.Linear(3072, 200), activation, nn.Linear(200, 10))
        found = read(Passive(), model, x, y)
        levels = recalls(found, x)
        assert levels[EXACT].recall == 0
        assert not found.certified.any()
        seen.append(levels[RECOGNISABLE].recall)
    assert sum(seen) / len(seen) > 0.6


def test_more_samples_than_rows_are_not_read(cifar):
    """A benign model with B > N: rank decides, and nothing is certified."""
    x, y, _ = batch_of(cifar, 60, 0)
    found = read(Passive(), image_net(cifar.shape, 40), x, y)
    assert not found.certified.any()
    assert recalls(found, x)[EXACT].recall == 0


def test_two_checkpoints_give_a_batch_away_and_prove_nothing(cifar):
    x, y, _ = batch_of(cifar, 20, 0)
    model = image_net(cifar.shape, 200)
    update = client_step(model, x, y)
    before = model.state_dict()
    sent = update.gradients["1.weight"], update.gradients["1.bias"]
    found, apart = read_states(*sent, before["1.weight"], before["1.bias"], shape=(3, 32, 32))
    assert apart == 20
    assert not found.certified.any()
    assert recalls(found, x)[FAITHFUL].recall == 1
    wrong = torch.randn(before["1.weight"].shape, generator=generator(1)) / 55
    assert read_states(*sent, wrong, before["1.bias"], shape=(3, 32, 32))[1] == 0


# Contracts.


@given(
    st.integers(1, 9), st.integers(1, 14), st.sampled_from(["plain", "same", "dead", "one class"]), st.integers(0, 99)
)
@settings(max_examples=30, deadline=None)
def test_any_shape_is_read_without_an_error_or_a_lie(batch, neurons, kind, seed):
    draws = generator(seed, "shapes")
    x = torch.randn(batch, 20, generator=draws, dtype=torch.float64)
    if kind == "same":
        x[batch // 2 :] = x[0]
    if kind == "dead":
        x[0] = 0
    classes = 1 if kind == "one class" else 3
    y = torch.arange(batch) % classes
    model = two_layer(20, neurons, max(2, classes), seed=seed).double()
    for attack in (Cascade(max(2, batch)), Passive()):
        before = x.clone()
        found = read(attack, model, x, y, layer="0")
        assert torch.equal(x, before)
        assert found.samples.isfinite().all()
        assert len(found.samples) == len(found.certified) == len(found.labels) == len(found.error)
        if found.certified.any():
            assert mean_squared_errors(found.samples[found.certified], x).amin(1).max() < 1e-6


def test_a_null_decoder_finds_nothing_and_a_doubled_sample_counts_once(cifar):
    x, y, _ = batch_of(cifar, 12, 0)
    model = image_net(cifar.shape, 120)
    mounted = mount(model, Cascade(12), x[:2], generator(0))
    update = client_step(mounted.model, x, y)
    silent = Update({n: torch.zeros_like(g) for n, g in update.gradients.items()}, {}, 12, 0.0)
    assert len(mounted.read(silent).samples) == 0
    twice = torch.cat([x, x[:1]])
    how = Reading(largest=float(x.abs().max()))
    found = mounted.read(client_step(mounted.model, twice, torch.cat([y, y[:1]])), how)
    assert 8 <= int(found.certified.sum()) <= 11  # two that look alike are not told from one that is repeated
    assert recalls(found, x)[EXACT].recall == 1


def test_the_same_seed_gives_the_same_reading(cifar):
    x, y, _ = batch_of(cifar, 32, 3)
    first, again = (read(Passive(), image_net(cifar.shape, 200), x, y) for _ in range(2))
    assert torch.equal(first.samples, again.samples)


def test_every_attack_of_the_registry_keeps_the_contract():
    photos = synthetic_photos(300, 8, seed=0)
    x, spare = normalised(photos, slice(0, 10)), flat(normalised(photos, slice(40, 300)))
    model = image_net(photos.shape, 60)
    before = {n: p.clone() for n, p in model.state_dict().items()}
    for attack in ATTACKS.values():
        prepared = attack.prepare(Knowledge(10, 60, 192, spare))
        found = read(prepared, model, x, photos.labels[:10] % 10)
        assert found.samples.shape[1] == 192
        assert all(torch.equal(p, before[n]) for n, p in model.state_dict().items()), attack.key


def test_senseless_settings_are_refused():
    with pytest.raises(BadValue, match="batch size is 1"):
        Cascade(1)


# What else is read.


def test_labels_are_counted_from_the_head(cifar):
    x, y, _ = batch_of(cifar, 64, 0)
    update = client_step(image_net(cifar.shape, 200), x, y)
    counts = label_counts(update.gradients["3.bias"], 64)
    truth = torch.bincount(y, minlength=10)
    assert int(torch.minimum(counts, truth).sum()) >= 62
    assert int(counts.sum()) == 64


def test_tokens_are_read_from_a_trained_and_from_a_frozen_embedding():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(300, 48), nn.Linear(48, 64), nn.ReLU(), nn.Flatten(), nn.Linear(64 * 6, 2))
    tokens = torch.randint(300, (5, 6), generator=generator(1))
    present = torch.zeros(300, dtype=torch.bool)
    present[tokens.flatten()] = True
    update = client_step(model, tokens, torch.arange(5) % 2)
    assert torch.equal(tokens_moved(update.gradients["0.weight"]), present)
    spanned = tokens_spanned(update.gradients["1.weight"], model[0].weight.detach())
    assert torch.equal(spanned, present)
    assert tokens_spanned(torch.randn(64, 48), model[0].weight.detach()) is None


def test_a_missing_bias_is_no_protection():
    from qbi.auditing import Client, audit

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 60, bias=False), nn.ReLU(), nn.Linear(60, 3))
    with torch.no_grad():
        model[0].weight.abs_().neg_()[:, ::2].mul_(-0.8)
    result = audit(model, (torch.rand(60, 30), torch.arange(60) % 3), attacks=["passive"], client=Client(8), batches=1)
    assert next(o for o in result.outcomes if o.layer == "0").status == "leaks"
    assert not any("Take the bias out" in line for line in result.advice)


# Several local steps


def test_an_honest_client_of_fedavg_gives_all_its_steps_away(cifar):
    """Each sample's inputs and silent rows are exact at its own step; nothing is proven of them."""
    x, y = normalised(cifar, slice(0, 200)), cifar.labels[:200]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(3072, 200), nn.ReLU(), nn.Linear(200, 10))
    client = Client(6, local_steps=4, training=LocalTraining(learning_rate=0.01))
    result = audit(model, (x, y), attacks=["passive"], client=client, batches=1, defences=False)
    assert result.worst.recovered[FAITHFUL].mean > 0.9
    assert not any(attack.certified for attack in result.attacks)


def test_the_server_counts_the_samples_of_all_steps():
    model = nn.Sequential(nn.Linear(12, 30), nn.ReLU(), nn.Linear(30, 3))
    batches = [(torch.randn(4, 12), torch.arange(4) % 3) for _ in range(3)]
    update = local_update(model, batches, LocalTraining("sgd", 0.1, epochs=2))
    assert (update.batch_size, update.samples, update.steps) == (4, 12, 6)


def test_a_sum_of_clients_keeps_how_many_steps_are_in_it():
    """Else samples of later steps could be certified by weights that they were not made with."""
    model = nn.Sequential(nn.Linear(12, 30), nn.ReLU(), nn.Linear(30, 3))
    batches = [(torch.randn(4, 12), torch.arange(4) % 3) for _ in range(3)]
    update = local_update(model, batches, LocalTraining("sgd", 0.1))
    for whole in (secure_sum([update, update]), weighted_mean([update, update])):
        assert (whole.samples, whole.steps) == (24, 3)
