"""The paper's figures: each function draws one and gives the numbers behind it."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from qbi.attacks import QBI, Mounted, Passive, mount
from qbi.carrier import Carrier, flat
from qbi.data.images import normalised, unit_pixels
from qbi.defences import AGGP, prune_rows
from qbi.exposure import leakage, observe
from qbi.extraction import extract
from qbi.extraction.normalisation import PublicStatistics
from qbi.federation import client_step
from qbi.lab.reproduce.prepared import map_images
from qbi.lab.reproduce.workplace import Workplace
from qbi.metrics import EXACT, l1, match, psnr, ssim
from qbi.randomness import generator
from qbi.records import ImageData
from qbi.report.pictures import side_by_side
from qbi.report.plotting import new_figure, picture_of

Drawn = tuple[bytes, dict[str, Any]]
BATCH, NEURONS = 20, 200
SHOWN_ROWS = 20


def draw_batch(place: Workplace, seed: int) -> Drawn:
    """Figure: a batch of 20 ImageNet images, and what a QBI layer of 200 neurons gives away of it."""
    data, index = _images(place, seed, "batch", BATCH)
    inputs = normalised(data, index)
    mounted = mount(_model(inputs), QBI(BATCH), inputs[:2], generator(seed, "figure-batch"))
    update = client_step(mounted.model, inputs, data.labels[index] % 10)
    found = extract(mounted.model, mounted.layer, mounted.carrier, update)
    exact = match(found.samples, flat(inputs))[EXACT]
    truth = unit_pixels(data, index)
    shown = torch.zeros_like(truth)
    shown[exact.recovered] = _to_pixels(data, found.samples[exact.candidate[exact.recovered]])
    count = int(exact.recovered.sum())
    caption = f"{count} of {BATCH} images recovered exactly, by real gradients; the paper shows 16 of 20. Black: not recovered."
    return side_by_side(truth, shown, ("true batch", "read from gradients")), {"recovered": count, "caption": caption}


def draw_passive(place: Workplace, seed: int) -> Drawn:
    """Figure: the first 20 neurons of a benign layer of 200, without and with AGGP."""
    data, index = _images(place, seed, "passive", BATCH)
    inputs = normalised(data, index)
    torch.manual_seed(seed)
    model = _model(inputs)
    carrier = Carrier(shape=data.shape, width=inputs[0].numel())
    return _leak(
        data,
        Mounted(model, "fc1", carrier, attack=Passive()),
        inputs,
        data.labels[index] % 10,
        seed,
        "a benign network",
    )


def draw_active(place: Workplace, seed: int) -> Drawn:
    """Figure: the same for a layer that QBI initialised."""
    data, index = _images(place, seed, "active", BATCH)
    inputs = normalised(data, index)
    torch.manual_seed(seed)
    mounted = mount(_model(inputs), QBI(BATCH), inputs[:2], generator(seed, "figure-active"))
    return _leak(data, mounted, inputs, data.labels[index] % 10, seed, "a QBI layer")


def _leak(data: ImageData, mounted: Mounted, inputs: Tensor, targets: Tensor, seed: int, what: str) -> Drawn:
    fired = observe(mounted.model, mounted.layer, inputs).fired
    update = client_step(mounted.model, inputs, targets)
    weight, bias = update.gradients["fc1.weight"], update.gradients["fc1.bias"]
    pruned = prune_rows(weight, fired.sum(1), generator(seed, "aggp"), AGGP())
    rows = slice(0, SHOWN_ROWS)
    left, right = (_rows_as_images(data, g[rows], bias[rows]) for g in (weight, pruned))
    counts = fired.sum(1)[rows].tolist()
    kept = (pruned[rows] != 0).double().mean(1).tolist()
    caption = (
        f"Gradient rows of the first {SHOWN_ROWS} neurons of {what}, divided by their bias gradients. Samples that fire "
        f"them: {', '.join(map(str, counts))}. Of all {NEURONS} rows, "
        f"{int((fired.sum(1) == 1).sum())} hold a single sample; AGGP prunes {int(((fired.sum(1) > 0) & (fired.sum(1) < 16)).sum())}."
    )
    numbers = {"counts": counts, "share_kept": kept, "caption": caption, "recall": leakage(fired).recall}
    return side_by_side(left, right, ("without AGGP", "with AGGP")), numbers


def _rows_as_images(data: ImageData, weight: Tensor, bias: Tensor) -> Tensor:
    """Each row divided by its bias gradient, in pixel space; dead rows stay black."""
    alive = bias != 0
    images = torch.zeros(len(weight), *data.shape)
    images[alive] = _to_pixels(data, (weight[alive].double() / bias[alive].double()[:, None]).float())
    return images


def draw_layernorm(place: Workplace, seed: int) -> Drawn:
    """Figure: images read back through LayerNorm, undone with public statistics, with their SSIM."""
    data, index = _images(place, seed, "layernorm", BATCH)
    inputs = unit_pixels(data, index)
    features = inputs[0].numel()
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Flatten(), nn.LayerNorm(features), nn.Linear(features, NEURONS), nn.ReLU(), nn.Linear(NEURONS, 10)
    )
    mounted = mount(model, QBI(BATCH), inputs[:2], generator(seed, "figure-layernorm"))
    update = client_step(mounted.model, inputs, data.labels[index] % 10)
    seen = extract(mounted.model, mounted.layer, mounted.carrier, update, keep_normalised=True)
    truth = nn.functional.layer_norm(flat(inputs), (features,))
    exact = match(seen.samples, truth)[EXACT]
    public = PublicStatistics(data.mean, data.std)
    restored = extract(mounted.model, mounted.layer, mounted.carrier, update, public=public).samples
    hit = exact.recovered
    shown = torch.zeros_like(inputs)
    shown[hit] = restored[exact.candidate[hit]].reshape(-1, *data.shape).clamp(0, 1)
    scores = ssim(shown[hit], inputs[hit], data_range=1.0).tolist()
    caption = (
        f"{int(hit.sum())} of {BATCH} images isolated; SSIM after undoing LayerNorm with public statistics from "
        f"{min(scores):.2f} to {max(scores):.2f}, mean {sum(scores) / len(scores):.2f} (the paper: 0.82 to 0.96)."
    )
    return side_by_side(inputs, shown, ("true batch", "read through LayerNorm")), {"ssim": scores, "caption": caption}


def draw_averaging(place: Workplace, seed: int) -> Drawn:
    """Figure: the mean of 1, 2, 4, 8, 16 and 25 images."""
    counts = (1, 2, 4, 8, 16, 25)
    data, index = _images(place, seed, "averaging", max(counts))
    images = unit_pixels(data, index)
    means = torch.stack([images[:n].mean(0) for n in counts])
    caption = f"Means of {', '.join(map(str, counts))} images: a mixture of few still shows the first."
    return side_by_side(images[: len(counts)], means, ("single images", "means of the first n")), {"caption": caption}


def draw_similarity(place: Workplace, seed: int) -> Drawn:
    """Figure: SSIM, L1 and PSNR between an image and its mean with 1 to 25 others, over 100 repetitions."""
    data = map_images(place.folders["imagenet"]).data
    repetitions, most = 100, 25
    totals = torch.zeros(3, repetitions, most, dtype=torch.float64)
    for repetition in range(repetitions):
        draw = generator(seed, "similarity", repetition)
        chosen = torch.randperm(len(data), generator=draw)[: most + 1]
        images = unit_pixels(data, chosen).to(place.device)
        means = (images.cumsum(0) / torch.arange(1, most + 2, device=images.device).view(-1, 1, 1, 1))[1:]
        truth = images[:1].expand_as(means).contiguous()
        totals[0, repetition] = ssim(means, truth, data_range=1.0)
        totals[1, repetition] = l1(means, truth)
        totals[2, repetition] = psnr(means, truth, data_range=1.0)
    curves = dict(zip(("SSIM", "L1", "PSNR"), totals.mean(1).tolist(), strict=True))
    fall = {name: (values[14] - values[0]) / (values[-1] - values[0]) for name, values in curves.items()}
    shares = ", ".join(f"{name} {100 * share:.0f} %" for name, share in fall.items())
    caption = (
        f"Means over {repetitions} repetitions. By n = 15 the curves made this share of their way to n = 25: {shares}."
    )
    return _curves(curves), {**curves, "caption": caption}


def _curves(curves: Mapping[str, list[float]]) -> bytes:
    figure = new_figure(9, 3)
    for axis, (name, values) in zip(figure.subplots(1, 3), curves.items(), strict=True):
        axis.plot(range(1, len(values) + 1), values, color="#2b6cb0")
        axis.axvline(16, color="#999", linestyle=":", linewidth=1)
        axis.set(title=name, xlabel="other images in the mean")
    return picture_of(figure)


def _images(place: Workplace, seed: int, name: str, count: int) -> tuple[ImageData, Tensor]:
    data = map_images(place.folders["imagenet"]).data
    return data, torch.randperm(len(data), generator=generator(seed, "figure", name))[:count]


def _model(inputs: Tensor) -> nn.Sequential:
    """The layer behind the identity prefix; that the prefix is the identity is shown elsewhere."""
    model = nn.Sequential()
    model.add_module("flatten", nn.Flatten())
    model.add_module("fc1", nn.Linear(inputs[0].numel(), NEURONS))
    model.add_module("relu", nn.ReLU())
    model.add_module("fc2", nn.Linear(NEURONS, 10))
    return model


def _to_pixels(data: ImageData, samples: Tensor) -> Tensor:
    from qbi.data.images import denormalised

    return denormalised(data, samples).clamp(0, 1)
