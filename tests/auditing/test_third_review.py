"""What a review with the source at hand found in verdicts and certificates, each as it was found."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from qbi.attacks import Cascade, Passive, Reading, mount
from qbi.auditing import Client, audit
from qbi.federation import client_step
from qbi.integrations.judging import objection
from qbi.metrics import EXACT, THRESHOLDS, match
from qbi.randomness import generator
from qbi.records import Interval
from qbi.report.comparison import compare_audits

X, Y = torch.randn(8, 40, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 5


def certified(model, attack, x, layer, largest=50.0):
    torch.manual_seed(0)
    sent = mount(model, attack, X[:2], generator(0, "rows"), layer=layer)
    update = client_step(sent.model, x, Y)
    return sent.read(update, Reading(largest=largest)), sent.read_at_layer(update, Reading(largest=largest))


def deep(*between):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 40), *between, nn.Linear(40, 120), nn.ReLU(), nn.Linear(120, 5))


@pytest.mark.parametrize("between", [nn.ReLU(), nn.GELU(), nn.LeakyReLU(), nn.BatchNorm1d(40)], ids=lambda m: type(m).__name__)  # fmt: skip
def test_behind_anything_but_a_change_of_shape_no_sample_is_certified(between):
    """A value below the shift that carries it past an activation was cut off, and certified; so were those behind statistics of 1e6."""
    cut = X.clone()
    cut[:5, 3] = -20
    found, _ = certified(deep(between), Cascade(8), cut, "2")
    assert not found.certified.any()


def test_who_only_looks_on_certifies_what_arrives_at_the_layer_and_no_sample():
    found, at_layer = certified(deep(nn.LeakyReLU()), Passive(), X, "2")
    assert at_layer.certified.any()
    assert not found.certified.any()
    flat = nn.Sequential(nn.Flatten(), nn.Linear(40, 120), nn.ReLU(), nn.Linear(120, 5))
    own, _ = certified(flat, Cascade(8), X, "1")
    assert own.certified.any()


@pytest.mark.parametrize("hidden", [1.0, 1e-6])
def test_three_classes_of_which_two_act_prove_nothing(hidden):
    """A head that is nearly blind to a class leaves two: then all samples send back the same up to a factor, and mixtures pass."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(40, 120), nn.ReLU(), nn.Linear(120, 3))
    with torch.no_grad():
        model[2].weight[2].mul_(hidden).add_((1 - hidden) * model[2].weight[:2].mean(0))
    sent = mount(model, Cascade(8), X[:2], generator(0, "rows"), layer="0")
    with torch.no_grad():
        sent.model[2].weight.copy_(model[2].weight)
    found = sent.read(client_step(sent.model, X, Y % 2), Reading(largest=50.0))
    assert bool(found.certified.any()) is (hidden == 1.0)


def plain(size=64):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, size), nn.ReLU(), nn.Linear(size, 3))


def audited(model, x, **more):
    return audit(model, (x, torch.arange(len(x)) % 3), client=Client(8), batches=2, defences=False, **more)


TABLE = torch.randn(80, 20, generator=torch.Generator().manual_seed(1))


def test_nothing_is_better_by_an_attack_that_was_not_tried_again():
    before, after = (audited(plain(), TABLE, attacks=attacks).document() for attacks in (["cascade", "qbi"], ["qbi"]))
    assert before["verdict"]["share"] > after["verdict"]["share"]
    assert compare_audits(before, after).change == "unknown"
    assert compare_audits(after, after).change == "same"


def test_what_was_not_tested_does_not_pass_because_something_else_leaks_a_little():
    result = audited(plain(), TABLE, attacks=["qbi"])
    assert result.status == "leaks"
    assert result.untested_parameters
    assert "not tested" in objection(result, max(0.0, result.share))
    assert not objection(result, max(0.0, result.share), allow_untested=True)


def test_the_attack_that_reads_most_is_the_one_that_is_named():
    """Where none reads anything exactly, who only looks on was named before who reads most."""
    first = audited(plain(200), TABLE, attacks=["passive"]).attacks[0]

    def reads(outcome, share):
        seen = {t: Interval(share if t is not EXACT else 0.0, 0.0, 1.0, 2) for t in THRESHOLDS}
        return replace(outcome, recovered=seen, beyond=dict.fromkeys(THRESHOLDS[1:], share), guessed={})

    little, much = reads(first, 0.02), reads(replace(first, crafted=True), 0.6)
    assert max((little, much), key=lambda a: a.badness(EXACT)) is much


def test_candidates_that_match_any_batch_read_nothing():
    """Rows of one-hot data hit some of every batch: given the gradient of another one, more than half seemed to be read."""
    x = torch.eye(12)[torch.randint(12, (200,), generator=torch.Generator().manual_seed(2))]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 100), nn.ReLU(), nn.Linear(100, 3))
    true = audit(model, (x, torch.arange(200) % 3), client=Client(8), batches=3, defences=False, attacks=["cascade"])
    sent = mount(model, Cascade(8), x[:2], generator(0, "rows"))
    found = sent.read(client_step(sent.model, x[:8], torch.arange(8) % 3))
    assert match(found.samples, x[100:108])[EXACT].recall > 0.2
    assert true.worst.guessed[EXACT] > 0.2
    assert true.status == "leaks"
