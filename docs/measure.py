"""Measurements behind tables of the documents: each writes docs/data/NAME.json, and `make docs` puts it into the pages.

python docs/measure.py best-case --data cifar-10-python.tar.gz
python docs/measure.py learned --data cifar10
python docs/measure.py detection --data cifar-10-python.tar.gz
python docs/measure.py calibration --data cifar-10-python.tar.gz
python docs/measure.py audit
python docs/measure.py federations --data cifar-10-python.tar.gz
python docs/measure.py saturation --data imagenet
python docs/measure.py training --data cifar10

What `qbi bench`, `compare` and `reproduce` write is kept beside them as it is, values rounded.
"""

import argparse
import functools
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from datetime import date
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import qbi
from qbi.attacks.best_case import BestCase
from qbi.benchmarks.private import Quickstart, two_layers
from qbi.carrier import flat
from qbi.data.images import normalised, unit_pixels
from qbi.data.open import open_images
from qbi.detection.parameters import BOUNDS
from qbi.experiments.calibrate import HELD_OUT_SEEDS, Calibration, answers, in_sample
from qbi.experiments.calibrate.judging import benign_models
from qbi.experiments.calibrate.models import HELD_OUT_OPTIMISERS, architectures, held_out_architectures
from qbi.experiments.learned import learn, name_candidates
from qbi.experiments.reproduce.training import full_form
from qbi.exposure import leakage, observe
from qbi.files import to_json, write_atomically
from qbi.metrics import CLEAR, FAITHFUL, RECOGNISABLE, match
from qbi.models import image_cnn
from qbi.randomness import generator
from qbi.report.roc import roc_picture
from qbi.theory import guarantees
from qbi.theory.guarantees import Prior, most_likely_guess

HERE = Path(__file__).parent / "data"
TRAINING = Path(__file__).parent.parent / "src/qbi/experiments/reproduce/published/training_full.json"


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
    with ProcessPoolExecutor(len(LEARNED), mp_context=get_context("spawn")) as pool:
        pixels = unit_pixels(images, slice(None))
        running = [pool.submit(_learn, pixels, device, *setting) for setting in LEARNED]
        rows = [future.result() for future in running]
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


def _learn(pixels: Tensor, device: str, noise: float, rounds: int) -> dict[str, Any]:
    order = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(0))
    x = pixels.to(device)
    found = learn(x[order[2000:]], x[order[:2000]], noise, rounds, seconds=LEARNING)
    return {**found.__dict__, "bits": found.bits}


def detection(data: str) -> dict[str, Any]:
    """`inspect` on benign models that no bound was set on, and against servers that know it."""
    images = open_images(data, size=32, count=6000, seed=0)
    kinds = held_out_architectures(images.shape)
    judged = [model for model, _ in benign_models(images, kinds, HELD_OUT_OPTIMISERS, HELD_OUT_SEEDS, 10)]
    return {
        "held-out": len(judged),
        "held-out reported": [f"{m.family}, {m.variant}" for m in judged if m.strength > 1],
        "answers": [
            {"server": a.name, "reported": a.judged.strength > 1, "strength": a.judged.strength, "recall": a.recall}
            for a in answers(images, 0)
        ],
    }


SLOW = ("paper's CNN", "paper's CNN, BatchNorm")
"""On a CPU these take hundreds of times as long as an MLP: they are trained on a quarter of the images."""


def calibration(data: str) -> dict[str, Any]:
    """The models the bounds were set on, trained again on a thousand images at one seed, and crafted ones; also draws the ROC."""
    images = open_images(data, size=32, count=1000, seed=0)
    quick = [name for name in architectures(images.shape) if name not in SLOW]
    benign, crafted = [], []
    for count, kinds in ((1000, quick), (250, SLOW)):
        few = replace(images, pixels=images.pixels[:count], labels=images.labels[:count])
        step = functools.partial(print, ".", end="", flush=True)
        for models, more in zip((benign, crafted), in_sample(few, 1, 10, step=step, only=kinds), strict=True):
            models.extend(more)
    found = Calibration(tuple(benign), (), tuple(crafted), (), BOUNDS)
    picture = roc_picture(found.curves(), [m.strength for m in benign], [m.strength for m in crafted])
    write_atomically(HERE.parent / "figures/roc.png", picture)
    return {"images": 1000, "images of slow kinds": 250, "slow kinds": SLOW, "bounds": dict(BOUNDS)} | found.summary()


def audits(_data: str) -> dict[str, Any]:
    """Time and memory of audits, each in a process of its own."""
    sizes = [(3072, 200), (12_288, 200), (49_152, 200), (12_288, 800), (12_288, 3200)]
    rows = [dict(zip(("seconds", "gib", "verdict"), _alone(_small_audit, *size), strict=True)) for size in sizes]
    large = []
    for name in ("the paper's CNN, N = 200", "VGG-11"):
        large.append(
            {"model": name} | dict(zip(("seconds", "gib", "verdict"), _alone(_large_audit, name), strict=True))
        )
    return {
        "rows": [{"features": m, "neurons": n} | row for (m, n), row in zip(sizes, rows, strict=True)],
        "large": large,
    }


def _alone(work: Callable[..., Any], *given: Any) -> tuple[float, float, str]:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        found: tuple[float, float, str] = pool.submit(work, *given).result()
    return found


def _judged(model: nn.Module, data: Any, **wishes: Any) -> tuple[float, float, str]:
    started = time.perf_counter()
    result = qbi.audit(model, data, client=qbi.Client(20), **wishes)
    gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return time.perf_counter() - started, gib, f"{result.status}, R = {100 * result.recall:.0f} %"


def _small_audit(features: int, neurons: int) -> tuple[float, float, str]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(features, neurons), nn.ReLU(), nn.Linear(neurons, 10))
    return _judged(model, (torch.randn(200, features), torch.arange(200) % 10), attacks=["qbi"])


def _large_audit(name: str) -> tuple[float, float, str]:
    torch.manual_seed(0)
    model = image_cnn((3, 224, 224), 200, 10) if "CNN" in name else _vgg()
    return _judged(model, open_images("photos", size=224, count=256, seed=0))


def _vgg() -> nn.Module:
    layers: list[nn.Module] = []
    width = 3
    for out in (64, 0, 128, 0, 256, 256, 0, 512, 512, 0, 512, 512, 0):
        layers += [nn.Conv2d(width, out, 3, padding=1), nn.ReLU()] if out else [nn.MaxPool2d(2)]
        width = out or width
    head = [
        nn.Linear(25_088, 4096),
        nn.ReLU(),
        nn.Dropout(),
        nn.Linear(4096, 4096),
        nn.ReLU(),
        nn.Dropout(),
        nn.Linear(4096, 10),
    ]
    return nn.Sequential(*layers, nn.Flatten(), *head)


EXAMPLE = Path(__file__).parent.parent / "examples/flower-guarded/measure.py"

FEDERATIONS = {
    "small CNN": "overhead --rounds 10 --model cnn",
    "two layers": "overhead --rounds 10 --model mlp",
    "100 clients": "scale --clients 100",
}
"""What the example's own `measure.py` is asked for."""


def federations(data: str) -> dict[str, Any]:
    """The example's federation on Ray, with and without the guard, one simulation after the other."""
    out = {}
    for name, words in FEDERATIONS.items():
        command = [sys.executable, EXAMPLE, *words.replace("DATA", data).split()]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        out[name] = json.loads(said[said.index("[\n") :])
        print(name, flush=True)
    return out


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
            isolated = leakage(observe(mounted.model, mounted.layer, x[chosen]).fired).isolated
            update = qbi.client_step(mounted.model, x[chosen], y[chosen])
            read = match(mounted.read(update).samples, x[chosen], data_range=4.0)[FAITHFUL].recovered
            counts["samples"] += len(chosen)
            counts["isolated"] += int(isolated.sum())
            counts["read"] += int(read.sum())
            counts["isolated, not read"] += int((isolated & ~read).sum())
            counts["read, not isolated"] += int((read & ~isolated).sum())
        rows.append({"scale": "1, the paper's" if gain == 1 else "1/√M, ours", **counts})
    return {"rows": rows}


def training(data: str) -> dict[str, Any]:
    """The full training figure, on a GPU where there is one."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    images = open_images(data, size=32, count=60_000, seed=0)
    machine = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    where = f"{machine}, torch {torch.__version__}, {date.today()}, {len(images):,} images, seeds 0 to 9"
    jobs = 10 if device == "cuda" else 1
    made = full_form(images, device, jobs=jobs, done=lambda seeds: print(f"{seeds} of 10 seeds", flush=True))
    return {"provenance": where} | made


def main() -> None:
    """Measure one thing and write it down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = {
        "best-case": best_case,
        "learned": learned,
        "detection": detection,
        "calibration": calibration,
        "audit": audits,
        "federations": federations,
        "training": training,
        "saturation": saturation,
    }
    parser.add_argument("what", choices=known)
    parser.add_argument("--data", default="photos")
    chosen = parser.parse_args()
    out = TRAINING if chosen.what == "training" else HERE / f"{chosen.what}.json"
    write_atomically(out, to_json(known[chosen.what](chosen.data)))


if __name__ == "__main__":
    main()
