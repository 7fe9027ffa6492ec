"""Pages in Chromium: light, dark and on a phone; what they say on the console and what they ask for is kept."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

VIEWS = {"light": ("light", 1100), "dark": ("dark", 1100), "phone": ("light", 390)}
"""Colour scheme and width."""


@dataclass
class Shown:
    """A page, and what it did beside showing itself."""

    page: Any
    width: int
    said: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    def is_clean(self) -> None:
        """Nothing on the console, nothing from elsewhere, no sideways scrolling."""
        assert self.said == []
        assert [url for url in self.asked if not url.startswith(("file:", "data:"))] == []
        assert self.page.evaluate("document.documentElement.scrollWidth") <= self.width


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser, or a reason to skip."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    program = next((p for p in ("/usr/bin/chromium", "/usr/bin/chromium-browser") if Path(p).exists()), None)
    if program is None:
        pytest.skip("Chromium is not installed")
    with playwright.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


def shown(browser: Any, path: Path, view: str, *, scripts: bool = True) -> Shown:
    """A page from disk in one view."""
    scheme, width = VIEWS[view]
    context = browser.new_context(
        color_scheme=scheme, viewport={"width": width, "height": 900}, java_script_enabled=scripts
    )
    found = Shown(context.new_page(), width)
    found.page.on("console", lambda message: found.said.append(message.text))
    found.page.on("pageerror", lambda problem: found.said.append(str(problem)))
    found.page.on("request", lambda request: found.asked.append(request.url))
    found.page.goto(path.as_uri())
    return found
