"""How sure the detectors are."""

import functools
from dataclasses import replace
from typing import Any

from qbi.data.open import open_images
from qbi.detection.detectors import DETECTORS
from qbi.files import write_atomically
from qbi.lab.calibrate import HELD_OUT_SEEDS, Calibration, evasions, in_sample
from qbi.lab.calibrate.judging import Judged, benign_models
from qbi.lab.calibrate.models import HELD_OUT_OPTIMISERS, OPTIMISERS, architectures, held_out_architectures
from qbi.lab.measurements import in_clone
from qbi.lab.report.roc import roc_picture

BOUNDS = {d.key: d.bound for d in DETECTORS.values()}


def detection(data: str) -> dict[str, Any]:
    """`inspect` on benign models that no bound was set on, and against servers that know it."""
    images = open_images(data, size=32, count=6000, seed=0)
    kinds = held_out_architectures(images.shape)
    judged = [model for model, _ in benign_models(images, kinds, HELD_OUT_OPTIMISERS, HELD_OUT_SEEDS, 10)]
    return {
        "held-out": len(judged),
        "held-out reported": [f"{m.family}, {m.variant}" for m in judged if m.strength > 1],
        "evasions": [
            {"server": a.name, "reported": a.judged.strength > 1, "strength": a.judged.strength, "recall": a.recall}
            for a in evasions(images, 0)
        ],
    }


SLOW = ("paper's CNN", "paper's CNN, BatchNorm")
"""On a CPU these take hundreds of times as long as an MLP: they are trained on a quarter of the images."""


def calibration(data: str) -> dict[str, Any]:
    """The models the bounds were set on, trained again on a thousand images at one seed, and crafted ones; also draws the ROC."""
    images = open_images(data, size=32, count=1000, seed=0)
    quick = [name for name in architectures(images.shape) if name not in SLOW]
    benign: list[Judged] = []
    crafted: list[Judged] = []
    for count, kinds in ((1000, quick), (250, SLOW)):
        few = replace(images, pixels=images.pixels[:count], labels=images.labels[:count])
        step = functools.partial(print, ".", end="", flush=True)
        for models, more in zip((benign, crafted), in_sample(few, 1, 10, step=step, only=kinds), strict=True):
            models.extend(more)
    found = Calibration(tuple(benign), (), tuple(crafted), (), BOUNDS)
    picture = roc_picture(found.curves(), [m.strength for m in benign], [m.strength for m in crafted])
    write_atomically(in_clone("docs/figures") / "roc.png", picture)
    return {"images": 1000, "images of slow kinds": 250, "slow kinds": SLOW, "bounds": dict(BOUNDS)} | found.summary()


def longer(data: str) -> dict[str, Any]:
    """MLPs of the kinds that bounds were set on, on all images with four seeds: the longest trainings, whose biases move most."""
    images = open_images(data, size=32, count=6000, seed=0)
    kinds = {name: make for name, make in architectures(images.shape).items() if "MLP" in name}
    judged = [model for model, _ in benign_models(images, kinds, OPTIMISERS, range(4), 10)]
    reported = [f"{m.family}, {m.variant}" for m in judged if m.strength > 1]
    return {"images": len(images), "benign": len(judged), "benign reported": reported}
