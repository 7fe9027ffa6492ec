"""How sure are the detectors? Benign models that we train, crafted ones that we mount, and the ROC between them."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qbi.attacks import ATTACKS, Attack, Knowledge, mount
from qbi.carrier import flat
from qbi.data.images import normalised
from qbi.detection.parameters import BOUNDS, model_suspicion
from qbi.models import Residual, image_cnn
from qbi.randomness import derive_seed, generator
from qbi.records import ImageData

NEURONS = 128
CLASSES = 10
GAINS = (0.01, 1.0, 100.0)
PARTS = (1.0, 0.25, 0.1)
"""Which part of the attacked layer's rows is crafted; the others stay as they were trained."""

TRAP_SCALE = {"trap_scale": 0.97}
"""At one scale: what is to be found does not depend on it."""


@dataclass(frozen=True)
class Judged:
    """One model and how suspicious it is to each detector."""

    family: str
    variant: str
    suspicion: Mapping[str, float]

    @property
    def strength(self) -> float:
        """The largest suspicion in units of its detector's bound: above 1, the model is reported."""
        return max(self.suspicion[detector] / bound for detector, bound in BOUNDS.items())


def architectures(shape: tuple[int, int, int]) -> dict[str, Callable[[], nn.Sequential]]:
    """The kinds of models: what people train, and what the attacks can be mounted on."""
    c, h, w = shape
    m = c * h * w

    def head(features: int) -> list[nn.Module]:
        return [nn.Linear(features, NEURONS), nn.ReLU(), nn.Linear(NEURONS, CLASSES)]

    def block(width: int) -> Residual:
        return Residual(
            nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1))
        )

    return {
        "MLP": lambda: nn.Sequential(nn.Flatten(), *head(m)),
        "deep MLP": lambda: nn.Sequential(nn.Flatten(), nn.Linear(m, 256), nn.ReLU(), *head(256)),
        "paper's CNN": lambda: image_cnn(shape, NEURONS, CLASSES),
        "paper's CNN, BatchNorm": lambda: image_cnn(shape, NEURONS, CLASSES, norm="batch"),
        "wide CNN": lambda: nn.Sequential(
            nn.Conv2d(c, 8, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(8, 8, 3, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            *head(8 * h * w),
        ),
        "pooling CNN": lambda: nn.Sequential(
            nn.Conv2d(c, 16, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 5),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(4),
            nn.Flatten(),
            *head(512),
        ),
        "residual": lambda: nn.Sequential(
            nn.Conv2d(c, 8, 3, padding=1), block(8), nn.ReLU(), nn.Flatten(), *head(8 * h * w)
        ),
    }


MOUNTABLE = ("MLP", "paper's CNN", "paper's CNN, BatchNorm", "wide CNN")

OPTIMISERS: Mapping[str, Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]] = {
    "Adam 1e-3": lambda p: torch.optim.Adam(p, lr=1e-3),
    "Adam 1e-2": lambda p: torch.optim.Adam(p, lr=1e-2),
    "AdamW decay 0.1": lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.1),
    "SGD 0.05": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=5e-4),
}


def benign_models(
    data: ImageData,
    seeds: Sequence[int],
    epochs: int,
    device: str = "cpu",
    progress: Callable[[int, int], None] | None = None,
) -> Iterator[tuple[Judged, nn.Sequential]]:
    """Every architecture with every optimiser and seed, looked at before, early in, and at the end of its training."""
    moments = {0, 1, epochs // 3, epochs}
    done, total = 0, len(architectures(data.shape)) * len(OPTIMISERS) * len(seeds)
    x, y = normalised(data, slice(None)).to(device), (data.labels % CLASSES).to(device)
    for architecture, make in architectures(data.shape).items():
        for optimiser, configure in OPTIMISERS.items():
            for seed in seeds:
                draws = generator(seed, "calibration", architecture, optimiser)
                torch.manual_seed(derive_seed(seed, architecture, optimiser) % 2**31)
                model = make().to(device)
                trainer = configure(iter(model.parameters()))
                for epoch in range(epochs + 1):
                    if epoch in moments:
                        variant = f"{optimiser}, {epoch} epochs, seed {seed}"
                        yield Judged(architecture, variant, model_suspicion(model.state_dict())), model
                    if epoch < epochs:
                        _train(model, trainer, x, y, draws)
                done += 1
                if progress is not None:
                    progress(done, total)


def _train(model: nn.Module, trainer: torch.optim.Optimizer, x: Tensor, y: Tensor, draws: torch.Generator) -> None:
    for chosen in torch.randperm(len(x), generator=draws).to(x.device).split(64):
        trainer.zero_grad()
        F.cross_entropy(model(x[chosen]), y[chosen]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        trainer.step()


def crafted_models(data: ImageData, base: nn.Sequential, architecture: str, seed: int) -> Iterator[Judged]:
    """Every attack on a copy of the model, at every joint scale, with all or part of the rows crafted."""
    x = normalised(data, slice(None))
    auxiliary = flat(x[torch.randperm(len(x), generator=generator(seed, "auxiliary"))[:NEURONS]])
    for name, attack in _prepared(auxiliary, seed):
        mounted = mount(base, attack, x[:2], generator(seed, "crafted", name, architecture), gain=1.0)
        before, after = base.get_submodule(mounted.layer), mounted.target
        assert isinstance(before, nn.Linear)
        order = torch.randperm(NEURONS, generator=generator(seed, "part", name))
        for gain in GAINS:
            for part in PARTS:
                state = copy.copy(mounted.model.state_dict())
                crafted = torch.zeros(NEURONS, dtype=torch.bool)
                crafted[order[: round(part * NEURONS)]] = True
                rows = crafted[:, None]
                state[f"{mounted.layer}.weight"] = torch.where(rows, after.weight * gain, before.weight).detach()
                state[f"{mounted.layer}.bias"] = torch.where(crafted, after.bias * gain, before.bias).detach()
                # The prefix is left out where there is one: what the layer itself gives away is the harder question.
                alone = {n: p for n, p in state.items() if n.startswith(f"{mounted.layer}.")}
                yield Judged(name, f"{architecture}, gain {gain:g}, {part:.0%} of the rows", model_suspicion(alone))
                if mounted.layer not in ("0", "1"):
                    yield Judged(
                        name,
                        f"{architecture} with prefix, gain {gain:g}, {part:.0%} of the rows",
                        model_suspicion(state),
                    )


def _prepared(auxiliary: Tensor, seed: int) -> Iterator[tuple[str, Attack]]:
    """Every crafting attack of the registry, for the batches at which it is to be found."""
    for attack in (a for a in ATTACKS.values() if a.crafts):
        for size in attack.calibrated_at:
            name = attack.name if len(attack.calibrated_at) == 1 else f"{attack.name}, B = {size}"
            yield name, attack.prepare(Knowledge(size, NEURONS, auxiliary.shape[1], auxiliary, TRAP_SCALE, seed))


def roc(benign: Sequence[float], crafted: Sequence[float]) -> list[tuple[float, float]]:
    """(false-positive rate, share found) at every threshold, from the strictest on."""
    levels = sorted({*benign, *crafted}, reverse=True)
    points = [(0.0, 0.0)]
    for level in levels:
        points.append((sum(b >= level for b in benign) / len(benign), sum(c >= level for c in crafted) / len(crafted)))
    return points


@dataclass(frozen=True)
class Calibration:
    """All models that were judged, and what follows."""

    benign: tuple[Judged, ...]
    crafted: tuple[Judged, ...]
    bounds: Mapping[str, float]

    @property
    def false_positive_rate(self) -> float:
        """The share of benign models that are reported."""
        return sum(m.strength > 1 for m in self.benign) / len(self.benign)

    @property
    def found(self) -> float:
        """The share of crafted models that are reported."""
        return sum(m.strength > 1 for m in self.crafted) / len(self.crafted)

    def curves(self) -> dict[str, list[tuple[float, float]]]:
        """ROC of each detector alone and of all together."""
        alone = {
            name: roc([m.suspicion[name] for m in self.benign], [m.suspicion[name] for m in self.crafted])
            for name in self.bounds
        }
        return alone | {"all together": roc([m.strength for m in self.benign], [m.strength for m in self.crafted])}


def calibrate(
    data: ImageData,
    seeds: int = 1,
    epochs: int = 10,
    device: str = "cpu",
    progress: Callable[[int, int], None] | None = None,
) -> Calibration:
    """Train the benign models; craft on the first and the last state of one training of each mountable architecture."""
    benign: list[Judged] = []
    crafted: list[Judged] = []
    for judged, model in benign_models(data, range(seeds), epochs, device, progress):
        benign.append(judged)
        moments = {f"Adam 1e-3, {epoch} epochs, seed 0" for epoch in (0, epochs)}
        if judged.family in MOUNTABLE and judged.variant in moments:
            crafted += crafted_models(data, copy.deepcopy(model).cpu(), judged.family, 0)
    return Calibration(tuple(benign), tuple(crafted), BOUNDS)
