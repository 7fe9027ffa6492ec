"""What left about a data set, kept over rounds, models and restarts: a small SQLite file on the client.

A participation is written down before its gradients are handed over, in one transaction with the check of the limit: a process that
is killed in between has spent what it may not have sent, never the other way round.
"""

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from qbi.errors import DataError, QbiError
from qbi.files import write_atomically
from qbi.theory import guarantees

SCHEMA = """
CREATE TABLE IF NOT EXISTS spent (
  id INTEGER PRIMARY KEY AUTOINCREMENT,
  at TEXT NOT NULL,
  data TEXT NOT NULL,
  family TEXT NOT NULL,
  noise REAL NOT NULL CHECK (noise >= 0),
  participations REAL NOT NULL CHECK (participations > 0),
  note TEXT NOT NULL
)
"""
TABLE = "spent"
WAIT = 30.0
"""Seconds to wait for another process that is writing."""


class BudgetSpent(QbiError):
    """What may leave about a data set has left.

    >>> issubclass(BudgetSpent, QbiError)
    True
    """


@dataclass(frozen=True)
class Entry:
    """Participations of a data set's samples at one level of noise, in the order in which they were written."""

    number: int
    at: str
    data: str
    family: str
    noise: float
    participations: float
    note: str

    @property
    def bits(self) -> float:
        """About one sample, at most."""
        return guarantees.bits(self.noise, self.participations)


class Ledger:
    """The file. What is stated here is a limit for one data set; all models that were trained on it add up.

    A mark beside the file holds the number of the last entry: a ledger that is older than its mark was put back from a copy, and is
    refused. Who puts back both is not found out; keep the mark elsewhere (`mark=`) if that is a worry.

    >>> import tempfile
    >>> ledger = Ledger(tempfile.mkdtemp() + "/clinic.ledger")
    >>> round(ledger.spend("clinic", "model", noise=0.1, limit=1500))
    72
    """

    def __init__(self, path: Path | str, *, mark: Path | str | None = None) -> None:
        self.path = Path(path)
        self.mark = Path(mark) if mark is not None else self.path.with_name(self.path.name + ".mark")

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        """The file as it is: nothing is made, and nothing but a ledger is read."""
        try:
            with closing(
                sqlite3.connect(f"{self.path.absolute().as_uri()}?mode=rw", uri=True, timeout=WAIT)
            ) as connection:
                if TABLE not in _tables(connection):
                    raise self._foreign()
                yield connection
        except sqlite3.Error as problem:
            raise DataError(f"ledger {self.path}: it cannot be read or written ({problem}).") from problem

    def _foreign(self) -> DataError:
        return DataError(f"{self.path}: this is no ledger; name the file that a private training keeps (`ledger=`).")

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            connection = sqlite3.connect(self.path, timeout=WAIT, isolation_level=None)
        except (OSError, sqlite3.Error) as problem:
            raise DataError(f"ledger {self.path}: it cannot be opened ({problem}).") from problem
        try:
            connection.execute("PRAGMA synchronous=FULL")
            connection.execute("BEGIN IMMEDIATE")
            if (found := _tables(connection)) and TABLE not in found:
                raise self._foreign()
            connection.execute(SCHEMA)
            yield connection
            connection.execute("COMMIT")
        except sqlite3.Error as problem:
            raise DataError(f"ledger {self.path}: it cannot be read or written ({problem}).") from problem
        finally:
            connection.close()

    def spend(
        self,
        data: str,
        family: str,
        noise: float,
        participations: float = 1,
        *,
        limit: float | None = None,
        note: str = "",
    ) -> float:
        """Write participations down, if the limit in bits allows it; the bits spent on the data set so far."""
        more = guarantees.bits(noise, participations)
        with self._open() as connection:
            self._check_mark(connection)
            before = self._within(connection, data, more, limit)
            row = (datetime.now(UTC).isoformat(timespec="seconds"), data, family, noise, participations, note)
            number = connection.execute(
                "INSERT INTO spent (at, data, family, noise, participations, note) VALUES (?, ?, ?, ?, ?, ?)", row
            ).lastrowid
            # The mark may only lag behind: what it says has happened must be in the file.
            connection.execute("COMMIT")
            write_atomically(self.mark, json.dumps({"last": number}).encode())
            connection.execute("BEGIN")
        return before + more

    def check(self, data: str, more: float, limit: float) -> None:
        """Raises where so many bits more pass the limit; nothing is written down."""
        with self._open() as connection:
            self._check_mark(connection)
            self._within(connection, data, more, limit)

    def _within(self, connection: sqlite3.Connection, data: str, more: float, limit: float | None) -> float:
        """The bits spent on the data set so far, if the limit allows so many more."""
        spent = self._by_family(connection, data)
        before = sum(spent.values())
        if limit is not None and before + more > limit * (1 + 1e-9):
            where = ", ".join(f"{name}: {bits:.3g}" for name, bits in spent.items()) or "nothing yet"
            raise BudgetSpent(
                f"the budget of “{data}” is used up: {before:.4g} of {limit:.4g} bits about each sample have left ({where}); "
                f"this step would add {more:.3g}. Raise the limit, or let no more of this data out."
            )
        return before

    def entries(self, data: str | None = None) -> list[Entry]:
        """Everything, in the order in which it was written; the clock does not matter."""
        if not self.path.exists():
            raise DataError(f"ledger {self.path}: there is no such file.")
        with self._reading() as connection:
            rows = connection.execute(
                "SELECT id, at, data, family, noise, participations, note FROM spent ORDER BY id"
            ).fetchall()
        return [entry for row in rows if (entry := Entry(*row)) and data in (None, entry.data)]

    def _check_mark(self, connection: sqlite3.Connection) -> None:
        if not self.mark.exists():
            return
        try:
            last = int(json.loads(self.mark.read_text(encoding="utf-8"))["last"])
        except (OSError, ValueError, KeyError, TypeError) as problem:
            raise DataError(f"ledger mark {self.mark}: it cannot be read ({problem}).") from problem
        found = connection.execute("SELECT COALESCE(MAX(id), 0) FROM spent").fetchone()[0]
        if found < last:
            raise DataError(
                f"ledger {self.path}: it ends at entry {found}, and entry {last} was written; an older copy was put back. Bring the newer "
                f"file back, or delete {self.mark} knowing that what was spent since is forgotten."
            )

    @staticmethod
    def _by_family(connection: sqlite3.Connection, data: str) -> dict[str, float]:
        rows = connection.execute("SELECT family, noise, participations FROM spent WHERE data = ?", (data,)).fetchall()
        out: dict[str, float] = {}
        for family, noise, participations in rows:
            out[family] = out.get(family, 0.0) + guarantees.bits(noise, participations)
        return out


def _tables(connection: sqlite3.Connection) -> set[str]:
    """Of the file, SQLite's own left out."""
    found = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'")
    return {name for (name,) in found}
