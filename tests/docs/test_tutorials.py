"""The tutorials run as they stand, each in a home and a folder of its own; and what they say agrees with what their cells print."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "docs"))
import notebooks
import walk
from prose import NUMBER, OUTSIDE

from published import missing

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs/tutorials").glob("*.ipynb"))
NEEDS = {"01": "torchvision", "02": "transformers", "04": "flwr", "05": "nvflare", "08": "matplotlib"}
STARTS_PROCESSES = {"04", "05", "08"}
LARGEST = 300_000
MOST_WORDS = 30


def cases():
    for page in PAGES:
        number = page.name[:2]
        marks = [pytest.mark.long, pytest.mark.timeout(400)]
        marks += [pytest.mark.serial] if number in STARTS_PROCESSES else []
        yield pytest.param(page, id=page.stem, marks=marks)


def cells(page, kind):
    return [c for c in json.loads(page.read_text(encoding="utf-8"))["cells"] if c["cell_type"] == kind]


@pytest.mark.parametrize("page", list(cases()))
def test_a_tutorial_runs(page):
    needed = NEEDS.get(page.name[:2])
    if needed and missing(needed):
        pytest.skip(f"{needed} is not installed")
    done = subprocess.run(
        [sys.executable, ROOT / "docs/notebooks.py", "--check", page],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.long
def test_what_executes_tutorials_keeps_outputs_and_stops_at_a_cell_that_fails(tmp_path):
    sources = ["from pathlib import Path\nprint(Path.home())", "1 + 1", "2 + 2;", "assert 1 == 2"]
    made = [{"cell_type": "code", "source": [text], "outputs": []} for text in sources]
    page = tmp_path / "page.ipynb"
    page.write_text(json.dumps({"cells": made[:3]}))
    problem, document = notebooks.executed(page)
    assert problem == ""
    said, number, nothing = (cell["outputs"] for cell in document["cells"])
    assert said[0]["text"] != [f"{Path.home()}\n"]
    assert number[0]["data"]["text/plain"] == ["2"]
    assert nothing == []
    page.write_text(json.dumps({"cells": made}))
    problem, document = notebooks.executed(page)
    assert "page.ipynb, cell 4" in problem
    assert "AssertionError" in problem
    assert document == {}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_tutorial_is_small_was_run_in_order_and_can_fail(page):
    assert page.stat().st_size < LARGEST
    code = cells(page, "code")
    assert [c["execution_count"] for c in code] == list(range(1, len(code) + 1)), "run docs/notebooks.py on it"
    assert not any(o["output_type"] == "error" for c in code for o in c["outputs"])
    assert sum(line.startswith("assert ") for c in code for line in c["source"]) >= 2


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_numbers_in_a_tutorials_prose_are_those_of_its_cells(page):
    shown = " ".join("".join(c["source"]) for c in cells(page, "code"))
    for cell in cells(page, "code"):
        for output in cell["outputs"]:
            shown += " ".join(output.get("text", [])) + " ".join(output.get("data", {}).get("text/plain", []))
    known = set(re.findall(r"\d+(?:[.,]\d+)*", shown))
    for cell in cells(page, "markdown"):
        prose = OUTSIDE.sub(" ", "".join(cell["source"]))
        said = {found for number in NUMBER.findall(prose) for found in re.findall(r"\d+(?:[.,]\d+)*", number)}
        assert said <= known, f"{said - known} in “{prose}”"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_sentences_of_a_tutorial_are_short(page):
    for cell in cells(page, "markdown"):
        for sentence in re.split(r"(?<=[.?!:])\s+|\n\n|\n#+ ", "".join(cell["source"])):
            assert len(sentence.split()) <= MOST_WORDS, sentence


def test_every_tutorial_stands_in_the_list():
    listed = re.findall(r"\]\(([^)]+\.ipynb)\)", (ROOT / "docs/tutorials/index.md").read_text(encoding="utf-8"))
    assert listed == [page.name for page in PAGES]


def test_the_page_for_new_users_can_be_walked_through():
    """Blocks have labels, files are written before they are used, and every section ends with something that must be said."""
    written: set[str] = set()
    titles = dict(walk.sections())
    assert set(walk.SAYS) <= set(titles)
    for text in titles.values():
        for kind, name, body in walk.BLOCK.findall(text):
            if kind == "bash":
                assert walk.labelled(body)[0]
                assert set(re.findall(r"\w+\.py", body)) <= written
                continue
            written.add(name)
            if kind == "python":
                compile(body, name, "exec")
