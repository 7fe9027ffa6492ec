"""A guarded round in the trainer's process, where the gate is another: private steps are paid for, and what they released gets a receipt."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from qbi.private.boundary import Boundary, State, inside
from qbi.private.owner import OwnersSite
from qbi.private.receipts import Receipts
from qbi.private.site import look_at_model, paying_boundary


@dataclass(frozen=True)
class PrivateRound:
    """One round: what was sent, and a way to answer."""

    boundary: Boundary
    receipts: Receipts

    @property
    def sent(self) -> dict[str, Tensor]:
        """The model as it came, to be loaded before `qbi.Private` is made."""
        return {n: v.clone() for n, v in self.boundary.sent.items()}

    def answer(self, state: State) -> dict[str, Tensor]:
        """A released state, checked, with receipts for it and for its difference to what was sent."""
        out = self.boundary.check_arrays(state)
        write_receipts(self.receipts, self.boundary.sent, out)
        return out


@contextmanager
def private_round(sent: State, site: OwnersSite | None = None, name: str = "") -> Iterator[PrivateRound]:
    """Train inside: `qbi.Private` must begin with what was sent, and each pass is written into the owner's ledger before it is released.

    `name` is the site's where several share an owner's file, as simulated ones do.
    """
    owner = OwnersSite.read() if site is None else site
    look_at_model(sent, owner.settings.inspect)
    with inside(paying_boundary(owner.settings, sent, {})) as boundary:
        yield PrivateRound(boundary, Receipts.of(owner, name))


def write_receipts(receipts: Receipts, sent: State, state: State) -> None:
    """For a state that was checked, and for its difference to what was sent, which frameworks may send in its place."""
    mine = {n: v.detach().cpu() for n, v in state.items()}
    alike = all(n in sent and sent[n].dtype == v.dtype and sent[n].shape == v.shape for n, v in mine.items())
    difference = [{n: _difference(v, sent[n].detach().cpu()) for n, v in mine.items()}] if alike else []
    receipts.write(sent, state, *difference)


def _difference(now: Tensor, before: Tensor) -> Tensor:
    return now ^ before if now.dtype == torch.bool else now - before
