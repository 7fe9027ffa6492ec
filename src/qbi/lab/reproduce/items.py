"""What can be reproduced, by name: each item with its cells, the function that computes one, its table or its figure."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from qbi.errors import BadValue
from qbi.lab.report.document import Document, FigureView, TableView
from qbi.lab.reproduce import figures, image_cells, tables, text_cells
from qbi.lab.reproduce.beyond_cells import BEYOND_GRID, BEYOND_TEXT_GRID, beyond_images, beyond_texts
from qbi.lab.reproduce.cells import FEDERATION_GRID, GRID, TEXT_GRID, Approach, Cell, Result
from qbi.lab.reproduce.federation_cells import federation_cell
from qbi.lab.reproduce.prepared import map_images, map_texts
from qbi.lab.reproduce.store import Store
from qbi.lab.reproduce.synthetic_cells import synthetic_cell
from qbi.lab.reproduce.tables import Results
from qbi.lab.reproduce.training import draw_training
from qbi.lab.reproduce.workplace import Workplace

RUNS = 10
SYNTHETIC_RUNS = 300


@dataclass(frozen=True)
class Family:
    """Cells that are computed in the same way: the settings, and the function from a cell to its result."""

    compute: Callable[[Cell, Workplace], Result]
    grid: tuple[tuple[int, int], ...] = GRID
    runs: int = RUNS


def _images(name: str, *, normalisation: bool = False) -> Callable[[Cell, Workplace], Result]:
    def compute(cell: Cell, place: Workplace) -> Result:
        images = map_images(place.folders[name], place.device)
        if cell.route == "gram":
            of = image_cells.normalisation_cell if normalisation else image_cells.attack_cell
            return of(cell, images.data, images.grams)
        real = image_cells.real_normalisation_cell if normalisation else image_cells.real_attack_cell
        return real(cell, images.data, images.grams, place.device)

    return compute


def _beyond(name: str) -> Callable[[Cell, Workplace], Result]:
    def compute(cell: Cell, place: Workplace) -> Result:
        return beyond_images(cell, map_images(place.folders[name], "cpu").data, place.device)

    return compute


def _texts(cell: Cell, place: Workplace) -> Result:
    of = text_cells.text_cell if cell.route == "gram" else text_cells.real_text_cell
    return of(cell, map_texts(place.folders["imdb"]), place.device)


FAMILIES = {
    "imagenet": Family(_images("imagenet")),
    "cifar10": Family(_images("cifar10")),
    "imdb": Family(_texts, TEXT_GRID),
    "synthetic": Family(lambda cell, place: synthetic_cell(cell, place.device), runs=SYNTHETIC_RUNS),
    "imagenet-normalisation": Family(_images("imagenet", normalisation=True)),
    "cifar10-normalisation": Family(_images("cifar10", normalisation=True)),
    "beyond-imagenet": Family(_beyond("imagenet"), BEYOND_GRID),
    "beyond-cifar10": Family(_beyond("cifar10"), BEYOND_GRID),
    "beyond-imdb": Family(
        lambda cell, place: beyond_texts(cell, map_texts(place.folders["imdb"]), place.device), BEYOND_TEXT_GRID
    ),
    "federation": Family(
        lambda cell, place: federation_cell(cell, map_images(place.folders["cifar10"], "cpu").data), FEDERATION_GRID
    ),
}


@dataclass(frozen=True)
class Item:
    """A table or figure: the families of cells it is made of, the data they need, and who makes it."""

    name: str
    title: str
    families: tuple[str, ...] = ()
    data: tuple[str, ...] = ()
    table: Callable[[Results, "Item"], TableView] | None = None
    draw: Callable[[Workplace, int], figures.Drawn] | None = None
    shows_samples: bool = True
    """Whether its picture shows data."""


BOTH = ("imagenet", "cifar10")
NORMALISATION = (*BOTH, "imagenet-normalisation", "cifar10-normalisation")
IMAGENET, CIFAR, IMDB = ("imagenet",), ("cifar10",), ("imdb",)

ITEMS = (
    Item("imagenet-recall", "R on ImageNet", IMAGENET, IMAGENET, tables.recall_table),
    Item("cifar10-recall", "R on CIFAR-10", CIFAR, CIFAR, tables.recall_table),
    Item("imdb-recall", "R on IMDB", IMDB, IMDB, tables.recall_table),
    Item("imagenet-active-precision", "A and P on ImageNet", IMAGENET, IMAGENET, tables.active_precision_table),
    Item("imdb-active-precision", "A and P on IMDB", IMDB, IMDB, tables.active_precision_table),
    Item("synthetic", "Predicted and observed A, P, R on noise", ("synthetic",), (), tables.synthetic_table),
    Item(
        "normalisation",
        "R behind data, batch and layer normalisation",
        NORMALISATION,
        BOTH,
        tables.normalisation_table,
    ),
    Item("wilcoxon", "QBI and PAIRS against trap weights", BOTH, BOTH, tables.wilcoxon_table),
    Item(
        "federation",
        "R in a federation: local steps, aggregation, sybils, noise",
        ("federation",),
        CIFAR,
        tables.federation_table,
    ),
    Item(
        "beyond-imagenet",
        "Whole batches of ImageNet",
        ("beyond-imagenet", "imagenet"),
        IMAGENET,
        tables.beyond_table,
    ),
    Item("beyond-cifar10", "Whole batches of CIFAR-10", ("beyond-cifar10", "cifar10"), CIFAR, tables.beyond_table),
    Item("beyond-imdb", "Whole batches of IMDB", ("beyond-imdb", "imdb"), IMDB, tables.beyond_table),
    Item("figure-batch", "A batch and what was read of it", data=IMAGENET, draw=figures.draw_batch),
    Item(
        "figure-passive", "What a benign network leaks, without and with AGGP", data=IMAGENET, draw=figures.draw_passive
    ),
    Item("figure-active", "What a QBI layer leaks, without and with AGGP", data=IMAGENET, draw=figures.draw_active),
    Item("figure-layernorm", "Read back through LayerNorm", data=IMAGENET, draw=figures.draw_layernorm),
    Item("figure-averaging", "The mean of n images", data=IMAGENET, draw=figures.draw_averaging),
    Item(
        "figure-similarity",
        "Similarity against the number of images averaged",
        data=IMAGENET,
        draw=figures.draw_similarity,
        shows_samples=False,
    ),
    Item(
        "figure-training",
        "Validation accuracy without and with AGGP",
        data=CIFAR,
        draw=draw_training,
        shows_samples=False,
    ),
)

GROUPS = {
    "all": ITEMS,
    "tables": tuple(item for item in ITEMS if item.table is not None),
    "figures": tuple(item for item in ITEMS if item.draw is not None),
    "beyond": tuple(item for item in ITEMS if item.name.startswith("beyond-")),
}
"""Names that stand for several items."""


def compute(cell: Cell, place: Workplace) -> tuple[Result, float]:
    """The result of a cell and the seconds it took: the one function that workers run."""
    if cell.item not in FAMILIES:
        raise BadValue(f"reproduce: no item is called {cell.item!r}.")
    started = time.perf_counter()
    result = FAMILIES[cell.item].compute(cell, place)
    return result, time.perf_counter() - started


def select(names: Sequence[str]) -> list[Item]:
    """Items by name; `all`, `tables`, `figures` and `beyond` stand for groups."""
    known = {item.name: item for item in ITEMS}
    chosen: dict[str, Item] = {}
    for name in names or ("all",):
        if name in GROUPS:
            chosen.update({item.name: item for item in GROUPS[name]})
        elif name in known:
            chosen[name] = known[name]
        else:
            raise BadValue(f"reproduce: no item is called {name!r}. `qbi reproduce --list` names them all.")
    return list(chosen.values())


def cells_for(
    items: Iterable[Item],
    *,
    runs: int | None = None,
    only: Sequence[tuple[int, int]] | None = None,
    seed: int = 0,
    route: Approach = "gram",
) -> list[Cell]:
    """The cells of the items, each once, the cheap ones of a run first."""
    wanted = dict.fromkeys(family for item in items for family in item.families)
    cells = []
    for name in wanted:
        family = FAMILIES[name]
        grid = family.grid if only is None else tuple(pair for pair in family.grid if pair in only)
        cells += [Cell(name, n, b, run, seed, route) for run in range(runs or family.runs) for n, b in grid]
    if only is not None and wanted and not cells:
        raise BadValue(f"--cells: none of {list(only)} is a cell of the chosen items; they are {list(GRID)}.")
    return cells


def build_document(store: Store, items: Sequence[Item], facts: dict[str, str], *, seed: int, route: str) -> Document:
    """Everything that is known of the chosen items."""
    results = Results(store, seed, route)
    made = tuple(item.table(results, item) for item in items if item.table is not None)
    drawn = []
    for item in items:
        stored = store.figure(f"{item.name}/{seed}") if item.draw is not None else None
        if stored is not None:
            image, numbers = stored
            drawn.append(
                FigureView(item.name, item.title, image, numbers, numbers["caption"], shows_samples=item.shows_samples)
            )
    return Document("The paper's evaluation, reproduced", made, tuple(drawn), facts)
