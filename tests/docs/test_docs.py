"""The pages say what the files say, and a number that is altered anywhere is noticed."""

import re
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
sys.path.insert(0, str(DOCS))

import prose  # noqa: E402
import render  # noqa: E402

PAGES = {page.name: page for page in render.pages()}


def altered(text, number):
    """The page with one number changed in its last digit (a word's number by another word)."""
    first, last = number.span()
    digits = [i for i in range(first, last) if text[i].isascii() and text[i].isdigit()]
    if not digits:
        return text[:first] + "ninety minutes" + text[last:]
    at = digits[-1]
    return text[:at] + str((int(text[at]) + 1) % 10) + text[at + 1 :]


def numbers(text):
    """All that stand outside of code and links, rendered or not."""
    code = re.compile(
        r"^```.*?^```|^ {4}.*?$|`[^`\n]+`|\]\([^)\s]*\)|https?://\S+|^\d+\. |<!--.*?-->", re.DOTALL | re.MULTILINE
    )
    bare = code.sub(lambda found: re.sub(r"[^\n]", "\0", found[0]), text)
    return list(prose.NUMBER.finditer(bare))


@pytest.mark.parametrize("name", PAGES)
def test_pages_are_as_their_files_have_them(name):
    assert render.wrong_with(name, PAGES[name].read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("name", [n for n, page in PAGES.items() if numbers(page.read_text(encoding="utf-8"))])
def test_eight_altered_numbers_of_a_page_are_noticed(name):
    """One at a time, from its first number to its last."""
    text = PAGES[name].read_text(encoding="utf-8")
    found = numbers(text)
    for number in [found[i * (len(found) - 1) // 7] for i in range(8)]:
        assert render.wrong_with(name, altered(text, number)), number


@pytest.mark.long
def test_every_number_in_prose_is_noticed():
    """Those that stand in no marker: every one of them, on every page."""
    missed = []
    for name, page in PAGES.items():
        text = page.read_text(encoding="utf-8")
        shown = prose.OUTSIDE.sub(lambda found: re.sub(r"[^\n]", "\0", found[0]), text)
        for number in prose.NUMBER.finditer(shown):
            if not list(prose.loose(name, altered(text, number))):
                missed.append((name, shown[max(0, number.start() - 30) : number.end() + 20]))
    assert missed == []


def test_a_new_number_and_a_phrase_that_is_gone_are_noticed():
    text = PAGES["README.md"].read_text(encoding="utf-8")
    for more in ("It reads 73 % of a batch.", "It takes nine minutes.", "R = 0.5.", "1e-4", "−2 points"):
        assert list(prose.loose("README.md", f"{text}\n{more}\n")), more
    for more in ("CIFAR-10 and float32 on an H200.", "`--size 32`", "    qbi audit --size 32", "[here](page32.md)"):
        assert not list(prose.loose("README.md", f"{text}\n{more}\n")), more
    findings = PAGES["findings.md"].read_text(encoding="utf-8")
    gone = findings.replace("at most 72 bits about one sample", "few bits about one sample")
    assert any("does not stand there" in line for line in prose.loose("findings.md", gone))


def test_the_check_ends_with_one_where_something_is_wrong(tmp_path, monkeypatch, capsys):
    page = tmp_path / "commands.md"
    text = PAGES["commands.md"].read_text(encoding="utf-8")
    monkeypatch.setattr(render, "pages", lambda: [page])
    monkeypatch.setattr(sys, "argv", ["render.py", "--check"])
    page.write_text(text, encoding="utf-8")
    assert render.main() == 0
    page.write_text(text.replace("at 60, 30 and 19 dB", "at 60, 30 and 18 dB"), encoding="utf-8")
    assert render.main() == 1
    assert "commands.md" in capsys.readouterr().out


def test_every_phrase_belongs_to_a_page():
    assert set(prose.phrases()) <= set(PAGES)
