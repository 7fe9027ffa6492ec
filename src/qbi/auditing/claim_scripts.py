"""Privacy settings out of Python scripts, which are read and never run."""

import ast
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from qbi.auditing.claim_records import PrivacySetting
from qbi.auditing.claims import MECHANISMS
from qbi.errors import DataError, first_line

RUN_CONFIG = "run_config"
"""What the app's config is called, as an attribute of its context."""
UNSEEN = {"globals", "locals", "vars", "exec", "eval", "setattr", "__dict__"}
"""With any of these a script may rebind names where nobody reads it."""
MOD = "Mod"
IN_NO_APP = "no app of this file has it among its mods: it never runs"


def parsed(file: Path, text: str) -> ast.Module:
    """A script as a tree."""
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError) as problem:
        raise DataError(f"{file}: no Python that can be read ({first_line(problem)}).") from problem


def values_of(tree: ast.Module, names: Sequence[str], config: Mapping[str, Any]) -> list[Any]:
    """What stands under these names in calls; None where it cannot be read."""
    known = _numbers(tree, config)
    found = (k for k in ast.walk(tree) if isinstance(k, ast.keyword) and k.arg in names)
    return [_value(k.value, known, config) for k in found]


def settings_of(tree: ast.Module, place: str, config: Mapping[str, Any]) -> Iterator[PrivacySetting]:
    """Every known mechanism that a script makes or lists, with the numbers that can be read."""
    known = _numbers(tree, config)
    used, own = _among_mods(tree), _of_their_own(tree)
    order = {"LocalDpMod": ("clipping_norm", "sensitivity", "epsilon", "delta")}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = _name(node.func)
            if name in MECHANISMS and name != "Opacus" and name not in own:
                arguments = dict(zip(order.get(name, ()), (_value(a, known, config) for a in node.args), strict=False))
                arguments |= {k.arg: _value(k.value, known, config) for k in node.keywords if k.arg}
                if any(k.arg is None for k in node.keywords) or any(isinstance(a, ast.Starred) for a in node.args):
                    arguments = {}
                numbers = {k: v for k, v in arguments.items() if v is not None and v is not config}
                runs = not name.endswith(MOD) or id(node) in used
                yield PrivacySetting(f"{place}:{node.lineno}", name, numbers, () if runs else (IN_NO_APP,), runs)
        elif isinstance(node, ast.keyword) and node.arg == "mods" and isinstance(node.value, ast.List):
            for mod in node.value.elts:
                if isinstance(mod, ast.Name | ast.Attribute) and (name := _name(mod)) in MECHANISMS and name not in own:
                    yield PrivacySetting(f"{place}:{mod.lineno}", name, {})


def _numbers(tree: ast.Module, config: Mapping[str, Any]) -> dict[str, Any]:
    """Names that stand for one number. One that is bound twice, in whatever way, stands for none: files are read, not run."""
    bound = list(_bound(tree))
    known: dict[str, Any] = {}
    if UNSEEN & {_name(n) for n in ast.walk(tree) if isinstance(n, ast.Name | ast.Attribute)}:
        return known
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            if bound.count(name) == 1 and "*" not in bound:
                known[name] = _value(node.value, known, config)
    return known


def _bound(tree: ast.Module) -> Iterator[str]:
    """Every name that a script binds, as often as it does, in whatever way."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (a.asname or a.name for a in node.names)
        elif isinstance(node, ast.Global | ast.Nonlocal):
            yield from node.names
        else:
            # Definitions, handlers and patterns.
            kinds = (
                ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.ExceptHandler | ast.MatchAs | ast.MatchStar
            )
            name = node.name if isinstance(node, kinds) else node.rest if isinstance(node, ast.MatchMapping) else None
            if name:
                yield name


def _of_their_own(tree: ast.Module) -> set[str]:
    """Names that do not stand for the framework's: bound by the script, or imported from elsewhere."""
    imports = [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and (n.module or "").split(".")[0] == "flwr"]
    theirs = Counter(a.name for n in imports if not n.level for a in n.names if a.asname in (None, a.name))
    return {name for name, times in Counter(_bound(tree)).items() if times > theirs[name]}


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
    if isinstance(node, ast.Attribute) and node.attr == RUN_CONFIG:
        return config
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        inside = _value(node.value, known, config)
        return config.get(str(node.slice.value)) if inside is config else None
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get" and node.args:
        key, inside = node.args[0], _value(node.func.value, known, config)
        return config.get(str(key.value)) if inside is config and isinstance(key, ast.Constant) else None
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) == 1:
        inner = _value(node.args[0], known, config)
        kinds: dict[str, type] = {"float": float, "int": int}
        kind = kinds.get(node.func.id)
        return kind(inner) if kind is not None and isinstance(inner, int | float) else None
    return None
