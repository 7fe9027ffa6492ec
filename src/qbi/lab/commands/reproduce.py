"""`qbi reproduce`: the paper's tables and figures, the paper's value beside ours."""

import os
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.table import Table

from qbi import __version__
from qbi.cli.common import Device, Json, Seed, announce, checked_device, console, counted, log, progress_bar
from qbi.errors import BadValue, DataError
from qbi.files import check_place, to_json, write_atomically

if TYPE_CHECKING:
    from qbi.lab.report.document import Document
    from qbi.lab.reproduce.cells import Approach, Cell
    from qbi.lab.reproduce.items import Item
    from qbi.lab.reproduce.run import Settings
    from qbi.lab.reproduce.store import Store

Cells = list[tuple[int, int]]


def parse_cells(text: str | None) -> Cells | None:
    """`200x20,1000x200` as pairs."""
    if text is None:
        return None
    pairs: Cells = []
    for part in text.split(","):
        neurons, cross, batch_size = part.strip().lower().partition("x")
        if not cross or not neurons.isdigit() or not batch_size.isdigit():
            raise BadValue(f"--cells: {part!r} is not of the form NxB, such as 200x20.")
        pairs.append((int(neurons), int(batch_size)))
    return pairs


def reproduce(
    items: Annotated[list[str] | None, typer.Argument(help="Items, or all, tables, figures, beyond.")] = None,
    list_items: Annotated[bool, typer.Option("--list", help="Name the items and stop.")] = False,
    data: Annotated[Path, typer.Option(help="Folder with the data sets or their archives.")] = Path("data"),
    cells: Annotated[str | None, typer.Option(help="Only these settings, as NxB: 200x20,1000x200.")] = None,
    runs: Annotated[
        int | None, typer.Option(min=1, max=10_000, help="Runs per cell (paper: 10; 300 on noise).")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="One run per cell, for a first look.")] = False,
    direct: Annotated[bool, typer.Option("--direct", help="Real weights and forward passes.")] = False,
    from_gradients: Annotated[bool, typer.Option("--from-gradients", help="Real client steps, read back.")] = False,
    jobs: Annotated[int | None, typer.Option(min=1, help="Worker processes (default: the number of cores).")] = None,
    engine: Annotated[Literal["local", "ray"], typer.Option(help="Where cells are computed.")] = "local",
    address: Annotated[str | None, typer.Option(help="Address of a Ray cluster.")] = None,
    render: Annotated[bool, typer.Option("--render", help="Only render what is already there.")] = False,
    out: Annotated[Path, typer.Option(help="Folder for results and renderings.")] = Path("out/reproduce"),
    no_samples: Annotated[bool, typer.Option("--no-samples", help="Leave pictures of data out.")] = False,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Skip unreadable images instead of stopping.")] = False,
    seed: Seed = 0,
    device: Device = "cpu",
    json: Json = False,
) -> None:
    """Reproduce the paper's evaluation; a killed run resumes where it stopped.

    [bold]Examples:[/bold]

      qbi reproduce --list

      qbi reproduce all --data ~/datasets

      qbi reproduce imagenet-recall --cells 200x20 --quick --data ~/datasets

      qbi reproduce --render
    """
    from qbi.lab.report.render import print_document
    from qbi.lab.reproduce.items import ITEMS, cells_for, select
    from qbi.lab.reproduce.run import Settings
    from qbi.lab.reproduce.store import Store
    from qbi.lab.workers import Workers

    if list_items:
        _list(ITEMS)
        return
    if direct and from_gradients:
        raise BadValue("reproduce: give --direct or --from-gradients, not both.")
    route: Approach = "direct" if direct else "gradients" if from_gradients else "gram"
    chosen = select(items or [])
    wanted = cells_for(chosen, runs=1 if quick else runs, only=parse_cells(cells), seed=seed, route=route)
    _check(out, engine, address)
    store = _stored(out, chosen, wanted, seed) if render else Store(out / "results.sqlite")
    if not render:
        processes = jobs or (1 if device != "cpu" else os.cpu_count() or 1)
        workers = Workers(processes, engine == "ray", address)
        settings = Settings(data, out, checked_device(device), workers, skip_bad, seed)
        announce(f"{counted(len(wanted), 'cell')}, {len(store.missing(wanted)):,} of them not yet computed.")
        _compute(chosen, wanted, store, settings)
    document = _render(store, chosen, out, seed, route, no_samples)
    if json:
        typer.echo(to_json(document.plain()), nl=False)
    else:
        print_document(document, console)
        console.print(f"Page: {out / 'reproduction.html'}   Markdown, LaTeX, JSON beside it.")


def _compute(items: "list[Item]", cells: "list[Cell]", store: "Store", settings: "Settings") -> None:
    """Everything that is missing, with a bar; then what it took."""
    from qbi.lab.reproduce.run import compute_all

    started = time.perf_counter()
    with progress_bar("preparing") as tell:
        compute_all(items, cells, store, settings, tell)
    log.print(f"Computed in {time.perf_counter() - started:.1f} s.")
    spent = ", ".join(f"{name} {seconds:.0f}" for name, seconds in store.seconds().items())
    log.print(f"Seconds of one core, of all that is stored: {spent}.")


def _render(store: "Store", items: "list[Item]", out: Path, seed: int, route: str, no_samples: bool) -> "Document":
    from qbi.lab.report.render import to_html, to_latex, to_markdown
    from qbi.lab.reproduce.items import build_document

    facts = {"date": datetime.now(UTC).date().isoformat(), "seed": str(seed), "route": route, "qbi": __version__}
    document = build_document(store, items, facts | store.facts(), seed=seed, route=route)
    if no_samples:
        document = document.without_samples()
    write_atomically(out / "reproduction.html", to_html(document))
    write_atomically(out / "reproduction.md", to_markdown(document, image_folder="figures"))
    write_atomically(out / "reproduction.tex", to_latex(document))
    write_atomically(out / "reproduction.json", to_json(document.plain()))
    for figure in document.figures:
        place = out / "figures" / f"{figure.name}.png"
        if figure.image is not None:
            write_atomically(place, figure.image)
        else:
            place.unlink(missing_ok=True)  # an earlier run's, which this one was asked not to show
    return document


def _check(out: Path, engine: str, address: str | None) -> None:
    """Whether results can be kept, and a cluster reached where one is asked for; told before data are prepared."""
    from qbi.lab.workers import check_cluster

    check_place(out)
    if engine == "ray":
        check_cluster(address)
    elif address is not None:
        raise BadValue(f"--address: {address} is not used without --engine ray; add that, or leave it out.")


def _stored(out: Path, items: "list[Item]", cells: "list[Cell]", seed: int) -> "Store":
    """What an earlier run kept of the items; an error where that is nothing, and nothing is made then."""
    from qbi.lab.reproduce.store import Store

    if (out / "results.sqlite").exists():
        store = Store(out / "results.sqlite")
        drawn = any(store.figure(f"{item.name}/{seed}") is not None for item in items)
        if drawn or len(store.missing(cells)) < len(cells):
            return store
    raise DataError(
        f"{out}: nothing is stored there of these items, this --seed and this route; run the same command without "
        "--render first, or give the --out of an earlier run."
    )


def _list(items: "tuple[Item, ...]") -> None:
    from qbi.lab.reproduce.items import GROUPS

    table = Table(title="What can be reproduced")
    for title in ("item", "what", "data"):
        table.add_column(title)
    for item in items:
        table.add_row(item.name, item.title, ", ".join(item.data) or "none")
    table.add_section()
    for name, members in GROUPS.items():
        table.add_row(name, f"{counted(len(members), 'item')} of these", "")
    console.print(table)
