"""Every form in which an audit is written down, by its key."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from qbi.errors import BadValue
from qbi.files import to_json
from qbi.report.audit import audit_page, to_junit, to_sarif
from qbi.report.model_card import to_model_card
from qbi.report.pdf import find_chromium, printed
from qbi.report.pictures import side_by_side


@dataclass(frozen=True)
class Written:
    """What there is to write: the result as plain data, the samples where they may be shown, and the gate's limit."""

    document: Mapping[str, Any]
    limit: float = 0.0
    command: str = ""
    samples: Mapping[str, Any] | None = None
    """`truth`, `read`, `exact`, `seen`, `texts`, `made`; None where no sample may stand in a report."""


@dataclass(frozen=True)
class Format:
    """One form: the file's name, and what stands in it; None where there is nothing to write."""

    key: str
    file: str
    write: Callable[[Written], str | bytes | None]
    always: bool = False
    """Whether it is written without being asked for."""
    check: Callable[[str], object] | None = None
    """Asked before work that takes long, with the option's name: raises where the form cannot be made here."""


def _page(found: Written) -> str:
    return audit_page(found.document, command=found.command, **(found.samples or {}))


def _picture(found: Written) -> bytes | None:
    truth: Tensor | None = (found.samples or {}).get("truth")
    read: Tensor | None = (found.samples or {}).get("read")
    if truth is None or read is None:
        return None
    return side_by_side(truth, read, ("what the client holds", "what the server reads"))


FORMATS: dict[str, Format] = {
    f.key: f
    for f in (
        Format("json", "audit.json", lambda found: to_json(found.document), always=True),
        Format("html", "report.html", _page, always=True),
        Format("png", "audit.png", _picture, always=True),
        Format("sarif", "audit.sarif", lambda found: to_json(to_sarif(found.document, found.limit))),
        Format("junit", "audit.xml", lambda found: to_junit(found.document, found.limit)),
        Format("model-card", "model-card.md", lambda found: to_model_card(found.document)),
        # The last: where a browser fails, all else is written.
        Format("pdf", "report.pdf", lambda found: printed(_page(found)), check=find_chromium),
    )
}
"""One of one's own is added with `FORMATS[key] = Format(...)`, and asked for with `--format key`."""


def select(keys: list[str], place: str) -> list[Format]:
    """Those that are always written, and those that were asked for."""
    unknown = [key for key in keys if key not in FORMATS]
    if unknown:
        raise BadValue(f"{place}: no format is called {unknown[0]!r}; there are {', '.join(FORMATS)}.")
    chosen = [f for f in FORMATS.values() if f.always or f.key in keys]
    for one in chosen:
        if one.check is not None:
            one.check(place)
    return chosen
