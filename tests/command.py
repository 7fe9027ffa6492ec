"""The program as a person runs it, in a process of its own."""

import subprocess
import sys
from pathlib import Path


def qbi(*arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    """One command, ended after ten minutes; the test that waits for it has a limit of its own."""
    command = [sys.executable, "-c", "from qbi.cli import main; main()", *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=600, check=False)
