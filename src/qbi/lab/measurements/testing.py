"""What the tests run through."""

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from qbi.lab.measurements import CLONE, in_clone

PACKAGE = __name__.partition(".")[0]


def coverage(_data: str) -> dict[str, Any]:
    """Statements of each room that the quick tests run through. Code that tests start in processes of their own is not counted."""
    in_clone("tests")
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "coverage.json"
        command = [sys.executable, "-m", "pytest", "-n", str(os.cpu_count() or 1), "--dist", "worksteal"]
        command += ["--cov=qbi", f"--cov-report=json:{report}", "-m", "not serial and not long"]
        own = {"COVERAGE_FILE": str(Path(folder) / "data"), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=CLONE, env={**os.environ, **own}, stdout=sys.stderr, check=False)
        files = json.loads(report.read_text())["files"]
    statements: Counter[str] = Counter()
    run: Counter[str] = Counter()
    for name, found in files.items():
        parts = Path(name).parts
        inside = parts[parts.index(PACKAGE) + 1 :]
        room = inside[0] if len(inside) > 1 else "beside the rooms"
        statements[room] += found["summary"]["num_statements"]
        run[room] += found["summary"]["covered_lines"]
    rows = [{"room": r, "statements": n, "run": run[r] / n} for r, n in sorted(statements.items()) if n]
    total = {"statements": statements.total(), "run": run.total() / statements.total()}
    return {"provenance": f"quick tests, exit code {done.returncode}", "rows": rows, "total": total}
