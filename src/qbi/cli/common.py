"""What the commands share: options, tables, progress, devices."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from qbi.errors import BadValue, first_line, printable

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output.")]
Seed = Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Same seed, same result.")]
Device = Annotated[str, typer.Option(help="Where to compute: cpu or cuda.")]

console = Console()
log = Console(stderr=True)


def announce(what: str) -> None:
    """Say how large a job is before it starts, on standard error: no long work is silent, not in a pipe either."""
    log.print(what, markup=False, highlight=False)


def checked_device(name: str) -> str:
    """Refuse a device that is not there."""
    import torch

    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as problem:
        raise BadValue(f"--device: {name!r} cannot be used here ({first_line(problem)}). Use cpu.") from None
    return name


@contextmanager
def progress_bar(what: str) -> Iterator[Progress]:
    """A progress bar when a person watches, nothing when the output is piped."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=log, transient=True, disable=not sys.stderr.isatty()) as bar:
        bar.add_task(what, total=None)
        yield bar


def words(text: str) -> list[str]:
    """The parts of a comma-separated option."""
    return [part.strip() for part in text.split(",") if part.strip()]


def percent(share: float | None) -> str:
    """A share of one as a percentage for tables."""
    return "–" if share is None else f"{100 * share:.1f}"


def plain(text: str) -> str:
    """Text of others, such as names in a file, for a console that reads markup: nothing in it is a command."""
    from rich.markup import escape

    return escape(printable(text))
