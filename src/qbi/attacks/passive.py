"""The server that only looks on: the model as it is, every linear layer read row by row."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from qbi.attacks.base import Attack
from qbi.errors import BadValue
from qbi.records import CraftedRows


@dataclass(frozen=True)
class Passive(Attack):
    """Changes nothing.

    >>> Passive.crafts
    False
    """

    key: ClassVar[str] = "passive"
    name: ClassVar[str] = "passive"
    deed: ClassVar[str] = "only looks on, the model as it is,"
    crafts: ClassVar[bool] = False

    def rows(self, neurons: int, features: int, generator: torch.Generator) -> CraftedRows:  # noqa: ARG002
        """There are none: what stands in the model stays."""
        raise BadValue("passive: it writes no rows; the model stays as it is.")
