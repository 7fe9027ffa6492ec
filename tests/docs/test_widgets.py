"""The interactive pictures of the pages, in Chromium and without Sphinx: the pages' own Markdown, script and style."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from browser import VIEWS, chromium, shown
from qbi.theory import leakage

DOCS = Path(__file__).parents[2] / "docs"
LEVELS = json.loads((DOCS / "data/levels.json").read_text(encoding="utf-8"))["rows"]
SPRITE = Image.open(DOCS / "figures/levels.png").convert("RGB")
STRIPS = 2 * len(LEVELS)

PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{name}</title>
<base href="{base}/"><link rel="stylesheet" href="_static/pictures.css">
<style>:root {{ color-scheme: light dark }} body {{ margin: 1rem; overflow-wrap: anywhere }} table {{ display: block; overflow-x: auto }}
pre {{ overflow-x: auto }}</style>
{body}<script src="_static/{script}"></script></html>"""


def built(folder, name, script):
    """A page of the docs as plain HTML."""
    markdown_it = pytest.importorskip("markdown_it", reason="markdown-it-py is not installed")
    body = markdown_it.MarkdownIt("commonmark").enable("table").render((DOCS / f"{name}.md").read_text("utf-8"))
    path = folder / f"{name}.html"
    path.write_text(PAGE.format(name=name, base=DOCS.as_uri(), body=body, script=script), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def browser():
    with chromium() as found:
        yield found


@pytest.mark.parametrize("view", VIEWS)
def test_expected_shares_are_those_of_the_theory(browser, tmp_path, view):
    found = shown(browser, built(tmp_path, "attacks", "recall.js"), view)
    page = found.page
    assert page.locator("[data-shown=B]").inner_text() == "20"
    assert page.locator("[data-shown=N]").inner_text() == "200"
    seen = set()
    for b, n in ((0, 0), (1, 3), (9, 5), (14, 8), (23, 15), (23, 0), (0, 15)):
        page.locator("[data-slider=B]").fill(str(b))
        page.locator("[data-slider=N]").fill(str(n))
        batch, neurons = (int(page.locator(f"[data-shown={name}]").inner_text().replace(",", "")) for name in "BN")
        seen.add((batch, neurons))
        wanted = {
            "A": leakage.expected_active(batch),
            "P": leakage.expected_precision(batch),
            "R": leakage.expected_recall(neurons, batch),
        }
        for name, value in wanted.items():
            output = page.locator(f"[data-share={name}]")
            assert float(output.get_attribute("data-value")) == pytest.approx(value, rel=1e-12)
            assert output.inner_text() == f"{100 * value:.1f} %"
    assert len(seen) == 7
    before = page.locator(".qbi-curve").get_attribute("d")
    page.locator("[data-slider=N]").focus()
    page.keyboard.press("ArrowLeft")  # from the last to the one before
    assert page.locator("[data-shown=N]").inner_text() == "3,000"
    assert page.locator(".qbi-curve").get_attribute("d") != before
    assert not page.locator("table").first.is_visible()
    page.locator("summary").first.click()
    assert page.locator("table").first.is_visible()
    found.is_clean()


@pytest.mark.parametrize("view", VIEWS)
def test_each_level_shows_its_own_strips(browser, tmp_path, view):
    found = shown(browser, built(tmp_path, "guard", "bits.js"), view)
    page = found.page
    for number, level in enumerate(LEVELS):
        page.locator("[data-slider=level]").fill(str(number))
        said = page.locator("[data-shown=level]").inner_text()
        assert said.startswith("no guard" if level["bits"] is None else f"{level['bits']:,.0f} bits")
        assert level["crafted"]["attack"] in page.locator("[data-strip=crafted]").get_attribute("aria-label")
        wanted = {"truth": 0, "crafted": max(1, 2 * number), "linear": 2 * number + 1}
        assert page.locator("[data-strip=linear]").is_visible() == (number > 0)
        if number == 0:
            wanted.pop("linear")
        else:
            assert f"{level['linear']['psnr']:.1f} dB" in page.locator("[data-strip=linear]").get_attribute(
                "aria-label"
            )
        for name, row in wanted.items():
            assert page.locator(f"[data-strip={name}]").get_attribute("data-row") == str(row)
            assert looks_like(page.locator(f"[data-strip={name}]").screenshot(), row)
    found.is_clean()


def looks_like(screenshot, row):
    """Whether no other strip of the picture is nearer to a screenshot, by means over blocks; the first two strips are the same."""
    small = (64, 8)
    taken = np.asarray(Image.open(io.BytesIO(screenshot)).convert("RGB").resize(small, Image.Resampling.BOX), float)
    strips = [SPRITE.crop((0, 32 * at, 256, 32 * (at + 1))).resize(small, Image.Resampling.BOX) for at in range(STRIPS)]
    errors = [np.abs(taken - np.asarray(strip, float)).mean() for strip in strips]
    return errors[row] == min(errors)


@pytest.mark.parametrize(("name", "script"), [("attacks", "recall.js"), ("guard", "bits.js")])
def test_without_scripts_the_table_is_there(browser, tmp_path, name, script):
    page = shown(browser, built(tmp_path, name, script), "phone", scripts=False).page
    place = page.locator(".qbi-recall, .qbi-bits")
    assert place.locator("table").is_visible()
    assert place.locator("tbody tr").count() >= 6
    assert place.locator("input").count() == 0


def test_the_picture_has_the_strips_that_the_table_has():
    assert (SPRITE.width, SPRITE.height) == (8 * 32, 32 * STRIPS)
    strips = np.asarray(SPRITE, float).reshape(STRIPS, 32, -1)
    errors = np.square((strips - strips[0]) / 255).reshape(STRIPS, 32, 8, 32, 3).mean((1, 3, 4))
    for number, level in enumerate(LEVELS):
        decibels = -10 * np.log10(np.maximum(errors[max(1, 2 * number)], 1e-12)).mean()
        assert decibels == pytest.approx(level["crafted"]["psnr"], abs=0.05)
