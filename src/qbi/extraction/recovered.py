"""What decoding hands on: samples found so far, and what the sent model says of them."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float64, Int
from torch import Tensor

from qbi.extraction.system import System


@runtime_checkable
class Tail(Protocol):
    """What the sent model makes of the layer's pre-activations: the shares that a sample has in each row."""

    @property
    def pins_values(self) -> bool:
        """Whether shares tell a sample from one that fires the same neurons; else two rows must agree on it."""
        ...

    def explain(
        self, z: Float64[Tensor, "k n"], rows: Int[Tensor, " k"], wanted: Float64[Tensor, " k"], system: System
    ) -> tuple[Int[Tensor, " k"], Float64[Tensor, "k o"], Float64[Tensor, " k"]]:
        """The label that explains a share `wanted` in one row, what it sends back from the outputs, and the relative miss."""
        ...

    def pulls(
        self, z: Float64[Tensor, "k n"], labels: Int[Tensor, " k"], before: Float64[Tensor, "k o"], system: System
    ) -> Float64[Tensor, "k o"]:
        """What samples of known labels send back from the outputs."""
        ...

    def shares(self, z: Float64[Tensor, "k n"], pulls: Float64[Tensor, "k o"]) -> Float64[Tensor, "k n"]:
        """What that amounts to in each row."""
        ...


@dataclass(frozen=True)
class Recovered:
    """Samples as combinations of rows, with their shares of each row, in the order in which they were found."""

    coefficients: Float64[Tensor, "s n"]
    shares: Float64[Tensor, "s n"]
    labels: Int[Tensor, " s"]
    pulls: Float64[Tensor, "s o"]
    rows: Int[Tensor, " s"]
    """The row each was read from."""

    def __len__(self) -> int:
        return len(self.labels)

    def joined(self, other: "Recovered") -> "Recovered":
        """Both together."""
        return Recovered(
            torch.cat([self.coefficients, other.coefficients]),
            torch.cat([self.shares, other.shares]),
            torch.cat([self.labels, other.labels]),
            torch.cat([self.pulls, other.pulls]),
            torch.cat([self.rows, other.rows]),
        )


def nothing(system: System, outputs: int) -> Recovered:
    """No sample yet."""
    empty = system.bias.new_empty(0, system.rows)
    none = torch.empty(0, dtype=torch.long, device=empty.device)
    return Recovered(empty, empty, none, empty.new_empty(0, outputs), none)
