"""Results in one SQLite file: a row per cell, written whole, never twice.

Write-ahead logging makes a kill at any moment harmless: a row is there or it is not, and what is not there is
computed again under the same seed.
"""

import json
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from qbi.errors import DataError, first_line
from qbi.lab.reproduce.cells import Cell, Result

SCHEMA = """
CREATE TABLE IF NOT EXISTS cells (key TEXT PRIMARY KEY, cell TEXT NOT NULL, result TEXT NOT NULL, seconds REAL);
CREATE TABLE IF NOT EXISTS figures (name TEXT PRIMARY KEY, image BLOB NOT NULL, numbers TEXT NOT NULL, seconds REAL);
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT NOT NULL);
"""


class Store:
    """The file of results of one reproduction."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.connection = sqlite3.connect(path, timeout=60)
            self.connection.execute("PRAGMA journal_mode=WAL")
            self.connection.executescript(SCHEMA)
        except (sqlite3.DatabaseError, OSError) as problem:
            raise DataError(
                f"{path}: not a usable results file ({problem}); move it away or give another --out."
            ) from None

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """A file that is damaged behind its header, or that another program wrote, is named in one sentence."""
        try:
            yield
        except (sqlite3.Error, ValueError, TypeError, KeyError) as problem:
            if "full" in str(problem):
                raise DataError(
                    f"{self.path}: the disk is full; free some space, and the same command goes on from what is kept."
                ) from None
            raise DataError(
                f"{self.path}: a results file that is damaged or of another kind ({first_line(problem)}); move it away or give another --out."
            ) from None

    def missing(self, cells: Iterable[Cell]) -> list[Cell]:
        """Those of the cells that have no result yet, in order."""
        with self._reading():
            return self._missing(cells)

    def _missing(self, cells: Iterable[Cell]) -> list[Cell]:
        known = {key for (key,) in self.connection.execute("SELECT key FROM cells")}
        return [cell for cell in cells if cell.key not in known]

    def put(self, cell: Cell, result: Result, seconds: float) -> None:
        """Keep a result; a second one for the same cell changes nothing."""
        row = (cell.key, json.dumps(asdict(cell)), json.dumps(result, sort_keys=True), seconds)
        with self._reading(), self.connection:
            self.connection.execute("INSERT OR IGNORE INTO cells VALUES (?, ?, ?, ?)", row)

    def results(self, item: str, seed: int, route: str) -> dict[Cell, Result]:
        """Everything known of one item."""
        with self._reading():
            return self._results(item, seed, route)

    def _results(self, item: str, seed: int, route: str) -> dict[Cell, Result]:
        rows = self.connection.execute("SELECT cell, result FROM cells ORDER BY key")
        found = {Cell(**json.loads(cell)): json.loads(result) for cell, result in rows}
        return {c: r for c, r in found.items() if (c.item, c.seed, c.route) == (item, seed, route)}

    def seconds(self) -> dict[str, float]:
        """Time spent on each item and figure, added over all workers."""
        with self._reading():
            return self._seconds()

    def _seconds(self) -> dict[str, float]:
        rows = self.connection.execute("SELECT cell, seconds FROM cells")
        total: dict[str, float] = {}
        for cell, spent in rows:
            item = json.loads(cell)["item"]
            total[item] = total.get(item, 0.0) + spent
        return total | dict(self.connection.execute("SELECT name, seconds FROM figures"))

    def put_figure(self, name: str, image: bytes, numbers: Mapping[str, Any], seconds: float) -> None:
        """Keep a figure with the numbers behind it."""
        row = (name, image, json.dumps(numbers, sort_keys=True), seconds)
        with self._reading(), self.connection:
            self.connection.execute("INSERT OR REPLACE INTO figures VALUES (?, ?, ?, ?)", row)

    def figure(self, name: str) -> tuple[bytes, dict[str, Any]] | None:
        """A figure, if it was made."""
        with self._reading():
            row = self.connection.execute("SELECT image, numbers FROM figures WHERE name = ?", (name,)).fetchone()
            return None if row is None else (row[0], json.loads(row[1]))

    def put_fact(self, name: str, value: str) -> None:
        """Keep a fact about the run, such as its data."""
        with self._reading(), self.connection:
            self.connection.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (name, value))

    def facts(self) -> dict[str, str]:
        """All facts."""
        with self._reading():
            return dict(self.connection.execute("SELECT name, value FROM facts"))

    def close(self) -> None:
        """Close the file."""
        self.connection.close()
