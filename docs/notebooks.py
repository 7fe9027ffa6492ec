"""Executes the tutorials, each in a process, a folder and a home of its own, and keeps what their cells print.

python docs/notebooks.py                  execute every tutorial and write its outputs
python docs/notebooks.py FILE …           these only
python docs/notebooks.py --check FILE …   execute them, write nothing; exit code 1 where a cell fails

A cell is run as Python runs a file: what it prints and what its last line gives are its outputs. Where `make zoo` has fetched
packages, they can be imported.
"""

import ast
import base64
import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
import types
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
TUTORIALS = HERE / "tutorials"
SECONDS = 300
"""What a tutorial may take."""


def main() -> int:
    """Execute, and write unless asked only to check."""
    words = sys.argv[1:]
    if words[:1] == ["--here"]:
        return _execute_here(Path(words[1]), Path(words[2]))
    paths = [Path(word) for word in words if word != "--check"] or sorted(TUTORIALS.glob("*.ipynb"))
    failed = False
    for path in paths:
        problem, document = executed(path)
        failed |= bool(problem)
        if problem:
            print(f"{path.name}: {problem}", file=sys.stderr)
        elif "--check" not in words:
            path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return int(failed)


def executed(path: Path) -> tuple[str, dict[str, Any]]:
    """What went wrong, if anything did, and the notebook with its outputs."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "executed.json"
        work, home = Path(folder) / "work", Path(folder) / "home"
        work.mkdir()
        home.mkdir()
        # Programs that came with this Python are found by name, as in an activated environment.
        programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
        running = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), "--here", str(path.resolve()), str(out)],
            cwd=work,
            env={**os.environ, "HOME": str(home), "PATH": programs},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            _, said = running.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            said = f"it took more than {SECONDS} s."
        finally:
            # What it started ends with it.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)
            running.wait()
        if running.returncode:
            return said[-4000:], {}
        return "", json.loads(out.read_text(encoding="utf-8"))


def _execute_here(path: Path, out: Path) -> int:
    """Execute in this process, cell by cell; the first that fails ends it."""
    _make_zoo_importable()
    document = json.loads(path.read_text(encoding="utf-8"))
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module  # what a cell defines can be found there, as in a notebook
    count = 0
    for cell in document["cells"]:
        if cell["cell_type"] != "code":
            continue
        count += 1
        source = "".join(cell["source"])
        try:
            outputs = _run(source, f"{path.name}, cell {count}", vars(module), count)
        except BaseException:
            traceback.print_exc()
            return 1
        cell["execution_count"], cell["outputs"] = count, outputs
    out.write_text(json.dumps(document), encoding="utf-8")
    return 0


def _run(source: str, place: str, names: dict[str, Any], count: int) -> list[dict[str, Any]]:
    """The outputs of one cell."""
    tree = ast.parse(source, place)
    shown = tree.body[-1] if tree.body else None
    last = ast.Expression(shown.value) if isinstance(shown, ast.Expr) else None
    if last is not None:
        tree.body.pop()
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(compile(tree, place, "exec"), names)
        value = eval(compile(last, place, "eval"), names) if last is not None else None
    outputs: list[dict[str, Any]] = []
    if text := said.getvalue():
        outputs.append({"name": "stdout", "output_type": "stream", "text": text.splitlines(keepends=True)})
    if value is not None and not source.rstrip().endswith(";"):
        data = _shown(value)
        outputs.append({"data": data, "execution_count": count, "metadata": {}, "output_type": "execute_result"})
    return outputs


def _shown(value: Any) -> dict[str, Any]:
    """A value as a notebook shows it: in words, and as a picture or a table where it has one."""
    data: dict[str, Any] = {"text/plain": repr(value).splitlines(keepends=True)}
    if hasattr(value, "_repr_html_"):
        data["text/html"] = value._repr_html_().splitlines(keepends=True)
    if hasattr(value, "_repr_png_"):
        data["image/png"] = base64.b64encode(value._repr_png_()).decode()
        data["text/plain"] = ["a picture"]  # its own words name an address in memory
    return data


def _make_zoo_importable() -> None:
    sys.path.append(str(HERE.parent / "tests"))
    from published import prepare

    prepare()


if __name__ == "__main__":
    sys.exit(main())
