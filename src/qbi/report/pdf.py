"""The report on paper: the page itself, printed by its own stylesheet through Chromium, where one is installed."""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from qbi.errors import DataError, first_line

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "microsoft-edge")
SECONDS = 120
"""How long printing may take."""


def find_chromium(place: str) -> str:
    """The program that prints: the one that `CHROME_PATH` names, or the first that is found; refuses where there is none."""
    named = os.environ.get("CHROME_PATH", "")
    found = shutil.which(named) if named else next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        what = f"CHROME_PATH is {named}, which cannot be run" if named else "no Chromium or Chrome was found"
        raise DataError(
            f"{place}: {what}; install one, name it in CHROME_PATH, or open report.html in any browser and print it."
        )
    return found


def printed(page: str) -> bytes:
    """A page as PDF; nothing is fetched, and nothing but the PDF is left behind."""
    program = find_chromium("pdf")
    with tempfile.TemporaryDirectory(prefix="qbi-pdf-", ignore_cleanup_errors=True) as folder:
        source, target = Path(folder, "report.html"), Path(folder, "report.pdf")
        source.write_text(page, encoding="utf-8")
        command = [
            program,
            "--headless",
            "--disable-gpu",
            "--disable-background-networking",
            "--no-first-run",
            "--no-pdf-header-footer",
            f"--user-data-dir={folder}/profile",
            f"--print-to-pdf={target}",
            # Chromium's sandbox refuses to start for root, as in containers.
            *(["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []),
            source.as_uri(),
        ]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=SECONDS, check=False, errors="replace"
            )
        except subprocess.TimeoutExpired:
            raise DataError(
                f"pdf: {program} did not end within {SECONDS} seconds; print report.html by hand."
            ) from None
        except OSError as problem:
            raise DataError(
                f"pdf: {program} cannot be run ({first_line(problem)}); name another in CHROME_PATH."
            ) from None
        made = target.read_bytes() if target.is_file() else b""
    if not made.startswith(b"%PDF-"):
        said = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise DataError(f"pdf: {program} printed nothing ({said[0][:160]}); print report.html by hand.")
    return made
