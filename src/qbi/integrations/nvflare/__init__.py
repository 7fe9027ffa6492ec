"""NVFlare: a site's filters, a private round for training scripts, a check of jobs, a recorder for one's own test server.

The owner of the data writes `qbi-site.toml` and names the filters in the site's `local/privacy.json` (`write_site` does both):
a job cannot leave them out. The simulator never runs a site's filters: there, a job carries them itself.
"""

from qbi.errors import MissingExtra

try:
    import nvflare  # noqa: F401
except ImportError as problem:
    raise MissingExtra("nvflare", "nvflare") from problem

from qbi.integrations.nvflare.filters import SiteData, SiteResults
from qbi.integrations.nvflare.recording import RecordedResults, RecordedTasks
from qbi.integrations.nvflare.script import received
from qbi.integrations.nvflare.workspace import ReviewedJobs, job_digest, write_site

__all__ = [
    "RecordedResults",
    "RecordedTasks",
    "ReviewedJobs",
    "SiteData",
    "SiteResults",
    "job_digest",
    "received",
    "write_site",
]
