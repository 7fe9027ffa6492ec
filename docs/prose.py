"""Numbers that stand in the pages by hand, and why each may.

A number belongs into a marker, where a file in `docs/data` says it, or into code. What is left must stand in a phrase of
`docs/by-hand.txt`: settings, definitions, values that others published, counts of things in the source. A number that is altered in a page then stands in no
phrase, and `docs/render.py --check` says so.
"""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

PHRASES = Path(__file__).parent / "by-hand.txt"

OUTSIDE = re.compile(
    r"<!-- (?:table|value) [a-z0-9-]+ -->.*?<!-- end -->"  # rendered
    r"|^```.*?^```"  # code
    r"|^ {4}.*?$"
    r"|`[^`\n]+`"
    r"|\]\([^)\s]*\)"  # where a link leads
    r"|https?://\S+"
    r"|^\d+\. ",  # numbers of a list
    re.DOTALL | re.MULTILINE,
)

WORDS = "two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|fifteen|sixteen|twenty|thirty|forty|fifty|hundred|thousand|half"
UNITS = "minutes?|seconds?|hours?|points?|percent|quarters?|thirds?|fifths?|tenths?|times|milliseconds?"

NUMBER = re.compile(
    r"(?<![A-Za-z_\d])(?<![A-Za-z]-)[-−+]?\d+(?:[.,·]\d+)*(?:e[-−+]?\d+)?[⁻⁰¹²³⁴⁵⁶⁷⁸⁹·]*"
    rf"|\b(?:{WORDS})(?:-\w+)? (?:and a half )?(?:{UNITS})\b",
    re.IGNORECASE,
)
"""Digits that are no part of a name (CIFAR-10, float32), and words that count units of measure."""


@cache
def phrases() -> dict[str, tuple[str, ...]]:
    """By page, as `by-hand.txt` has them."""
    found: dict[str, list[str]] = {}
    page = ""
    for line in PHRASES.read_text(encoding="utf-8").splitlines():
        if line.startswith("[") and line.endswith("]"):
            page = line[1:-1]
            found[page] = []
        elif line.strip() and not line.startswith("#"):
            found[page].append(line.strip())
    return {name: tuple(own) for name, own in found.items()}


def _spaced(phrase: str) -> str:
    """Where a line is broken does not matter."""
    return r"(?<![\w.,])" + r"\s+".join(map(re.escape, phrase.split())) + r"(?![\w]|[.,]\d)"


def loose(page: str, text: str) -> Iterator[str]:
    """What is wrong with a page: numbers in no phrase, and phrases that are not there."""
    prose = OUTSIDE.sub(lambda found: re.sub(r"[^\n]", "\0", found[0]), text)
    covered: list[tuple[int, int]] = []
    for phrase in phrases().get(page, ()):
        spans = [found.span() for found in re.finditer(_spaced(phrase), prose)]
        if not spans:
            yield f"{page}: “{phrase}” of by-hand.txt does not stand there"
        covered += spans
    for found in NUMBER.finditer(prose):
        if not any(first <= found.start() and found.end() <= last for first, last in covered):
            line = prose.count("\n", 0, found.start()) + 1
            around = prose[max(0, found.start() - 40) : found.end() + 30].replace("\n", " ").replace("\0", "")
            yield f"{page}, line {line}: {found[0]} stands in no marker and in no phrase of by-hand.txt (…{around}…)"
