"""One contract for all defences, AGGP to the letter, the count of what a step gives away against what extraction reads."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from qbi.attacks import PAIRS, QBI, Imprint, Mirrored, TrapWeights, mount
from qbi.carrier import flat
from qbi.data.images import normalised, unit_pixels
from qbi.data.photos import synthetic_photos
from qbi.defences import (
    AGGP,
    Defence,
    DropClose,
    DropDominated,
    DropSparse,
    HideReadable,
    LeakRefused,
    Noise,
    NoisyRows,
    Sparsify,
    chain,
    defended_step,
    keep_share,
    prune_rows,
)
from qbi.defences.aggp import kept_entries, prune_by_sorting
from qbi.errors import BadValue, CannotMount
from qbi.exposure import count_leaks, difference_leaks, observe
from qbi.extraction import read_rows
from qbi.federation.exposed import exposed_step
from qbi.lab.compare import Setting, judge, run_matrix
from qbi.metrics import EXACT, FAITHFUL, RECOGNISABLE, match
from qbi.randomness import generator

FEATURES, NEURONS, BATCH = 40, 60, 12


def mlp(seed=0, features=FEATURES, neurons=NEURONS):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(features, neurons), nn.ReLU(), nn.Linear(neurons, 4))


def batch(features, count=BATCH):
    return torch.randn(count, features, generator=generator(0)), torch.arange(count) % 3


def attacked_step(seed=0, attack=None, batch=BATCH, neurons=NEURONS, features=FEATURES):
    x = torch.randn(batch, features, generator=generator(seed, "x"))
    mounted = mount(mlp(seed, features, neurons), attack or QBI(batch), x, generator(seed, "rows"))
    return x, mounted, exposed_step(mounted.model, x, torch.arange(batch) % 4, layers=["0"])


DEFENCES: dict[str, Defence] = {
    "aggp": AGGP(),
    "aggp without bias": AGGP(bias="drop"),
    "sparse": DropSparse(3),
    "dominated": DropDominated(0.3),
    "close": DropClose(4),
    "sparsify": Sparsify(0.1),
    "noise": Noise(1.0),
    "row noise": NoisyRows(3.0),
    "hide readable": HideReadable(3.0),
    "chain": chain(DropSparse(2), Noise(0.5)),
}
OFF = {
    "nothing": chain(),
    "sparse": DropSparse(0),
    "dominated": DropDominated(1.0),
    "close": DropClose(0),
    "sparsify": Sparsify(1.0),
    "noise": Noise(0.0),
    "row noise": NoisyRows(0.0),
    "hide readable": HideReadable(0.0),
    "aggp": AGGP(lowest=1.0, highest=1.0, random_part=1.0),
}


@pytest.mark.parametrize("defence", DEFENCES.values(), ids=DEFENCES.keys())
def test_contract(defence):
    _, _, step = attacked_step()
    before = {name: g.clone() for name, g in step.update.gradients.items()}
    once, again = (defence.apply(step, generator(1)) for _ in range(2))
    assert all(torch.equal(g, before[n]) for n, g in step.update.gradients.items())
    assert once.update.gradients.keys() == before.keys()
    for name, gradient in once.update.gradients.items():
        assert gradient.shape == before[name].shape
        assert gradient.dtype == before[name].dtype
        assert gradient.isfinite().all()
        assert torch.equal(gradient, again.update.gradients[name])
    assert any(not torch.equal(g, before[n]) for n, g in once.update.gradients.items())
    assert defence.kind == "heuristic"
    assert defence.name


@pytest.mark.parametrize("defence", OFF.values(), ids=OFF.keys())
def test_switched_off_it_changes_nothing(defence):
    _, _, step = attacked_step()
    after = defence.apply(step, generator(1)).update.gradients
    assert all(torch.equal(g, after[n]) for n, g in step.update.gradients.items())


@pytest.mark.parametrize(
    "name", ["aggp", "aggp without bias", "sparse", "dominated", "close", "noise", "row noise", "hide readable"]
)
def test_single_rows_give_nothing_away_any_more(name):
    x, _, step = attacked_step()
    read = lambda s: read_rows(s.update.gradients["0.weight"], s.update.gradients["0.bias"]).samples  # noqa: E731
    assert match(read(step), x)[EXACT].recall > 0.5
    assert match(read(DEFENCES[name].apply(step, generator(1))), x)[EXACT].recall == 0


def naive_aggp(gradient, counts, aggp):
    """Row by row: which entries may stay, and how many must."""
    out = []
    for row, count in zip(gradient, counts.tolist(), strict=True):
        if count == 0 or count >= aggp.cutoff:
            out.append((None, None))
            continue
        largest = int(keep_share(count, aggp) * len(row))
        order = row.abs().argsort(descending=True)
        bound = row.abs()[order[largest - 1]] if largest else torch.inf
        out.append((row.abs() >= bound, int(aggp.random_part * largest)))
    return out


@given(st.integers(1, 12), st.integers(1, 400), st.integers(3, 16), st.integers(0, 10**6), st.booleans())
@settings(max_examples=80, deadline=None)
def test_aggp_keeps_a_random_part_of_the_largest(rows, features, cutoff, seed, quantised):
    aggp = AGGP(cutoff=cutoff, lowest=0.1)
    gradient = torch.randn(rows, features, generator=generator(seed))
    if quantised:
        gradient = gradient.mul(2).round()
    counts = torch.randint(0, cutoff + 3, (rows,), generator=generator(seed, "counts"))
    pruned = prune_rows(gradient, counts, generator(seed, "prune"), aggp)
    for row, (before, after) in enumerate(zip(gradient, pruned, strict=True)):
        allowed, kept = naive_aggp(gradient, counts, aggp)[row]
        if allowed is None:
            assert torch.equal(before, after)
            continue
        changed = after != before
        assert (after[changed] == 0).all()
        survivors = after != 0
        assert (allowed | ~survivors).all()
        if not quantised:
            assert int(survivors.sum()) == kept


def test_a_row_of_one_sample_keeps_the_documented_number():
    gradient = torch.randn(3, 150_528, generator=generator(0))
    pruned = prune_rows(gradient, torch.tensor([1, 0, 16]), generator(1), AGGP())
    assert (pruned != 0).sum(1).tolist() == [int(0.25 * int(0.01 * 150_528)), 150_528, 150_528]


def test_the_kept_quarter_is_random_and_seeded():
    gradient, counts = torch.randn(1, 4000, generator=generator(0)), torch.tensor([1])
    masks = [prune_rows(gradient, counts, generator(seed), AGGP(lowest=0.1)) != 0 for seed in (1, 1, 2)]
    assert torch.equal(masks[0], masks[1])
    shared = int((masks[0] & masks[2]).sum())
    assert 10 < shared < 50  # two random hundreds of four hundred share about 25


def test_masks_of_repeated_rounds_unite():
    """The same batch again and again: every round uncovers other entries, up to the largest share."""
    gradient, counts, draws = torch.randn(1, 4000, generator=generator(0)), torch.tensor([1]), generator(9)
    seen = torch.zeros(4000, dtype=torch.bool)
    for _ in range(60):
        seen |= prune_rows(gradient, counts, draws, AGGP())[0] != 0
    assert int(seen.sum()) == int(0.01 * 4000)


def test_keep_share_meets_its_bounds():
    assert keep_share(1, AGGP()) == pytest.approx(0.01)
    assert keep_share(15, AGGP()) == pytest.approx(0.95)


GRID = [(n, b) for n in (200, 500, 1000) for b in (20, 50, 100, 200)]


@pytest.mark.parametrize(("neurons", "batch"), GRID)
def test_aggp_brings_recall_to_zero_at_every_setting_of_the_paper(cifar, neurons, batch):
    chosen = torch.randperm(len(cifar), generator=generator(neurons, batch))[:batch]
    attacks = {
        "qbi": (QBI(batch), normalised),
        "pairs": (PAIRS(batch, flat(normalised(cifar, slice(0, neurons)))), normalised),
        "trap weights": (TrapWeights(0.97 if batch < 100 else 0.95), unit_pixels),
    }
    for name, (attack, feed) in attacks.items():
        x = flat(feed(cifar, chosen))
        mounted = mount(mlp(0, 3072, neurons), attack, x[:2], generator(1))
        step = exposed_step(mounted.model, x, cifar.labels[chosen] % 4, layers=["0"])
        for defence, expected in ((chain(), True), (AGGP(), False)):
            sent = defence.apply(step, generator(2)).update.gradients
            read = read_rows(sent["0.weight"], sent["0.bias"])
            recall = match(read.samples, x)[EXACT].recall
            assert (recall > 0) == expected, (name, recall)


def test_every_entry_aggp_keeps_is_an_exact_value(cifar):
    """Erratum 4: the bias gradient is left, so kept entries divide to input values."""
    x = flat(normalised(cifar, slice(0, 20)))
    mounted = mount(mlp(0, 3072, 200), QBI(20), x[:2], generator(1))
    step = exposed_step(mounted.model, x, cifar.labels[:20] % 4, layers=["0"])
    single = step.exposures[0].counts == 1
    sent = AGGP().apply(step, generator(2)).update.gradients
    owner = step.exposures[0].active[single].to(torch.uint8).argmax(1)
    quotient = sent["0.weight"][single] / sent["0.bias"][single, None]
    kept = quotient != 0
    torch.testing.assert_close(quotient[kept], x[owner][kept], rtol=1e-4, atol=1e-5)
    assert kept.sum(1).tolist() == [int(0.25 * int(0.01 * 3072))] * int(single.sum())
    without = AGGP(bias="drop").apply(step, generator(2)).update.gradients
    assert (without["0.bias"][single] == 0).all()


# The adaptive judge: rows that hold many samples, read by differences.


def imprinted(cifar, batch, neurons):
    x = flat(normalised(cifar, slice(0, batch)))
    means = flat(normalised(cifar, slice(1000, 3000))).mean(1)
    mounted = mount(mlp(0, 3072, neurons), Imprint(float(means.mean()), float(means.std())), x[:2], generator(1))
    return x, mounted, exposed_step(mounted.model, x, cifar.labels[:batch] % 4, layers=["0"])


def imprint_recall(x, mounted, step):
    return match(mounted.read(step.update).samples, x, data_range=6.0)[FAITHFUL].recall


def test_imprint_passes_aggp_at_large_batches_and_not_our_rule(cifar):
    x, mounted, step = imprinted(cifar, 64, 400)
    open_ = imprint_recall(x, mounted, step)
    aggp = imprint_recall(x, mounted, AGGP().apply(step, generator(0)))
    ours = imprint_recall(x, mounted, DropClose(16).apply(step, generator(0)))
    assert open_ > 0.6
    assert aggp > 0.3
    assert ours == 0


@pytest.mark.long
def test_mirrored_rows_pass_aggp_and_not_row_noise(cifar):
    """(w, b) fires for one sample, (−w, −b) for all others: no row with few samples, and yet the one is read."""
    setting = Setting(neurons=200, batches=2)
    plain, pruned, noisy = (judge(cifar, "mirrored", d, 20, setting) for d in ("none", "aggp", "row-noise-3"))
    assert plain.recall[FAITHFUL] > 0.6
    assert pruned.recall[FAITHFUL] > 0.4
    assert noisy.recall[FAITHFUL] == 0
    assert noisy.recall[RECOGNISABLE] < 0.1


def test_repeated_rounds_unite_masks_and_average_noise(cifar):
    once, often = (judge(cifar, "qbi", "row-noise-1", 20, Setting(batches=1, rounds=r)) for r in (1, 16))
    assert once.recall[RECOGNISABLE] < 0.2 < often.recall[RECOGNISABLE]
    once, often = (judge(cifar, "qbi", "aggp", 20, Setting(batches=1, rounds=r)) for r in (1, 16))
    assert once.exposed < often.exposed < 0.05
    assert often.recall[FAITHFUL] == 0


@pytest.mark.long
def test_the_matrix_does_not_depend_on_the_number_of_jobs():
    photos = synthetic_photos(200, 8, seed=0)
    setting = Setting(neurons=40, batches=1, epochs=1, trainings=2)
    one, two = (
        run_matrix(photos, ["qbi", "mirrored"], ["none", "row-noise-3"], [10], setting, jobs=jobs) for jobs in (1, 2)
    )
    assert one[1] == two[1]
    assert len(one[1]["none", 10]) == 2
    assert [replace(o, seconds=0.0) for o in one[0]] == [replace(o, seconds=0.0) for o in two[0]]


def test_the_accelerators_pruning_is_the_same_rule():
    draws = generator(0, "accelerator")
    gradient = torch.randn(80, 300, generator=draws)
    counts = torch.randint(0, 20, (80,), generator=draws)
    pruned = gradient.clone()
    prune_by_sorting(pruned, counts, 0, AGGP())
    for row, count in enumerate(counts.tolist()):
        kept = pruned[row].nonzero()[:, 0]
        if 0 < count < 16:
            assert len(kept) == kept_entries(count, 300, AGGP())
            largest = gradient[row].abs().topk(int(keep_share(count, AGGP()) * 300)).indices
            assert set(kept.tolist()) <= set(largest.tolist())
        else:
            assert torch.equal(pruned[row], gradient[row])


def test_imprint_needs_a_head_to_make_equal():
    x = torch.randn(4, FEATURES)
    model = nn.Sequential(nn.Linear(FEATURES, 5), nn.ReLU())
    with pytest.raises(CannotMount, match="no linear layer follows"):
        mount(model, Imprint(), x, generator(0))


# The exact count, and policies in a training loop.


@pytest.mark.long
def test_the_count_equals_what_extraction_reads_on_a_thousand_random_models():
    disagreements, leaking = [], 0
    for trial in range(1000):
        draw = np.random.default_rng(trial)
        batch, neurons, features = (int(draw.integers(*r)) for r in ((1, 14), (1, 40), (2, 50)))
        attack = QBI(max(2, batch)) if trial % 3 else TrapWeights(0.9)
        x = torch.randn(batch, features, generator=generator(trial), dtype=torch.float64)
        mounted = mount(
            mlp(trial, features, neurons).double(),
            attack,
            x,
            generator(trial, "rows"),
            gain=[None, 1.0, 30.0][trial % 3],
        )
        step = exposed_step(mounted.model, x, torch.arange(batch) % 4, layers=["0"])
        counted = count_leaks(step.exposures[0]).samples
        read = read_rows(step.update.gradients["0.weight"], step.update.gradients["0.bias"])
        recovered = match(read.samples, x)[EXACT].recovered
        leaking += int(counted.any())
        if not torch.equal(counted, recovered):
            disagreements.append(trial)
    assert disagreements == []
    assert leaking > 300


def stepped(policy, seed=0, **options):
    x, mounted, step = attacked_step(seed)
    report = defended_step(mounted.model, x, torch.arange(BATCH) % 4, policy, **options)
    return x, mounted.model, report, step


def test_a_report_leaves_gradients_alone():
    _, model, report, step = stepped("report", layers=["0"])
    torch.testing.assert_close(model[0].weight.grad, step.update.gradients["0.weight"])
    assert report.samples == count_leaks(step.exposures[0]).samples.nonzero()[:, 0].tolist()
    assert len(report.samples) > 5
    assert "samples alone in a row" in str(report)


@pytest.mark.parametrize("policy", ["auto", "noise", "aggp", "drop", "skip"])
def test_policies_protect(policy):
    x, model, _, _ = stepped(policy)
    if policy == "skip":
        assert all(p.grad is None for p in model.parameters())
    else:
        read = read_rows(model[0].weight.grad, model[0].bias.grad)
        assert match(read.samples, x)[EXACT].recall == 0


def test_differences_of_rows_are_counted_and_benign_rows_have_none(cifar):
    """Imprint and mirrored rows give nothing away row by row at this size, and much by differences."""
    x = flat(normalised(cifar, slice(0, 40)))
    y = cifar.labels[:40]
    means = flat(normalised(cifar, slice(1000, 1400))).mean(1)
    for attack in (Imprint(float(means.mean()), float(means.std())), Mirrored(40)):
        mounted = mount(mlp(0, 3072, 200), attack, x[:2], generator(0))
        exposure = exposed_step(mounted.model, x, y % 4, layers=["0"]).exposures[0]
        update = exposed_step(mounted.model, x, y % 4, layers=["0"]).update
        found = match(mounted.read(update).samples, x, data_range=4.0)[FAITHFUL].recovered
        counted = difference_leaks(exposure) | count_leaks(exposure).samples
        assert not (found & ~counted).any()
        assert counted.sum() > count_leaks(exposure).samples.sum()
    for seed in range(20):
        benign = exposed_step(mlp(seed, 3072, 200), x, y % 4, layers=["0"]).exposures[0]
        assert not difference_leaks(benign).any()


def test_auto_leaves_benign_steps_alone():
    x, y = torch.randn(40, 60, generator=generator(3)), torch.arange(40) % 4
    for seed in range(10):
        model = mlp(seed, 60, 50)
        report = defended_step(model, x, y, "auto")
        plain = exposed_step(model, x, y).update.gradients
        assert report.rows_changed == 0
        assert all(torch.equal(p.grad, plain[n]) for n, p in model.named_parameters())


def test_refuse_raises_and_clears():
    x, mounted, _ = attacked_step()
    with pytest.raises(LeakRefused, match="samples alone in a row"):
        defended_step(mounted.model, x, torch.arange(BATCH) % 4, "refuse")
    assert all(p.grad is None for p in mounted.model.parameters())


def test_a_benign_step_passes_the_strictest_policy():
    torch.manual_seed(0)
    model, x = mlp(), torch.randn(64, FEATURES)
    report = defended_step(model, x, torch.arange(64) % 4, "refuse", layers=["0"])
    assert report.samples == []
    assert model[0].weight.grad is not None


def test_autocast_is_watched():
    """Products in float16: what is counted is what can be read, and what is put in place has the weights' own type."""
    x, mounted, _ = attacked_step()
    model, y = mounted.model, torch.arange(BATCH) % 4
    with torch.autocast("cpu", dtype=torch.float16):
        report = defended_step(model, x, y, "report", layers=["0"])
    assert len(report.samples) > 5
    assert model[0].weight.grad.dtype is torch.float32
    read = read_rows(model[0].weight.grad, model[0].bias.grad)
    assert match(read.samples, x, data_range=4.0)[RECOGNISABLE].recall > 0.3
    with torch.autocast("cpu", dtype=torch.float16):
        defended_step(model, x, y, "noise", layers=["0"])
    read = read_rows(model[0].weight.grad, model[0].bias.grad)
    assert match(read.samples, x, data_range=4.0)[RECOGNISABLE].recall < 0.1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: defended_step(nn.Linear(3, 3, bias=False), *batch(3)), "no linear layer with a bias"),
        (lambda: defended_step(mlp(), *batch(FEATURES), layers=["1"]), "not a linear layer with a bias"),
        (lambda: AGGP(cutoff=2), "cutoff is 2"),
        (lambda: AGGP(lowest=0.5, highest=0.1), "shares are"),
        (lambda: DropDominated(0.0), "share is 0"),
        (lambda: Sparsify(2.0), "share is 2"),
        (lambda: Noise(-1.0), "level is -1"),
    ],
)
def test_bad_settings_are_refused(call, message):
    with pytest.raises(BadValue, match=message):
        call()


def test_observing_and_counting_agree_on_a_plain_layer():
    x, mounted, step = attacked_step()
    assert torch.equal(step.exposures[0].active, observe(mounted.model, "0", x).fired)
