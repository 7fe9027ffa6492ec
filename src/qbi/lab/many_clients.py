"""Many clients in Flower's simulation: messages in waves, and what the workers' processes held."""

import os
import resource
import time
from collections.abc import Iterable
from typing import Any

from flwr.app import Context, Message, MetricRecord
from flwr.serverapp import Grid


class Waves:
    """A grid that sends so many messages at a time; in all else the one it is given.

    Flower's engine looks through every message that is under way, for every client, ten times a second: with a thousand at once those are
    a million looks.
    """

    def __init__(self, grid: Grid, size: int) -> None:
        self._grid, self._size = grid, size

    def __getattr__(self, name: str) -> Any:
        return getattr(self._grid, name)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        """All replies; the time is that of one wave."""
        every = list(messages)
        waves = [every[start : start + self._size] for start in range(0, len(every), self._size)]
        return [reply for wave in waves for reply in self._grid.send_and_receive(wave, timeout=timeout)]


def timed(msg: Message, context: Context, call_next: Any) -> Message:
    """The outermost mod: seconds from message to reply, and what the worker's process has held at most."""
    started = time.perf_counter()
    reply: Message = call_next(msg, context)
    if reply.has_content():
        for record in reply.content.values():
            if isinstance(record, MetricRecord):
                record["seconds"] = time.perf_counter() - started
                record["worker"] = os.getpid()
                record["peak"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return reply


def held(peaks: dict[int, list[float]]) -> list[dict[str, float]]:
    """What each worker's process held at most, MiB: after a tenth of its replies, and after all. A peak never falls."""
    ordered = [sorted(own) for own in peaks.values()]
    return [{"replies": len(own), "after a tenth": own[len(own) // 10], "peak": own[-1]} for own in ordered]
