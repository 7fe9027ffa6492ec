"""What a candidate adds to an update if the client's targets are classes, label by label."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from jaxtyping import Float64, Int
from torch import Tensor, nn

from qbi.attacks.behind import Behind
from qbi.extraction.decoding import MOST_REPEATS
from qbi.extraction.system import System
from qbi.federation.client import Loss

MOST_HELD = 2**22
"""Output gradients that are asked for at a time."""


@dataclass(frozen=True)
class ByLabel:
    """For targets that are classes: every possible label is tried, through autograd and the client's own loss."""

    behind: Behind
    loss: Loss
    labels: Int[Tensor, " l"]
    scale: float
    """What the mean over the batch divides by; 1 for a sum."""
    is_mean: bool
    kept: Tensor
    is_sure: bool = True
    """Whether what a label sends back may prove a sample: the loss is cross-entropy, as a mean or a sum over samples."""
    weights: Float64[Tensor, " c"] | None = None
    """Of each class, where they are not all the same."""
    as_it_runs: bool = False
    """Whether the model itself is asked, and never the map that stands for it: certificates are given so."""
    pins_values: ClassVar[bool] = True

    def _output_grad(self, out: Tensor, labels: Tensor) -> Tensor:
        with torch.enable_grad():
            leaf = out.detach().requires_grad_()
            value = self.loss(leaf, labels)
            (grad,) = torch.autograd.grad(value, leaf)
        # A mean over these candidates is undone; the client's own mean stands in the scale.
        if self.weights is not None:
            return grad * float(self.weights[labels].sum()) / self.scale
        return grad * (len(out) if self.is_mean else 1) / self.scale

    @property
    def goes_anywhere(self) -> bool:
        """Whether all that is asked here is a matter of the map and of plain cross-entropy, on whichever device."""
        held = self.loss.buffers() if isinstance(self.loss, nn.Module) else ()
        return self.is_sure and self._mapped is not None and not list(held)

    @cached_property
    def _mapped(self) -> tuple[Tensor, Tensor] | None:
        """What each output makes of each row that fires, and what it is where none does; None where more than this layer bends."""
        heads = None if self.as_it_runs else self.behind.affine_map
        if heads is None:
            return None
        with torch.no_grad():
            at_rest = self.behind.forward(heads.new_zeros(1, self.behind.neurons))
        kept = self.kept
        return heads.to(kept.device)[:, kept], at_rest.to(kept.device)

    def _outputs(self, z: Tensor) -> Tensor:
        if self._mapped is not None:
            heads, at_rest = self._mapped
            return z.relu() @ heads.T + at_rest
        with torch.no_grad():
            return self.behind.forward(self.behind.widened(z, self.kept))

    def each_label(self, z: Float64[Tensor, "k n"]) -> Iterator[tuple[int, Float64[Tensor, "k o"]]]:
        """Each label, and what samples of it send back from the outputs, standing there once; many labels are asked for together."""
        out = self._outputs(z)
        for part in self.labels.split(max(1, MOST_HELD // max(1, out.numel()))):
            labels = part.repeat_interleave(len(out))
            grads = self._output_grad(out.repeat(len(part), 1), labels).unflatten(0, (len(part), len(out)))
            yield from zip(part.tolist(), grads, strict=True)

    def explain(
        self,
        z: Float64[Tensor, "k n"],
        rows: Int[Tensor, " k"],
        wanted: Float64[Tensor, " k"],
        system: System,  # noqa: ARG002
    ) -> tuple[Int[Tensor, " k"], Float64[Tensor, "k o"], Float64[Tensor, " k"]]:
        """The label whose share is nearest, standing there once or a few times."""
        ratios = self.ratios(z, rows, wanted)
        counts = ratios.round().clamp(1, MOST_REPEATS)
        best, place = ((ratios - counts) / counts).abs().nan_to_num(torch.inf).min(0)
        times = counts.gather(0, place[None])[0].nan_to_num(1.0)
        label = self.labels[place].masked_fill(best.isinf(), -1)
        return label, self.single(z, label.clamp_min(0)) * times[:, None], best

    def explain_whole(
        self,
        z: Float64[Tensor, "k n"],
        backprops: Float64[Tensor, "k n"],
        system: System,  # noqa: ARG002
    ) -> tuple[Int[Tensor, " k"], Float64[Tensor, "k o"], Float64[Tensor, " k"]]:
        """The label whose backprops are nearest over all rows; in a single one two labels may send the same."""
        best = z.new_full((len(z),), torch.inf)
        label, output_grads = torch.full((len(z),), -1, device=z.device), z.new_zeros(len(z), self.behind.outputs)
        size = backprops.square().sum(1).clamp_min(1e-300)
        for candidate, grads in self.each_label(z):
            sent = self.backprops(z, grads)
            times = (sent * backprops).sum(1) / sent.square().sum(1).clamp_min(1e-300)
            times = times.round().clamp(1, MOST_REPEATS)[:, None]
            miss = ((sent * times - backprops).square().sum(1) / size).sqrt().nan_to_num(torch.inf)
            better = miss < best
            best, label = torch.where(better, miss, best), torch.where(better, candidate, label)
            output_grads = torch.where(better[:, None], grads * times, output_grads)
        return label, output_grads, best

    def ratios(
        self, z: Float64[Tensor, "k n"], rows: Int[Tensor, " k"], wanted: Float64[Tensor, " k"]
    ) -> Float64[Tensor, "l k"]:
        """For each label, how many times what it sends to a row the row holds."""
        slopes = self.behind.row_slopes(self.behind.widened(z, self.kept), self.kept[rows])
        share = torch.stack([(grads * slopes).sum(1) for _, grads in self.each_label(z)])
        return wanted / torch.where(share == 0, torch.nan, share)

    def output_grads(
        self,
        z: Float64[Tensor, "k n"],
        labels: Int[Tensor, " k"],
        before: Float64[Tensor, "k o"],
        system: System,  # noqa: ARG002
    ) -> Float64[Tensor, "k o"]:
        """From the loss; how often a sample stands in the batch is kept."""
        now = self.single(z, labels)
        times = (before * now).sum(1) / now.square().sum(1).clamp_min(1e-300)
        return now * times.round().clamp(1, MOST_REPEATS)[:, None]

    def single(self, z: Float64[Tensor, "k n"], labels: Int[Tensor, " k"]) -> Float64[Tensor, "k o"]:
        """What samples of known labels send back from the outputs, each standing there once."""
        return self._output_grad(self._outputs(z), labels)

    def backprops(self, z: Float64[Tensor, "k n"], output_grads: Float64[Tensor, "k o"]) -> Float64[Tensor, "k n"]:
        """By a backward pass, or the map that stands for one."""
        if self._mapped is not None:
            return (output_grads @ self._mapped[0]) * (z > 0)
        return self.behind.backward(self.behind.widened(z, self.kept), output_grads)[:, self.kept]
