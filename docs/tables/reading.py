"""What commands wrote, and Markdown."""

import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent.parent

FRONTIER = DOCS.parent / "src/qbi/report/frontier.json"


@cache
def load(name: str) -> Any:
    """What a command wrote."""
    path = FRONTIER if name == "frontier" else DOCS / "data" / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8"))


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Markdown."""
    head = list(head)
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *map(list, rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


EXACT, FAITHFUL, RECOGNISABLE = "mse<1e-10", "psnr>60", "psnr>19"
