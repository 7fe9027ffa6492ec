"""For a training script, between `flare.receive` and `flare.send`:

    with received(flare.receive()) as here:
        model.load_state_dict(here.sent)
        private = qbi.Private(model, F.cross_entropy, bits=72)
        for x, y in private.batches(dataset, batch_size=64):
            private.step(optimiser, x, y)
        flare.send(here.answer(private))

The owner's file is named by the environment variable QBI_SITE, which the owner sets where the site is started.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import nvflare.client as flare
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from torch import Tensor

from qbi.integrations.nvflare.exchange import like, tensors
from qbi.private import Private
from qbi.private.owner import OwnersSite
from qbi.private.trainer import PrivateRound, private_round


@dataclass(frozen=True)
class FlareRound:
    """One round of a training script: what was sent, and the answer to it."""

    model: FLModel
    inner: PrivateRound

    @property
    def sent(self) -> dict[str, Tensor]:
        """The model as it came."""
        return self.inner.sent

    def answer(self, private: Private, metrics: Mapping[str, Any] | None = None) -> FLModel:
        """What to send: the released state, as arrays of the kind that came. Metrics arrive only where the owner has named them."""
        params = like(self.inner.answer(private.state_dict()), self.model.params)
        return FLModel(params=params, params_type=ParamsType.FULL, metrics=dict(metrics) if metrics else None)


@contextmanager
def received(model: FLModel, site: OwnersSite | None = None) -> Iterator[FlareRound]:
    """A round inside the boundary: private steps are paid for, what they release gets a receipt for the site's filter."""
    with private_round(tensors(model.params), site, _site_name()) as inner:
        yield FlareRound(model, inner)


def _site_name() -> str:
    """As NVFlare knows the site; none outside of a job."""
    try:
        return str(flare.get_site_name())
    except Exception:  # each way of running a script fails in its own way where there is no job
        return ""
