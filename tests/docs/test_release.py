"""A release cannot be made of files that disagree, of a wheel that lacks something, or by a workflow with more rights than it needs."""

import json
import re
import shutil
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "checks"))

import release  # noqa: E402

NAMED = ("src/qbi/__init__.py", "CITATION.cff", ".zenodo.json", "CHANGELOG.md")


@pytest.fixture
def copy(tmp_path):
    for name in NAMED:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def version():
    return re.search(r'__version__ = "(.+)"', (ROOT / NAMED[0]).read_text())[1]


def test_all_files_name_one_version():
    assert list(release.wrong_with_versions(ROOT, None)) == []
    assert release.main([]) == 0


@pytest.mark.parametrize("name", NAMED[1:])
def test_a_file_with_another_version_is_found(copy, name, monkeypatch):
    text = (copy / name).read_text()
    (copy / name).write_text(text.replace(version(), "9.9.9", 1))
    found = list(release.wrong_with_versions(copy, None))
    assert len(found) == 1
    assert name in found[0]
    monkeypatch.setattr(release, "ROOT", copy)
    assert release.main([]) == 1


def test_a_tag_needs_the_version_and_a_day(copy):
    changes = copy / "CHANGELOG.md"
    undated = re.sub(r"^(## \[\d.*?\] - ).*$", r"\1not tagged yet", changes.read_text(), count=1, flags=re.MULTILINE)
    changes.write_text(undated)
    assert any("write the day" in line for line in release.wrong_with_versions(copy, f"v{version()}"))
    changes.write_text(undated.replace("not tagged yet", "2026-12-01"))
    assert list(release.wrong_with_versions(copy, f"v{version()}")) == []
    for tag in ("v9.9.9", version()):
        assert any("the tag is" in line for line in release.wrong_with_versions(copy, tag))


def packed(path, leave_out="", alter=""):
    with zipfile.ZipFile(path, "w") as wheel:
        for file in (ROOT / "src").rglob("*"):
            name = file.relative_to(ROOT / "src").as_posix()
            if file.is_file() and "__pycache__" not in file.parts and name != leave_out:
                wheel.writestr(name, b"other" if name == alter else file.read_bytes())
    return path


def test_a_wheel_that_lacks_a_template_or_has_an_older_one_is_found(tmp_path):
    template = "qbi/report/audit.html.j2"
    assert list(release.wrong_with_wheel(packed(tmp_path / "whole.whl"))) == []
    for odd in ({"leave_out": template}, {"alter": template}):
        found = list(release.wrong_with_wheel(packed(tmp_path / "odd.whl", **odd)))
        assert len(found) == 1
        assert template in found[0]
    assert release.main(["--wheel", str(tmp_path / "none.whl")]) == 1
    assert release.main(["--wheel"]) == 1


@pytest.mark.skipif(find_spec("hatchling") is None, reason="hatchling is not installed")
def test_the_wheel_that_is_built_is_whole(tmp_path):
    code = f"import hatchling.build as b; print(b.build_wheel({str(tmp_path)!r}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    wheel = tmp_path / done.stdout.split()[-1]
    assert list(release.wrong_with_wheel(wheel)) == []
    with zipfile.ZipFile(wheel) as inside:
        assert {n.split("/")[0] for n in inside.namelist()} == {"qbi", f"qbi-{version()}.dist-info"}
        entry = inside.read(f"qbi-{version()}.dist-info/entry_points.txt").decode()
    assert "qbi = qbi.cli:main" in entry
    assert "qbi.integrations.pytest_plugin" in entry


def test_the_workflow_publishes_without_a_token_and_after_all_checks():
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    text = (ROOT / ".github/workflows/release.yml").read_text()
    found = yaml.safe_load(text)
    jobs = found["jobs"]
    assert found["permissions"] == {"contents": "read"}
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    assert set(jobs["publish"]["needs"]) == {"build", "install"}
    assert "secrets." not in text
    assert "password" not in text
    runs = [step.get("run", "") for step in jobs["build"]["steps"]]
    assert any("twine check --strict" in run for run in runs)
    assert any('checks/release.py "$GITHUB_REF_NAME"' in run for run in runs)
    named = re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text())
    assert jobs["install"]["strategy"]["matrix"]["python"] == named


def test_metadata_for_zenodo_says_what_the_citation_says():
    found = json.loads((ROOT / ".zenodo.json").read_text())
    citation = (ROOT / "CITATION.cff").read_text()
    assert found["title"] in citation
    assert found["upload_type"] == "software"
    assert found["license"] == "Apache-2.0"
    assert found["creators"]
    assert found["related_identifiers"][0]["identifier"] in citation


def test_the_image_copies_what_is_there_and_runs_as_nobody():
    text = (ROOT / "Dockerfile").read_text()
    let_in = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = [s for line in re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.MULTILINE) for s in line.split()]
    assert "src" in copied
    assert set(copied) <= let_in
    assert all((ROOT / name).exists() for name in copied)
    lines = text.splitlines()
    assert lines.index("USER qbi") < lines.index('ENTRYPOINT ["qbi"]')
