"""Processes of a federation on this machine: a free port, and an end that leaves nothing running."""

import os
import signal
import socket
import subprocess


def end(process: subprocess.Popen[bytes]) -> None:
    """The process and its whole session: frameworks start one process an app."""
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


def free_port() -> int:
    """One that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
