"""Puts tables and numbers into the documents from the files that commands wrote.

They stand between `<!-- table NAME -->`, or `<!-- value NAME -->` within a line, and `<!-- end -->`.

python docs/render.py          write them
python docs/render.py --check  say which differ, with exit code 1
"""

import re
import sys
from pathlib import Path

from tables import TABLES, VALUES

DOCS = Path(__file__).parent
ROOT = DOCS.parent
TABLE = re.compile(r"(<!-- table ([a-z0-9-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
VALUE = re.compile(r"(<!-- value ([a-z0-9-]+) -->).*?(<!-- end -->)", re.DOTALL)


def rendered(text: str) -> str:
    """A page with its tables as the files have them."""
    text = TABLE.sub(lambda found: f"{found[1]}\n{TABLES[found[2]]()}\n{found[3]}", text)
    return VALUE.sub(lambda found: f"{found[1]}{VALUES[found[2]]()}{found[3]}", text)


def main() -> int:
    """Write, or check."""
    wrong = []
    for page in [*sorted(DOCS.glob("*.md")), ROOT / "README.md"]:
        before = page.read_text(encoding="utf-8")
        after = rendered(before)
        if after != before:
            wrong.append(page.name)
            if "--check" not in sys.argv:
                page.write_text(after, encoding="utf-8")
    if "--check" in sys.argv and wrong:
        print(f"tables differ from their files in {', '.join(wrong)}: run make docs")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
