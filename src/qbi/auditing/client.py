"""How the audited client works."""

from dataclasses import dataclass, field
from typing import Literal

from qbi.errors import BadValue
from qbi.federation.local import LocalTraining

Precision = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True)
class Client:
    """A client: its batch, its local steps, and the precision of what it sends.

    Args:
        batch_size: samples in a batch.
        local_steps: steps before it updates with its weights; 0 sends the gradient of one batch.
        training: optimiser and learning rate of the local steps.
        precision: what is sent is rounded to this type.

    >>> Client(batch_size=8, local_steps=3).samples
    24
    """

    batch_size: int = 20
    local_steps: int = 0
    training: LocalTraining = field(default_factory=LocalTraining)
    precision: Precision = "float32"

    def __post_init__(self) -> None:
        if self.batch_size == 1:
            raise BadValue(
                "client: batches of 1 are not audited: a single sample is read from every row of a linear layer with a bias, whatever "
                "the model. Give 2 or more."
            )
        if self.batch_size < 2 or self.local_steps < 0:
            raise BadValue(
                f"client: batches of {self.batch_size}, {self.local_steps} local steps; batches need 2, steps 0 or more."
            )

    @property
    def samples(self) -> int:
        """How many samples one update is made of."""
        return self.batch_size * max(1, self.local_steps)
