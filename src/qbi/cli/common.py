"""What the commands share: options, tables, progress, devices."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from qbi.errors import BadValue, first_line, printable

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output.")]
Seed = Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Same seed, same result.")]
Device = Annotated[str, typer.Option(help="Where to compute: cpu or cuda.")]

ImageSource = Annotated[
    str,
    typer.Option(help="'photos' (built in), a folder or archive of images, CIFAR-10 as a file or folder, or hf:NAME."),
]

FASTEST = 1e6
"""Learning rates above it overflow in float32."""

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


Tell = Callable[[str, int, int | None], None]
"""What is being done, how much of it is done, and of how much."""


@contextmanager
def progress_bar(what: str) -> Iterator[Tell]:
    """A bar when a person watches; where the output is no terminal, a line for each stage and each tenth of it."""
    if not sys.stderr.isatty():
        yield _plain_lines()
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=log, transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda stage, done, total: bar.update(task, description=stage, completed=done, total=total)


@contextmanager
def stages() -> Iterator[Callable[[str], None]]:
    """What is being done: a spinner when a person watches, a line for each stage where the output is no terminal."""
    if not sys.stderr.isatty():
        yield announce
        return
    with log.status("loading", spinner="dots") as status:
        yield status.update


def _plain_lines() -> Tell:
    told: dict[str, int] = {}

    def tell(stage: str, done: int, total: int | None) -> None:
        tenth = 10 * done // total if total else 0
        if told.get(stage, -1) < tenth:
            told[stage] = tenth
            announce(f"{stage}: {done:,} of {total:,}" if total else stage)

    return tell


def counted(number: int, one: str, many: str | None = None) -> str:
    """A number with the word for what is counted."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def some(option: str, chosen: list[str]) -> list[str]:
    """Refuse an option that names nothing."""
    if not chosen:
        raise BadValue(f"{option}: it names nothing; give one or more, comma-separated, or leave the option out.")
    return chosen


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
