"""A client's step that also records what only the client can know: each sample's share of every row."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from qbi.exposure import Exposure, vulnerable_layers, watched
from qbi.federation.client import Loss, client_step, default_loss
from qbi.records import Update


@dataclass(frozen=True)
class ClientStep:
    """What a client is about to send, and what it knows about it."""

    update: Update
    exposures: tuple[Exposure, ...]


def exposed_step(
    model: nn.Module,
    inputs: Tensor | tuple[Tensor, ...],
    targets: Tensor,
    *,
    layers: Sequence[str] | None = None,
    loss: Loss = default_loss,
    seed: int = 0,
    as_it_is: bool = False,
) -> ClientStep:
    """A FedSGD step with the exposure of the named linear layers (all with a bias, if none is named)."""
    names = tuple(vulnerable_layers(model)) if layers is None else tuple(layers)
    with watched(model, names) as watch:
        update = client_step(model, inputs, targets, loss=loss, seed=seed, as_it_is=as_it_is)
    return ClientStep(update=update, exposures=tuple(watch.exposure(name) for name in names))
