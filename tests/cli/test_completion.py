"""Completion of commands and options, in a shell as a person uses it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

BASH = shutil.which("bash") or ""
pytestmark = pytest.mark.skipif(not BASH, reason="bash is not installed")
SOURCE = str(Path(__file__).parents[2] / "src")


def in_bash(lines, home):
    """What a shell says to these lines, with a home of its own and this program as `qbi`."""
    program = home / "bin/qbi"
    program.parent.mkdir(exist_ok=True)
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m qbi "$@"\n')
    program.chmod(0o755)
    path = f"{program.parent}{os.pathsep}{os.environ['PATH']}"
    given = {**os.environ, "HOME": str(home), "PATH": path, "PYTHONPATH": SOURCE}
    done = subprocess.run([BASH, "-c", lines], env=given, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


COMPLETED = 'COMP_WORDS=({words}); COMP_CWORD={last}; _qbi_completion qbi; echo "${{COMPREPLY[@]}}"'


@pytest.mark.parametrize(
    ("typed", "offered"),
    [("qbi au", ["audit"]), ("qbi di", ["diff"]), ("qbi audit --fail", ["--fail-above", "--fail-at"])],
)
def test_what_the_shell_is_shown_completes_commands_and_options(tmp_path, typed, offered):
    words = COMPLETED.format(words=typed, last=len(typed.split()) - 1)
    assert in_bash(f'eval "$(qbi --show-completion)"; {words}', tmp_path) == offered


def test_completion_is_installed_for_the_shell_and_works_from_there(tmp_path):
    in_bash("qbi --install-completion; true", tmp_path)
    assert "qbi" in (tmp_path / ".bashrc").read_text()
    words = COMPLETED.format(words="qbi led", last=1)
    assert in_bash(f'source "$HOME/.bashrc"; {words}', tmp_path) == ["ledger"]
