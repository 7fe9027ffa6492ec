"""How sure `qbi inspect` is: on the models its bounds were set on, on others, and against servers that know it."""

import copy
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from qbi.detection.detectors import DETECTORS
from qbi.lab.calibrate.crafted import MOUNTABLE, Evasion, crafted_models, evasions
from qbi.lab.calibrate.judging import Judged, benign_models, roc
from qbi.lab.calibrate.models import (
    HELD_OUT_OPTIMISERS,
    OPTIMISERS,
    architectures,
    held_out_architectures,
)
from qbi.records import ImageData

__all__ = [
    "Calibration",
    "Evasion",
    "Judged",
    "calibrate",
    "crafted_models",
    "evasions",
    "in_sample",
    "roc",
    "trainings",
]

HELD_OUT_SEEDS = (100, 101)
"""Of the models that no bound was set on."""


@dataclass(frozen=True)
class Calibration:
    """All models that were judged, and what follows."""

    benign: tuple[Judged, ...]
    """Those the bounds were set on."""
    held_out: tuple[Judged, ...]
    """Other kinds of models, other optimisers, other seeds."""
    crafted: tuple[Judged, ...]
    evasions: tuple[Evasion, ...]
    bounds: Mapping[str, float]

    def curves(self) -> dict[str, list[tuple[float, float]]]:
        """ROC of each detector alone and of all together."""
        alone = {
            name: roc([m.suspicion[name] for m in self.benign], [m.suspicion[name] for m in self.crafted])
            for name in self.bounds
        }
        return alone | {"all together": roc([m.strength for m in self.benign], [m.strength for m in self.crafted])}

    def summary(self) -> dict[str, object]:
        """The counts, in-sample and held-out apart."""
        curves = self.curves()
        extremes = {
            name: {"most suspicious": max(values), "99 %": sorted(values)[int(0.99 * (len(values) - 1))]}
            for name in self.bounds
            if (values := [m.suspicion[name] for m in self.benign])
        }
        return {
            "benign": len(self.benign),
            "benign reported": _reported(self.benign),
            "held-out": len(self.held_out),
            "held-out reported": _reported(self.held_out),
            "crafted": len(self.crafted),
            "crafted reported": len(self.crafted) - len(_missed(self.crafted)),
            "crafted missed": _missed(self.crafted),
            "by attack": [_by_attack(self.crafted, name) for name in dict.fromkeys(m.family for m in self.crafted)],
            "found at 1 % false positives": {
                name: max((found for false, found in curve if false <= 0.01), default=0.0)
                for name, curve in curves.items()
            },
            "most suspicious benign": extremes,
            "evasions": [
                {"server": a.name, "reported": a.judged.strength > 1, "strength": a.judged.strength, "recall": a.recall}
                for a in self.evasions
            ],
        }


def _reported(models: tuple[Judged, ...]) -> list[str]:
    return [f"{m.family}, {m.variant}" for m in models if m.strength > 1]


def _missed(models: tuple[Judged, ...]) -> list[str]:
    return [f"{m.family}, {m.variant}" for m in models if m.strength <= 1]


def _by_attack(models: tuple[Judged, ...], attack: str) -> dict[str, object]:
    own = [m.strength for m in models if m.family == attack]
    return {"attack": attack, "found": sum(s > 1 for s in own), "of": len(own), "least strength": min(own)}


def trainings(data: ImageData, seeds: int) -> int:
    """How many models are trained."""
    kinds, others = architectures(data.shape), held_out_architectures(data.shape)
    return len(kinds) * len(OPTIMISERS) * seeds + len(others) * len(HELD_OUT_OPTIMISERS) * len(HELD_OUT_SEEDS)


def in_sample(
    data: ImageData,
    seeds: int,
    epochs: int,
    device: str = "cpu",
    step: Callable[[], None] = lambda: None,
    only: Collection[str] | None = None,
) -> tuple[tuple[Judged, ...], tuple[Judged, ...]]:
    """Models of the kinds that bounds were set on, and crafted ones made of the first and last state of one training of each."""
    benign: list[Judged] = []
    crafted: list[Judged] = []
    kinds = {name: make for name, make in architectures(data.shape).items() if only is None or name in only}
    for judged, model in benign_models(data, kinds, OPTIMISERS, range(seeds), epochs, device, step):
        benign.append(judged)
        moments = {f"Adam 1e-3, {epoch} epochs, seed 0" for epoch in (0, epochs)}
        if judged.family in MOUNTABLE and judged.variant in moments:
            crafted += crafted_models(data, copy.deepcopy(model).cpu(), judged.family, 0)
    return tuple(benign), tuple(crafted)


def calibrate(
    data: ImageData,
    seeds: int = 1,
    epochs: int = 10,
    device: str = "cpu",
    progress: Callable[[int, int], None] | None = None,
) -> Calibration:
    """Train the benign models, those that bounds were set on and others; craft models, and let servers answer to the detectors."""
    others = held_out_architectures(data.shape)
    total, done = trainings(data, seeds), 0

    def step() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(done, total)

    benign, crafted = in_sample(data, seeds, epochs, device, step)
    held_out = benign_models(data, others, HELD_OUT_OPTIMISERS, HELD_OUT_SEEDS, epochs, device, step)
    return Calibration(
        benign,
        tuple(judged for judged, _ in held_out),
        crafted,
        tuple(evasions(data, 0)),
        {d.key: d.bound for d in DETECTORS.values()},
    )
