"""Heuristic policies in a training loop, a round without any framework, and noise that nobody can repeat."""

import gc
import math
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn
from torch.nn import functional as F

import qbi
from qbi import defended_step, randomness
from qbi.attacks import QBI, mount
from qbi.defences import LeakRefused
from qbi.defences.policy import POLICIES, decide, policy_named
from qbi.defences.rules import HideReadable
from qbi.errors import BadValue
from qbi.federation.exposed import exposed_step
from qbi.models import two_layer
from qbi.private.allowed import NotReleased
from qbi.private.boundary import THREE_LINES
from qbi.private.defence import PrivateStep
from qbi.private.site import Reply, SiteSettings, guarded_round
from qbi.randomness import SystemEntropy, generator, normal_like, random_integer


def leaking(seed=0):
    x = torch.randn(12, 40, generator=generator(seed, "x"))
    mounted = mount(two_layer(40, 60, 4, seed=seed), QBI(12), x, generator(seed, "rows"))
    return mounted.model, x, torch.arange(12) % 4


def backward(model, x, y):
    F.cross_entropy(model(x), y).backward()


def draws(seed):
    """As `defended_step` meets them after it has seeded dropout."""
    source = generator(seed)
    random_integer(source)
    return source


def protected(policy, seed=None):
    model, x, y = leaking()
    defended_step(model, x, y, policy, draws=None if seed is None else generator(seed))
    return model[0].weight.grad.clone()


def test_a_server_cannot_repeat_the_noise():
    """Seeded noise is the server's to subtract; without a seed every step draws its own, and no seed gives it back."""
    model, x, y = leaking()
    truth = exposed_step(model, x, y, layers=["0"]).update.gradients["0.weight"]
    first, second = protected("auto"), protected("auto")
    assert not torch.equal(first, second)
    assert torch.equal(protected("auto", seed=0), protected("auto", seed=0))
    size = 3.0 * truth.square().mean(1).sqrt()
    for seed in range(20):
        replayed = normal_like(truth, draws(seed)) * size[:, None]
        assert (first - replayed - truth).norm() > 0.5 * (first - truth).norm()
    # Where the seed is known it works: the test can fail.
    known = protected("auto", seed=7) - normal_like(truth, draws(7)) * size[:, None]
    torch.testing.assert_close(known, truth, rtol=1e-3, atol=1e-5)


def test_a_private_steps_noise_is_fresh_and_of_the_stated_size():
    """The same model, batch and step twice: what differs is noise, √2 times as wide."""
    model, x, y = leaking()
    first, second = (PrivateStep(qbi.Budget.for_goal(bits=8)).update(model, x, y, SystemEntropy()) for _ in range(2))
    apart = torch.cat([(g - second.gradients[n]).flatten() for n, g in first.gradients.items()])
    noise = qbi.Budget.for_goal(bits=8).noise / len(x)
    # 2,700 values: six standard errors.
    assert float(apart.std()) == pytest.approx(2**0.5 * noise, rel=6 / (2 * len(apart)) ** 0.5)


def test_noise_of_the_system_is_standard_normal(monkeypatch):
    """The transform on bytes that are the same at every run: a law tested on fresh bytes fails once in a while by chance."""
    monkeypatch.setattr(randomness, "os", SimpleNamespace(urandom=np.random.default_rng(0).bytes))
    values = SystemEntropy().normal((200, 501)).double()
    assert values.shape == (200, 501)
    assert stats.kstest(values.flatten().numpy(), "norm").pvalue > 0.01
    assert stats.kstest(values.flatten().square().numpy(), "chi2", (1,)).pvalue > 0.01
    halves = values.flatten()[: 200 * 501 // 2], values.flatten()[200 * 501 // 2 :]
    assert stats.pearsonr(halves[0].abs().numpy(), halves[1].abs().numpy()).pvalue > 0.01


@pytest.mark.parametrize(("word", "radius"), [(b"\0" * 8, math.sqrt(2 * 65 * math.log(2))), (b"\xff" * 8, 0.0)])
def test_the_ends_of_the_systems_noise(monkeypatch, word, radius):
    """The smallest word of 64 bits stands for a radius of 9.5, the largest for none; neither is infinite or no number."""
    monkeypatch.setattr(
        randomness, "os", SimpleNamespace(urandom=lambda count: word * (count // 16) + b"\0" * (count // 2))
    )
    assert float(SystemEntropy().normal((2,)).norm()) == pytest.approx(radius, abs=1e-5)


def test_values_of_the_systems_noise_do_not_tell_of_each_other(monkeypatch):
    """Two values share one radius and one angle: each leaves with few of its digits, on a grid of 2⁻¹⁶."""
    monkeypatch.setattr(randomness, "os", SimpleNamespace(urandom=np.random.default_rng(0).bytes))
    values = SystemEntropy().normal((10_000,)).double() * 2**16
    assert torch.equal(values, values.round())
    assert len(values.unique()) > 9_000


def test_noise_of_the_system_is_fresh():
    source = SystemEntropy()
    assert source.integer() != source.integer()
    assert not torch.equal(source.normal((5,)), source.normal((5,)))
    assert 0 <= random_integer(generator(0)) < 2**62


@pytest.mark.parametrize("policy", POLICIES)
def test_a_step_in_a_training_loop_is_what_the_policy_decided(policy):
    """The same step, the same policy, the same random numbers: the same gradients are in place when the optimiser steps."""
    model, x, y = leaking()
    decision = decide(policy_named(policy, "test"), exposed_step(model, x, y), draws(3))
    backward(model, x, y)  # raw gradients that stand there must not stay, nor be added to
    if decision.act == "refuse":
        with pytest.raises(LeakRefused, match="alone in a row"):
            defended_step(model, x, y, policy, draws=generator(3))
        assert all(p.grad is None for p in model.parameters())
        return
    report = defended_step(model, x, y, policy, draws=generator(3))
    assert report.policy == policy
    assert report.rows_changed == decision.rows_changed
    assert report.loss == pytest.approx(float(F.cross_entropy(model(x), y).detach()), rel=1e-6)
    for name, parameter in model.named_parameters():
        if decision.act == "clear":
            assert parameter.grad is None
        else:
            torch.testing.assert_close(parameter.grad, decision.gradients[name])


def test_policies_do_what_their_names_say():
    model, x, y = leaking()
    step = exposed_step(model, x, y)
    acts = {name: decide(policy_named(name, "test"), step, generator(0)).act for name in POLICIES}
    assert acts == dict.fromkeys(POLICIES, "send") | {"skip": "clear", "refuse": "refuse"}
    changed = {name: decide(policy_named(name, "test"), step, generator(0)).rows_changed for name in POLICIES}
    assert changed["report"] == 0
    assert min(changed[name] for name in ("auto", "noise", "aggp", "drop")) > 0
    with pytest.raises(BadValue, match="no policy is called 'hope'"):
        policy_named("hope", "test")


# Whatever goes wrong, no raw gradient stays.


class Failure(Exception):
    """Of the client's own code."""


def failing(error):
    def loss(_out, _y):
        raise error

    return loss


def infinite(out, _y):
    return (out.sum(1) * 1e30).exp().clamp_max(1e30).sum()


WRONG = {
    "unknown policy": (BadValue, "no policy is called", {"policy": "hope"}),
    "the policy that is gone": (BadValue, "private.step", {"policy": "budget"}),
    "no such layer": (BadValue, "not a linear layer with a bias", {"layers": ["1"]}),
    "no layers": (BadValue, "nothing to look at", {"layers": []}),
    "the loss fails": (Failure, "^sorry$", {"loss": failing(Failure("sorry"))}),
    "the loss is interrupted": (KeyboardInterrupt, "^sorry$", {"loss": failing(KeyboardInterrupt("sorry"))}),
    "the loss is no number": (BadValue, "loss is nan", {"loss": lambda out, _y: out.sum() * torch.nan}),
    "gradients are no numbers": (
        LeakRefused,
        "NaN or infinite",
        {"loss": lambda out, _y: (out * 0).sum().abs().sqrt()},
    ),
    "a leaking step is refused": (LeakRefused, "alone in a row", {"policy": "refuse"}),
    "targets are missing": (BadValue, "12 inputs but 3 targets", {"targets": torch.zeros(3, dtype=torch.long)}),
}


@pytest.mark.parametrize("case", WRONG)
@pytest.mark.parametrize("stale", [False, True], ids=["", "stale"])
def test_an_exception_leaves_no_raw_gradients(case, stale):
    """Neither those of this step nor those that the client's own backward pass had left there."""
    error, words, options = WRONG[case]
    model, x, y = leaking()
    if stale:
        backward(model, x, y)
    with pytest.raises(error, match=words):
        defended_step(model, x, **({"targets": y} | options))
    assert all(p.grad is None for p in model.parameters())


def test_a_fault_inside_a_defence_leaves_no_raw_gradients(monkeypatch):
    model, x, y = leaking()
    backward(model, x, y)

    def broken(*_arguments):
        raise Failure

    monkeypatch.setattr(HideReadable, "apply", broken)
    with pytest.raises(Failure):
        defended_step(model, x, y, "auto")
    assert all(p.grad is None for p in model.parameters())


def test_a_layer_that_no_sample_reaches_is_refused():
    """What cannot be looked at does not pass."""
    model = nn.Sequential(nn.Linear(40, 4))
    model.add_module("beside", nn.Linear(3, 3))
    model.forward = lambda x: model[0](x)
    _, x, y = leaking()
    with pytest.raises(BadValue, match="beside: no forward and backward pass was seen"):
        defended_step(model, x, y)
    assert all(p.grad is None for p in model.parameters())
    assert defended_step(model, x, y, layers=["0"]).leaks


def test_only_trained_weights_get_gradients_and_parts_stay_in_their_mode():
    """As in plain training: frozen weights none, statistics of a part in eval() as they were, of others as plain training moves them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(40), nn.Linear(40, 30), nn.BatchNorm1d(30), nn.ReLU(), nn.Linear(30, 4))
    model[2].eval()
    model[4].requires_grad_(False)
    again = nn.Sequential(*(type(m)(*a) for m, a in zip(model, [(40,), (40, 30), (30,), (), (30, 4)], strict=True)))
    again.load_state_dict(model.state_dict())
    again[2].eval()
    _, x, y = leaking()
    report = defended_step(model, x, y, "report")
    loss = F.cross_entropy(again(x), y)
    loss.backward()
    assert report.loss == pytest.approx(float(loss.detach()))
    assert [m.training for m in model] == [True, True, False, True, True]
    assert all(torch.equal(b, again.get_buffer(n)) for n, b in model.named_buffers())
    assert int(model[0].num_batches_tracked) == 1
    for n, p in model.named_parameters():
        assert (p.grad is not None) == (not n.startswith("4"))
        if p.grad is not None:
            torch.testing.assert_close(p.grad, again.get_parameter(n).grad)


@pytest.mark.parametrize("policy", ["auto", "report", "private"])
def test_training_that_is_over_keeps_no_model_alive(policy):
    """A simulation's worker trains hundreds of clients: their models and gradients go with them, not with the next collection."""

    def training():
        model, x, y = leaking()
        if policy == "private":
            privately(model, torch.optim.SGD(model.parameters(), lr=0.1), x, y, batch_size=4)
        else:
            defended_step(model, x, y, policy)
        return [weakref.ref(p) for p in model.parameters()]

    training()  # torch keeps the first model that it meets in a process
    gc.collect()
    gc.disable()
    try:
        assert [held() for held in training()] == [None] * 4
    finally:
        gc.enable()


# What is gone says where it went.


def test_the_guards_that_are_gone_name_the_three_lines():
    lines = THREE_LINES.splitlines()
    assert lines == [
        "private = qbi.Private(model, loss, bits=72)",
        "for x, y in private.batches(dataset, batch_size=64):",
        "    private.step(optimiser, x, y)",
    ]
    for name in ("LeakGuard", "AmbientGuard"):
        with pytest.raises(AttributeError, match=f"qbi.{name} is gone") as said:
            getattr(qbi, name)
        assert THREE_LINES in str(said.value)
    model, x, y = leaking()
    with pytest.raises(BadValue, match="the policy budget is now a step of its own") as told:
        defended_step(model, x, y, "budget")
    assert THREE_LINES in str(told.value)


def test_the_three_lines_do_what_they_say():
    torch.manual_seed(0)
    model, loss = nn.Linear(40, 4), F.cross_entropy
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    before, dataset = model.weight.detach().clone(), (torch.randn(128, 40), torch.arange(128) % 4)
    exec(THREE_LINES, {"qbi": qbi, "model": model, "loss": loss, "optimiser": optimiser, "dataset": dataset})
    assert not torch.equal(before, model.weight)


# A round without any framework.


def plain_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 60), nn.ReLU(), nn.Linear(60, 4))


def a_round(settings, train, sent=None, **options):
    """What leaves of a round in which the client's code trains a model on 40 samples and returns a state and two numbers."""
    model = plain_model()
    sent = {n: p.clone() for n, p in model.state_dict().items()} if sent is None else sent
    model.load_state_dict(sent)
    x, y = torch.randn(40, 40, generator=generator(1)), torch.arange(40) % 4

    def work():
        optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
        state = train(model, optimiser, x, y)
        return Reply({"arrays": state}, {"metrics": {"num-examples": 40, "loss": 0.123}})

    return sent, guarded_round(settings, sent, work, trains=True, **options)


def privately(model, optimiser, x, y, batch_size=20):
    private = qbi.Private(model)
    for some, targets in private.batches((x, y), batch_size):
        private.step(optimiser, some, targets)
    return private.state_dict()


def plainly(model, optimiser, x, y):
    backward(model, x, y)
    optimiser.step()
    return dict(model.state_dict())


def test_a_round_without_any_framework():
    sent, passed = a_round(SiteSettings(), privately)
    assert passed.bits == pytest.approx(72)
    assert not torch.equal(passed.reply.arrays["arrays"]["0.weight"], sent["0.weight"])
    assert passed.reply.numbers == {"metrics": {"num-examples": 1}}
    with pytest.raises(NotReleased, match="neither as it was sent nor released"):
        a_round(SiteSettings(), plainly)
    with pytest.raises(NotReleased, match="not what the server sent"):
        a_round(SiteSettings(), lambda *given: plainly(*given) and privately(*given))
    crafted, *_ = leaking()
    with pytest.raises(BadValue, match="looks crafted"):
        a_round(SiteSettings(), privately, dict(crafted.state_dict()))
    assert a_round(SiteSettings(inspect="warn"), privately, dict(crafted.state_dict()))[1].signs
    with pytest.raises(BadValue, match="NaN or infinite"):
        a_round(SiteSettings(inspect="off"), privately, {n: p * torch.nan for n, p in sent.items()})


def test_a_round_whose_code_stays_as_it_is_is_released_whole():
    """The policy `update`: the difference is clipped over all weights and noise lies on it, whatever the code did."""
    sent, passed = a_round(SiteSettings(policy="update", bits=1e9, clip=1e-3, total=1e10), plainly)
    out = passed.reply.arrays["arrays"]
    moved = torch.cat([(out[n].double() - sent[n].double()).flatten() for n in sent])
    noise = qbi.Budget.for_goal(bits=1e9).noise * 1e-3
    assert float(moved.norm()) == pytest.approx(1e-3, abs=5 * noise * len(moved) ** 0.5 + 1e-6)
    assert passed.bits == pytest.approx(1e9)
    again = a_round(SiteSettings(policy="update", bits=8.0), plainly)[1].reply.arrays["arrays"]
    spread = torch.cat([(again[n] - sent[n]).flatten() for n in sent]).std()
    assert float(spread) == pytest.approx(qbi.Budget.for_goal(bits=8).noise, rel=0.1)


def test_a_run_stops_where_its_total_is_spent(tmp_path):
    """In mid-round, after earlier rounds of the run, and with a ledger after a restart; nothing leaves of such a round."""
    with pytest.raises(qbi.BudgetSpent, match="budget of this run is used up"):
        a_round(SiteSettings(total=100), lambda *given: privately(*given) and privately(*given))
    with pytest.raises(qbi.BudgetSpent, match="28 of 28 may still"):
        a_round(SiteSettings(total=100), privately, spent=72.0)
    assert a_round(SiteSettings(total=100), privately, spent=20.0)[1].bits == pytest.approx(72)
    settings = SiteSettings(policy="update", total=150, ledger=str(tmp_path / "ledger"))
    for _ in range(2):
        a_round(settings, plainly)
    with pytest.raises(qbi.BudgetSpent, match="144 of 150"):
        a_round(settings, plainly)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"qbi-inspect": "perhaps"}, "qbi-inspect"),
        ({"qbi-policy": "budget"}, "'budget' is gone"),
        ({"qbi-policy": "auto"}, "qbi.defended_step"),
        ({"qbi-limit": 3}, "qbi-limit: there is no such setting"),
        ({"qbi-bits": "many"}, "is no number"),
        ({"qbi-metrics": "accuracy:99"}, "bits go from 1 to 32"),
    ],
)
def test_senseless_settings_of_a_site_are_refused(config, words):
    with pytest.raises(BadValue, match=words):
        SiteSettings.of(config)
