"""Undo the normalisation layer in front of the attacked one.

BatchNorm: the update brings the running statistics after the step, the server knows those it sent, and the
difference is the batch's own mean and variance, exactly. LayerNorm: each sample's statistics stay with the client,
so public statistics of the domain stand in for them, and the result is close, not exact.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from qbi.carrier import Normalised
from qbi.errors import CannotRead
from qbi.records import Update

BatchNorm = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d


@dataclass(frozen=True)
class PublicStatistics:
    """Mean and standard deviation of the domain, one a channel."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


def undo(
    samples: Float[Tensor, "k m"],
    shape: tuple[int, ...],
    sent: nn.Module,
    step: Normalised,
    update: Update,
    public: PublicStatistics | None,
) -> Float[Tensor, "k m"]:
    """Undo one normalisation layer on samples of the given shape."""
    name = step.layer
    layer = sent.get_submodule(name)
    channel = step.channel.to(samples.device)
    if isinstance(layer, nn.LayerNorm):
        if public is None:
            raise CannotRead(f"{name} (LayerNorm): undoing it needs public statistics of the domain; give them.")
        return undo_layer_norm(samples, shape, public, _chosen(layer.weight, channel), _chosen(layer.bias, channel))
    if not isinstance(layer, BatchNorm):
        raise CannotRead(f"{name} ({type(layer).__name__}): this kind of normalisation cannot be undone.")
    mean, variance = batch_statistics(layer, name, update, update.batch_size * step.positions)
    values = samples.double()
    if layer.weight is not None:
        values = (values - layer.bias.double()[channel]) / layer.weight.double()[channel]
    restored = mean[channel] + values * (variance + layer.eps).sqrt()[channel]
    return restored.to(samples.dtype).detach()


def _chosen(parameter: Tensor | None, channel: Tensor) -> Tensor | None:
    return None if parameter is None else parameter.detach().flatten()[channel]


def batch_statistics(layer: BatchNorm, name: str, update: Update, count: int) -> tuple[Tensor, Tensor]:
    """The batch's mean and biased variance, solved from the running ones before and after (erratum 11).

    PyTorch normalises with the biased variance but stores the unbiased one; `count` = B·H·W undoes the factor.
    With `momentum=None` the running statistics are cumulative averages.
    """
    if layer.running_mean is None or layer.running_var is None or layer.num_batches_tracked is None:
        raise CannotRead(f"{name} ({type(layer).__name__}): it tracks no statistics, so the batch's own stay hidden.")
    momentum = 1 / (int(layer.num_batches_tracked) + 1) if layer.momentum is None else layer.momentum
    if momentum == 0:
        raise CannotRead(f"{name} ({type(layer).__name__}): momentum is 0, so its statistics never move.")
    new_mean = update.buffers[f"{name}.running_mean"].double()
    new_variance = update.buffers[f"{name}.running_var"].double()
    mean = (new_mean - (1 - momentum) * layer.running_mean.double()) / momentum
    unbiased = (new_variance - (1 - momentum) * layer.running_var.double()) / momentum
    return mean, (unbiased * (count - 1) / count).clamp_min(0)


def undo_layer_norm(
    samples: Float[Tensor, "k m"],
    shape: tuple[int, ...],
    public: PublicStatistics,
    gamma: Tensor | None = None,
    beta: Tensor | None = None,
) -> Float[Tensor, "k m"]:
    """Put public statistics, channel by channel, in the place of each sample's own."""
    values = samples
    if gamma is not None:
        offset = torch.zeros_like(gamma) if beta is None else beta
        values = (samples - offset) / gamma
    per_channel = values.reshape(len(samples), shape[0], -1)
    mean = torch.tensor(public.mean).to(per_channel)[:, None]
    std = torch.tensor(public.std).to(per_channel)[:, None]
    return (per_channel * std + mean).reshape(samples.shape)
