"""A federation of real NVFlare processes on this machine, provisioned below a private home and ended when the block is left."""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from qbi.errors import QbiError
from qbi.integrations.nvflare.workspace import write_site
from qbi.integrations.processes import end, free_port

ADMIN = "admin@nvidia.com"
PROJECT = """api_version: 3
name: local
description: a federation on one machine
participants:
- {{name: server, type: server, org: nvidia, fed_learn_port: {port}, default_host: localhost}}
- {{name: {admin}, type: admin, org: nvidia, role: project_admin}}
{sites}
builders:
- path: nvflare.lighter.impl.workspace.WorkspaceBuilder
  args: {{template_file: [master_template.yml]}}
- path: nvflare.lighter.impl.static_file.StaticFileBuilder
  args: {{config_folder: config}}
- path: nvflare.lighter.impl.cert.CertBuilder
- path: nvflare.lighter.impl.signature.SignatureBuilder
"""


class SitesFailed(QbiError):
    """A federation that did not start or did not end in time."""


class LocalSites:
    """`with LocalSites(2, site="update", …) as sites: sites.run(job)`. Nothing is left running after the block.

    Args:
        clients: how many sites.
        owners: what stands in each site's `qbi-site.toml` besides the ledger; without it, no site has a guard.
    """

    def __init__(self, clients: int, owners: str | None = None, *, start_within: float = 90.0) -> None:
        self.names = [f"site-{number}" for number in range(1, clients + 1)]
        self.owners, self.start_within = owners, start_within
        self.home = Path(tempfile.mkdtemp(prefix="qbi-nvflare-"))
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
        workspace = {"HOME": str(self.home), "NVFLARE_POC_WORKSPACE": str(self.home / "poc")}
        self.environment = {**os.environ, **workspace, "PATH": programs}

    @property
    def kits(self) -> Path:
        """Where each participant's folder lies."""
        return self.home / "poc" / "local" / "prod_00"

    def site_file(self, name: str) -> Path:
        """The owner's file of a site."""
        return self.home / "owners" / name / "qbi-site.toml"

    def __enter__(self) -> "LocalSites":
        try:
            self._provision()
            for name in ("server", *self.names):
                self.start(name)
            self._wait()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _value: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._end()

    def start(self, name: str) -> None:
        """Start a participant."""
        owner = {"QBI_SITE": str(self.site_file(name))} if name != "server" and self.owners is not None else {}
        command = ["bash", str(self.kits / name / "startup" / "sub_start.sh"), "--once"]
        with (self.home / f"{name}.log").open("wb") as file:
            self.processes[name] = subprocess.Popen(
                command,
                env={**self.environment, **owner},
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def kill(self, name: str) -> None:
        """End one site the hard way, with everything it started."""
        end(self.processes[name])

    def log(self, name: str) -> str:
        """What one participant said."""
        return (self.home / f"{name}.log").read_text(errors="replace")

    def run(self, job: Path, *, within: float = 180.0) -> str:
        """Submit a job's folder and wait for its end; NVFlare's own word for how it ended."""
        session = self._session()
        try:
            number = session.submit_job(str(job.absolute()))
            deadline = time.monotonic() + within
            while time.monotonic() < deadline:
                status = str(session.get_job_meta(number).get("status", ""))
                if status.startswith("FINISHED"):
                    return status
                time.sleep(1.0)
            session.abort_job(number)
        finally:
            session.close()
        raise SitesFailed(f"federation: the job did not end within {within:g} s; see {self.home}.")

    def _provision(self) -> None:
        sites = "\n".join(f"- {{name: {name}, type: client, org: nvidia}}" for name in self.names)
        project = self.home / "project.yml"
        project.write_text(PROJECT.format(port=free_port(), admin=ADMIN, sites=sites))
        command = ["nvflare", "poc", "prepare", "-i", str(project)]
        done = subprocess.run(
            command,
            env=self.environment,
            input="y\n",
            capture_output=True,
            text=True,
            check=False,
            timeout=self.start_within,
        )
        if not self.kits.exists():
            raise SitesFailed(f"federation: it was not prepared ({(done.stdout + done.stderr).strip()[-300:]}).")
        if self.owners is None:
            return
        for name in self.names:
            place = self.site_file(name)
            place.parent.mkdir(parents=True)
            place.write_text(f'ledger = "{name}.ledger"\n{self.owners}', encoding="utf-8")
            write_site(self.kits / name / "local", place)

    def _session(self) -> Any:
        from nvflare.fuel.flare_api.flare_api import new_secure_session

        return new_secure_session(ADMIN, str(self.kits / ADMIN), timeout=self.start_within)

    def _wait(self) -> None:
        deadline = time.monotonic() + self.start_within
        problem: BaseException | None = None
        while time.monotonic() < deadline:
            if any(process.poll() is not None for process in self.processes.values()):
                break
            try:
                session = self._session()
                try:
                    if len(session.get_system_info().client_info) >= len(self.names):
                        return
                finally:
                    session.close()
            except Exception as found:  # not yet there
                problem = found
            time.sleep(1.0)
        said = {name: self.log(name)[-300:] for name in self.processes}
        raise SitesFailed(f"federation: not all sites came up ({problem}; {said}).")

    def _end(self) -> None:
        for process in self.processes.values():
            end(process)
        shutil.rmtree(self.home, ignore_errors=True)
