"""One contract for all attacks, and what a null attack must score."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from qbi.attacks import PAIRS, QBI, Attack, TrapWeights, mount
from qbi.errors import BadValue, DataError
from qbi.exposure import isolated_samples, leakage, observe
from qbi.extraction import extract
from qbi.federation import client_step
from qbi.metrics import EXACT, match
from qbi.randomness import generator
from qbi.records import CraftedRows

FEATURES, NEURONS, BATCH = 48, 30, 8


def auxiliary(count=NEURONS, features=FEATURES):
    return torch.randn(count, features, generator=generator(0, "auxiliary"))


class Null(Attack):
    """Changes nothing that matters: ordinary small rows, a bias of zero."""

    key = name = "null"
    action = "does nothing that matters"

    def rows(self, neurons, features, generator):
        weight = torch.randn(neurons, features, generator=generator) / features**0.5
        return CraftedRows(weight, torch.zeros(neurons))


ATTACKS = {
    "qbi": QBI(BATCH),
    "qbi exact": QBI(BATCH, exact=True),
    "pairs": PAIRS(BATCH, auxiliary()),
    "trap weights": TrapWeights(0.9),
    "null": Null(),
}
every_attack = pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS.keys())


def mlp(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, NEURONS), nn.ReLU(), nn.Linear(NEURONS, 3)).to(dtype)


def batch(dtype=torch.float32):
    x = torch.randn(BATCH, FEATURES, generator=generator(0, "batch"), dtype=dtype)
    return x, torch.arange(BATCH) % 3


@every_attack
def test_rows_have_the_promised_shape_and_are_finite(attack):
    rows = attack.rows(NEURONS, FEATURES, generator(1))
    assert rows.weight.shape == (NEURONS, FEATURES)
    assert rows.bias.shape == (NEURONS,)
    assert rows.weight.dtype == rows.bias.dtype == torch.float32
    assert rows.weight.isfinite().all()
    assert rows.bias.isfinite().all()


@every_attack
def test_same_seed_same_rows_other_seed_other_rows(attack):
    first, again, other = (attack.rows(NEURONS, FEATURES, generator(seed)) for seed in (1, 1, 2))
    assert torch.equal(first.weight, again.weight)
    assert not torch.equal(first.weight, other.weight)


@every_attack
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_mounting_leaves_the_model_untouched_and_keeps_its_type(attack, dtype):
    model, (x, _) = mlp(dtype), batch(dtype)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    mounted = mount(model, attack, x, generator(1))
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert mounted.target.weight.dtype == dtype
    assert mounted.target.weight.device == x.device
    assert not torch.equal(mounted.target.weight, model[0].weight)


@every_attack
def test_gradients_give_exactly_the_isolated_samples(attack):
    x, y = batch(torch.float64)
    mounted = mount(mlp(torch.float64), attack, x, generator(3))
    isolated = isolated_samples(observe(mounted.model, mounted.layer, x).fired)
    found = extract(mounted.model, mounted.layer, mounted.carrier, client_step(mounted.model, x, y))
    assert torch.equal(match(found.samples, x)[EXACT].recovered, isolated)


def test_a_saturated_head_gives_away_more_than_activations_say():
    """A huge gain makes some samples certain: they send no gradient, and rows they share become readable."""
    x, y = batch(torch.float64)
    mounted = mount(mlp(torch.float64), QBI(BATCH), x, generator(3), gain=100.0)
    fired = observe(mounted.model, mounted.layer, x).fired
    single = [client_step(mounted.model, x[i : i + 1], y[i : i + 1]) for i in range(BATCH)]
    share = torch.stack([update.gradients["0.bias"].abs() for update in single], 1)
    sends = share > 1e-6 * share.amax(1, keepdim=True).clamp_min(1e-300)
    found = extract(mounted.model, mounted.layer, mounted.carrier, client_step(mounted.model, x, y))
    recovered = match(found.samples, x)[EXACT].recovered
    assert torch.equal(recovered, isolated_samples(sends & fired))
    assert not torch.equal(recovered, isolated_samples(fired))


def test_the_null_attack_recovers_nothing_from_a_real_batch():
    x = torch.randn(40, FEATURES, generator=generator(4))
    mounted = mount(mlp(), Null(), x, generator(5))
    found = extract(mounted.model, mounted.layer, mounted.carrier, client_step(mounted.model, x, torch.arange(40) % 3))
    exact = match(found.samples, x)[EXACT]
    assert exact.recall == 0
    assert leakage(observe(mounted.model, mounted.layer, x).fired).recall == 0


def test_a_benign_layer_scores_what_theory_says():
    """Rows through the origin fire for half of all samples: P = B·2^-B, A = 1 − 2^-B."""
    layers, size = 4000, 6
    x = torch.randn(size, FEATURES, generator=generator(6))
    fired = Null().rows(layers, FEATURES, generator(7)).weight @ x.T > 0
    found = leakage(fired)
    # Correlation between the samples moves each pair's agreement a little; B·2^-B is the uncorrelated value.
    assert found.precision == pytest.approx(size * 2.0**-size, abs=0.02)
    assert found.active == pytest.approx(1 - 2.0**-size, abs=0.02)


@given(st.integers(1, 33), st.integers(1, 9))
@settings(max_examples=40, deadline=None)
def test_trap_weights_lean_to_the_negative_at_any_size(features, neurons):
    weight = TrapWeights(0.8).rows(neurons, features, generator(8)).weight
    negative = (features + 1) // 2
    assert ((weight < 0).sum(1) == negative).all()
    largest_negative = (-weight.clamp_max(0)).sort(1).values[:, -1]
    assert (weight.clamp_min(0).amax(1) <= 0.8 * largest_negative + 1e-6).all()
    if features % 2 == 0:
        mirrored = weight.clamp_min(0).sort(1).values[:, features // 2 :]
        torch.testing.assert_close(mirrored, 0.8 * (-weight.clamp_max(0)).sort(1).values[:, features // 2 :])


@given(st.integers(2, 12), st.integers(1, 25), st.integers(1, 20))
@settings(max_examples=40, deadline=None)
def test_pairs_accepts_any_shape(batch_size, neurons, features):
    attack = PAIRS(batch_size, auxiliary(neurons, features), patience=50)
    rows = attack.rows(neurons, features, generator(9))
    assert rows.weight.shape == (neurons, features)
    assert rows.weight.isfinite().all()


@pytest.mark.parametrize("gain", [None, 0.01, 1.0, 3.0])
def test_the_gain_scales_weights_and_bias_together(gain):
    x, _ = batch()
    rows = QBI(BATCH).rows(NEURONS, FEATURES, generator(1))
    target = mount(mlp(), QBI(BATCH), x, generator(1), gain=gain).target
    scale = FEATURES**-0.5 if gain is None else gain
    torch.testing.assert_close(target.weight.detach(), rows.weight * scale)
    torch.testing.assert_close(target.bias.detach(), rows.bias * scale)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: QBI(1).rows(3, 4, generator(0)), "batch size is 1"),
        (lambda: QBI(0).rows(3, 4, generator(0)), "batch size is 0"),
        (lambda: QBI(4).rows(0, 4, generator(0)), "neurons is 0"),
        (lambda: mount(mlp(), QBI(4), batch()[0], generator(0), gain=0.0), "gain is 0"),
        (lambda: TrapWeights(1.5), "scale is 1.5"),
        (lambda: TrapWeights(0.9).rows(-1, 4, generator(0)), "neurons is -1"),
        (lambda: PAIRS(4, auxiliary(3)).rows(9, FEATURES, generator(0)), "3 auxiliary samples for 9 neurons"),
        (lambda: PAIRS(4, auxiliary(9)).rows(9, 7, generator(0)), "48 values, the layer carries 7"),
        (lambda: PAIRS(4, auxiliary(9) * torch.nan).rows(9, FEATURES, generator(0)), "non-finite"),
    ],
)
def test_bad_settings_are_refused_in_a_sentence(call, message):
    with pytest.raises((BadValue, DataError), match=message):
        call()
