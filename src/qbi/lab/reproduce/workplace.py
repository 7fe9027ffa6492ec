"""Where a worker finds prepared data, and where it computes."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Workplace:
    """Folders of prepared data by name, and a device."""

    folders: Mapping[str, Path]
    device: str = "cpu"
