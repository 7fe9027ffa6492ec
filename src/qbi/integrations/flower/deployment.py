"""A federation of real processes on this machine: one SuperLink, several SuperNodes, ended when the block is left."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from qbi.errors import QbiError
from qbi.integrations.flower.certificates import write_certificates
from qbi.integrations.processes import end, free_port

QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}
OPEN = ("--insecure",)
ENDED = ("finished:completed", "finished:failed", "finished:stopped")


class FederationFailed(QbiError):
    """A federation that did not start, did not end in time, or ended badly."""


class LocalFederation:
    """`with LocalFederation(3) as federation: federation.run(app, {...})`. Nothing is left running after the block.

    Clients are processes of their own (SuperNodes), or virtual ones on Ray where `simulated`. With `owners`, each SuperNode stands behind
    a gate: that is what its `qbi-site.toml` says besides the ledger. With `tls`, the SuperLink has a certificate for this machine.
    """

    def __init__(
        self,
        clients: int,
        *,
        simulated: bool = False,
        node_config: Mapping[str, str] | None = None,
        owners: str | None = None,
        tls: bool = False,
        start_within: float = 60.0,
    ) -> None:
        self.clients, self.simulated, self.start_within = clients, simulated, start_within
        self.node_config, self.owners, self.tls = dict(node_config or {}), owners, tls
        self.home = Path(tempfile.mkdtemp(prefix="qbi-flower-"))
        self.nodes: list[subprocess.Popen[bytes]] = []
        self.link: subprocess.Popen[bytes] | None = None
        self._before: Any = None
        # Flower starts programs of its own by name.
        programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
        self.environment = {**os.environ, **QUIET, "FLWR_HOME": str(self.home), "PATH": programs}

    def __enter__(self) -> "LocalFederation":
        if threading.current_thread() is threading.main_thread():
            # A program that is asked to end leaves its blocks only if the signal is an exception.
            self._before = signal.signal(signal.SIGTERM, lambda _sign, _frame: sys.exit(128 + signal.SIGTERM))
        api, *rest = [free_port() for _ in range(1 + self.clients)]
        servers, clients, trust = write_certificates(self.home) if self.tls else (OPEN, OPEN, "insecure = true")
        config = f'[superlink]\ndefault = "here"\n\n[superlink.here]\naddress = "127.0.0.1:{api}"\n{trust}\n'
        (self.home / "config.toml").write_text(config)
        try:
            self.link = self._start(
                "superlink",
                "flower-superlink",
                *servers,
                *("--host", "127.0.0.1", "--port", str(api)),
                *(("--simulation",) if self.simulated else ()),
            )
            self._wait_for(api)
            for number, port in enumerate([] if self.simulated else rest):
                settings = {"partition-id": number, "num-partitions": self.clients}
                words = [f"{k}={v}" for k, v in settings.items()] + [f'{k}="{v}"' for k, v in self.node_config.items()]
                self.nodes.append(
                    self._start(
                        f"supernode-{number}",
                        *self._supernode(number),
                        *clients,
                        *("--superlink", f"127.0.0.1:{api}"),
                        *("--port", str(port)),
                        *("--node-config", " ".join(words)),
                    )
                )
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _value: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._end()

    def run(self, app: Path, config: Mapping[str, Any], *, within: float = 180.0) -> str:
        """Submit an app and wait for its end; the status is Flower's own, since its command exits 0 on failure."""
        words = " ".join(f"{k}={_toml(v)}" for k, v in config.items())
        virtual = ("--federation-config", f"num-supernodes={self.clients}") if self.simulated else ()
        done = self._ask("run", str(app), "here", "--run-config", words, *virtual, "--format", "json")
        run = str(done.get("run-id", ""))
        if not run:
            raise FederationFailed(f"federation: the app was not taken ({done}).")
        deadline = time.monotonic() + within
        while time.monotonic() < deadline:
            status = self.status(run)
            if status in ENDED:
                return status
            time.sleep(4.0)
        self._ask("stop", run, "here", "--format", "json")
        raise FederationFailed(f"federation: run {run} did not end within {within:g} s; see {self.home}.")

    def status(self, run: str) -> str:
        """What Flower says of a run."""
        found = self._ask("list", "here", "--run-id", run, "--format", "json")
        runs = found.get("runs", [])
        return str(runs[0]["status"]) if runs else "unknown"

    def site_file(self, number: int) -> Path:
        """The owner's file of a client."""
        return self.home / f"owner-{number}" / "qbi-site.toml"

    def _supernode(self, number: int) -> tuple[str, ...]:
        """Flower's own program, or the same behind the owner's gate."""
        if self.owners is None:
            return ("flower-supernode",)
        place = self.site_file(number)
        place.parent.mkdir()
        place.write_text(f'ledger = "client.ledger"\n{self.owners}', encoding="utf-8")
        return (sys.executable, "-m", "qbi.integrations.flower.supernode", "--qbi-site", str(place))

    def kill(self, number: int) -> None:
        """End one client the hard way, with everything it started."""
        end(self.nodes[number])

    def log(self, name: str) -> str:
        """What one process said: `superlink` or `supernode-0` …"""
        return (self.home / f"{name}.log").read_text(errors="replace")

    def _start(self, name: str, program: str, *arguments: str) -> subprocess.Popen[bytes]:
        command = [program if Path(program).is_absolute() else str(Path(sys.executable).parent / program), *arguments]
        with (self.home / f"{name}.log").open("wb") as file:
            return subprocess.Popen(
                command, env=self.environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )

    def _ask(self, *arguments: str) -> dict[str, Any]:
        command = [str(Path(sys.executable).parent / "flwr"), *arguments]
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=self.start_within, check=False
        )
        start = done.stdout.find("{")
        try:
            return dict(json.loads(done.stdout[start:]))
        except (json.JSONDecodeError, ValueError) as problem:
            said = (done.stdout + done.stderr).strip()[-300:]
            raise FederationFailed(f"federation: flwr {arguments[0]} gave no answer ({said}).") from problem

    def _wait_for(self, port: int) -> None:
        deadline = time.monotonic() + self.start_within
        while time.monotonic() < deadline:
            with socket.socket() as probe:
                probe.settimeout(0.5)
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    return
            if self.link is not None and self.link.poll() is not None:
                break
            time.sleep(0.2)
        raise FederationFailed(f"federation: the SuperLink did not start ({self.log('superlink')[-300:]}).")

    def _end(self) -> None:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)
            self._before = None
        for process in [*self.nodes, *([self.link] if self.link is not None else [])]:
            end(process)
        shutil.rmtree(self.home, ignore_errors=True)


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return json.dumps(value)
