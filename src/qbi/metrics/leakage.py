"""A, P and R of one batch from the activations of a real layer."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from qbi.errors import CannotRead
from qbi.firing import isolated_samples, isolation
from qbi.records import Leakage


def leakage(fired: Bool[Tensor, "n b"]) -> Leakage:
    """Eqs. 2–4: shares of active neurons, of neurons with one sample, and of samples that some neuron isolates."""
    found = isolation(fired)
    isolated = isolated_samples(fired)
    return Leakage(
        active=float((found.counts > 0).double().mean()),
        precision=float(found.isolates.double().mean()),
        recall=float(isolated.double().mean()),
        isolated=isolated,
    )


@dataclass(frozen=True)
class Observation:
    """What a client sees of one layer on its batch: the features that arrive, and which neurons fire."""

    features: Float[Tensor, "b w"]
    fired: Bool[Tensor, "n b"]


def observe(model: nn.Module, layer: str, inputs: Tensor | tuple[Tensor, ...], *, seed: int = 0) -> Observation:
    """Watch one linear layer during a pass in train mode, as a client runs it; the model is unchanged."""
    caught: list[Observation] = []

    def watch(_module: nn.Module, arrived: tuple[Tensor, ...], out: Tensor) -> None:
        # A layer that acts on each position by itself sees every position as a sample.
        features, fired = arrived[0].detach(), out.detach() > 0
        caught.append(Observation(features.reshape(-1, features.shape[-1]), fired.reshape(-1, fired.shape[-1]).T))

    hook = model.get_submodule(layer).register_forward_hook(watch)
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    was_training = model.training
    try:
        model.train()
        first = inputs[0] if isinstance(inputs, tuple) else inputs
        with torch.no_grad(), torch.random.fork_rng(devices=[first.device] if first.device.type == "cuda" else []):
            # The same seed as in a client's step: dropout falls on the same values.
            torch.manual_seed(seed)
            torch.func.functional_call(model, buffers, inputs if isinstance(inputs, tuple) else (inputs,))
    finally:
        model.train(was_training)
        hook.remove()
    if len(caught) != 1:
        raise CannotRead(f"{layer}: it ran {len(caught)} times in one pass; a firing pattern needs exactly one.")
    return caught[0]
