"""Links of the built site: each leads to a file that is there, and to a place in it; what a page loads comes from the site itself.

python docs/links.py out/site    say what is wrong, exit code 1 where something is; list links that lead elsewhere in external-links.txt

Links to other sites are listed, not fetched: whether they answer is not for a build to depend on.
"""

import sys
from collections import defaultdict
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADS = {
    "script": "src",
    "img": "src",
    "link": "href",
    "iframe": "src",
    "source": "src",
    "video": "src",
    "audio": "src",
}
"""Elements that fetch something by themselves, and where it stands."""

HINTS = {"canonical", "search", "index", "next", "prev", "author", "top", "up"}
"""What a `link` may say of pages without fetching one."""


class Page(HTMLParser):
    """Places, links and what is loaded, of one page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.places: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Called by the parser."""
        named = {name: value or "" for name, value in attrs}
        self.places.update(value for name, value in named.items() if name in ("id", "name"))
        if tag == "a" and "href" in named:
            self.links.append(named["href"])
        if tag in LOADS and named.get(LOADS[tag]) and not set(named.get("rel", "").split()) & HINTS:
            self.loaded.append(named[LOADS[tag]])


def leads_elsewhere(link: str) -> bool:
    """To another site; data within the page is none."""
    parts = urlsplit(link)
    return bool(parts.netloc) or parts.scheme in ("http", "https", "mailto", "ftp")


def wrong_with(site: Path) -> Iterator[str]:
    """Every dead link and everything that is fetched from elsewhere, in sentences."""
    pages = {path.resolve(): Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    for path, page in pages.items():
        here = path.relative_to(site.resolve())
        for link in [*page.links, *page.loaded]:
            parts = urlsplit(link)
            if leads_elsewhere(link):
                if link in page.loaded:
                    yield f"{here}: {link} is fetched from another site; keep a copy in docs/_static."
                continue
            if parts.scheme:
                continue  # data: and the like stand in the page itself
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            if not target.is_file():
                yield f"{here}: {link} leads nowhere."
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].places:
                yield f"{here}: {link} leads to a page without that place."


def external(site: Path) -> dict[str, set[str]]:
    """Links to other sites, and the pages they stand on."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in sorted(site.rglob("*.html")):
        for link in Page(path.read_text(encoding="utf-8")).links:
            if leads_elsewhere(link):
                found[link].add(str(path.relative_to(site)))
    return found


def main() -> int:
    """Check one site."""
    if len(sys.argv) != 2 or not (Path(sys.argv[1]) / "index.html").is_file():
        print("docs/links.py: give the folder of a built site; `make site` builds one in out/site.", file=sys.stderr)
        return 2
    site = Path(sys.argv[1])
    wrong, away = sorted(set(wrong_with(site))), external(site)
    lines = [f"{link}  ({', '.join(sorted(pages))})" for link, pages in sorted(away.items())]
    (site / "external-links.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(wrong) or f"All links lead somewhere; {len(away)} lead to other sites ({site}/external-links.txt).")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
