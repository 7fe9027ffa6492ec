"""Architectures of published packages: every trained parameter accounted for, no verdict that an attack by hand refutes, no crash."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from by_hand import hands_on
from linear_weights import linear_weights
from published import PACKAGES, missing

pytestmark = pytest.mark.long

HERE = Path(__file__).parents[1]
OPEN = 0.10
"""Of all linear layers of the zoo, the share on which no attack needs to be tried that could read something."""


@pytest.fixture(scope="module")
def audited(tmp_path_factory, worker_id):
    """Lines of the zoo by package, each from a process of its own, since what it puts on the path stays there; once for all workers."""
    base = tmp_path_factory.getbasetemp()
    kept = base if worker_id == "master" else base.parent

    def of(package):
        if missing(package):
            pytest.skip(f"{package} is not installed; `make zoo` fetches it")
        file = kept / f"published-{package}.jsonl"
        if not file.exists():
            out = subprocess.run(
                [sys.executable, HERE / "published.py", package],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                capture_output=True,
                text=True,
                check=False,
            )
            assert out.returncode == 0, out.stderr[-2000:]
            part = base / "part"
            part.write_text(out.stdout)
            part.rename(file)
        lines = [json.loads(line) for line in file.read_text().splitlines() if line.startswith("{")]
        assert lines
        return lines

    return of


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("package", PACKAGES)
def test_no_published_model_crashes_or_gets_a_wrong_verdict(package, audited):
    lines = audited(package)
    assert {line["model"]: line["crash"] for line in lines if "crash" in line} == {}
    assert [line["model"] for line in lines if not line["complete"]] == []
    assert [line["model"] for line in lines if line["status"] not in ("leaks", "not tested")] == []
    assert all(line["layers"] for line in lines)


@pytest.mark.parametrize(
    ("first", "x"),
    [
        (nn.Linear(20, 60), (40, 20)),
        (nn.Linear(20, 60, bias=False), (40, 20)),
        (nn.Conv1d(4, 60, 5, stride=5), (40, 4, 20)),
        (nn.Conv1d(4, 60, 5, stride=5, groups=2), (40, 4, 20)),
    ],
    ids=["linear", "no bias", "convolution", "groups"],
)
def test_the_attack_by_hand_reads_what_leaks(first, x):
    torch.manual_seed(0)
    values = torch.rand(x) + 0.2
    with torch.no_grad():
        wide = first(values).flatten(1).shape[1]
    model = nn.Sequential(first, nn.ReLU(), nn.Flatten(), nn.Linear(wide, 3))
    data = (values, torch.arange(40) % 3)
    assert linear_weights(model, data) == ["0.weight", "3.weight"]
    found, untried = hands_on(model, data, ["0.weight"], 8)
    assert found["0.weight"] > 0
    assert not untried


def test_low_rank_adapters_name_no_frozen_layer(audited):
    (line,) = audited("peft")
    assert line["named"]
    assert all("lora_" in name or "classifier" in name for name in line["named"])


@pytest.mark.timeout(3600)
def test_few_layers_of_the_zoo_are_left_untried(audited):
    """Says how many are called not tested, and holds down those on which nothing was tried that could have read something."""
    lines = [line for package in PACKAGES if not missing(package) for line in audited(package)]
    if not lines:
        pytest.skip("no package of the zoo is installed; `make zoo` fetches them")
    layers, left, untried, by_hand = (
        sum(line[key] for line in lines) for key in ("layers", "not_tested", "not_tried", "tried_by_hand")
    )
    missed = sum(len(line["missed"]) for line in lines)
    print(f"{len(lines)} models, {layers} linear layers: {left} not tested ({left / layers:.1%}),")
    print(
        f"nothing tried on {untried} ({untried / layers:.1%}); {by_hand} tried by hand, {missed} not tested ones read"
    )
    assert untried < OPEN * layers
    assert by_hand > 0
