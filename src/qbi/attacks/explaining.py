"""What the sent model says of a candidate: with which label, if any, it explains its part of an update."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from jaxtyping import Float64, Int
from torch import Tensor, nn

from qbi.attacks.base import Carried, Reading
from qbi.attacks.behind import Behind
from qbi.attacks.by_label import ByLabel
from qbi.attacks.weighing import agreed, class_weights, is_cross_entropy
from qbi.errors import CannotRead, first_line
from qbi.extraction.decoding import row_bound
from qbi.extraction.system import System
from qbi.federation.client import Loss
from qbi.records import Update

ALL_LABELS = 64
"""Classes up to which every label is tried; beyond, those that the head's bias gradient says are there."""

MOST_OUTPUTS = 32
"""Outputs up to which targets that are numbers are solved for."""


@dataclass(frozen=True)
class ByNumber:
    """For targets that are numbers, or a loss that is not known: whatever a sample sends back from the outputs, its backprops
    must lie in the space that the update allows. That determines it up to its size, which the row gives."""

    behind: Behind
    kept: Tensor
    pins_values: ClassVar[bool] = False

    def explain(
        self, z: Float64[Tensor, "k n"], rows: Int[Tensor, " k"], wanted: Float64[Tensor, " k"], system: System
    ) -> tuple[Int[Tensor, " k"], Float64[Tensor, "k o"], Float64[Tensor, " k"]]:
        """The output gradient that the space allows best; its row is met by its size, and the space is the test."""
        output_grads, slopes = self._allowed(z, system)
        own = (output_grads * slopes[torch.arange(len(z), device=z.device), :, rows]).sum(1)
        size = wanted / torch.where(own == 0, torch.nan, own)
        none = torch.full((len(z),), -1, device=z.device)
        return (
            none,
            (output_grads * size[:, None]).nan_to_num(0.0),
            torch.zeros_like(size).masked_fill(~size.isfinite(), torch.inf),
        )

    def explain_whole(
        self, z: Float64[Tensor, "k n"], backprops: Float64[Tensor, "k n"], system: System
    ) -> tuple[Int[Tensor, " k"], Float64[Tensor, "k o"], Float64[Tensor, " k"]]:
        """As above, its size by the row in which most is sent back."""
        rows = (backprops / system.sizes).abs().argmax(1)
        return self.explain(z, rows, backprops[torch.arange(len(rows), device=rows.device), rows], system)

    def output_grads(
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

    def backprops(self, z: Float64[Tensor, "k n"], output_grads: Float64[Tensor, "k o"]) -> Float64[Tensor, "k n"]:
        """By a backward pass."""
        return self.behind.backward(self.behind.widened(z, self.kept), output_grads)[:, self.kept]


def tail_for(carried: Carried, update: Update, how: Reading, system: System) -> tuple[ByLabel | ByNumber, int]:
    """How candidates at this layer are explained, and the number of the model's outputs; an error says why they cannot be."""
    behind = Behind(carried)
    if how.targets == "numbers":
        if behind.outputs > MOST_OUTPUTS or system.rows - system.rank <= behind.outputs:
            raise CannotRead(
                f"{carried.layer}: {behind.outputs} outputs with targets that are numbers; too many to be solved for."
            )
        return ByNumber(behind, system.kept), behind.outputs
    labels = _labels(carried.model, update, behind.outputs).to(system.bias.device)
    try:
        parts = _divided_by(how.loss, behind.outputs, system.bias)
        weights = class_weights(how.loss, behind.outputs, system.bias) if parts is None else None
        sure = parts is not None and is_cross_entropy(how.loss, behind.outputs, system.bias)
    except Exception as problem:
        # The user's own function may take nothing but its own data.
        raise CannotRead(
            f"{carried.layer}: what the loss sends back is not known ({first_line(problem)})."
        ) from problem
    scale = float(max(1, update.batch_size)) if parts == 2 else 1.0
    tail = ByLabel(behind, how.loss, labels, scale, parts == 2, system.kept, sure, weights)
    return _scaled(tail, system, adds_up=parts is not None), behind.outputs


def _scaled(tail: ByLabel, system: System, *, adds_up: bool) -> ByLabel:
    """With the factor that rows agree on, where the one that is expected explains none of them."""
    rows = (system.bias != 0).nonzero()[:, 0]
    z, wanted = system.products[rows] / system.bias[rows, None], system.bias[rows]
    if len(rows) == 0 or not bool(z.isfinite().all()):
        return tail
    noise = system.rounding * system.sketch[rows].norm(dim=1) / system.sketch.shape[1] ** 0.5
    _, _, miss = tail.explain(z, rows, wanted, system)
    if adds_up and bool((miss < row_bound(system, noise / wanted.abs())).any()):
        return tail
    ratios = tail.ratios(z, rows, wanted)
    factor = agreed(ratios.flatten())
    if factor is None:
        return tail
    # A number that nobody said may be a client's scale, or how many samples of a kind stand in every row: it is read with, and proves nothing.
    return replace(tail, scale=tail.scale / factor, is_sure=False)


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
