"""The laboratory's one pool: the same work on one core, on several, or on a Ray cluster, with the same results to the bit."""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any, TypeVar

import torch

from qbi.errors import BadValue, MissingExtra, first_line

T = TypeVar("T")
R = TypeVar("R")

RETRIES = 3
"""How often the work of a lost Ray worker is tried again."""
ANSWERS_WITHIN = 5.0
"""Seconds in which a cluster must take a connection."""


@dataclass(frozen=True)
class Workers:
    """Where work is done; nothing here changes a result."""

    jobs: int = 1
    use_ray: bool = False
    address: str | None = None

    def map(self, work: Callable[..., R], tasks: Sequence[T], *shared: Any) -> Iterator[tuple[T, R]]:
        """`work(task, *shared)` for every task, each as it is done. `shared` goes to a process once, not with every task."""
        if self.jobs < 1:
            raise BadValue(f"{self.jobs} jobs; at least one is needed.")
        if not tasks:
            return
        if self.use_ray:
            yield from _on_ray(work, tasks, shared, self.address)
        elif self.jobs == 1:
            for task in tasks:
                yield task, _on_one_thread(work, task, shared)
        else:
            yield from _on_processes(work, tasks, shared, self.jobs)


def alone(work: Callable[..., R], *given: Any) -> R:
    """The result of one call in a process of its own, whose memory and threads are nobody else's."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(work, *given).result()


def _on_one_thread(work: Callable[..., R], task: Any, shared: tuple[Any, ...]) -> R:
    """One thread for each task, however many workers there are: sums in another order would change the last digits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return work(task, *shared)
    finally:
        torch.set_num_threads(threads)


_HERE: dict[str, Any] = {}


def _start(parent: int, work: Callable[..., Any], shared: tuple[Any, ...]) -> None:
    """What a worker process does first. A killed parent cannot tell its workers; they look for themselves."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    _HERE.update(work=work, shared=shared)


def _one(task: Any) -> Any:
    return _on_one_thread(_HERE["work"], task, _HERE["shared"])


def _on_processes(
    work: Callable[..., R], tasks: Sequence[T], shared: tuple[Any, ...], jobs: int
) -> Iterator[tuple[T, R]]:
    with ProcessPoolExecutor(
        jobs, mp_context=get_context("spawn"), initializer=_start, initargs=(os.getpid(), work, shared)
    ) as pool:
        futures = {pool.submit(_one, task): task for task in tasks}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        finally:
            pool.shutdown(cancel_futures=True)


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


def _on_ray(
    work: Callable[..., R], tasks: Sequence[T], shared: tuple[Any, ...], address: str | None
) -> Iterator[tuple[T, R]]:
    ray = _ray()
    started = not ray.is_initialized()
    if started:
        try:
            ray.init(address=address, log_to_driver=False, include_dashboard=False)
        except (OSError, ValueError, RuntimeError) as problem:
            raise _unreachable(address, problem) from None
    remote: Any = ray.remote(max_retries=RETRIES, num_cpus=1)(_on_one_thread).options(name=work.__name__)
    try:
        sent = ray.put(shared)
        waiting = {remote.remote(work, task, sent): task for task in tasks}
        while waiting:
            (done,), _ = ray.wait(list(waiting), num_returns=1)
            yield waiting.pop(done), ray.get(done)
    finally:
        if started:
            ray.shutdown()
