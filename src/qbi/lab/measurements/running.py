"""Times, memory and trainings."""

import json
import resource
import subprocess
import sys
import tempfile
import time
from datetime import date
from importlib import import_module
from typing import Any

import torch
from torch import nn

import qbi
from qbi.attacks import Passive
from qbi.data.open import open_images
from qbi.lab.measurements import in_clone
from qbi.lab.networks import Quickstart
from qbi.lab.reproduce.training import full_form
from qbi.lab.workers import alone
from qbi.models import image_cnn


def audits(_data: str) -> dict[str, Any]:
    """Time and memory of audits, each in a process of its own."""
    sizes = [(3072, 200), (12_288, 200), (49_152, 200), (12_288, 800), (12_288, 3200)]
    rows = [dict(zip(("seconds", "gib", "verdict"), alone(_small_audit, *size), strict=True)) for size in sizes]
    large = []
    for name in ("the paper's CNN, N = 200", "VGG-11"):
        large.append({"model": name} | dict(zip(("seconds", "gib", "verdict"), alone(_large_audit, name), strict=True)))
    return {
        "rows": [{"features": m, "neurons": n} | row for (m, n), row in zip(sizes, rows, strict=True)],
        "large": large,
    }


ASKED = {
    "MLP 10–50–10, batches of 8": 5,
    "LeNet-5, 32×32, batches of 20": 20,
    "Flower's quickstart, passive alone, batches of 32": 15,
    "EfficientNet-B0, 224×224, batches of 8": 180,
    "`qbi audit --attack all`": 45,
    "`qbi audit`": 60,
}
"""Audits that users waited for, and the seconds that we aimed at."""


def audit_times(_data: str) -> dict[str, Any]:
    """Times of common audits, each in a process of its own."""
    rows = []
    for name, aim in ASKED.items():
        seconds, gib, verdict = alone(_asked, name)
        rows.append({"audit": name, "aim": aim, "seconds": seconds, "gib": gib, "verdict": verdict})
        print(rows[-1], flush=True)
    return {"rows": rows}


def _asked(name: str) -> tuple[float, float, str]:
    """One of them; commands are run as a user runs them, starting included."""
    torch.manual_seed(0)
    if name.startswith("`"):
        started = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", *name.strip("`").split()]
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        gib = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
        return time.perf_counter() - started, gib, f"exit code {done.returncode}"
    if name.startswith("MLP"):
        mlp = nn.Sequential(nn.Linear(10, 50), nn.ReLU(), nn.Linear(50, 10))
        return _judged(mlp, (torch.randn(100, 10), torch.arange(100) % 10), batch_size=8, loss="cross-entropy")
    if name.startswith("EfficientNet"):
        sys.path.append(str(in_clone("tests")))
        import_module("published").prepare()
        net = import_module("timm").create_model("efficientnet_b0", num_classes=10)
        return _judged(net, open_images("photos", size=224, count=64, seed=0), batch_size=8)
    images = open_images("photos", size=32, count=256, seed=0)
    if name.startswith("LeNet"):
        return _judged(_lenet(), images)
    return _judged(Quickstart(), images, batch_size=32, attacks=[Passive.key], defences=False)


def _lenet() -> nn.Module:
    body = [nn.Conv2d(3, 6, 5), nn.ReLU(), nn.AvgPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.AvgPool2d(2)]
    head = [nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)]
    return nn.Sequential(*body, nn.Flatten(), *head)


def _judged(model: nn.Module, data: Any, *, batch_size: int = 20, **wishes: Any) -> tuple[float, float, str]:
    started = time.perf_counter()
    result = qbi.audit(model, data, client=qbi.Client(batch_size), **wishes)
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
    out = subprocess.run([sys.executable, in_clone("tests/published.py")], capture_output=True, text=True, check=True)
    lines = [json.loads(line) for line in out.stdout.splitlines() if line.startswith("{")]
    counts = ("layers", "leaks", "not_tested", "not_tried", "tried_by_hand")
    kept = ("model", "package", "status", *counts, "seconds")
    rows = [{key: line[key] for key in kept} for line in lines if "layers" in line]
    total = {key: sum(row[key] for row in rows) for key in counts}
    missed = sum(len(line.get("missed", {})) for line in lines)
    crashes = [line["model"] for line in lines if "crash" in line]
    return {"models": rows, "total": total, "missed": missed, "crashes": crashes}
