"""The model behind an attacked layer, as a function of the layer's pre-activations."""

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from qbi.attacks.base import Carried
from qbi.errors import CannotRead, first_line
from qbi.randomness import generator
from qbi.routing.tail import first_tensor, tail_of

FEW_OUTPUTS = 16
"""Outputs up to which a backward pass for each is cheaper than one forward pass with derivatives, whose first call takes seconds."""


MOST_SLOPES = 64
"""Outputs up to which what all of them send back is looked at together."""

MOST_MAPPED = 256
"""Outputs up to which it is looked at whether anything but the layer's own rectifier bends."""

NEXT_TO_ZERO = 1e-9


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
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                self.outputs = first_tensor(self.run(torch.zeros(1, self.neurons, dtype=torch.float64))).shape[1]
                self._check(carried.layer)
        except CannotRead:
            raise
        except Exception as problem:
            raise CannotRead(
                f"{carried.layer}: what stands behind it cannot be run ({first_line(problem)})."
            ) from problem

    def _check(self, layer: str) -> None:
        """Samples must come through alone, and twice the same: what mixes them, or draws, may be a function that no module shows."""
        rows = torch.randn(3, self.neurons, generator=generator(0, "behind"), dtype=torch.float64)
        together, again = self.forward(rows), self.forward(rows)
        alone = torch.cat([self.forward(row) for row in rows.split(1)])
        if together.shape != alone.shape or not bool(
            torch.isclose(together, again, rtol=1e-9, atol=1e-12, equal_nan=True).all()
            and torch.isclose(together, alone, rtol=1e-9, atol=1e-12, equal_nan=True).all()
        ):
            raise CannotRead(f"{layer}: what stands behind it mixes samples or draws at random; none explains itself.")

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
        if self.affine_map is not None:
            return self.affine_map.to(z)[:, rows].T * (z.gather(1, rows[:, None]) > 0)
        if self.outputs <= FEW_OUTPUTS:
            return torch.stack([each.gather(1, rows[:, None])[:, 0] for each in self._pulled(z)], 1)
        direction = torch.zeros_like(z)
        direction[torch.arange(len(z), device=z.device), rows] = 1
        found: Any = torch.func.jvp(self.forward, (z,), (direction,))
        slopes: Tensor = found[1]
        return slopes

    def jacobian(self, z: Tensor) -> Tensor:
        """All slopes, one vector of the layer for each output: k × outputs × neurons."""
        return torch.stack(list(self._pulled(z)), 1)

    def _pulled(self, z: Tensor) -> Iterator[Tensor]:
        """What arrives at the layer when one output after another is pulled at."""
        with torch.enable_grad():
            z = z.detach().requires_grad_()
            out = self.forward(z)
        for o in range(out.shape[1]):
            yield torch.autograd.grad(out[:, o].sum(), z, retain_graph=True)[0]

    @cached_property
    def affine_map(self) -> Tensor | None:
        """What each output makes of each neuron that fires, where the layer's own rectifier is all that bends; None elsewhere.

        Looked at where all neurons fire, and at random signs from tiny values to huge ones: a second rectifier, or anything else that bends,
        does not send the same everywhere.
        """
        if self.outputs > MOST_MAPPED:
            return None
        draws = generator(0, "affine")
        sizes = torch.logspace(-3, 4, 16, dtype=torch.float64)[:, None]
        z = sizes * torch.randn(len(sizes), self.neurons, generator=draws, dtype=torch.float64)
        every = self.jacobian(torch.ones_like(z[:1]))
        found = self.jacobian(torch.cat([z, z.abs(), -z.abs()]))
        wanted = every * (torch.cat([z, z.abs(), -z.abs()]) > 0)[:, None]
        same = (found - wanted).abs() <= 1e-9 * every.abs().amax()
        return every[0] if bool(same.all()) else None

    def slopes_if_firing(self, kept: Tensor) -> Callable[[Tensor], Tensor | None]:
        """From pre-activations of these rows to how each output would move with each of them if it fired: k × outputs × rows.

        None where a row below zero is not silent, and where outputs are many, or one.
        """

        def slopes(z: Tensor) -> Tensor | None:
            if not 2 <= self.outputs <= MOST_SLOPES:
                return None
            if self.affine_map is not None:
                return self.affine_map.to(z)[:, kept].expand(len(z), -1, -1)
            # Just below zero, further down, and where these samples are: what is silent there is a rectifier's.
            down = -torch.tensor([NEXT_TO_ZERO, 0.1, 1.0], dtype=z.dtype, device=z.device)[:, None].expand(
                -1, len(kept)
            )
            below = torch.cat([down, z.abs().neg() - NEXT_TO_ZERO])
            if bool(self.jacobian(self.widened(below, kept))[:, :, kept].any()):
                return None
            # Rows that are silent come just above zero, so that nothing behind them changes.
            return self.jacobian(self.widened(z.clamp_min(NEXT_TO_ZERO), kept))[:, :, kept]

        return slopes
