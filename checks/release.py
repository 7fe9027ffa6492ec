"""Whether a release may be made: every file names one version, and a wheel holds what runs.

python checks/release.py                 the files agree
python checks/release.py v0.2.0          and so does the tag
python checks/release.py --wheel FILE    the wheel has every module, template and table of the source
"""

import json
import re
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src"


def main(arguments: list[str]) -> int:
    """Print what is wrong; exit code 1 if anything is."""
    if arguments[:1] == ["--wheel"]:
        found = [line for name in arguments[1:] for line in wrong_with_wheel(Path(name))]
        found += [] if arguments[1:] else ["--wheel: name a wheel."]
    else:
        found = list(wrong_with_versions(ROOT, arguments[0] if arguments else None))
    for line in found:
        print(line)
    return int(bool(found))


def wrong_with_versions(root: Path, tag: str | None) -> Iterator[str]:
    """Files that name another version than the package, and a tag that does."""
    version = _first(root / "src/qbi/__init__.py", r'^__version__ = "(.+)"$')
    named = {
        "CITATION.cff": _first(root / "CITATION.cff", r"^version: (.+)$"),
        ".zenodo.json": json.loads((root / ".zenodo.json").read_text(encoding="utf-8")).get("version"),
        "CHANGELOG.md": _first(root / "CHANGELOG.md", r"^## \[(\d.*?)\]"),
    }
    for file, other in named.items():
        if other != version:
            yield f"{file}: it names version {other}, and the package is {version}; change one of them."
    if tag is None:
        return
    if tag != f"v{version}":
        yield f"the tag is {tag}, and the package is {version}; tag v{version}."
    dated = _first(root / "CHANGELOG.md", r"^## \[\d.*?\] - (.+)$")
    if not re.fullmatch(r"\d{4}-\d{2}-\d{2}", dated or ""):
        yield f"CHANGELOG.md: version {version} is “{dated}”; write the day of the release, such as 2026-12-01."


def wrong_with_wheel(path: Path) -> Iterator[str]:
    """Files of the source that a wheel does not have, or has otherwise."""
    if not path.is_file():
        yield f"{path}: no such file; build it with python -m build."
        return
    with zipfile.ZipFile(path) as wheel:
        inside = {name: wheel.read(name) for name in wheel.namelist()}
    for file in sorted(p for p in SOURCE.rglob("*") if p.is_file() and "__pycache__" not in p.parts):
        name = file.relative_to(SOURCE).as_posix()
        if name not in inside:
            yield f"{path.name}: {name} is missing."
        elif inside[name] != file.read_bytes():
            yield f"{path.name}: {name} is not the one of the source; build it anew."


def _first(file: Path, pattern: str) -> str | None:
    found = re.search(pattern, file.read_text(encoding="utf-8"), re.MULTILINE)
    return found[1] if found else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
