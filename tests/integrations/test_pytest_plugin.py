"""The pytest plugin as a project uses it, in pytest runs of their own."""

import tomllib
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

SUITE = """
import torch
from torch import nn
import qbi

OPTIONS = dict(client=qbi.Client(batch_size=4), batches=1, defences=False, attacks=["passive"])

def data():
    draws = torch.Generator().manual_seed(0)
    return torch.randn(40, 12, generator=draws), torch.arange(40) % 3

def leaky():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 3))
"""

LEAKS = SUITE + "\ndef test_it(qbi_audit):\n    qbi_audit(leaky(), data(), **OPTIONS)\n"


@pytest.fixture
def run(pytester, monkeypatch):
    """A run that knows the plugin by name alone: the package may or may not be installed with its entry point."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")

    def start(suite, *arguments):
        pytester.makepyfile(suite)
        return pytester.runpytest_subprocess(
            "-p", "qbi.integrations.pytest_plugin", "-p", "no:cacheprovider", *arguments
        )

    return start


def test_a_model_that_leaks_fails_with_the_verdict_and_is_in_the_junit_file(run, pytester):
    done = run(LEAKS, "--junit-xml=found.xml")
    done.assert_outcomes(failed=1)
    done.stdout.fnmatch_lines(["*100.0 % is read, and at most 0.0 % may be.*layer 0*"])
    assert 'name="qbi_share" value="1.0"' in (pytester.path / "found.xml").read_text()


@pytest.mark.long
def test_the_command_line_sets_the_share_and_a_call_overrules_it(run):
    run(LEAKS, "--qbi-fail-above", "1").assert_outcomes(passed=1)
    strict = LEAKS.replace("**OPTIONS)\n", "fail_above=0.5, **OPTIONS)\n")
    run(strict, "--qbi-fail-above", "1").assert_outcomes(failed=1)


@pytest.mark.long
def test_a_share_that_is_none_is_refused(run):
    done = run(LEAKS, "--qbi-fail-above", "7")
    assert done.ret == pytest.ExitCode.USAGE_ERROR
    done.stderr.fnmatch_lines(["*7 is no share; it lies between 0 and 1*"])
    done = run(LEAKS.replace("**OPTIONS)\n", "fail_above=2, **OPTIONS)\n"))
    done.assert_outcomes(failed=1)
    done.stdout.fnmatch_lines(["*fail_above: 2 is no share*"])


@pytest.mark.long
def test_what_was_not_tested_does_not_pass_unless_it_may(run):
    suite = (
        SUITE
        + """
class Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(12))
    def forward(self, x):
        return (x * self.scale.exp()).view(-1, 3, 4).sum(2)

def test_closed(qbi_audit):
    qbi_audit(Table(), data(), **OPTIONS)

def test_open(qbi_audit):
    assert qbi_audit(Table(), data(), allow_untested=True, **OPTIONS).status == "not tested"
"""
    )
    done = run(suite)
    done.assert_outcomes(passed=1, failed=1)
    done.stdout.fnmatch_lines(["*not tested*allow_untested=True*"])


def test_the_plugin_is_light_and_has_its_entry_point(run):
    suite = "import sys\ndef test_it(pytestconfig):\n    assert 'torch' not in sys.modules\n"
    run(suite).assert_outcomes(passed=1)
    settings = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert settings["project"]["entry-points"]["pytest11"] == {"qbi": "qbi.integrations.pytest_plugin"}
