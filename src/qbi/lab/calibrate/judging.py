"""How sure are the detectors? Benign models that we train, crafted ones that we mount, and the ROC between them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import nn

from qbi.data.images import normalised
from qbi.detection.detectors import DETECTORS
from qbi.detection.parameters import model_suspicion
from qbi.lab.calibrate.models import CLASSES, Make, Optimisers
from qbi.lab.training import plain_step, train
from qbi.randomness import derive_seed, generator
from qbi.records import ImageData

BATCH = 64


@dataclass(frozen=True)
class Judged:
    """One model and how suspicious it is to each detector."""

    family: str
    variant: str
    suspicion: Mapping[str, float]

    @property
    def strength(self) -> float:
        """The largest suspicion in units of its detector's bound: above 1, the model is reported."""
        return max(self.suspicion[d.key] / d.bound for d in DETECTORS.values())


def benign_models(
    data: ImageData,
    kinds: Mapping[str, Make],
    optimisers: Optimisers,
    seeds: Sequence[int],
    epochs: int,
    device: str = "cpu",
    progress: Callable[[], None] = lambda: None,
) -> Iterator[tuple[Judged, nn.Sequential]]:
    """Every architecture with every optimiser and seed, looked at before, early in, and at the end of its training."""
    moments = {0, 1, epochs // 3, epochs}
    x, y = normalised(data, slice(None)).to(device), (data.labels % CLASSES).to(device)
    places = torch.arange(len(x), device=x.device)
    for architecture, make in kinds.items():
        for optimiser, configure in optimisers.items():
            for seed in seeds:
                draws = generator(seed, "calibration", architecture, optimiser)
                torch.manual_seed(derive_seed(seed, architecture, optimiser) % 2**31)
                model = make().to(device)
                step = plain_step(model, configure(chain(model.parameters())), x, y, clip=10.0)
                for epoch in range(epochs + 1):
                    if epoch in moments:
                        variant = f"{optimiser}, {epoch} epochs, seed {seed}"
                        yield Judged(architecture, variant, model_suspicion(model.state_dict())), model
                    if epoch < epochs:
                        for _ in train(step, places, BATCH, 1, draws):
                            pass
                progress()


def roc(benign: Sequence[float], crafted: Sequence[float]) -> list[tuple[float, float]]:
    """(false-positive rate, share found) at every threshold, from the strictest on."""
    levels = sorted({*benign, *crafted}, reverse=True)
    points = [(0.0, 0.0)]
    for level in levels:
        points.append((sum(b >= level for b in benign) / len(benign), sum(c >= level for c in crafted) / len(crafted)))
    return points
