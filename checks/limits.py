"""Limits that hold for all code: `make check` fails where one is passed.

Functions of at most 60 lines, modules of at most 250, lines of code of at most 120 characters, prose wrapped, no class name twice, no public function that
nothing refers to.
"""

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src"
ELSEWHERE = ("tests", "docs", "examples", "checks")
FUNCTION, MODULE, LINE, PROSE = 60, 250, 120, 160
RENDERED = re.compile(r"<!-- (?:table|value) [\w-]+ -->.*?<!-- end -->", re.DOTALL)
TEXT = re.compile(r"""["']|#""")
"""Sentences for people stay on one line: the formatter does not break them."""


def main() -> int:
    """Print every place; exit code 1 if there is one."""
    files = {path: path.read_text(encoding="utf-8") for path in sorted(SOURCE.rglob("*.py"))}
    trees = {path: ast.parse(text) for path, text in files.items()}
    found = [*_lengths(files, trees), *_classes_twice(trees), *_unreferenced(files, trees), *_prose()]
    for line in found:
        print(line)
    return int(bool(found))


def _lengths(files: dict[Path, str], trees: dict[Path, ast.Module]) -> Iterator[str]:
    for path, text in files.items():
        lines = text.splitlines()
        name = path.relative_to(ROOT)
        if len(lines) > MODULE:
            yield f"{name}: {len(lines)} lines, at most {MODULE}; give a part of it a module of its own."
        for number, line in enumerate(lines, 1):
            if len(line) > LINE and not TEXT.search(line) and not _in_docstring(trees[path], number):
                yield f"{name}:{number}: {len(line)} characters, at most {LINE}."
        for node in ast.walk(trees[path]):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and _length(node) > FUNCTION:
                yield f"{name}:{node.lineno}: {node.name} has {_length(node)} lines of code, at most {FUNCTION}."


def _prose() -> Iterator[str]:
    """Lines of the pages that are not wrapped; tables, code and rendered values are as long as they are."""
    for path in [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]:
        fenced = False
        text = RENDERED.sub(lambda found: "\n" * found[0].count("\n"), path.read_text(encoding="utf-8"))
        for number, line in enumerate(text.splitlines(), 1):
            fenced ^= line.startswith("```")
            if len(line) > PROSE and not fenced and not line.startswith(("|", "    ")):
                yield f"{path.relative_to(ROOT)}:{number}: {len(line)} characters, at most {PROSE}; wrap it."


def _length(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines from the first statement to the last, the docstring left out: a command's table of options is no logic."""
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    return (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0


def _in_docstring(tree: ast.Module, number: int) -> bool:
    constants = (n for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str))
    return any(n.lineno <= number <= (n.end_lineno or n.lineno) for n in constants)


def _classes_twice(trees: dict[Path, ast.Module]) -> Iterator[str]:
    places: dict[str, list[str]] = {}
    for path, tree in trees.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    for name, where in places.items():
        if len(where) > 1:
            yield f"{name} is a class in {' and '.join(where)}; names stand once."


def _unreferenced(files: dict[Path, str], trees: dict[Path, ast.Module]) -> Iterator[str]:
    """Public functions and classes whose name stands nowhere but in its own definition, lists of exports and tests."""
    exports = {
        path
        for path, tree in trees.items()
        if path.name == "__init__.py" and not any(isinstance(n, ast.FunctionDef | ast.ClassDef) for n in tree.body)
    }
    words = Counter(word for path, text in files.items() if path not in exports for word in re.findall(r"\w+", text))
    outside = Counter(
        word
        for folder in ("docs", "examples")
        for kind in ("py", "md", "ipynb")
        for path in (ROOT / folder).rglob(f"*.{kind}")
        for word in re.findall(r"\w+", path.read_text(encoding="utf-8"))
    )
    for path, tree in trees.items():
        for node in tree.body:
            if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name.startswith("_"):
                continue
            if not node.decorator_list and words[node.name] <= 1 and not outside[node.name]:
                yield f"{path.relative_to(ROOT)}:{node.lineno}: nothing refers to {node.name}; delete it."


if __name__ == "__main__":
    sys.exit(main())
