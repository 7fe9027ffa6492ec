"""DP-SGD through Opacus: noise of the stated size, clipping as a loop over single samples does it, ε as accounted."""

import pytest
import torch
from torch import nn

from qbi.defences import DPSGD, protected_step
from qbi.errors import BadValue
from qbi.federation import client_step
from qbi.randomness import generator

pytest.importorskip("opacus", reason="the extra dp is not installed")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def problem(batch=12):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(48, 20), nn.ReLU(), nn.Linear(20, 4)
    )
    return model, torch.randn(batch, 2, 4, 4), torch.arange(batch) % 4


def one_by_one(model, x, y, clip):
    total = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for i in range(len(x)):
        gradients = client_step(model, x[i : i + 1], y[i : i + 1]).gradients
        norm = torch.stack([g.norm() for g in gradients.values()]).norm()
        for name, g in gradients.items():
            total[name] += g * min(1.0, clip / float(norm))
    return {name: g / len(x) for name, g in total.items()}


@pytest.mark.parametrize("clip", [0.05, 0.5, 100.0])
def test_clipping_is_that_of_a_loop_over_samples(clip):
    model, x, y = problem()
    private = DPSGD(clip=clip, noise=0.0).update(model, x, y, generator(0)).gradients
    for name, expected in one_by_one(model, x, y, clip).items():
        torch.testing.assert_close(private[name], expected, rtol=1e-4, atol=1e-7)


def test_without_clip_and_noise_it_is_the_plain_gradient():
    model, x, y = problem()
    private = DPSGD(clip=1e9, noise=0.0)
    assert private.kind == "heuristic"
    assert private.guarantee(sample_rate=0.1, steps=1, delta=1e-5).epsilon == float("inf")
    for name, g in client_step(model, x, y).gradients.items():
        torch.testing.assert_close(private.update(model, x, y, generator(0)).gradients[name], g, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(("clip", "noise"), [(0.5, 1.0), (2.0, 3.0)])
def test_the_noise_has_the_stated_deviation_and_never_less(clip, noise):
    model, x, y = problem()
    plain = DPSGD(clip=clip, noise=0.0).update(model, x, y, generator(0)).gradients
    private = DPSGD(clip=clip, noise=noise)
    values = [
        (private.update(model, x, y, generator(run)).gradients[n] - plain[n]).flatten() * len(x)
        for run in range(12)
        for n in plain
    ]
    found = torch.cat(values)
    expected = noise * clip
    # The deviation of n normal values has a relative error of 1/√(2n).
    assert abs(float(found.std()) / expected - 1) < 4 / (2 * len(found)) ** 0.5
    assert abs(float(found.mean())) < 4 * expected / len(found) ** 0.5


def test_one_sample_moves_the_sum_by_no_more_than_the_clip():
    model, x, y = problem()
    private = DPSGD(clip=0.3, noise=0.0)
    with_it = private.update(model, x, y, generator(0)).gradients
    without = private.update(model, x[:-1], y[:-1], generator(0)).gradients
    moved = torch.cat([(with_it[n] * len(x) - without[n] * (len(x) - 1)).flatten() for n in with_it])
    assert float(moved.norm()) <= 0.3 * (1 + 1e-4)


def test_epsilon_is_the_accountants_and_comes_with_its_scope():
    from opacus.accountants import RDPAccountant

    accountant = RDPAccountant()
    for _ in range(100):
        accountant.step(noise_multiplier=1.1, sample_rate=0.01)
    found = DPSGD(clip=1.0, noise=1.1).guarantee(sample_rate=0.01, steps=100, delta=1e-5)
    assert found.epsilon == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-9)
    assert "one sample added or removed" in str(found)
    assert "100 steps" in found.scope


def test_a_private_step_is_seeded_and_leaves_the_model_alone():
    model, x, y = problem()
    before = {n: p.clone() for n, p in model.state_dict().items()}
    private = DPSGD()
    assert private.kind == "formal"
    first, second, other = (protected_step(private, model, x, y, generator(s)).update.gradients for s in (1, 1, 2))
    assert all(torch.equal(first[n], second[n]) for n in first)
    assert not torch.equal(first["0.weight"], other["0.weight"])
    assert all(torch.equal(p, before[n]) for n, p in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_bad_settings_and_models_are_refused():
    for settings in ({"clip": 0.0}, {"clip": -1.0}, {"noise": -0.1}):
        with pytest.raises(BadValue, match="DP-SGD"):
            DPSGD(**settings)
    with pytest.raises(BadValue, match="rate"):
        DPSGD().guarantee(sample_rate=2.0, steps=1, delta=1e-5)
    mixed = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    with pytest.raises(BadValue, match="single samples"):
        DPSGD().update(mixed, torch.randn(4, 4), torch.tensor([0, 1, 0, 1]), generator(0))
