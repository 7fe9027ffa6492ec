"""Times, memory and trainings."""

import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from datetime import date
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import nn

import qbi
from qbi.data.open import open_images
from qbi.experiments.reproduce.training import full_form
from qbi.models import image_cnn


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


EXAMPLE = Path(__file__).parents[2] / "examples/flower-guarded/measure.py"

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


def training(data: str) -> dict[str, Any]:
    """The full training figure, on a GPU where there is one."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    images = open_images(data, size=32, count=60_000, seed=0)
    machine = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    where = f"{machine}, torch {torch.__version__}, {date.today()}, {len(images):,} images, seeds 0 to 9"
    jobs = 10 if device == "cuda" else 1
    made = full_form(images, device, jobs=jobs, done=lambda seeds: print(f"{seeds} of 10 seeds", flush=True))
    return {"provenance": where} | made


def zoo(_data: str) -> dict[str, Any]:
    """Audits of published architectures in small, a row for each, and how many of their linear layers stay untested."""
    tests = Path(__file__).parents[2] / "tests"
    out = subprocess.run([sys.executable, tests / "published.py"], capture_output=True, text=True, check=True)
    lines = [json.loads(line) for line in out.stdout.splitlines() if line.startswith("{")]
    counts = ("layers", "leaks", "nothing_read", "not_tested", "not_tried", "tried_by_hand")
    kept = ("model", "package", "status", *counts, "seconds")
    rows = [{key: line[key] for key in kept} for line in lines if "layers" in line]
    total = {key: sum(row[key] for row in rows) for key in counts}
    refuted = sum(len(line.get("wrong", {})) for line in lines)
    missed = sum(len(line.get("missed", {})) for line in lines)
    crashes = [line["model"] for line in lines if "crash" in line]
    return {"models": rows, "total": total, "refuted_by_hand": refuted, "missed": missed, "crashes": crashes}
