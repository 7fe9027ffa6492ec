"""What can be reproduced: the paper's tables and figures by name, and the cells each needs."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from qbi.errors import BadValue
from qbi.experiments.cells import Cell, Route

NEURONS = (200, 500, 1000)
BATCH_SIZES = (20, 50, 100, 200)
GRID = tuple((n, b) for n in NEURONS for b in BATCH_SIZES)
TEXT_GRID = tuple((1000, b) for b in BATCH_SIZES)
FEDERATION_GRID = ((200, 20),)
RUNS = 10
SYNTHETIC_RUNS = 300


@dataclass(frozen=True)
class Item:
    """A table or figure of the paper: the cell items it is made of, and the data they need."""

    name: str
    title: str
    cells: tuple[str, ...] = ()
    data: tuple[str, ...] = ()
    figure: bool = False


ITEMS = (
    Item("imagenet-recall", "R on ImageNet", ("imagenet",), ("imagenet",)),
    Item("cifar10-recall", "R on CIFAR-10", ("cifar10",), ("cifar10",)),
    Item("imdb-recall", "R on IMDB", ("imdb",), ("imdb",)),
    Item("imagenet-active-precision", "A and P on ImageNet", ("imagenet",), ("imagenet",)),
    Item("imdb-active-precision", "A and P on IMDB", ("imdb",), ("imdb",)),
    Item("synthetic", "Predicted and observed A, P, R on noise", ("synthetic",)),
    Item(
        "normalisation",
        "R behind data, batch and layer normalisation",
        ("imagenet", "cifar10", "imagenet-normalisation", "cifar10-normalisation"),
        ("imagenet", "cifar10"),
    ),
    Item("wilcoxon", "QBI and PAIRS against trap weights", ("imagenet", "cifar10"), ("imagenet", "cifar10")),
    Item("federation", "R in a federation: local steps, aggregation, sybils, noise", ("federation",), ("cifar10",)),
    Item("figure-batch", "A batch and what was read of it", data=("imagenet",), figure=True),
    Item("figure-passive", "What a benign network leaks, without and with AGGP", data=("imagenet",), figure=True),
    Item("figure-active", "What a QBI layer leaks, without and with AGGP", data=("imagenet",), figure=True),
    Item("figure-layernorm", "Read back through LayerNorm", data=("imagenet",), figure=True),
    Item("figure-averaging", "The mean of n images", data=("imagenet",), figure=True),
    Item("figure-similarity", "Similarity against the number of images averaged", data=("imagenet",), figure=True),
    Item("figure-training", "Validation accuracy without and with AGGP", data=("cifar10",), figure=True),
)


def select(names: Sequence[str]) -> list[Item]:
    """Items by name; `all`, `tables` and `figures` stand for groups."""
    known = {item.name: item for item in ITEMS}
    groups = {
        "all": list(ITEMS),
        "tables": [item for item in ITEMS if not item.figure],
        "figures": [item for item in ITEMS if item.figure],
    }
    chosen: dict[str, Item] = {}
    for name in names or ("all",):
        if name in groups:
            chosen.update({item.name: item for item in groups[name]})
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
    route: Route = "gram",
) -> list[Cell]:
    """The cells of the items, each once, the cheap ones of a run first."""
    wanted = dict.fromkeys(cell_item for item in items for cell_item in item.cells)
    cells = []
    for name in wanted:
        grid = {"imdb": TEXT_GRID, "federation": FEDERATION_GRID}.get(name, GRID)
        if only is not None:
            grid = tuple(pair for pair in grid if pair in only)
        count = runs or (SYNTHETIC_RUNS if name == "synthetic" else RUNS)
        cells += [Cell(name, n, b, run, seed, route) for run in range(count) for n, b in grid]
    if only is not None and wanted and not cells:
        raise BadValue(f"--cells: none of {list(only)} is a cell of the chosen items; they are {list(GRID)}.")
    return cells
