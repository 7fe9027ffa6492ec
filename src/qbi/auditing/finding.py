"""What was found out about one layer, and what was not."""

from dataclasses import dataclass, field
from typing import Literal

from torch import nn

from qbi.attacks import Carried
from qbi.carrier import Carrier
from qbi.routing.targets import Target

Reach = Literal["exact", "lossy", "unreachable"]


BESIDE = "labels and tokens"
"""What is looked for beside samples, as something that was not tried is called."""


@dataclass(frozen=True)
class Untested:
    """Something that was not tried on a layer, and why."""

    attack: str
    layer: str
    reason: str
    parameters: tuple[str, ...] = ()
    """Trained parameters that nothing else is known of."""

    def __str__(self) -> str:
        return f"{self.attack} on {self.layer}: not tested ({self.reason})"


@dataclass(frozen=True)
class Finding:
    """One linear layer: what a server could carry to it, and why not more."""

    target: Target
    reach: Reach
    reason: str
    decided_by: str
    carried: Carried | None = field(default=None, repr=False)
    """The model as a server would send it, its rows not yet written."""
    model: nn.Module | None = field(default=None, repr=False)
    """The client's model with this layer written out as a linear one, where it goes by another name."""
    untouched: bool = False
    """Whether no weights stand between the input and the layer: its input is the sample, even for who only looks."""
    parameters: tuple[str, ...] = ()
    """The trained parameters whose gradients are read here."""
    followed: bool = True
    """Whether the model could be followed behind the layer."""

    @property
    def name(self) -> str:
        """The layer's name in the model."""
        return self.target.name

    @property
    def carrier(self) -> Carrier | None:
        """How samples arrive, where they do."""
        return None if self.carried is None else self.carried.carrier

    @property
    def attackable(self) -> bool:
        """Whether rows can be written at all."""
        return self.carrier is not None

    @property
    def is_provable(self) -> bool:
        """Whether nothing stands in the way of attacks: where a first one reads nothing, more are tried."""
        return self.reach == "exact" and self.followed and self.target.has_bias and self.target.rectified

    @property
    def is_head(self) -> bool:
        """Whether its outputs are the model's."""
        return self.followed and self.target.activation == "none"

    @property
    def rank(self) -> tuple[bool, bool, bool, bool, int]:
        """Larger is more exposed: a bias, silent rows, the whole sample, and then how much of it arrives."""
        values = 0 if self.carrier is None else self.carrier.features
        return self.attackable, self.target.has_bias, self.target.rectified, self.reach == "exact", values
