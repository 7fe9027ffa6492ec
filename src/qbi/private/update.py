"""The policy `update`, for training code that stays as it is: a round's whole update clipped, noise on the grid.

It needs to see nothing of the training, holds for any code, and bounds what leaves about *everything the client holds*, not about one
sample. The price is higher.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from qbi.finite import is_finite
from qbi.private.allowed import NotReleased
from qbi.private.boundary import State, by_position
from qbi.private.goal import Budget
from qbi.private.keystream import Keys, system_key
from qbi.private.release import Grid, release


@dataclass
class ReleasedUpdate:
    """Releases states of one round; each release costs one participation of all that the client holds."""

    budget: Budget
    keys: Keys = system_key

    def release(self, sent: State, returned: State) -> dict[str, Tensor]:
        """What may leave in the place of what the training code returned: what was sent, and a clipped, noisy difference.

        Whole numbers (counters) leave as they were sent.
        """
        named = by_position(returned, sent)
        moved = _moving(sent, named)
        clip = self.budget.clip
        difference = torch.cat([(named[n].double().cpu() - sent[n].double().cpu()).flatten() for n in moved])
        if not is_finite(difference):
            # NaN and infinities have no length to clip: as if nothing had been learned.
            difference.zero_()
        difference *= clip / torch.linalg.vector_norm(difference).clamp_min(clip)
        grid = Grid.of(clip, self.budget.noise, difference.numel())
        whole = release(difference, grid, keys=self.keys) * grid.step
        parts = whole.split([sent[n].numel() for n in moved])
        out = {n: v.detach().clone() for n, v in sent.items()}
        for name, part in zip(moved, parts, strict=True):
            out[name] = (sent[name].double().cpu() + part.reshape(sent[name].shape)).to(sent[name].dtype)
        # Under the names in which it would have left, in the order in which it was sent.
        theirs = dict(zip(named, returned, strict=True))
        return {theirs[n]: out[n] for n in sent}


def _moving(sent: State, returned: Mapping[str, Tensor]) -> list[str]:
    """The arrays that training moves."""
    if set(returned) != set(sent):
        raise NotReleased(
            "update: the reply must hold the arrays that were sent, all of them and no other; this one does not."
        )
    for name, value in returned.items():
        if value.shape != sent[name].shape:
            raise NotReleased(
                f"update: “{name}” came as {tuple(sent[name].shape)} and would leave as {tuple(value.shape)}."
            )
    moved = [n for n, v in sent.items() if v.is_floating_point() and v.numel()]
    if not moved:
        raise NotReleased("update: nothing that was sent can be trained.")
    return moved
