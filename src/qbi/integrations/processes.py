"""Processes of a federation on this machine: a free port, and an end that leaves nothing running."""

import os
import signal
import socket
import subprocess
from contextlib import suppress
from pathlib import Path


def end(process: subprocess.Popen[bytes]) -> None:
    """The process, its whole session, and what it started in sessions of their own: frameworks start a process for each app or job."""
    below = _below(process.pid)
    for sign in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, sign)
        except ProcessLookupError:
            break
        try:
            process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            continue
    process.wait(timeout=10)
    for number in below:
        with suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)


def _below(process: int) -> list[int]:
    """Children and their children, where the system lists processes as files."""
    parents: dict[int, int] = {}
    for place in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError, IndexError):
            parents[int(place.parent.name)] = int(place.read_text().rsplit(")", 1)[1].split()[1])
    found, last = [], {process}
    while last:
        last = {child for child, parent in parents.items() if parent in last}
        found += sorted(last)
    return found


def free_port() -> int:
    """One that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
