"""For a test server of one's own: what goes to clients and what comes back, written down as safetensors for `qbi replay`.

They are filters of the server's side of a job: `job.to_server(RecordedTasks(...), filter_type=FilterType.TASK_DATA)`.
"""

import json
from pathlib import Path

from nvflare.apis.filter import Filter
from nvflare.apis.fl_constant import ReservedKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable, make_copy
from nvflare.app_common.app_constant import AppConstants
from safetensors.torch import save
from torch import Tensor

from qbi.data.checkpoint import load_parameters
from qbi.files import write_atomically
from qbi.integrations.nvflare.exchange import MODELS, exchanged, like, tensors


class RecordedTasks(Filter):  # type: ignore[misc]
    """Writes what is sent in each round to `out`; in the first, sends the model in the file `crafted` instead, if there is one."""

    def __init__(self, out: str, crafted: str = "") -> None:
        super().__init__()
        self.out, self.crafted = out, crafted

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:  # noqa: ARG002
        """The task, with another model in it where one is named."""
        found = exchanged(shareable)
        if found is None or found.data_kind not in MODELS:
            return shareable
        number = shareable.get_header(AppConstants.CURRENT_ROUND, 0)
        if self.crafted and number == 0:
            # Another object: the controller's own model stays what it is.
            found.data = like(load_parameters(Path(self.crafted)), found.data)
            shareable = found.update_shareable(make_copy(shareable))
        _keep(Path(self.out) / f"sent-{number}.safetensors", tensors(found.data))
        return shareable


class RecordedResults(Filter):  # type: ignore[misc]
    """Writes each client's reply to `out` before anything aggregates it, and its meta, which may hold more than it should."""

    def __init__(self, out: str) -> None:
        super().__init__()
        self.out = out

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        """The result as it came."""
        peer = fl_ctx.get_peer_context()
        name = peer.get_identity_name() if peer is not None else "client"
        number = shareable.get_header(AppConstants.CURRENT_ROUND, 0)
        place = Path(self.out) / f"{name}-{number}"
        found = exchanged(shareable)
        code = shareable.get_header(ReservedKey.RC, "")
        said = {"code": str(code), "kind": str(found and found.data_kind), "meta": str(found and found.meta)}
        write_atomically(place.with_suffix(".json"), json.dumps(said, indent=1))
        if found is not None and found.data_kind in MODELS:
            _keep(place.with_suffix(".safetensors"), tensors(found.data))
        return shareable


def _keep(place: Path, state: dict[str, Tensor]) -> None:
    write_atomically(place, save({n: v.contiguous() for n, v in state.items()}))
