"""Privacy settings out of a federation's files: NVFlare's jobs and `privacy.json`, Flower's apps, training scripts. Nothing is run."""

import json
import math
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from qbi.auditing.claim_records import PrivacySetting
from qbi.auditing.claim_scripts import parsed, settings_of, values_of
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
NVFLARES = ("SVTPrivacy", "PercentilePrivacy", "ExcludeVars")
AT_SERVER = "it stands in the server's own config: the server has every update before that, so against the server nothing is bounded"
INWARD = "for what comes in: it never sees what leaves"
NO_TASK = "for no task by name: it never runs"
OTHER_KINDS = "told to look at some kinds of data alone: updates of the other kinds pass it as they are"
WHOLE = {"WEIGHTS", "WEIGHT_DIFF"}
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
            found += settings_of(parsed(file, _text(file)), str(file), config)
        elif file.suffix in FORMS and file.stem.startswith(("config_fed", "privacy")):
            raise DataError(f"{file}: files of this form are not read, and it may hold filters; write it as JSON.")
    return found


def rounds_in(path: Path) -> tuple[int | None, bool]:
    """The largest number of rounds that the files say, where they say one; and whether every one that they say could be read."""
    config = _app_config(path if path.is_dir() else path.parent)
    said = [value for name, value in config.items() if name in ROUNDS]
    for file in [path] if path.is_file() else _files(path):
        if file.suffix == ".json":
            said += [node[name] for node in _nodes(_json(file)) for name in ROUNDS if name in node]
        elif file.suffix == ".py":
            said += values_of(parsed(file, _text(file)), ROUNDS, config)
    numbers = [_count(value) for value in said]
    return max((n for n in numbers if n is not None), default=None), None not in numbers


def _count(value: Any) -> int | None:
    """A number of rounds, however it is written; None where it is none."""
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return math.ceil(number) if 0 < number < math.inf else None


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
        idle = NEVER_RUNS if isinstance(tasks, list) and "*" in tasks else NO_TASK if not tasks else ""
        idle = AT_SERVER if "server" in file.stem else idle
        idle = idle or (INWARD if str(chain.get("direction", "out")).lower() not in ("out", "inout") else "")
        for part in _listed(chain, "filters"):
            for found in _of_filter(file, part, (FAILS_OPEN,)):
                yield replace(found, remarks=(idle, *found.remarks), runs=False) if idle else found


def _of_filter(file: Path, part: Mapping[str, Any], remarks: tuple[str, ...]) -> Iterator[PrivacySetting]:
    place, _, name = str(part.get("path", part.get("name", ""))).rpartition(".")
    arguments = part.get("args", {})
    if name in NVFLARES and place.partition(".")[0] in ("nvflare", ""):
        given = arguments if isinstance(arguments, dict) else {}
        kinds = given.get("data_kinds")
        idle = [OTHER_KINDS] if kinds and not (isinstance(kinds, list) and {*map(str, kinds)} >= WHOLE) else []
        if str(part.get("direction", "out")).lower() not in ("out", "inout"):
            idle.append(INWARD)
        yield PrivacySetting(str(file), name, given, (*idle, *remarks), runs=not idle)


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
