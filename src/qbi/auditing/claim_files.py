"""Privacy settings out of a federation's files: NVFlare's jobs and `privacy.json`, Flower's apps, training scripts. Nothing is run."""

import ast
import json
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from qbi.auditing.claims import MECHANISMS, PrivacySetting
from qbi.errors import DataError, first_line

LARGEST = 2**22
MOST_FILES = 2000
SKIPPED = {".venv", "node_modules", ".git", "__pycache__"}
ROUNDS = ("num-server-rounds", "num_server_rounds", "num_rounds", "rounds", "num-rounds")
NEVER_RUNS = (
    'for tasks ["*"]: NVFlare 2.9 looks filters up by a task\'s own name, so this one never runs; name the tasks'
)
FAILS_OPEN = "results of other kinds, with an error code or without data pass it as they are, and so does their meta (INITIAL_METRICS)"
MOD = "Mod"
IN_NO_APP = "no app of this file has it among its mods: it never runs"
SITE = "a site's filter: the simulator does not run it"


def settings_in(path: Path) -> list[PrivacySetting]:
    """Every known mechanism in a file, or in the files of a folder."""
    if not path.exists():
        raise DataError(f"{path}: no such file or folder; give a job, an app, a privacy.json or a script.")
    files = [path] if path.is_file() else _files(path)
    config = _app_config(path if path.is_dir() else path.parent)
    found: list[PrivacySetting] = []
    for file in files:
        if file.suffix == ".json":
            found += _in_json(file)
        elif file.suffix == ".py":
            found += _in_script(file, config)
    return found


def rounds_in(path: Path) -> int | None:
    """How many rounds the files say, where they say it."""
    for name, value in _app_config(path if path.is_dir() else path.parent).items():
        if name in ROUNDS and isinstance(value, int):
            return value
    for file in [path] if path.is_file() else _files(path):
        if file.suffix == ".json" and file.name.startswith("config_fed_server"):
            for node in _nodes(_json(file)):
                rounds = node.get("num_rounds")
                if isinstance(rounds, int):
                    return rounds
    return None


def _files(folder: Path) -> list[Path]:
    out = []
    for place in sorted(folder.rglob("*")):
        if place.suffix in (".json", ".py") and not SKIPPED & set(place.parts) and place.is_file():
            out.append(place)
        if len(out) > MOST_FILES:
            raise DataError(f"{folder}: more than {MOST_FILES} files; give the folder of one job or app.")
    return out


def _text(file: Path) -> str:
    try:
        if file.stat().st_size > LARGEST:
            return ""
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise DataError(f"{file}: it cannot be read ({first_line(problem)}).") from problem


def _json(file: Path) -> Any:
    try:
        return json.loads(_text(file) or "{}")
    except (json.JSONDecodeError, RecursionError) as problem:
        raise DataError(f"{file}: no JSON ({first_line(problem)}).") from problem


def _in_json(file: Path) -> Iterator[PrivacySetting]:
    document = _json(file)
    if not isinstance(document, dict):
        return
    scopes = document.get("scopes")
    if isinstance(scopes, list):
        several = (f"one of {len(scopes)} scopes, of which a job chooses its own",) if len(scopes) > 1 else ()
        for scope in scopes:
            for chain in _listed(scope, "task_result_filters"):
                yield from _of_filter(file, chain, (SITE, FAILS_OPEN, *several))
        return
    for chain in _listed(document, "task_result_filters"):
        tasks = chain.get("tasks", [])
        star = (NEVER_RUNS,) if isinstance(tasks, list) and "*" in tasks else ()
        for part in _listed(chain, "filters"):
            for found in _of_filter(file, part, (*star, FAILS_OPEN)):
                yield replace(found, runs=not star)


def _of_filter(file: Path, part: Mapping[str, Any], remarks: tuple[str, ...]) -> Iterator[PrivacySetting]:
    name = str(part.get("path", part.get("name", ""))).rsplit(".", 1)[-1]
    arguments = part.get("args", {})
    if name in MECHANISMS:
        yield PrivacySetting(str(file), name, arguments if isinstance(arguments, dict) else {}, remarks)


def _listed(node: Any, name: str) -> Iterator[dict[str, Any]]:
    found = node.get(name, []) if isinstance(node, dict) else []
    yield from (part for part in found if isinstance(part, dict)) if isinstance(found, list) else ()


def _nodes(node: Any) -> Iterator[dict[str, Any]]:
    if isinstance(node, dict):
        yield node
    for part in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from _nodes(part)


def _app_config(folder: Path) -> dict[str, Any]:
    """What stands under [tool.flwr.app.config] here or in a folder above."""
    for place in (folder, *folder.absolute().parents[:2]):
        file = place / "pyproject.toml"
        if file.is_file():
            try:
                found = tomllib.loads(_text(file))
            except tomllib.TOMLDecodeError as problem:
                raise DataError(f"{file}: no TOML ({first_line(problem)}).") from problem
            node: Any = found
            for name in ("tool", "flwr", "app", "config"):
                node = node.get(name, {}) if isinstance(node, dict) else {}
            if node:
                return dict(node)
    return {}


def _in_script(file: Path, config: Mapping[str, Any]) -> Iterator[PrivacySetting]:
    try:
        tree = ast.parse(_text(file))
    except (SyntaxError, ValueError, RecursionError):
        return
    known: dict[str, Any] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            name, value = node.targets[0].id, _value(node.value, known, config)
            # A name that stands for several numbers stands for none: files are read, not run.
            known[name] = None if name in known and known[name] != value else value
    used = _among_mods(tree)
    order = {"LocalDpMod": ("clipping_norm", "sensitivity", "epsilon", "delta")}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = _name(node.func)
            if name in MECHANISMS and name != "Opacus":
                arguments = dict(zip(order.get(name, ()), (_value(a, known, config) for a in node.args), strict=False))
                arguments |= {k.arg: _value(k.value, known, config) for k in node.keywords if k.arg}
                numbers = {k: v for k, v in arguments.items() if v is not None}
                runs = not name.endswith(MOD) or id(node) in used
                yield PrivacySetting(f"{file}:{node.lineno}", name, numbers, () if runs else (IN_NO_APP,), runs)
        elif isinstance(node, ast.keyword) and node.arg == "mods" and isinstance(node.value, ast.List):
            for mod in node.value.elts:
                if isinstance(mod, ast.Name | ast.Attribute) and (name := _name(mod)) in MECHANISMS:
                    yield PrivacySetting(f"{file}:{mod.lineno}", name, {})


def _among_mods(tree: ast.Module) -> set[int]:
    """Calls that stand in an app's list of mods, or whose name does."""
    lists = [n.value for n in ast.walk(tree) if isinstance(n, ast.keyword) and n.arg == "mods"]
    inside = [part for value in lists for part in ast.walk(value)]
    names = {n.id for n in inside if isinstance(n, ast.Name)}
    assigned = [
        n.value
        for n in ast.walk(tree)
        if isinstance(n, ast.Assign) and any(isinstance(t, ast.Name) and t.id in names for t in n.targets)
    ]
    return {id(n) for n in (*inside, *assigned) if isinstance(n, ast.Call)}


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _value(node: ast.expr, known: Mapping[str, Any], config: Mapping[str, Any]) -> Any:
    """A number that stands there, is the value of a name, or is looked up in the app's config; None for anything else."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        return known.get(node.id)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        inner = _value(node.operand, known, config)
        return -inner if isinstance(inner, int | float) else None
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        return config.get(str(node.slice.value))
    if isinstance(node, ast.Call) and _name(node.func) in ("float", "int", "get") and node.args:
        first = node.args[0]
        return (
            config.get(str(first.value))
            if _name(node.func) == "get" and isinstance(first, ast.Constant)
            else _value(first, known, config)
        )
    return None
