"""The report for people: its first screen, what each number means, and the page on paper."""

import re
import stat
from collections import OrderedDict
from html import unescape
from pathlib import Path

import pytest
import torch
from torch import nn

import qbi
from qbi.auditing import Client, audit
from qbi.auditing.samples import image_samples
from qbi.data.photos import synthetic_photos
from qbi.report import pdf
from qbi.report.audit import audit_page
from qbi.report.glossary import TERMS, meanings

CHROMIUM = next((p for p in ("/usr/bin/chromium", "/usr/bin/chromium-browser") if Path(p).exists()), None)


@pytest.fixture(scope="module")
def page():
    torch.manual_seed(0)
    layers = {"flat": nn.Flatten(), "wide": nn.Linear(192, 40), "relu": nn.ReLU(), "head": nn.Linear(40, 3)}
    model = nn.Sequential(OrderedDict(layers))
    samples = image_samples(synthetic_photos(80, 8, seed=0))
    result = audit(model, samples, client=Client(8), batches=2, attacks=["passive", "qbi"])
    return audit_page(result.document(), command="qbi audit")


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed")
    with playwright.sync_playwright() as p:
        started = p.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def opened(browser, page, tmp_path):
    (tmp_path / "report.html").write_text(page)
    context = browser.new_context(viewport={"width": 1100, "height": 800})
    shown = context.new_page()
    shown.goto((tmp_path / "report.html").as_uri())
    yield shown
    context.close()


def test_words_stand_once_and_every_meaning_in_a_page_is_the_glossarys(page):
    keys = [t.key for t in TERMS]
    assert len(set(keys)) == len(keys)
    known = set(meanings("images").values())
    shown = {unescape(t) for t in re.findall(r'title="([^"]*)"', page)}
    assert len(shown) > 15
    assert shown <= known


def test_side_information_stands_in_the_page(page):
    assert "Side information" in page
    assert "labels" in page


def test_the_first_screen_says_what_is_seen_how_bad_it_is_and_what_to_do(opened):
    first = opened.locator(".first")
    assert first.locator("h2").all_inner_texts() == ["What a server can see", "How bad it is", "What to do"]
    for place in (".verdict", ".key dd >> nth=-1", "li >> nth=0"):
        box = first.locator(place).bounding_box()
        assert box["y"] + box["height"] <= 800, place
    assert "server" in first.locator(".verdict").inner_text()
    assert re.fullmatch(r"[\d.]+ %", first.locator(".key dd").first.inner_text())


def test_every_number_in_a_table_has_its_meaning_and_the_keyboard_reaches_it(opened):
    cells = opened.locator("td").evaluate_all(
        "cells => cells.filter(c => /^[\\d.]+( [×±] [\\d.]+)?( %)?$/.test(c.textContent.trim())).map(c => c.title)"
    )
    assert len(cells) > 20
    assert all(cells)
    heads = opened.locator("abbr")
    assert heads.evaluate_all("all => all.every(a => a.title && a.tabIndex === 0)")
    opened.locator("details summary").focus()
    assert opened.locator("#means").is_hidden()
    for _ in range(40):
        opened.keyboard.press("Tab")
        if opened.evaluate("document.activeElement.textContent") == "R exact":
            break
    assert opened.locator("#means").is_visible()
    assert opened.locator("#means").inner_text() == meanings("images")["mse<1e-10"]
    opened.keyboard.press("Escape")
    assert opened.locator("#means").is_hidden()
    opened.locator("td[title]").first.click()
    assert opened.locator("#means").is_visible()


def test_on_paper_sliders_are_tables_and_all_is_on_white(opened):
    assert opened.locator(".printed").is_hidden()
    opened.emulate_media(media="print", color_scheme="dark")
    assert opened.locator(".printed td").count() > 10
    assert opened.locator(".printed").is_visible()
    assert opened.locator(".sliders").first.is_hidden()
    assert opened.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
def test_a_page_is_printed_whole_and_nothing_is_left_behind(page, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    made = pdf.printed(page)
    assert made.startswith(b"%PDF-")
    assert len(re.findall(rb"/Type\s*/Page\b", made)) >= 2
    assert list(tmp_path.glob("qbi-pdf-*")) == []


def program(path, lines):
    path.write_text(f"#!/bin/sh\n{lines}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_a_browser_that_hangs_fails_or_prints_nonsense_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(pdf, "SECONDS", 1)
    for lines, said in (
        ("sleep 30", "did not end within 1 seconds"),
        ("echo no display >&2; exit 1", "printed nothing .no display."),
        (
            'for a; do case "$a" in --print-to-pdf=*) echo text > "${a#*=}";; esac; done',
            "printed nothing .exit code 0.",
        ),
    ):
        monkeypatch.setenv("CHROME_PATH", program(tmp_path / "browser", lines))
        with pytest.raises(qbi.DataError, match=said):
            pdf.printed("<p>page</p>")


def test_without_a_browser_the_audit_does_not_begin(tmp_path, monkeypatch, qbi_here):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CHROME_PATH", str(tmp_path / "nowhere"))
    code, said = qbi_here("audit", "--pdf")
    assert code == 2
    assert "--pdf: CHROME_PATH is" in said
    monkeypatch.delenv("CHROME_PATH")
    monkeypatch.setenv("PATH", str(tmp_path))
    code, said = qbi_here("audit", "--format", "pdf")
    assert code == 2
    assert "no Chromium or Chrome was found" in said
    assert "print it" in said
    assert list(tmp_path.iterdir()) == []


SMALL = (
    "--size",
    8,
    "--neurons",
    20,
    "--batch-size",
    4,
    "--batches",
    1,
    "--attack",
    "qbi",
    "--no-defences",
    "--no-decode",
)


def test_where_a_browser_fails_all_else_is_written(tmp_path, monkeypatch, qbi_here):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CHROME_PATH", program(tmp_path / "browser", "exit 1"))
    code, said = qbi_here("audit", "--pdf", "--format", "model-card", *SMALL)
    assert code == 2
    assert "printed nothing" in said
    assert {"audit.json", "report.html", "model-card.md"} <= {p.name for p in (tmp_path / "out/audit").iterdir()}
    assert not (tmp_path / "out/audit/report.pdf").exists()


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
def test_the_command_writes_the_report_on_paper(tmp_path, monkeypatch, qbi_here):
    monkeypatch.chdir(tmp_path)
    code, said = qbi_here("audit", "--pdf", *SMALL)
    assert code in (0, 3), said
    assert (tmp_path / "out/audit/report.pdf").read_bytes().startswith(b"%PDF-")
