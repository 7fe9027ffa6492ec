"""What every attack is: a way to write the rows of a linear layer."""

from typing import Protocol, runtime_checkable

import torch

from qbi.records import CraftedRows


@runtime_checkable
class Attack(Protocol):
    """Rows for a layer of `neurons` outputs that sees samples of `features` values.

    The rows are float32 and live on the generator's device; the same generator state gives the same rows.
    """

    @property
    def name(self) -> str:
        """How tables and reports call it."""
        ...

    def rows(self, neurons: int, features: int, generator: torch.Generator) -> CraftedRows:
        """Write the rows."""
        ...
