"""Puts tables and numbers into the documents from the files that commands wrote.

They stand between `<!-- table NAME -->`, or `<!-- value NAME -->` within a line, and `<!-- end -->`. A number anywhere else must stand in
code or in a phrase of `by-hand.txt` (`prose.py`).

python docs/render.py          write them
python docs/render.py --check  say what differs, and which numbers stand in the pages by hand; exit code 1 where there are some
"""

import re
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

from prose import loose
from tables import TABLES, VALUES

DOCS = Path(__file__).parent
ROOT = DOCS.parent
TABLE = re.compile(r"(<!-- table ([a-z0-9-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
VALUE = re.compile(r"(<!-- value ([a-z0-9-]+) -->).*?(<!-- end -->)", re.DOTALL)


@cache
def _made(make: Callable[[], str]) -> str:
    return make()


def rendered(text: str) -> str:
    """A page with its tables as the files have them."""
    text = TABLE.sub(lambda found: f"{found[1]}\n{_made(TABLES[found[2]])}\n{found[3]}", text)
    return VALUE.sub(lambda found: f"{found[1]}{_made(VALUES[found[2]])}{found[3]}", text)


def pages() -> list[Path]:
    """Those that are rendered and looked at."""
    return [*sorted(DOCS.glob("*.md")), ROOT / "README.md"]


def wrong_with(page: str, text: str) -> list[str]:
    """What a check says of a page."""
    differs = [f"{page}: tables or numbers differ from their files; run make docs"] if rendered(text) != text else []
    return differs + list(loose(page, text))


def main() -> int:
    """Write, or check."""
    if "--check" not in sys.argv:
        for page in pages():
            before = page.read_text(encoding="utf-8")
            after = rendered(before)
            if after != before:
                page.write_text(after, encoding="utf-8")
        return 0
    wrong = [line for page in pages() for line in wrong_with(page.name, page.read_text(encoding="utf-8"))]
    print("\n".join(wrong), end="\n" if wrong else "")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
