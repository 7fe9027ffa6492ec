"""The server that only looks on: the model as it is, every linear layer read row by row and as a whole."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from qbi.attacks.base import Attack, Carried, Reading
from qbi.attacks.joint import read_whole
from qbi.errors import BadValue
from qbi.records import Candidates, CraftedRows, Update


@dataclass(frozen=True)
class Passive(Attack):
    """Changes nothing, and reads what an honest model gives away.

    >>> Passive.crafts
    False
    """

    key: ClassVar[str] = "passive"
    name: ClassVar[str] = "passive"
    action: ClassVar[str] = "only looks on and leaves the model as it is"
    crafts: ClassVar[bool] = False

    def rows(self, neurons: int, features: int, generator: torch.Generator) -> CraftedRows:  # noqa: ARG002
        """There are none: what stands in the model stays."""
        raise BadValue("passive: it writes no rows; the model stays as it is.")

    def read(self, sent: Carried, update: Update, how: Reading) -> Candidates:
        """Single rows, and the whole update taken apart: rectifiers silence about half of each sample's rows."""
        return read_whole(sent, update, how)
