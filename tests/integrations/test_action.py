"""The GitHub Action: its shell steps, run here one after another as a runner does; expressions are filled in by hand."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
ACTION = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
STEPS = {step["name"]: step for step in ACTION["runs"]["steps"] if "run" in step}
FAST = "--size 8 --batches 1 --no-defences --no-decode --attack passive"

NETS = """
import torch
from torch import nn

class Leaky(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(192, 80), nn.ReLU(), nn.Linear(80, 10))

class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(192))

    def forward(self, x):
        return (x.flatten(1)[:, :190] * self.scale[:190].exp()).view(-1, 10, 19).sum(2)
"""

FAKE_GH = '#!/bin/sh\nprintf "%s\\n" "$@" > "$GH_SAID"\nexit "${GH_CODE:-0}"\n'


@pytest.fixture
def runner(tmp_path):
    """Runs the steps with these inputs; returns the exit codes by step and the folder of the run."""
    (tmp_path / "nets.py").write_text(NETS)
    tools = tmp_path / "tools"
    tools.mkdir()
    for name, text in {
        "gh": FAKE_GH,
        "qbi": f'#!/bin/sh\nexec "{sys.executable}" -c "from qbi.cli import main; main()" "$@"\n',
        "python": '#!/bin/sh\nprintf "%s\\n" "$@" > "$PIP_SAID"\n',
    }.items():
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)

    def run(event="pull_request", gh_code=0, **given):
        inputs = {name: entry.get("default", "") for name, entry in ACTION["inputs"].items()}
        inputs |= {name.replace("_", "-"): value for name, value in given.items()}
        context = {f"inputs.{name}": value for name, value in inputs.items()} | {
            "inputs.source || github.action_path": inputs["source"] or str(ROOT),
            "github.token": "none",
            "github.repository": "clinic/net",
            "github.event.pull_request.number": "7",
        }
        codes = {}
        for name, step in STEPS.items():
            if name == "Comment" and not (inputs["comment"] == "true" and event == "pull_request"):
                continue
            files = {
                f: str(tmp_path / f.lower()) for f in ("GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY", "GH_SAID", "PIP_SAID")
            }
            own = {k: filled(v, context) for k, v in step.get("env", {}).items()}
            environment = {**os.environ, **files, **own, "RUNNER_TEMP": str(tmp_path), "GH_CODE": str(gh_code)}
            environment["PATH"] = f"{tools}:{os.environ['PATH']}"
            done = subprocess.run(
                ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]],
                cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=200,
            )  # fmt: skip
            codes[name] = done.returncode
            (tmp_path / f"{name}.said").write_text(done.stdout + done.stderr)
            if step.get("id"):
                for line in (tmp_path / "github_output").read_text().splitlines():
                    key, _, value = line.partition("=")
                    context[f"steps.{step['id']}.outputs.{key}"] = value
        return codes

    return run


def filled(text, context):
    return re.sub(r"\$\{\{ (.*?) \}\}", lambda found: context[found[1]], text)


def test_a_leaking_model_fails_and_is_commented_on(runner, tmp_path):
    codes = runner(model="nets.py:Leaky", batch_size="4", options=FAST)
    assert codes == {"Install": 0, "Audit": 0, "Comment": 0, "Judge": 1}
    assert "::error::A server reads more than a share of 0.1" in (tmp_path / "Judge.said").read_text()
    card = (tmp_path / "qbi-audit/model-card.md").read_text()
    assert (tmp_path / "github_step_summary").read_text() == card
    said = (tmp_path / "gh_said").read_text().splitlines()
    assert said[:5] == ["pr", "comment", "7", "--repo", "clinic/net"]
    assert Path(said[-1]).read_text() == card
    sarif = next(line for line in (tmp_path / "github_output").read_text().splitlines() if line.startswith("sarif="))
    results = json.loads(Path(sarif.removeprefix("sarif=")).read_text())["runs"][0]["results"]
    # Code scanning refuses results without a file.
    assert {r["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] for r in results} == {"nets.py"}
    assert not (tmp_path / "qbi-audit/audit.png").exists()
    assert (tmp_path / "pip_said").read_text().splitlines()[-1] == str(ROOT)


@pytest.mark.long
def test_below_the_threshold_it_passes_and_a_refused_comment_is_a_warning(runner, tmp_path):
    codes = runner(model="nets.py:Leaky", batch_size="4", options=FAST, fail_above="1", gh_code=1)
    assert set(codes.values()) == {0}
    assert "::warning::" in (tmp_path / "Comment.said").read_text()


@pytest.mark.long
def test_what_was_not_tested_fails_unless_it_may(runner):
    more = {"model": "nets.py:Scaled", "batch_size": "4", "options": FAST, "event": "push"}
    assert runner(**more) == {"Install": 0, "Audit": 0, "Judge": 3}
    assert runner(**more, allow_untested="true")["Judge"] == 0


@pytest.mark.long
def test_bad_input_fails_without_a_comment(runner, tmp_path):
    codes = runner(model="nets.py:Nothing")
    assert codes["Judge"] == 2
    assert not (tmp_path / "gh_said").exists()


def test_nothing_a_user_gives_stands_in_a_script(runner, tmp_path):
    """Inputs reach the shell as variables: what they hold is never run."""
    assert not any("${{" in step["run"] for step in STEPS.values())
    runner(model="nets.py:Leaky; touch taken", batch_size="4$(touch taken)", options="$(touch taken) `touch taken`")
    assert not (tmp_path / "taken").exists()
