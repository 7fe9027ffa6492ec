"""Results are written whole or not at all."""

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qbi.errors import DataError


def write_atomically(path: Path, content: bytes | str) -> None:
    """Write beside the target, then move into place: a reader sees the old file or the new one, never a part."""
    data = content.encode() if isinstance(content, str) else content
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as problem:
        raise DataError(f"{path}: it cannot be written ({problem.strerror}); choose another place.") from problem
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        temporary.chmod(0o644)
        temporary.replace(path)
    except OSError as problem:
        temporary.unlink(missing_ok=True)
        raise DataError(f"{path}: it cannot be written ({problem.strerror}); choose another place.") from problem


def to_json(document: Mapping[str, Any]) -> str:
    """Readable JSON that refuses NaN, which other readers would choke on."""
    return json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def check_file(path: Path) -> None:
    """Whether a file can be written; asked before work that takes long."""
    if path.is_dir():
        raise DataError(f"{path}: it cannot be written (a folder of that name is there); choose another place.")
    try:
        check_place(path.parent)
    except DataError as problem:
        raise DataError(str(problem).replace(str(path.parent), str(path), 1)) from None


def check_place(folder: Path) -> None:
    """Whether results can be written into a folder; asked before work that takes long."""
    existing = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise DataError(f"{folder}: it cannot be written ({existing} is no folder to write to); choose another place.")
