"""What a firing pattern tells: which neurons are active, which isolate a sample, which samples are lost.

The pattern is a matrix of booleans, one row per neuron, one column per sample, possibly with leading dimensions
for independent layers. Every route to A, P, R (real forward passes, Gram-space draws, theory's checks) ends here.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from qbi.calling import as_client, hooked
from qbi.errors import CannotRead
from qbi.records import Leakage


@dataclass(frozen=True)
class Isolation:
    """How many samples each neuron fires for, and which one it is where there is exactly one."""

    counts: Int[Tensor, "*layers n"]
    isolates: Bool[Tensor, "*layers n"]
    sample: Int[Tensor, "*layers n"]


def isolation(fired: Bool[Tensor, "*layers n b"]) -> Isolation:
    """Find the neurons that fire for exactly one sample, and that sample (0 where there is none)."""
    counts = fired.sum(-1)
    isolates = counts == 1
    sample = fired.to(torch.uint8).argmax(-1) * isolates
    return Isolation(counts=counts, isolates=isolates, sample=sample)


def isolated_samples(fired: Bool[Tensor, "*layers n b"]) -> Bool[Tensor, "*layers b"]:
    """Which samples stand alone in at least one neuron: those a server reads exactly."""
    return (fired & (fired.sum(-1, keepdim=True) == 1)).any(-2)


def leakage(fired: Bool[Tensor, "n b"]) -> Leakage:
    """Eqs. 2–4: shares of active neurons, of neurons with one sample, and of samples that some neuron isolates."""
    found = isolation(fired)
    return Leakage.of(
        active=float((found.counts > 0).double().mean()),
        precision=float(found.isolates.double().mean()),
        recall=float(isolated_samples(fired).double().mean()),
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

    # The same seed as in a client's step: dropout falls on the same values.
    with hooked(after={model.get_submodule(layer): watch}), as_client(model, seed=seed), torch.no_grad():
        model(*(inputs if isinstance(inputs, tuple) else (inputs,)))
    if not caught:
        raise CannotRead(f"{layer}: it did not run in this pass; there is nothing to see of it.")
    return Observation(torch.cat([c.features for c in caught]), torch.cat([c.fired for c in caught], 1))
