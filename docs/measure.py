"""Measurements behind tables of the documents: each writes docs/data/NAME.json, and `make docs` puts it into the pages.

python docs/measure.py best-case --data cifar-10-python.tar.gz
python docs/measure.py policies --data cifar-10-python.tar.gz
python docs/measure.py overhead
"""

import argparse
import copy
import resource
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qbi.attacks.best_case import BestCase
from qbi.carrier import flat
from qbi.data.images import normalised, unit_pixels
from qbi.data.open import open_images
from qbi.defences import AmbientGuard
from qbi.errors import QbiError
from qbi.experiments.frontier import Quickstart
from qbi.files import to_json, write_atomically
from qbi.metrics import CLEAR, RECOGNISABLE
from qbi.randomness import generator
from qbi.theory import guarantees
from qbi.theory.guarantees import Prior, most_likely_guess

HERE = Path(__file__).parent / "data"


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


def policies(data: str) -> dict[str, Any]:
    """Flower's quickstart as shipped (rate 0.1, momentum 0.9, B = 32), 12 rounds of 5 clients, under every policy."""
    images = open_images(data, size=32, count=6000, seed=0)
    x, y = normalised(images, slice(None)), images.labels
    out: dict[str, Any] = {}
    for policy in ("none", "budget", "auto", "noise", "aggp", "drop"):
        found: list[float | str] = []
        for seed in range(3):
            try:
                found.append(round(100 * _federated(x, y, policy, seed), 1))
            except QbiError as problem:
                found.append(f"stopped: {str(problem).split('.')[0]}")
        out[policy] = found
    return {"policies": out}


def _federated(x: Tensor, y: Tensor, policy: str, seed: int) -> float:
    torch.manual_seed(seed)
    shared, order = Quickstart(), torch.randperm(len(x))
    held_out, parts = order[:1000], order[1000:].chunk(5)
    for _ in range(12):
        states = []
        for part in parts:
            model = copy.deepcopy(shared)
            optimiser = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

            def train(
                model: nn.Module = model, part: Tensor = part, optimiser: torch.optim.Optimizer = optimiser
            ) -> None:
                for batch in part[torch.randperm(len(part))].split(32):
                    optimiser.zero_grad()
                    F.cross_entropy(model(x[batch]), y[batch]).backward()
                    optimiser.step()

            if policy == "none":
                train()
            else:
                with AmbientGuard(policy):  # type: ignore[arg-type]
                    train()
            states.append(model.state_dict())
        shared.load_state_dict({n: torch.stack([s[n] for s in states]).mean(0) for n in states[0]})
    with torch.no_grad():
        return float((shared(x[held_out]).argmax(1) == y[held_out]).double().mean())


def overhead(_data: str) -> dict[str, Any]:
    """Median seconds of a step, plain and under the budget, on two threads; and the largest memory of the process."""
    torch.set_num_threads(2)
    x, y = torch.randn(64, 3, 32, 32), torch.arange(64) % 10
    models: dict[str, Callable[[], nn.Module]] = {
        "two layers, 616,000 weights": lambda: nn.Sequential(
            nn.Flatten(), nn.Linear(3072, 200), nn.ReLU(), nn.Linear(200, 10)
        ),
        "Flower's quickstart, 62,006 weights": Quickstart,
        "CNN, 9.8 million weights": _cnn,
    }
    rows = []
    for name, make in models.items():
        model = make()
        batch = 32 if "CNN" in name else 64
        row: dict[str, Any] = {"model": name, "batch": batch}
        for policy in ("plain", "budget"):
            row[policy] = _timed(model, x[:batch], y[:batch], policy)
            row[f"{policy} MiB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
        rows.append(row)
    return {"rows": rows}


def _cnn() -> nn.Module:
    layers: list[nn.Module] = []
    width = 3
    for out in (64, 128, 256, 512):
        for inputs in (width, out):
            layers += [nn.Conv2d(inputs, out, 3, padding=1), nn.GroupNorm(8, out), nn.ReLU()]
        layers.append(nn.MaxPool2d(2))
        width = out
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(2048, 2500), nn.ReLU(), nn.Linear(2500, 10))


def _timed(model: nn.Module, x: Tensor, y: Tensor, policy: str) -> float:
    optimiser = torch.optim.SGD(model.parameters(), lr=0.01)
    seconds = []

    def step() -> None:
        started = time.perf_counter()
        optimiser.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimiser.step()
        seconds.append(time.perf_counter() - started)

    if policy == "plain":
        for _ in range(8):
            step()
    else:
        with AmbientGuard("budget"):
            for _ in range(8):
                step()
    return statistics.median(seconds[3:])


def main() -> None:
    """Measure one thing and write it down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = {"best-case": best_case, "policies": policies, "overhead": overhead}
    parser.add_argument("what", choices=known)
    parser.add_argument("--data", default="photos")
    chosen = parser.parse_args()
    write_atomically(HERE / f"{chosen.what}.json", to_json(known[chosen.what](chosen.data)))


if __name__ == "__main__":
    main()
