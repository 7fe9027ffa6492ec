"""Gradient matching in an audit: when it is tried, what it may change, and what it may not."""

import json

import pytest
import torch
from torch import nn

from qbi.auditing import Client, audit, match
from qbi.data.photos import synthetic_photos
from qbi.matching import Effort
from qbi.metrics import RECOGNISABLE

PHOTOS = synthetic_photos(120, 16, seed=2)
ASKED = {"client": Client(2), "attacks": ["passive"], "batches": 1, "defences": False}


def convolutions(seed=0):
    """Nothing but convolutions and the head's bias is trained: passive reading finds nothing there."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Conv2d(3, 12, 5, 2, 2), nn.Tanh(), nn.Conv2d(12, 12, 5, 2, 2), nn.Tanh(), nn.Flatten(), nn.Linear(192, 10))  # fmt: skip
    net[5].weight.requires_grad_(False)
    return net


def test_where_nothing_else_reads_images_are_seen_and_the_model_leaks():
    said = []
    result = audit(convolutions(), PHOTOS, match=None, progress=said.append, **ASKED)
    assert not any(a.reads for a in result.attacks)
    assert result.matched.tried
    assert result.matched.certain
    assert result.matched.recovered[RECOGNISABLE] == 1
    assert result.matched.guessed[RECOGNISABLE] == 0
    assert result.status == "leaks"
    assert result.share == 1
    assert (
        "by gradient matching (recognisable, 19 dB; 600 steps from 1 start, B = 2); a guess hits 0 %" in result.verdict
    )
    assert any(line.startswith("gradient matching: 600 steps from 1 start, about ") for line in said)
    found = result.document()["matched"]
    assert found["share"] == 1
    assert found["announced_seconds"] > 0
    assert set(result.accounts.values()) == {"not tested"}
    assert audit(convolutions(), PHOTOS, **ASKED).matched is None


def test_a_descent_in_vain_tests_nothing(monkeypatch):
    """Not tested stays not tested, and the sentence says what was tried, and for how long."""
    monkeypatch.setattr(match, "QUICK", Effort(2, 1))
    result = audit(convolutions(), PHOTOS, match=None, **ASKED)
    assert result.matched.tried
    assert not result.matched.says_more
    assert result.status == "not tested"
    assert result.share == 0
    assert "Gradient matching (2 steps from 1 start, B = 2) saw no more than a guess" in result.verdict
    assert "safe" not in result.verdict


def test_what_takes_long_is_announced_and_not_tried_unasked(monkeypatch):
    monkeypatch.setattr(match, "seconds_needed", lambda *_, **__: 600.0)
    said = []
    result = audit(convolutions(), PHOTOS, match=None, progress=said.append, **ASKED)
    assert not result.matched.tried
    assert "about 10 min on this machine" in result.matched.reason
    assert any("was not tried" in line for line in said)
    assert result.status == "not tested"
    assert "atching" not in result.verdict
    large = audit(convolutions(), PHOTOS, match=None, **(ASKED | {"client": Client(20)}))
    assert "batches of 20" in large.matched.reason
    monkeypatch.setattr(match, "FULL", Effort(2, 1))
    assert audit(convolutions(), PHOTOS, match=True, **ASKED).matched.tried


def test_a_model_that_leaks_anyway_is_not_matched_unasked():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(768, 50), nn.ReLU(), nn.Linear(50, 10))
    assert audit(net, PHOTOS, match=None, **ASKED).matched is None


def test_labels_that_nobody_can_read_are_said(monkeypatch):
    monkeypatch.setattr(match, "FULL", Effort(2, 1))
    net = nn.Sequential(nn.Conv2d(3, 4, 5, 2, 2), nn.Tanh(), nn.Flatten(), nn.Linear(256, 10, bias=False))
    result = audit(net, PHOTOS, match=True, **ASKED)
    assert not result.matched.tried
    assert "no linear head with a bias" in result.matched.reason


def test_a_model_that_fails_on_the_way_back_is_not_tried(monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("no second derivative here")

    monkeypatch.setattr(match, "seconds_needed", broken)
    result = audit(convolutions(), PHOTOS, match=True, **ASKED)
    assert not result.matched.tried
    assert "no second derivative here" in result.matched.reason


@pytest.mark.parametrize(
    ("options", "says"),
    [(("--data", "text"), "--match: "), (("--local-steps", 2), "--match: a client with 2 local steps")],
)
def test_matching_that_cannot_be_is_refused(options, says, tmp_path, qbi_here):
    code, said = qbi_here(
        "audit", "--match", "--batch-size", 2, "--batches", 1, "--neurons", 20, "--out", tmp_path, *options
    )
    assert code == 2
    assert says in said
    assert "Traceback" not in said


@pytest.mark.long
def test_the_report_shows_it(tmp_path, qbi_here):
    file = tmp_path / "net.py"
    file.write_text(
        "from torch import nn\n\n\ndef net():\n"
        "    made = nn.Sequential(nn.Conv2d(3, 12, 5, 2, 2), nn.Tanh(), nn.Conv2d(12, 12, 5, 2, 2), nn.Tanh())\n"
        "    made.extend([nn.Flatten(), nn.Linear(192, 10)])\n"
        "    made[5].weight.requires_grad_(False)\n    return made\n"
    )
    asked = ("--size", 16, "--batch-size", 2, "--batches", 1, "--attack", "passive", "--no-defences", "--out", tmp_path)
    code, said = qbi_here("audit", f"{file}:net", *asked, "--sarif", "--junit")
    assert code == 0
    assert "Gradient matching, 600 steps from 1 start (announced" in " ".join(said.split())
    page = (tmp_path / "report.html").read_text()
    assert "<h2>Gradient matching</h2>" in page
    assert "picture made of image 2" in page
    assert json.loads((tmp_path / "audit.json").read_text())["matched"]["tried"]
    assert "gradient matching reads 100 % of samples" in (tmp_path / "audit.sarif").read_text()
    qbi_here("audit", f"{file}:net", *asked, "--no-samples")
    assert "picture made of image" not in (tmp_path / "report.html").read_text()
    qbi_here("audit", f"{file}:net", *asked, "--no-match")
    assert "<h2>Gradient matching</h2>" not in (tmp_path / "report.html").read_text()
