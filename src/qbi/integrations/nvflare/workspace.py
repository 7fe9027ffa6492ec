"""A site's own folder: its policy with one scope, and which jobs it takes.

`privacy.json` with exactly one scope, which is the default: a job that names another is rejected, a job that names none gets it.
`resources.json` with `ReviewedJobs`: what code a job brings is read by the owner before it runs, or it does not run.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from nvflare.apis.app_validation import AppValidator

from qbi.errors import BadValue, DataError
from qbi.files import write_atomically
from qbi.private.owner import OwnersSite

SCOPE = "guarded"
HERE = "qbi.integrations.nvflare"
SERVERS = "config/config_fed_server.json"
SIGNATURES = (".__nvfl_sig.json", ".__nvfl_submitter.crt")
"""Files that do not come into effect at a site: the server's configuration, and NVFlare's signatures, which are added on the way."""
ANY = "*"
"""Under `reviewed`: every job is taken. Its code runs beside the filters and could change them."""


def write_site(local: Path, site: Path) -> None:
    """Write `privacy.json` into a site's `local` folder; in its `resources.json`, ask `ReviewedJobs`, and stream no logs."""
    OwnersSite.read(site)
    arguments = {"site": str(site.absolute())}
    scope = {
        "name": SCOPE,
        "properties": {},
        "task_data_filters": [{"path": f"{HERE}.SiteData", "args": arguments}],
        "task_result_filters": [{"path": f"{HERE}.SiteResults", "args": arguments}],
    }
    write_atomically(local / "privacy.json", json.dumps({"scopes": [scope], "default_scope": SCOPE}, indent=2))
    resources = local / "resources.json"
    example = local / "resources.json.default"
    place = resources if resources.exists() else example
    if not place.exists():
        raise BadValue(f"{local}: there is no resources.json; give the `local` folder of a site's workspace.")
    settings = json.loads(place.read_text(encoding="utf-8"))
    # By default a site streams each job's error log to the server, tracebacks included: text that may hold a sample.
    settings["allow_log_streaming"] = False
    kept = [c for c in settings.get("components", []) if "LogStreamer" not in str(c.get("path", c.get("name", "")))]
    settings["components"] = kept
    settings["app_validator"] = {"path": f"{HERE}.ReviewedJobs", "args": arguments}
    write_atomically(resources, json.dumps(settings, indent=2))


class ReviewedJobs(AppValidator):  # type: ignore[misc]
    """Takes a job if the owner has read it: its code, and the client's configuration, which may send past every filter."""

    def __init__(self, site: str) -> None:
        super().__init__()
        self.site = OwnersSite.read(site)

    def validate(self, app_folder: str) -> tuple[str, dict[str, Any]]:
        """NVFlare's question: an empty sentence is a yes."""
        found = job_digest(Path(app_folder))
        if found in self.site.reviewed or ANY in self.site.reviewed:
            return "", {}
        self.site.note(f"a job was not taken: it is {found}, which is not among those reviewed.")
        return "this site takes reviewed jobs only", {}


def job_digest(app: Path) -> str:
    """Of all files of a job's app but the server's, names included: what the owner writes under `reviewed` after reading them."""
    total = hashlib.sha256()
    links = [p for p in app.rglob("*") if p.is_symlink()]
    if links:
        raise DataError(f"{links[0]}: a job with links is not judged; what they lead to can change.")
    for place in sorted(p for p in app.rglob("*") if p.is_file() and p.name not in SIGNATURES):
        name = place.relative_to(app).as_posix()
        if name != SERVERS:
            content = place.read_bytes()
            total.update(f"{len(name.encode())}:{len(content)}:{name}".encode() + content)
    return f"sha256:{total.hexdigest()}"
