"""Everything `qbi reproduce` computes: prepare the data, work through the cells, draw the figures."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from qbi.data.locating import require
from qbi.errors import DataError
from qbi.lab.reproduce.cells import Cell
from qbi.lab.reproduce.items import Item, compute
from qbi.lab.reproduce.prepared import cache_data
from qbi.lab.reproduce.store import Store
from qbi.lab.reproduce.workplace import Workplace
from qbi.lab.workers import Workers

Tell = Callable[[str, int, int | None], None]
"""What is being done, how much of it is done, and of how much."""
CACHED_WITHIN = 0.5
"""Seconds below which data were taken from the cache, so that their preparation is not told anew."""


@dataclass(frozen=True)
class Settings:
    """How and where to compute; nothing here changes a result, except the seed."""

    data: Path
    out: Path
    device: str = "cpu"
    workers: Workers = field(default_factory=Workers)
    skip_bad: bool = False
    seed: int = 0


def run_cells(
    cells: Sequence[Cell],
    place: Workplace,
    store: Store,
    workers: Workers = Workers(),  # noqa: B008 (frozen)
    done: Callable[[Cell], None] = lambda _cell: None,
) -> None:
    """Compute what is missing and store each result as it comes; what is stored is never computed again."""
    for cell, (result, seconds) in workers.map(compute, store.missing(cells), place):
        store.put(cell, result, seconds)
        done(cell)


def compute_all(items: Sequence[Item], cells: Sequence[Cell], store: Store, settings: Settings, tell: Tell) -> None:
    """Compute what is missing of the items."""
    folders = {}
    for name in dict.fromkeys(need for item in items for need in item.data):
        found = require(settings.data, name)
        loaded = 0

        def progress(count: int, name: str = name) -> None:
            nonlocal loaded
            loaded += count
            tell(f"loading {name}", loaded, None)

        started = time.perf_counter()
        folders[name] = cache_data(found, settings.out / "cache", skip_bad=settings.skip_bad, progress=progress)
        source = f"{found.path.name}, cached as {folders[name].name}"
        before = store.facts().get(f"data {name}", source)
        if before != source:
            raise DataError(
                f"{settings.out}: its results were made with other data ({before}) than {found.path} ({source}). "
                "Give another --out."
            )
        store.put_fact(f"data {name}", source)
        spent = time.perf_counter() - started
        if spent > CACHED_WITHIN:
            store.put_fact(f"preparing {name}", f"{spent:.1f} s")
    place = Workplace(folders=folders, device=settings.device)
    done = 0

    def cell_done(cell: Cell) -> None:
        nonlocal done
        done += 1
        tell(cell.item, done, len(cells))

    run_cells(cells, place, store, settings.workers, cell_done)
    figures = [(item, item.draw) for item in items if item.draw is not None]
    for index, (item, draw) in enumerate(figures):
        tell(item.name, index, len(figures))
        key = f"{item.name}/{settings.seed}"
        if store.figure(key) is None:
            started = time.perf_counter()
            image, numbers = draw(place, settings.seed)
            store.put_figure(key, image, numbers, time.perf_counter() - started)
