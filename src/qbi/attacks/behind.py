"""The model behind an attacked layer, as a function of the layer's pre-activations."""

from typing import Any

import torch
from torch import Tensor

from qbi.attacks.base import Carried
from qbi.errors import CannotRead, first_line
from qbi.routing.tail import first_tensor, tail_of

FEW_OUTPUTS = 16
"""Outputs up to which a backward pass for each is cheaper than one forward pass with derivatives, whose first call takes seconds."""


class SeesPositions(CannotRead):
    """A layer that acts on each position by itself: how many of them stand in an update is not known."""


class Behind:
    """The model behind the layer, and its derivatives, in float64."""

    def __init__(self, carried: Carried) -> None:
        if carried.carrier.norm is not None:
            raise CannotRead(f"{carried.layer}: batch normalisation behind it mixes the samples; none explains itself.")
        if carried.carrier.reference is not None:
            raise CannotRead(f"{carried.layer}: it has no bias, so samples are known up to a factor only.")
        if not carried.probe:
            raise CannotRead(f"{carried.layer}: the shape of the clients' inputs is not known.")
        traced = carried.traced
        value = traced.values[traced.nodes_of(carried.layer)[0]] if traced.nodes_of(carried.layer) else None
        if not isinstance(value, Tensor) or value.dim() != 2:
            raise SeesPositions(f"{carried.layer}: it sees positions one by one; no single one explains a share.")
        self.run = tail_of(traced, carried.layer)
        self.neurons = value.shape[1]
        try:
            with torch.no_grad():
                self.outputs = first_tensor(self.run(torch.zeros(1, self.neurons, dtype=torch.float64))).shape[1]
        except CannotRead:
            raise
        except Exception as problem:
            raise CannotRead(
                f"{carried.layer}: what stands behind it cannot be run ({first_line(problem)})."
            ) from problem

    def widened(self, z: Tensor, kept: Tensor) -> Tensor:
        """Pre-activations of all neurons; those whose rows are silent stay below zero."""
        if len(kept) == self.neurons:
            return z
        out = z.new_full((len(z), self.neurons), -1.0)
        out[:, kept] = z
        return out

    def forward(self, z: Tensor) -> Tensor:
        """The outputs."""
        return first_tensor(self.run(z))

    def backward(self, z: Tensor, output_grads: Tensor) -> Tensor:
        """Pulls at the outputs, as they arrive at the layer."""
        with torch.enable_grad():
            z = z.detach().requires_grad_()
            (back,) = torch.autograd.grad((self.forward(z) * output_grads).sum(), z)
        return back

    def row_slopes(self, z: Tensor, rows: Tensor) -> Tensor:
        """How each output moves with the one neuron of each candidate."""
        if self.outputs <= FEW_OUTPUTS:
            own = rows[:, None, None].expand(-1, self.outputs, 1)
            return self.jacobian(z).gather(2, own)[:, :, 0]
        direction = torch.zeros_like(z)
        direction[torch.arange(len(z), device=z.device), rows] = 1
        found: Any = torch.func.jvp(self.forward, (z,), (direction,))
        slopes: Tensor = found[1]
        return slopes

    def jacobian(self, z: Tensor) -> Tensor:
        """All slopes, one vector of the layer for each output: k × outputs × neurons."""
        with torch.enable_grad():
            z = z.detach().requires_grad_()
            out = self.forward(z)
            each = [torch.autograd.grad(out[:, o].sum(), z, retain_graph=True)[0] for o in range(out.shape[1])]
        return torch.stack(each, 1)
