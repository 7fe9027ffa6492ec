"""The site: its links, its pages in Chromium, and that they fit what they speak of."""

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from browser import VIEWS, chromium, shown
from qbi.attacks import ATTACKS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
sys.path.insert(0, str(DOCS))

import links  # noqa: E402
import prose  # noqa: E402

NEW = ("index", "attacks", "guard", "threat-model", "faq", "papers", "reference")
GOOD = '<html><body id="top"><a href="#top">up</a> <a href="https://example.org/x#y">away</a><img src="data:,"></body></html>'

CONTENTS = re.compile(r"^```\{toctree\}$(.*?)^```$", re.S | re.M)


@pytest.mark.parametrize(
    ("html", "wrong"),
    [
        (GOOD, None),
        (GOOD.replace("#top", "gone.html"), "gone.html leads nowhere"),
        (GOOD.replace('"#top"', '"#bottom"'), "#bottom leads to a page without that place"),
        (GOOD.replace('"#top"', '"index.html#bottom"'), "without that place"),
        (GOOD.replace("data:,", "gone.png"), "gone.png leads nowhere"),
        (GOOD.replace("data:,", "https://example.org/x.png"), "fetched from another site"),
        (GOOD.replace("data:,", "//example.org/x.png"), "fetched from another site"),
        (GOOD.replace("<img", '<link rel="stylesheet" href="https://example.org/a.css"><img'), "fetched from another"),
        (GOOD.replace("<img", '<link rel="canonical" href="https://example.org/"><img'), None),
        (GOOD.replace("<img", '<script src="https://example.org/a.js"></script><img'), "fetched from another"),
    ],
)
def test_dead_links_and_foreign_files_are_found(tmp_path, html, wrong):
    (tmp_path / "index.html").write_text(html)
    found = list(links.wrong_with(tmp_path))
    assert len(found) == (wrong is not None)
    assert wrong is None or wrong in found[0]
    assert list(links.external(tmp_path)) == ["https://example.org/x#y"]


def slug(heading):
    """The place of a heading, as code hosts name it."""
    words = re.sub(r"<!--.*?-->|[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
    return re.sub(r"[^\w\- ]", "", words).replace(" ", "-")


def test_links_between_the_pages_lead_somewhere_without_the_site_too():
    """As files of the repository, the way code hosts follow them."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted(DOCS.rglob("*.md"))]
    wrong, followed = [], 0
    for page in pages:
        text = prose.OUTSIDE.sub(lambda found: found[0] if found[0].startswith("](") else "", page.read_text("utf-8"))
        for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", text):
            path, _, place = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            followed += 1
            if not target.exists():
                wrong.append(f"{page.name}: {link}")
            elif place and place not in {slug(h) for h in re.findall(r"^#+ (.*)$", target.read_text("utf-8"), re.M)}:
                wrong.append(f"{page.name}: {link} (no such heading)")
    assert wrong == []
    assert followed > 60


def test_every_page_has_its_place_in_the_contents():
    """What Sphinx warns of, and fails on, without building anything."""
    named = set(
        re.findall(r"^[a-z][a-z/-]*$", "\n".join(CONTENTS.findall((DOCS / "index.md").read_text("utf-8"))), re.M)
    )
    assert named == {page.stem for page in DOCS.glob("*.md")} - {"index"} | {"tutorials/index"}


def test_every_attack_of_the_registry_is_explained():
    text = (DOCS / "attacks.md").read_text(encoding="utf-8").lower()
    missing = [a.name for a in ATTACKS.values() if a.name.lower() not in text and a.key != "passive"]
    assert missing == []
    assert "unmixing" in text  # what the passive server does


@pytest.mark.parametrize("name", NEW)
def test_sentences_are_short(name):
    text = (DOCS / f"{name}.md").read_text(encoding="utf-8")
    text = re.sub(r"<!-- table .*?<!-- end -->|^```.*?^```|^ {4}.*?$|^\|.*?$|<[^>]*>", "", text, flags=re.S | re.M)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    sentences = re.split(r"(?<=[.?!])[*)\]]*\s+|\n\n|\n- |\n#+ ", text)
    assert [s for s in sentences if len(re.findall(r"\w[\w.,'’-]*", s)) > 30] == []
    assert len(sentences) > 10


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Built as `make site` does, with a notebook among the tutorials."""
    if importlib.util.find_spec("sphinx") is None or importlib.util.find_spec("myst_nb") is None:
        pytest.skip("Sphinx is not installed (make site installs it)")
    source = tmp_path_factory.mktemp("site") / "docs"
    shutil.copytree(DOCS, source)
    if not list((source / "tutorials").glob("*.ipynb")):
        notebook = '{"cells": [{"cell_type": "markdown", "metadata": {}, "source": ["# One"]}], "metadata": {}, "nbformat": 4, "nbformat_minor": 4}'
        (source / "tutorials/one.ipynb").write_text(notebook)
    out = source.parent / "out"
    build = [sys.executable, "-m", "sphinx", "-b", "html", "-n", "-W", "--keep-going", "-q", source, out]
    done = subprocess.run(build, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return out


@pytest.mark.long
def test_the_built_site_has_no_dead_link_and_every_notebook(site):
    assert list(links.wrong_with(site)) == []
    assert len(links.external(site)) > 10
    assert len(list((site / "tutorials").glob("*.html"))) >= 2
    reference = (site / "reference.html").read_text(encoding="utf-8")
    for name in ("qbi.Private", "qbi.audit", "qbi.EXACT", "qbi.MissingExtra", "qbi.ATTACKS"):
        assert f'id="{name}"' in reference


@pytest.mark.long
@pytest.mark.serial
@pytest.mark.parametrize("view", VIEWS)
def test_the_built_site_in_a_browser(site, view):
    with chromium() as browser:
        for source in sorted(DOCS.glob("*.md")):
            path = site / f"{source.stem}.html"
            found = shown(browser, path, view)
            assert found.page.locator("h1").count() == 1
            assert found.page.evaluate("[...document.images].every(i => i.complete && i.naturalWidth > 0)"), path.name
            found.is_clean()
        page = shown(browser, site / "attacks.html", view).page
        page.locator("[data-slider=B]").fill("0")
        assert page.locator("[data-share=R]").inner_text() == "100.0 %"
        page = shown(browser, site / "guard.html", view).page
        page.locator("[data-slider=level]").fill("3")
        assert page.locator("[data-shown=level]").inner_text().startswith("72 bits")
        assert page.locator("[data-strip=linear]").is_visible()
