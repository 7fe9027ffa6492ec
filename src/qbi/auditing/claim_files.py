"""Privacy settings out of a federation's files: NVFlare's jobs and `privacy.json`, Flower's apps, training scripts. Nothing is run."""

import ast
import json
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from qbi.auditing.claim_records import PrivacySetting
from qbi.auditing.claims import MECHANISMS
from qbi.errors import DataError, first_line

LARGEST = 2**22
MOST_FILES = 2000
FORMS = (".conf", ".yml", ".yaml")
"""NVFlare reads these too."""
SKIPPED = {".venv", "node_modules", ".git", "__pycache__"}
ROUNDS = ("num-server-rounds", "num_server_rounds", "num_rounds", "rounds", "num-rounds")
NEVER_RUNS = (
    'for tasks ["*"]: NVFlare 2.9 looks filters up by a task\'s own name, so this one never runs; name the tasks'
)
FAILS_OPEN = "results of other kinds, with an error code or without data pass it as they are, and so does their meta (INITIAL_METRICS)"
MOD = "Mod"
CONFIG = ("run_config", "cfg", "config")
"""What a script calls the app's config, by custom; a script that means something else by it is misread, and never to its credit."""
NVFLARES = ("SVTPrivacy", "PercentilePrivacy", "ExcludeVars")
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
        elif file.suffix in FORMS and file.stem.startswith(("config_fed", "privacy")):
            raise DataError(f"{file}: files of this form are not read, and it may hold filters; write it as JSON.")
    return found


def _tree(file: Path) -> ast.Module:
    try:
        return ast.parse(_text(file))
    except (SyntaxError, ValueError, RecursionError) as problem:
        raise DataError(f"{file}: no Python that can be read ({first_line(problem)}).") from problem


def rounds_in(path: Path) -> int | None:
    """The largest number of rounds that the files say, where they say one."""
    config = _app_config(path if path.is_dir() else path.parent)
    said = [value for name, value in config.items() if name in ROUNDS]
    for file in [path] if path.is_file() else _files(path):
        if file.suffix == ".json":
            said += [node[name] for node in _nodes(_json(file)) for name in ROUNDS if name in node]
        elif file.suffix == ".py":
            found = (k for k in ast.walk(_tree(file)) if isinstance(k, ast.keyword) and k.arg in ROUNDS)
            said += [k.value.value for k in found if isinstance(k.value, ast.Constant)]
    numbers = [int(v) for v in said if not isinstance(v, bool) and str(v).isdigit()]
    return max(numbers, default=None)


def _files(folder: Path) -> list[Path]:
    out = []
    for place in sorted(folder.rglob("*")):
        if place.suffix in (".json", ".py", *FORMS) and not SKIPPED & set(place.parts) and place.is_file():
            out.append(place)
        if len(out) > MOST_FILES:
            raise DataError(f"{folder}: more than {MOST_FILES} files; give the folder of one job or app.")
    return out


def _text(file: Path) -> str:
    try:
        if file.stat().st_size > LARGEST:
            raise DataError(
                f"{file}: larger than {LARGEST // 2**20} MiB; no settings are. Give the folder of one job or app."
            )
        return file.read_text(encoding="utf-8-sig")
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
    place, _, name = str(part.get("path", part.get("name", ""))).rpartition(".")
    arguments = part.get("args", {})
    if name in NVFLARES and place.partition(".")[0] in ("nvflare", ""):
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
    tree = _tree(file)
    known = _numbers(tree, config)
    used = _among_mods(tree)
    order = {"LocalDpMod": ("clipping_norm", "sensitivity", "epsilon", "delta")}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = _name(node.func)
            if name in MECHANISMS and name != "Opacus":
                arguments = dict(zip(order.get(name, ()), (_value(a, known, config) for a in node.args), strict=False))
                arguments |= {k.arg: _value(k.value, known, config) for k in node.keywords if k.arg}
                if any(k.arg is None for k in node.keywords) or any(isinstance(a, ast.Starred) for a in node.args):
                    arguments = {}
                numbers = {k: v for k, v in arguments.items() if v is not None}
                runs = not name.endswith(MOD) or id(node) in used
                yield PrivacySetting(f"{file}:{node.lineno}", name, numbers, () if runs else (IN_NO_APP,), runs)
        elif isinstance(node, ast.keyword) and node.arg == "mods" and isinstance(node.value, ast.List):
            for mod in node.value.elts:
                if isinstance(mod, ast.Name | ast.Attribute) and (name := _name(mod)) in MECHANISMS:
                    yield PrivacySetting(f"{file}:{mod.lineno}", name, {})


def _numbers(tree: ast.Module, config: Mapping[str, Any]) -> dict[str, Any]:
    """Names that stand for one number. One that is bound twice, in whatever way, stands for none: files are read, not run."""
    bound = [n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)]
    bound += [n.arg for n in ast.walk(tree) if isinstance(n, ast.arg)]
    imported = [n for n in ast.walk(tree) if isinstance(n, ast.Import | ast.ImportFrom)]
    bound += [a.asname or a.name for n in imported for a in n.names]
    known: dict[str, Any] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            if bound.count(name) == 1 and "*" not in bound:
                known[name] = _value(node.value, known, config)
    return known


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
        return None if isinstance(node.value, bool) else node.value
    if isinstance(node, ast.Name):
        return known.get(node.id)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        inner = _value(node.operand, known, config)
        return -inner if isinstance(inner, int | float) else None
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant) and _name(node.value) in CONFIG:
        return config.get(str(node.slice.value))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get" and node.args:
        key = node.args[0]
        asked = _name(node.func.value) in CONFIG and isinstance(key, ast.Constant)
        return config.get(str(key.value)) if asked and isinstance(key, ast.Constant) else None
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) == 1:
        inner = _value(node.args[0], known, config)
        kinds: dict[str, type] = {"float": float, "int": int}
        kind = kinds.get(node.func.id)
        return kind(inner) if kind is not None and isinstance(inner, int | float) else None
    return None
