"""The README is short, is read once, and holds no number that nothing measured; links of all pages lead somewhere."""

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs"))

import prose  # noqa: E402
import render  # noqa: E402

LINES, WORDS = 120, 30
README = (ROOT / "README.md").read_text(encoding="utf-8")
MARKER = re.compile(r"<!-- .*? -->")


def sentences(text):
    """Of paragraphs, points of lists, cells of tables and captions; code is none."""
    text = MARKER.sub("", re.sub(r"^```.*?^```|^ {4}\S.*?$", "", text, flags=re.DOTALL | re.MULTILINE))
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    for block in re.split(r"\n\s*\n|\n(?=[-#|])|(?<=\S) \| |\|\n", text):
        yield from re.split(r"(?<=[.!?])[*_]*\s+", " ".join(block.split()))


def words(sentence):
    return re.findall(r"[\w'’,.:+-]*\w[\w'’]*", sentence)


def too_long(text):
    return [s for s in sentences(text) if len(words(s)) > WORDS]


def test_it_is_short():
    assert len(README.splitlines()) < LINES


def test_every_sentence_is_read_once():
    assert too_long(README) == []
    assert len(list(sentences(README))) > 40
    long = " ".join(["word"] * (WORDS + 1))
    for place in (f"A first one. {long}.", f"- {long}", f"| a | {long} |", f"*{long}.*", f"[{long}](page.md)"):
        assert too_long(f"Before.\n\n{place}\n\nAfter."), place


def test_every_number_is_rendered():
    """None by hand, not even in a phrase that is allowed elsewhere, and none inside a sentence."""
    assert "README.md" not in prose.phrases()
    assert list(prose.loose("README.md", README)) == []
    assert list(prose.loose("README.md", f"{README}\nIt reads 73 %.\n"))
    assert "<!-- value" not in README
    for line in README.splitlines():
        assert MARKER.fullmatch(line) or not MARKER.search(line), line
    table = README.split("<!-- table findings -->")[1].split("<!-- end -->")[0]
    rows = table.strip().splitlines()[2:]
    assert len(rows) == 10
    assert all(re.search(r"\d", row) and "](docs/" in row for row in rows)


def test_it_leads_with_the_batch_and_says_what_it_is_for():
    assert README.index("docs/figures/quickstart-batch.png") < README.index("## Install")
    assert README.count("![") == 1
    assert "auditing one's own systems" in README
    for wanted in ("pip install .\n", "pip install qbi\n", "make demo", "make test", "qbi audit "):
        assert wanted in README, wanted
    assert len(re.findall(r"^```python$", README, re.MULTILINE)) == 3


PAGES = {page.relative_to(ROOT).as_posix(): page for page in [*render.pages(), *ROOT.glob("*.md")]}


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name):
    page = PAGES[name]
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("http://", "https://")):
            continue
        file, _, anchor = target.partition("#")
        found = (page.parent / file) if file else page
        assert found.exists(), f"{name}: {target}"
        if anchor:
            heads = re.findall(r"^#+ (.*)$", found.read_text(encoding="utf-8"), re.MULTILINE)
            slugs = {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}
            assert anchor in slugs, f"{name}: {target}"
