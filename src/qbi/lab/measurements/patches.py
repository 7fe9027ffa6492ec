"""What the patch embedding and the positions of a vision transformer give away."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from qbi.carrier import flat
from qbi.data.images import denormalised, normalised, unit_pixels
from qbi.data.open import open_images
from qbi.errors import CannotRead
from qbi.federation import client_step
from qbi.lab.honest import in_one_place
from qbi.lab.networks import VisionTransformer
from qbi.metrics import EXACT, FAITHFUL, RECOGNISABLE, Guess, match
from qbi.patches import PatchEmbedding, find_embedding, one_class_speaks, read_patches, stands_alone
from qbi.private.defence import PrivateStep
from qbi.private.goal import Budget
from qbi.randomness import generator
from qbi.records import ImageData

HELD, BATCHES, BATCHES_ON_CPU = 1000, 10, 3
"""Images that no model is trained on, and batches of each row, on a GPU and on a CPU."""


@dataclass(frozen=True)
class PatchTask:
    """One row."""

    what: str
    batch_size: int
    trained: bool = False
    crafted: bool = False
    """Whether the head lets one class speak, each class of the batch in an update of its own."""
    bits: float | None = None
    shuffled: bool = False
    """Whether the positions' gradient is put out of order first."""


def settings() -> Iterator[PatchTask]:
    """One for each row of the table."""
    for trained in (False, True):
        for size in (1, 2):
            yield PatchTask("looks on", size, trained)
        for size in (2, 8, 32):
            yield PatchTask("one class speaks", size, trained, crafted=True)
    yield PatchTask("positions out of order", 1, shuffled=True)
    for bits in (72.0, 18.0, 8.0):
        yield PatchTask(f"private step, {bits:g} bits", 1, bits=bits)


def patches(data: str) -> dict[str, Any]:
    """Batches of CIFAR-10, network as initialised; on a GPU also trained for two epochs."""
    on_gpu = torch.cuda.is_available()
    device, batches = ("cuda", BATCHES) if on_gpu else ("cpu", BATCHES_ON_CPU)
    images = open_images(data, size=32, count=6000, seed=0)
    x, y = normalised(images, slice(HELD, None)).to(device), images.labels[HELD:].to(device)
    models: dict[bool, nn.Module] = {}
    for trained in (False, True) if on_gpu else (False,):
        torch.manual_seed(0)
        models[trained] = VisionTransformer().to(device)
        if trained:
            in_one_place(2, rate=0.01)(models[trained], x, y, 0)
    rows = []
    for task in (task for task in settings() if task.trained in models):
        found = [_one(task, models[task.trained], images, number, device) for number in range(batches)]
        means = {key: sum(f[key] for f in found) / len(found) for key in found[0]}
        rows.append({**task.__dict__, "batches": batches, **means})
        print(rows[-1], flush=True)
    where = f"{images.name}, {HELD:,} held out; 64 patches of 48 values, 192 wide, six layers; {batches} batches a row, {device}"
    return {"provenance": where, "rows": rows}


def _one(task: PatchTask, model: nn.Module, images: ImageData, number: int, device: str) -> dict[str, float]:
    x, y = normalised(images, slice(HELD)).to(device), images.labels[:HELD].to(device)
    order = torch.randperm(HELD, generator=generator(0, "patches", number))
    chosen = order[: task.batch_size]
    embedding = find_embedding(model, (3, 32, 32))
    assert embedding is not None
    read, proven, updates = [], 0, 0
    for sent, label, gradients in _sent(task, model, x[chosen], y[chosen], embedding, number):
        updates += 1
        try:
            found = read_patches(embedding, gradients, x[0].numel())
        except CannotRead:
            continue
        read.append(found.image)
        proven += stands_alone(found, sent, embedding, gradients, x[chosen], label)
    made = flat(denormalised(images, torch.stack(read))) if read else torch.zeros(0, x[0].numel())
    pixels = flat(unit_pixels(images, slice(None)))
    truth = pixels[chosen]
    recoveries = match(made, truth)
    guess = Guess.of(truth, recoveries, pixels[HELD:], 1.0)
    shares = {k: float(recoveries[t].recovered.double().mean()) for k, t in (("exact", EXACT), ("faithful", FAITHFUL), ("recognisable", RECOGNISABLE))}  # fmt: skip
    return shares | {"proven": proven / task.batch_size, "guess": guess.share[RECOGNISABLE], "updates": float(updates)}


def _sent(
    task: PatchTask, model: nn.Module, x: Tensor, y: Tensor, embedding: PatchEmbedding, number: int
) -> Iterator[tuple[nn.Module, Tensor, Mapping[str, Tensor]]]:
    """The models that a server sends, a label that may be there, and the updates that it gets of one batch."""
    if task.crafted:
        for label in y.unique():
            sent = one_class_speaks(model, int(label))
            yield sent, label[None], client_step(sent, x, y).gradients
    elif task.bits is not None:
        step = PrivateStep(Budget.for_goal(bits=task.bits))
        yield model, y[:1], step.update(model, x, y, generator(number, "noise", device=str(x.device))).gradients
    else:
        gradients = dict(client_step(model, x, y).gradients)
        if task.shuffled:
            order = torch.randperm(65, generator=generator(number, "order"))
            gradients[embedding.positions] = gradients[embedding.positions][:, order]
        yield model, y[:1], gradients
