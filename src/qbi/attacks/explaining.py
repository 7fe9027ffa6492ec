"""What the sent model says of a candidate: with which label, if any, it explains its part of an answer."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float64, Int
from torch import Tensor, nn

from qbi.attacks.base import Carried, Reading
from qbi.errors import CannotRead, first_line
from qbi.extraction.decoding import MOST_REPEATS
from qbi.extraction.system import System
from qbi.federation.client import Loss
from qbi.records import Update
from qbi.routing.tail import first_tensor, tail_of

ALL_LABELS = 64
"""Classes up to which every label is tried; beyond, those that the head's bias gradient says are there."""

FEW_OUTPUTS = 16
"""Outputs up to which a backward pass for each is cheaper than one forward pass with derivatives, whose first call takes seconds."""

MOST_OUTPUTS = 32
"""Outputs up to which targets that are numbers are solved for."""


class SeesPositions(CannotRead):
    """A layer that acts on each position by itself: how many of them stand in an answer is not known."""


class _Behind:
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

    def pulled(self, z: Tensor, pulls: Tensor) -> Tensor:
        """Pulls at the outputs, as they arrive at the layer."""
        with torch.enable_grad():
            z = z.detach().requires_grad_()
            (back,) = torch.autograd.grad((self.forward(z) * pulls).sum(), z)
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


@dataclass(frozen=True)
class ByLabel:
    """For targets that are classes: every possible label is tried, through autograd and the client's own loss."""

    behind: _Behind
    loss: Loss
    labels: Int[Tensor, " l"]
    scale: float
    """What the mean over the batch divides by; 1 for a sum."""
    kept: Tensor
    is_sure: bool = True
    """Whether what a label sends back is known: the loss is a mean or a sum over samples."""
    pins_values: ClassVar[bool] = True

    def _pull(self, out: Tensor, labels: Tensor) -> Tensor:
        with torch.enable_grad():
            leaf = out.detach().requires_grad_()
            value = self.loss(leaf, labels)
            (pull,) = torch.autograd.grad(value, leaf)
        # A mean over these candidates is undone; the client's own mean stands in the scale.
        return pull * (len(out) if self.scale != 1 else 1) / self.scale

    def explain(
        self, z: Float64[Tensor, "k n"], rows: Int[Tensor, " k"], wanted: Float64[Tensor, " k"], system: System
    ) -> tuple[Int[Tensor, " k"], Float64[Tensor, "k o"], Float64[Tensor, " k"]]:
        """The label whose share is nearest, standing there once or a few times."""
        wide = self.behind.widened(z, system.kept)
        with torch.no_grad():
            out = self.behind.forward(wide)
        slopes = self.behind.row_slopes(wide, system.kept[rows])
        best = z.new_full((len(z),), torch.inf)
        label, times = torch.full((len(z),), -1, device=z.device), torch.ones_like(best)
        for candidate in self.labels.tolist():
            share = (self._pull(out, torch.full((len(z),), candidate, device=z.device)) * slopes).sum(1)
            ratio = wanted / torch.where(share == 0, torch.nan, share)
            count = ratio.round().clamp(1, MOST_REPEATS)
            miss = ((ratio - count) / count).abs().nan_to_num(torch.inf)
            better = miss < best
            best, times = torch.where(better, miss, best), torch.where(better, count, times)
            label = torch.where(better, candidate, label)
        pulls = self._pull(out, label.clamp_min(0)) * times[:, None]
        return label, pulls, best

    def pulls(
        self, z: Float64[Tensor, "k n"], labels: Int[Tensor, " k"], before: Float64[Tensor, "k o"], system: System
    ) -> Float64[Tensor, "k o"]:
        """From the loss; how often a sample stands in the batch is kept."""
        now = self.single(z, labels, system)
        times = (before * now).sum(1) / now.square().sum(1).clamp_min(1e-300)
        return now * times.round().clamp(1, MOST_REPEATS)[:, None]

    def single(self, z: Float64[Tensor, "k n"], labels: Int[Tensor, " k"], system: System) -> Float64[Tensor, "k o"]:
        """What samples of known labels send back from the outputs, each standing there once."""
        with torch.no_grad():
            out = self.behind.forward(self.behind.widened(z, system.kept))
        return self._pull(out, labels)

    def shares(self, z: Float64[Tensor, "k n"], pulls: Float64[Tensor, "k o"]) -> Float64[Tensor, "k n"]:
        """By a backward pass."""
        return self.behind.pulled(self.behind.widened(z, self.kept), pulls)[:, self.kept]


@dataclass(frozen=True)
class ByNumber:
    """For targets that are numbers, or a loss that is not known: whatever a sample sends back from the outputs, its shares
    must lie in the space that the answer allows. That determines it up to its size, which the row gives."""

    behind: _Behind
    kept: Tensor
    pins_values: ClassVar[bool] = False

    def explain(
        self, z: Float64[Tensor, "k n"], rows: Int[Tensor, " k"], wanted: Float64[Tensor, " k"], system: System
    ) -> tuple[Int[Tensor, " k"], Float64[Tensor, "k o"], Float64[Tensor, " k"]]:
        """The pull that the space allows best; its row is met by its size, and the space is the test."""
        pulls, slopes = self._allowed(z, system)
        own = (pulls * slopes[torch.arange(len(z), device=z.device), :, rows]).sum(1)
        size = wanted / torch.where(own == 0, torch.nan, own)
        none = torch.full((len(z),), -1, device=z.device)
        return (
            none,
            (pulls * size[:, None]).nan_to_num(0.0),
            torch.zeros_like(size).masked_fill(~size.isfinite(), torch.inf),
        )

    def pulls(
        self,
        z: Float64[Tensor, "k n"],
        labels: Int[Tensor, " k"],  # noqa: ARG002
        before: Float64[Tensor, "k o"],
        system: System,
    ) -> Float64[Tensor, "k o"]:
        """The allowed direction again, at the size it had."""
        now, _ = self._allowed(z, system)
        return now * (before * now).sum(1, keepdim=True)

    def _allowed(self, z: Tensor, system: System) -> tuple[Tensor, Tensor]:
        slopes = self.behind.jacobian(self.behind.widened(z, system.kept))[:, :, system.kept]
        scaled = slopes / system.sizes
        rest = scaled - (scaled @ system.basis) @ system.basis.T
        metric = (scaled @ scaled.transpose(1, 2)).diagonal(dim1=1, dim2=2).sum(1)[:, None, None]
        _, vectors = torch.linalg.eigh(rest @ rest.transpose(1, 2) / metric.clamp_min(1e-300))
        return vectors[:, :, 0], slopes

    def shares(self, z: Float64[Tensor, "k n"], pulls: Float64[Tensor, "k o"]) -> Float64[Tensor, "k n"]:
        """By a backward pass."""
        return self.behind.pulled(self.behind.widened(z, self.kept), pulls)[:, self.kept]


def tail_for(carried: Carried, update: Update, how: Reading, system: System) -> tuple[ByLabel | ByNumber, int]:
    """How candidates at this layer are explained, and the number of the model's outputs; an error says why they cannot be."""
    behind = _Behind(carried)
    if how.targets == "numbers":
        if behind.outputs > MOST_OUTPUTS or system.rows - system.rank <= behind.outputs:
            raise CannotRead(
                f"{carried.layer}: {behind.outputs} outputs with targets that are numbers; too many to be solved for."
            )
        return ByNumber(behind, system.kept), behind.outputs
    labels = _labels(carried.model, update, behind.outputs).to(system.bias.device)
    parts = _divided_by(how.loss, behind.outputs, system.bias)
    scale = float(max(1, update.batch_size)) if parts != 1 else 1.0
    return ByLabel(behind, how.loss, labels, scale, system.kept, is_sure=parts is not None), behind.outputs


def _labels(model: nn.Module, update: Update, outputs: int) -> Tensor:
    """The labels that may be there: all of a few, or those that the head's bias gradient pulls up."""
    every = torch.arange(max(2, outputs))
    if outputs <= ALL_LABELS:
        return every
    head = [n for n, p in model.named_parameters() if p.shape == (outputs,) and n in update.gradients]
    if not head:
        return every
    present = (update.gradients[head[-1]] < 0).nonzero()[:, 0].cpu()
    return present if len(present) else every


def _divided_by(loss: Loss, outputs: int, like: Tensor) -> float | None:
    """What a loss divides the sum over a batch of two by: 2 for a mean, 1 for a sum, None where samples do not simply add up."""
    draws = torch.Generator().manual_seed(0)
    out = torch.randn(2, outputs, generator=draws, dtype=torch.float64).to(like)
    target: Any = torch.tensor([0, min(1, max(0, outputs - 1))], device=like.device)
    both = loss(out, target)
    total = loss(out[:1], target[:1]) + loss(out[1:], target[1:])
    for parts in (2.0, 1.0):
        if bool((both * parts - total).abs() <= 1e-9 * total.abs()):
            return parts
    return None
