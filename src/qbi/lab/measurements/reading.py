"""What servers read."""

from typing import Any

import torch
from torch import Tensor, nn

import qbi
from qbi.attacks.best_case import BestCase
from qbi.carrier import flat
from qbi.data.images import normalised, unit_pixels
from qbi.data.open import open_images
from qbi.exposure import isolated_samples, observe
from qbi.lab.learned import learn, name_candidates
from qbi.lab.networks import Quickstart, two_layers
from qbi.lab.workers import Workers
from qbi.metrics import CLEAR, FAITHFUL, RECOGNISABLE, match
from qbi.randomness import generator
from qbi.theory import guarantees
from qbi.theory.guarantees import Prior, most_likely_guess


def best_case(data: str) -> dict[str, Any]:
    """The best-case server on CIFAR-10: one sample alone, principal components of 5,000 others, 1 and 16 rounds."""
    images = open_images(data, size=32, count=6000, seed=0)
    values = flat(unit_pixels(images, slice(None)))
    others, held_out = values[:5000], values[5000:6000]
    server, prior = BestCase.knowing(others), Prior.of(others.double().numpy(), 1.0)
    by_mean = (server.mean - held_out).square().mean(1)
    guesses = int((by_mean <= RECOGNISABLE.largest_error(1.0)).sum())
    chance = most_likely_guess(guesses, len(held_out))
    rows = []
    for noise in (0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0):
        row: dict[str, Any] = {"noise": noise, "bits": guarantees.bits(noise)}
        for rounds in (1, 16):
            error = server.errors(held_out, noise, generator(0, noise, rounds), rounds)
            row[f"read {rounds}"] = prior.psnr(float(error.mean()))
            row[f"most {rounds}"] = guarantees.largest_psnr(prior, noise, rounds)
            row[f"linear {rounds}"] = prior.psnr(guarantees.linear_error(prior, noise, rounds))
            row[f"19 dB {rounds}"] = float((error <= RECOGNISABLE.largest_error(1.0)).double().mean())
            row[f"30 dB {rounds}"] = float((error <= CLEAR.largest_error(1.0)).double().mean())
            row[f"chance {rounds}"] = guarantees.reconstruction(chance, noise, rounds)
        rows.append(row)
    return {"others": len(others), "held out": len(held_out), "guessed": guesses, "chance": chance, "rows": rows}


LEARNED = ((0.05, 1), (0.1, 1), (0.2, 1), (0.3, 1), (0.1, 16), (0.2, 16))
"""Noise and participations for which a code is learned."""
LEARNING = 240.0
"""Seconds for each, all at once on one GPU."""


def learned(data: str) -> dict[str, Any]:
    """Servers with a learned code, and with a list of candidates, on a GPU where there is one."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    images = open_images(data, size=32, count=60_000, seed=0)
    pixels = unit_pixels(images, slice(None))
    done = dict(Workers(len(LEARNED)).map(_learn, LEARNED, pixels, device))
    rows = [done[setting] for setting in LEARNED]
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(1))[:6102]
    x, y = normalised(images, order).to(device), images.labels[order].to(device)
    named = []
    for name, make in (("two-layer", two_layers), ("quickstart", Quickstart)):
        torch.manual_seed(0)
        model = make().to(device)
        for size, batches, bits in (
            (2, 8, 72.0),
            (32, 4, 72.0),
            (2, 8, 18.0),
            (32, 4, 18.0),
            (2, 8, 8.0),
            (32, 4, 8.0),
            (2, 8, 0.7),
        ):
            found = name_candidates(model, x, y, batch_size=size, batches=batches, bits=bits)
            named.append({"network": name, **found.document()})
    return {"public": len(images) - 2000, "held out": 2000, "rows": rows, "candidates": named}


def _learn(setting: tuple[float, int], pixels: Tensor, device: str) -> dict[str, Any]:
    noise, rounds = setting
    order = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(0))
    x = pixels.to(device)
    found = learn(x[order[2000:]], x[order[:2000]], noise, rounds, seconds=LEARNING)
    return {**found.__dict__, "bits": found.bits}


def saturation(data: str) -> dict[str, Any]:
    """Samples that single rows isolate, and samples that gradients give, at the paper's scale of rows and at ours."""
    images = open_images(data, size=224, count=200, seed=0)
    x, y = flat(normalised(images, slice(0, 200))), torch.arange(200) % 10
    rows = []
    for gain in (1.0, x.shape[1] ** -0.5):
        counts = {"samples": 0, "isolated": 0, "read": 0, "isolated, not read": 0, "read, not isolated": 0}
        for number, chosen in enumerate(torch.arange(200).split(50)):
            torch.manual_seed(number)
            model = nn.Sequential(nn.Linear(x.shape[1], 300), nn.ReLU(), nn.Linear(300, 10))
            mounted = qbi.mount(model, qbi.QBI(50), x[:2], generator(number), gain=gain)
            isolated = isolated_samples(observe(mounted.model, mounted.layer, x[chosen]).fired)
            update = qbi.client_step(mounted.model, x[chosen], y[chosen])
            read = match(mounted.read(update).samples, x[chosen], data_range=4.0)[FAITHFUL].recovered
            counts["samples"] += len(chosen)
            counts["isolated"] += int(isolated.sum())
            counts["read"] += int(read.sum())
            counts["isolated, not read"] += int((isolated & ~read).sum())
            counts["read, not isolated"] += int((read & ~isolated).sum())
        rows.append({"scale": "1, the paper's" if gain == 1 else "1/√M, ours", **counts})
    return {"rows": rows}
