"""What an operation's handler may ask of whoever watches."""

from typing import Protocol, runtime_checkable

from torch import Tensor

from qbi.uses.kinds import Kind


@runtime_checkable
class Watcher(Protocol):
    """Somebody who follows the uses of weights through a model's operations."""

    def name_of(self, tensor: Tensor | None) -> str | None:
        """The name of a tracked parameter."""
        ...

    def use(self, kind: Kind, given: Tensor, out: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """Take note of a use; the output to go on with."""
        ...

    def refuse(self, sentence: str) -> None:
        """Say that this cannot be, where it matters."""
        ...
