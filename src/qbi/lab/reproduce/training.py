"""What AGGP costs a benign network: validation accuracy over epochs, with and without.

The full form (25 epochs, 10 seeds, all of CIFAR-10) takes a GPU: `qbi measure training` makes it and keeps it in
`published/training_full.json`. The short one runs anywhere.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qbi.data.images import normalised
from qbi.defences import AGGP, prune_rows_in_place
from qbi.lab.reproduce.prepared import map_images
from qbi.lab.reproduce.workplace import Workplace
from qbi.lab.training import accuracy, train
from qbi.lab.workers import Workers
from qbi.metrics import mean_interval
from qbi.models import image_cnn
from qbi.randomness import derive_seed, generator
from qbi.records import ImageData
from qbi.report.plotting import new_figure, picture_of

BATCH_SIZE = 64
LEARNING_RATE = 1e-5
EPOCHS = 25
SHORT_IMAGES, SHORT_EPOCHS, SHORT_SEEDS = 1280, 3, 2


@dataclass(frozen=True)
class TrainingRun:
    """Validation accuracy after every epoch of one run, and the share of rows AGGP pruned."""

    accuracy: list[float]
    pruned_share: float


def train_cnn(
    images: Tensor,
    labels: Tensor,
    held_out: tuple[Tensor, Tensor],
    *,
    aggp: AGGP | None,
    epochs: int,
    seed: int,
    batch_size: int = BATCH_SIZE,
    epoch_done: Callable[[int], None] | None = None,
) -> TrainingRun:
    """Train the paper's CNN with Adam on normalised images; the same seed sees the same weights and batches."""
    device = images.device
    torch.manual_seed(derive_seed(seed, "weights") % 2**31)
    model = image_cnn((3, *images.shape[2:]), classes=10).to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    layer = model.get_submodule("fc1")
    assert isinstance(layer, nn.Linear)
    counts: list[Tensor] = []
    layer.register_forward_hook(lambda _m, _i, out: counts.append((out > 0).sum(0)) if model.training else None)
    optimiser = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    order, masks = generator(seed, "order"), generator(seed, "masks")
    reached: list[float] = []
    pruned, seen = torch.zeros((), dtype=torch.long, device=device), 0
    images = images.contiguous(memory_format=torch.channels_last)

    def step(chosen: Tensor) -> None:
        nonlocal seen
        counts.clear()
        optimiser.zero_grad(set_to_none=True)
        F.cross_entropy(model(images[chosen]), labels[chosen]).backward()
        if aggp is not None:
            assert layer.weight.grad is not None
            prune_rows_in_place(layer.weight.grad, counts[0], masks, aggp)
            pruned.add_(((counts[0] > 0) & (counts[0] < aggp.cutoff)).sum())
            seen += len(counts[0])
        optimiser.step()

    model.train()
    places, last = torch.arange(len(images), device=device), -(-len(images) // batch_size) - 1
    for epoch, number in train(step, places, batch_size, epochs, order):
        if number == last:
            reached.append(accuracy(model, *held_out))
            if epoch_done is not None:
                epoch_done(epoch)
    return TrainingRun(reached, int(pruned) / seen if seen else 0.0)


def both_arms(seed: int, data: ImageData, device: str, epochs: int) -> dict[str, TrainingRun]:
    """One seed of the paper's figure: a sixth of the images held out, both arms with the same weights and batches."""
    images, labels = normalised(data, slice(None)).to(device), data.labels.to(device)
    order = torch.randperm(len(data), generator=generator(seed, "full training")).to(device)
    held_out, kept = order[: len(data) // 6], order[len(data) // 6 :]
    validation = images[held_out], labels[held_out]
    return {
        arm: train_cnn(images[kept], labels[kept], validation, aggp=settings, epochs=epochs, seed=seed)
        for arm, settings in (("base", None), ("aggp", AGGP()))
    }


def full_form(
    data: ImageData,
    device: str,
    *,
    epochs: int = EPOCHS,
    seeds: int = 10,
    jobs: int = 1,
    done: Callable[[int], None] = lambda _finished: None,
) -> dict[str, Any]:
    """The paper's figure, seeds side by side in `jobs` processes."""
    found: dict[int, dict[str, TrainingRun]] = {}
    for seed, arms_of_seed in Workers(jobs).map(both_arms, range(seeds), data, device, epochs):
        found[seed] = arms_of_seed
        done(len(found))
    arms = {arm: [found[seed][arm] for seed in range(seeds)] for arm in ("base", "aggp")}
    return {
        "epochs": epochs,
        "batch_size": BATCH_SIZE,
        "learning_rate": LEARNING_RATE,
        "pruned_row_share": sum(t.pruned_share for t in arms["aggp"]) / seeds,
        **{arm: [t.accuracy for t in trained] for arm, trained in arms.items()},
    }


def draw_training(place: Workplace, seed: int) -> tuple[bytes, dict[str, Any]]:
    """Figure: the kept full run, beside a short one made here."""
    data = map_images(place.folders["cifar10"]).data
    order = torch.randperm(len(data), generator=generator(seed, "training"))
    train_index, test_index = order[:SHORT_IMAGES], order[SHORT_IMAGES : 2 * SHORT_IMAGES]
    images, labels = normalised(data, train_index), data.labels[train_index]
    held_out = normalised(data, test_index), data.labels[test_index]
    short: dict[str, list[list[float]]] = {"base": [], "aggp": []}
    for run in range(SHORT_SEEDS):
        for arm, settings in (("base", None), ("aggp", AGGP())):
            trained = train_cnn(
                images, labels, held_out, aggp=settings, epochs=SHORT_EPOCHS, seed=derive_seed(seed, run)
            )
            short[arm].append(trained.accuracy)
    full = _kept()
    numbers: dict[str, Any] = {"short": short, "full": full}
    caption = f"Short form: {SHORT_IMAGES} images, {SHORT_EPOCHS} epochs, {SHORT_SEEDS} seeds."
    if full is not None:
        ends = {arm: mean_interval([100 * run[-1] for run in full[arm]]) for arm in ("base", "aggp")}
        caption = (
            f"Full form ({full['provenance']}): after {len(full['base'][0])} epochs base "
            f"{ends['base'].mean:.1f} ± {ends['base'].half_width:.1f} %, AGGP {ends['aggp'].mean:.1f} ± "
            f"{ends['aggp'].half_width:.1f} %, over {len(full['base'])} seeds. {caption}"
        )
    return _plot(short, full), {**numbers, "caption": caption}


def _kept() -> dict[str, Any] | None:
    path = files("qbi.lab.reproduce").joinpath("published", "training_full.json")
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else None


def _plot(short: dict[str, list[list[float]]], full: dict[str, Any] | None) -> bytes:
    panels = [("short form, made here", short)] + ([("full form, kept", full)] if full is not None else [])
    figure = new_figure(5 * len(panels), 3.4)
    for axis, (title, runs) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        for arm, colour in (("base", "#4a5568"), ("aggp", "#c05621")):
            curves = torch.tensor(runs[arm], dtype=torch.float64) * 100
            epochs = range(1, curves.shape[1] + 1)
            mean = curves.mean(0)
            half = 1.96 * curves.std(0) / len(curves) ** 0.5
            axis.plot(epochs, mean, label=arm, color=colour)
            axis.fill_between(epochs, mean - half, mean + half, color=colour, alpha=0.2)
        axis.set(title=title, xlabel="epoch", ylabel="validation accuracy, %")
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.legend()
    return picture_of(figure)
