"""Tables of ours beside published values, and figures: one document, rendered several ways."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from qbi.records import Interval


@dataclass(frozen=True)
class ValuePair:
    """One value of ours, in percent, beside the paper's."""

    ours: Interval | None
    published: float | None

    @property
    def difference(self) -> float | None:
        """Ours less the paper's."""
        if self.ours is None or self.published is None:
            return None
        return self.ours.mean - self.published


@dataclass(frozen=True)
class TableView:
    """A table of the paper with both values in every cell, and how far they may lie apart."""

    name: str
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[ValuePair, ...]], ...]
    judged: tuple[bool, ...]
    """Which columns are held to the tolerance; the others are shown for comparison only."""
    tolerance: float
    mean_tolerance: float
    note: str = ""

    @property
    def differences(self) -> list[float]:
        """All known differences of judged columns."""
        return [
            entry.difference
            for _, entries in self.rows
            for entry, judged in zip(entries, self.judged, strict=True)
            if judged and entry.difference is not None
        ]

    @property
    def misses(self) -> list[str]:
        """Judged cells that lie further from the paper than the tolerance, in words."""
        found = []
        for label, entries in self.rows:
            for column, entry, judged in zip(self.columns, entries, self.judged, strict=True):
                off = entry.difference
                if judged and off is not None and abs(off) > self.tolerance:
                    found.append(f"{label} {column}: {off:+.1f}")
        return found

    @property
    def verdict(self) -> str:
        """One sentence on the agreement."""
        off = [abs(d) for d in self.differences]
        if not off:
            return "No published value to compare with."
        mean = sum(off) / len(off)
        text = f"Mean absolute difference {mean:.2f} (allowed {self.mean_tolerance:g}), largest {max(off):.2f} "
        text += f"(allowed {self.tolerance:g}), over {len(off)} cells."
        return text if not self.misses else f"{text} Misses: {'; '.join(self.misses)}."


@dataclass(frozen=True)
class FigureView:
    """A figure as PNG, with the numbers behind it."""

    name: str
    title: str
    image: bytes | None
    numbers: Mapping[str, Any]
    caption: str = ""
    shows_samples: bool = False
    """Whether the picture shows data, which may not be passed on."""


@dataclass(frozen=True)
class Document:
    """Everything that was reproduced, with what is needed to repeat it."""

    title: str
    tables: tuple[TableView, ...]
    figures: tuple[FigureView, ...]
    facts: Mapping[str, str] = field(default_factory=dict)

    def without_samples(self) -> "Document":
        """The same with every picture of data taken out; captions and numbers stay."""
        figures = tuple(replace(f, image=None) if f.shows_samples else f for f in self.figures)
        return replace(self, figures=figures)

    def plain(self) -> dict[str, Any]:
        """The document as plain data, without pictures."""
        return {
            "title": self.title,
            "facts": dict(self.facts),
            "tables": [_plain_table(table) for table in self.tables],
            "figures": [
                {"name": f.name, "title": f.title, "numbers": dict(f.numbers), "caption": f.caption}
                for f in self.figures
            ],
        }


def _plain_table(table: TableView) -> dict[str, Any]:
    return {
        "name": table.name,
        "title": table.title,
        "columns": list(table.columns),
        "rows": [{"label": label, "entries": [_plain_entry(e) for e in entries]} for label, entries in table.rows],
        "verdict": table.verdict,
        "note": table.note,
    }


def _plain_entry(entry: ValuePair) -> dict[str, float | int | None]:
    ours = entry.ours
    known_width = ours is not None and ours.count > 1
    return {
        "ours": None if ours is None else ours.mean,
        "half_width": ours.half_width if ours is not None and known_width else None,
        "runs": None if ours is None else ours.count,
        "published": entry.published,
        "difference": entry.difference,
    }
