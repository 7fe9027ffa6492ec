"""The program as a person runs it, in a process of its own."""

import subprocess
import sys
from pathlib import Path


def qbi(*arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    """One command, ended after 200 seconds."""
    command = [sys.executable, "-c", "from qbi.cli import main; main()", *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=200, check=False)
