"""Entries of a long measurement, each written as it is done: one that was stopped goes on where it was."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qbi.files import to_json, write_atomically


@dataclass(frozen=True)
class Kept:
    """Entries by name, below the folder that the command is run in; those of other devices are others.

    >>> Kept("pictures", "cpu").place("quickstart 16").as_posix()
    'out/pictures/cpu-quickstart 16.json'
    """

    measurement: str
    device: str

    def place(self, key: str) -> Path:
        """The file of an entry."""
        return Path("out") / self.measurement / f"{self.device}-{key}.json"

    def get(self, key: str) -> Any:
        """An entry that was done, or None."""
        path = self.place(key)
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None

    def put(self, key: str, entry: Any) -> None:
        """Write one down."""
        write_atomically(self.place(key), to_json(entry))
