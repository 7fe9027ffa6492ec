"""Reading a whole update: decoding in coefficients against decoding in the space of the samples."""

import torch
from torch import Tensor

from qbi.attacks import Attack, Cascade, Mounted, Passive, mount
from qbi.federation import client_step
from qbi.lab.benchmarks.timing import Comparison, Shape, seconds
from qbi.models import two_layer
from qbi.randomness import generator
from qbi.records import Update

CLASSES = 10


def bench_whole(shape: Shape, batch: Tensor, attack: Attack, *, seed: int = 0, repeats: int = 3) -> Comparison:
    """Time the reading of one update, the gradients being there.

    The naive way forms every residual row in the space of the samples and runs it through the layer, once for each step of
    the decoding; one such step is timed and multiplied by the number of samples found, at four to a step.
    """
    device = str(batch.device)
    sent, update = _update(shape, batch, attack, seed)

    def ours() -> object:
        return sent.read(update)

    ours()
    fast = seconds(ours, device, repeats=repeats)
    gradient, weight = update.gradients[f"{sent.layer}.weight"], sent.target.weight.detach()

    def naive_step() -> object:
        residual = gradient - gradient[:, :1] * gradient[:1]
        return residual @ weight.T

    naive_step()
    one = seconds(naive_step, device, repeats=repeats)
    steps = max(1, shape.batch_size // 4)
    note = f"{steps} steps of {one * 1e3:.1f} ms"
    return Comparison(f"reading by {attack.name}", shape, fast, one * steps, True, note)


def _update(shape: Shape, batch: Tensor, attack: Attack, seed: int) -> tuple[Mounted, Update]:
    side = round((shape.features / 3) ** 0.5)
    model = torch.nn.Sequential(torch.nn.Flatten(), *two_layer(shape.features, shape.neurons, CLASSES, seed=seed)).to(
        batch.device
    )
    images = batch.reshape(-1, 3, side, side)
    targets = torch.arange(len(images), device=batch.device) % CLASSES
    sent = mount(model, attack, images[:2], generator(seed, "bench", device=batch.device), layer="1")
    return sent, client_step(sent.model, images, targets)


def attacks_for(shape: Shape) -> tuple[Attack, ...]:
    """Cascade at every shape; unmixing where an honest model gives the batch away."""
    cascade = Cascade(shape.batch_size)
    return (cascade, Passive()) if shape.batch_size <= 64 else (cascade,)
