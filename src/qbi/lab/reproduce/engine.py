"""Work through cells on one core, several, or a Ray cluster: the same results to the bit."""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from typing import Any

from qbi.errors import BadValue, MissingExtra, first_line
from qbi.lab.reproduce.cells import Cell, Result
from qbi.lab.reproduce.items import compute
from qbi.lab.reproduce.store import Store
from qbi.lab.reproduce.workplace import Workplace

Computed = tuple[Cell, Result, float]
RETRIES = 3
"""How often a cell of a lost Ray worker is tried again."""
ANSWERS_WITHIN = 5.0
"""Seconds in which a cluster must take a connection."""


def run_cells(
    cells: Sequence[Cell],
    place: Workplace,
    store: Store,
    *,
    jobs: int = 1,
    ray_address: str | None = None,
    use_ray: bool = False,
    progress: Callable[[Cell], None] | None = None,
) -> None:
    """Compute what is missing and store each result as it comes; what is stored is never computed again."""
    missing = store.missing(cells)
    if not missing:
        return
    if use_ray:
        outcomes = _on_ray(missing, place, ray_address)
    elif jobs == 1:
        outcomes = ((cell, *compute(cell, place)) for cell in missing)
    else:
        outcomes = _on_processes(missing, place, jobs)
    for cell, result, seconds in outcomes:
        store.put(cell, result, seconds)
        if progress is not None:
            progress(cell)


def _on_processes(cells: Sequence[Cell], place: Workplace, jobs: int) -> Iterator[Computed]:
    context = get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=_end_with_parent, initargs=(os.getpid(),)) as pool:
        futures = {pool.submit(compute, cell, place): cell for cell in cells}
        try:
            for future in as_completed(futures):
                yield futures[future], *future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _end_with_parent(parent: int) -> None:
    """A killed parent cannot tell its workers; they look for themselves."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def check_cluster(address: str | None) -> None:
    """Whether Ray is installed and somebody answers at the address; asked before data are prepared."""
    _ray()
    host, colon, port = (address or "").removeprefix("ray://").rpartition(":")
    if not colon:
        return  # none, or a word such as auto that Ray itself looks up
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=ANSWERS_WITHIN):
            return
    except (OSError, ValueError, OverflowError) as problem:
        raise _unreachable(address, problem) from None


def _ray() -> Any:
    try:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        import ray
    except ImportError as problem:
        raise MissingExtra("ray", "ray") from problem
    return ray


def _unreachable(address: str | None, problem: Exception) -> BadValue:
    return BadValue(
        f"--address: {address or 'a Ray cluster'} cannot be reached ({first_line(problem)}); start Ray there "
        "(`ray start --head`), correct host:port, or leave --engine ray out."
    )


def _on_ray(cells: Sequence[Cell], place: Workplace, address: str | None) -> Iterator[Computed]:
    ray = _ray()
    started = not ray.is_initialized()
    if started:
        try:
            ray.init(address=address, log_to_driver=False, include_dashboard=False)
        except (OSError, ValueError, RuntimeError) as problem:
            raise _unreachable(address, problem) from None
    remote: Any = ray.remote(max_retries=RETRIES, num_cpus=1)(compute)
    try:
        waiting = {remote.remote(cell, place): cell for cell in cells}
        while waiting:
            (done,), _ = ray.wait(list(waiting), num_returns=1)
            yield waiting.pop(done), *ray.get(done)
    finally:
        if started:
            ray.shutdown()
