"""Walks through `first-five-minutes.md` as a new user would, and writes down how long each step took.

python docs/walk.py            walk, and write docs/data/first-steps.json
python docs/walk.py --check    walk only

Blocks are taken from the page in their order: `bash` is run, a block with a file's name is written. They share one empty home and one
environment, which the page makes itself. What a step must end with stands in its first line, what a section must say in `SAYS`.
"""

import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

HERE = Path(__file__).parent
ROOT = HERE.parent
PAGE = HERE / "first-five-minutes.md"
OUT = HERE / "data/first-steps.json"
SAYS = {
    "A model of your own": "can recover",
    "The GitHub Action": "::error::A server reads more than a share of 0.1",
    "The Trainer callback": "AuditFailed",
    "The Flower client": "This client does not answer.",
}
BLOCK = re.compile(r"^```(\w+) ?(\S*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
SHELL = ("bash", "--noprofile", "--norc", "-eo", "pipefail", "-c")


def main() -> int:
    """Walk; exit code 1 where a step or a section does not do what the page says."""
    steps: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        for title, text in sections():
            said = ""
            for kind, name, body in BLOCK.findall(text):
                if kind == "bash":
                    label, code = labelled(body)
                    seconds, output = run(body, home, expected=code)
                    steps.append({"section": title, "step": label, "seconds": round(seconds, 1)})
                    said += output
                else:
                    place = home / name
                    place.parent.mkdir(parents=True, exist_ok=True)
                    place.write_text(body)
                if kind == "yaml":
                    seconds, output = act(place, home)
                    steps.append({"section": title, "step": "the job's steps", "seconds": round(seconds, 1)})
                    said += output
            if SAYS.get(title, "") not in said:
                print(f"{title}: “{SAYS[title]}” was not said\n{said[-3000:]}", file=sys.stderr)
                return 1
    if "--check" not in sys.argv:
        facts = {
            "date": datetime.now(UTC).date().isoformat(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
        }
        OUT.write_text(json.dumps({**facts, "steps": steps}, indent=1) + "\n")
    return 0


def sections() -> list[tuple[str, str]]:
    """The page's sections by title, in order."""
    _, *parts = re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return [(title, text) for title, _, text in (part.partition("\n") for part in parts)]


def labelled(body: str) -> tuple[str, int]:
    """What a block calls itself, and the exit code that it ends with."""
    found = re.fullmatch(r"# ([^(]+?)(?: \(exit code (\d+)\))?", body.splitlines()[0])
    if found is None:
        raise ValueError(f"a block of the page begins with {body.splitlines()[0]!r} instead of a comment.")
    return found[1], int(found[2] or 0)


def run(script: str, home: Path, *, expected: int = 0, more: dict[str, str] | None = None) -> tuple[float, str]:
    """One block, in the environment that the page has made so far."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV"))}
    environment = {**kept, "HOME": str(home), "QBI": str(ROOT), "PIP_NO_CACHE_DIR": "1", **(more or {})}
    if (home / "new").exists():
        environment["PATH"] = f"{home / 'new/bin'}:{kept['PATH']}"
    started = time.perf_counter()
    done = subprocess.run([*SHELL, script], cwd=home, env=environment, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - started
    said = done.stdout + done.stderr
    if done.returncode != expected:
        raise SystemExit(f"exit code {done.returncode} instead of {expected}:\n{script}\n{said[-3000:]}")
    print(f"{seconds:6.1f} s  {script.splitlines()[0]}", flush=True)
    return seconds, said


def act(workflow: Path, home: Path) -> tuple[float, str]:
    """The action's shell steps with the workflow's inputs, one after another; all but the last must end well."""
    action = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
    (job,) = yaml.safe_load(workflow.read_text())["jobs"].values()
    own = next(step["with"] for step in job["steps"] if step["uses"].startswith("OWNER/"))
    known = {f"inputs.{name}": own.get(name, entry.get("default", "")) for name, entry in action["inputs"].items()}
    known["inputs.source || github.action_path"] = str(ROOT)
    files = {name: str(home / name.lower()) for name in ("GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY")}
    total, said = 0.0, ""
    for step in action["runs"]["steps"]:
        if step.get("name") not in ("Install", "Audit", "Judge"):
            continue
        given = {k: re.sub(r"\$\{\{ (.*?) \}\}", lambda m: known[m[1]], v) for k, v in step["env"].items()}
        last = step["name"] == "Judge"
        seconds, output = run(step["run"], home, expected=int(last), more={**files, **given, "RUNNER_TEMP": str(home)})
        total, said = total + seconds, said + output
        if "id" in step:
            for line in Path(files["GITHUB_OUTPUT"]).read_text().splitlines():
                name, _, value = line.partition("=")
                known[f"steps.{step['id']}.outputs.{name}"] = value
    return total, said


if __name__ == "__main__":
    sys.exit(main())
