"""What decoding hands on: samples found so far, and what the sent model says of them."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float64, Int
from torch import Tensor

from qbi.extraction.system import System


@runtime_checkable
class Tail(Protocol):
    """What the sent model makes of the layer's pre-activations: the backprops that a sample has in each row."""

    @property
    def pins_values(self) -> bool:
        """Whether backprops tell a sample from one that fires the same neurons; else two rows must agree on it."""
        ...

    def explain(
        self, z: Float64[Tensor, "k n"], rows: Int[Tensor, " k"], wanted: Float64[Tensor, " k"], system: System
    ) -> tuple[Int[Tensor, " k"], Float64[Tensor, "k o"], Float64[Tensor, " k"]]:
        """The label that explains a share `wanted` in one row, what it sends back from the outputs, and the relative miss."""
        ...

    def output_grads(
        self, z: Float64[Tensor, "k n"], labels: Int[Tensor, " k"], before: Float64[Tensor, "k o"], system: System
    ) -> Float64[Tensor, "k o"]:
        """What samples of known labels send back from the outputs."""
        ...

    def backprops(self, z: Float64[Tensor, "k n"], output_grads: Float64[Tensor, "k o"]) -> Float64[Tensor, "k n"]:
        """What that amounts to in each row."""
        ...


@dataclass(frozen=True)
class Recovered:
    """Samples as combinations of rows, with their backprops in each row, in the order in which they were found."""

    coefficients: Float64[Tensor, "s n"]
    backprops: Float64[Tensor, "s n"]
    labels: Int[Tensor, " s"]
    output_grads: Float64[Tensor, "s o"]
    rows: Int[Tensor, " s"]
    """The row each was read from."""

    def __len__(self) -> int:
        return len(self.labels)

    def joined(self, other: "Recovered") -> "Recovered":
        """Both together."""
        return Recovered(
            torch.cat([self.coefficients, other.coefficients]),
            torch.cat([self.backprops, other.backprops]),
            torch.cat([self.labels, other.labels]),
            torch.cat([self.output_grads, other.output_grads]),
            torch.cat([self.rows, other.rows]),
        )


def nothing(system: System, outputs: int) -> Recovered:
    """No sample yet."""
    empty = system.bias.new_empty(0, system.rows)
    none = torch.empty(0, dtype=torch.long, device=empty.device)
    return Recovered(empty, empty, none, empty.new_empty(0, outputs), none)
