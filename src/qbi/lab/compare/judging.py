"""One attack against one defence, on the same batches for all: what leaks."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Literal

import torch
from torch import Tensor, nn

from qbi.attacks import Attack, InputRange, Knowledge, Mounted, mount
from qbi.attacks.registry import select
from qbi.carrier import flat
from qbi.data.images import denormalised, normalised, unit_pixels
from qbi.defences import Defence, StepDefence, protected_step
from qbi.defences.registry import DEFENCES
from qbi.defences.registry import select as select_defences
from qbi.errors import DataError
from qbi.federation.exposed import ClientStep
from qbi.metrics import RECOGNISABLE, THRESHOLDS, Threshold, match, ssim
from qbi.models import two_layer
from qbi.randomness import derive_seed, generator
from qbi.records import ImageData, Update

LAYER = "1"
CLASSES = 10


@dataclass(frozen=True)
class Setting:
    """What is held fixed over the matrix."""

    neurons: int = 200
    batches: int = 3
    rounds: int = 1
    epochs: int = 3
    trainings: int = 1
    optimiser: Literal["adam", "sgd"] = "adam"
    learning_rate: float = 1e-3
    gain: float | None = None
    seed: int = 0


@dataclass(frozen=True)
class Judgement:
    """One attack against one defence at one batch size, averaged over batches."""

    attack: str
    defence: str
    kind: str
    batch_size: int
    recall: Mapping[Threshold, float]
    ssim: float
    exposed: float
    seconds: float


@dataclass(frozen=True)
class _Seen:
    """What one batch gave."""

    recall: Mapping[Threshold, float]
    ssim: float
    exposed: float
    seconds: float


def judge(data: ImageData, attack: str, defence: str, batch_size: int, setting: Setting) -> Judgement:
    """Run the attack on several batches with the defence in place, and count."""
    (kind,) = select([attack], "compare")
    select_defences([defence], "compare")
    if batch_size + setting.neurons > len(data):
        raise DataError(
            f"compare: {len(data)} samples are too few for a batch of {batch_size} and {setting.neurons} auxiliary ones."
        )
    each = [_one(data, kind, DEFENCES[defence], batch_size, setting, batch) for batch in range(setting.batches)]
    return Judgement(
        attack=attack,
        defence=defence,
        kind=DEFENCES[defence].kind,
        batch_size=batch_size,
        recall={threshold: fmean(one.recall[threshold] for one in each) for threshold in THRESHOLDS},
        ssim=fmean(one.ssim for one in each),
        exposed=fmean(one.exposed for one in each),
        seconds=fmean(one.seconds for one in each),
    )


def _one(
    data: ImageData,
    attack: type[Attack],
    defence: Defence | StepDefence,
    batch_size: int,
    setting: Setting,
    batch: int,
) -> _Seen:
    name = (attack.key, batch_size, batch)
    order = torch.randperm(len(data), generator=generator(setting.seed, "samples", *name))
    chosen, auxiliary = order[:batch_size], order[batch_size : batch_size + setting.neurons]
    feed = unit_pixels if attack.domain is InputRange.UNIT else normalised
    x, y = feed(data, chosen), data.labels[chosen] % CLASSES
    sent = _mounted(attack, x, flat(feed(data, auxiliary)), setting, name)
    draws = generator(setting.seed, "defence", *name)
    started = time.perf_counter()
    steps = [protected_step(defence, sent.model, x, y, draws, layers=[LAYER]) for _ in range(setting.rounds)]
    spent = (time.perf_counter() - started) / setting.rounds
    candidates = sent.read(_united([step.update for step in steps]))
    exposed = torch.stack([_exposed(step, flat(x)) for step in steps]).any(0)
    truth = unit_pixels(data, chosen)
    unit = attack.domain is InputRange.UNIT
    pixels = candidates.samples if unit else flat(denormalised(data, candidates.samples))
    recoveries = match(pixels, flat(truth))
    best = recoveries[RECOGNISABLE]
    similar = 0.0
    if best.recovered.any():
        images = pixels[best.candidate[best.recovered]].reshape(-1, *data.shape).clamp(0, 1)
        similar = float(ssim(images, truth[best.recovered], data_range=1.0).sum()) / batch_size
    recall = {threshold: recovery.recall for threshold, recovery in recoveries.items()}
    return _Seen(recall, similar, float(exposed.double().mean()), spent)


def _mounted(attack: type[Attack], x: Tensor, auxiliary: Tensor, setting: Setting, name: tuple[object, ...]) -> Mounted:
    batch_size, features = len(x), auxiliary.shape[1]
    model = network(features, setting.neurons, CLASSES, derive_seed(setting.seed, "model", *name))
    prepared = attack.prepare(Knowledge(batch_size, setting.neurons, features, auxiliary, seed=setting.seed))
    gain = None if setting.gain is None else setting.gain / math.sqrt(features)
    return mount(model, prepared, x[:2], generator(setting.seed, "rows", *name), layer=LAYER, gain=gain)


def network(features: int, neurons: int, classes: int, seed: int) -> nn.Sequential:
    """The network that is attacked and trained: it takes images, so that a server knows that they are images."""
    return nn.Sequential(nn.Flatten(), *two_layer(features, neurons, classes, seed=seed))


def _united(rounds: Sequence[Update]) -> Update:
    """What a server makes of repeated rounds on one batch."""
    names = rounds[0].gradients.keys()
    united = {name: _unite([update.gradients[name] for update in rounds]) for name in names}
    return replace(rounds[0], gradients=united)


def _unite(rounds: Sequence[Tensor]) -> Tensor:
    """Each entry's mean over the rounds in which it was sent.

    Noise averages out, and entries that one round's mask took away come from another's.
    """
    if len(rounds) == 1:
        return rounds[0]
    sent = torch.stack([gradient != 0 for gradient in rounds]).sum(0)
    return torch.stack(list(rounds)).double().sum(0).div(sent.clamp_min(1)).to(rounds[0].dtype)


def _exposed(step: ClientStep, x: Tensor) -> Tensor:
    """Which input values can be divided out of rows in which one sample stands."""
    weight, bias = step.update.gradients[f"{LAYER}.weight"], step.update.gradients[f"{LAYER}.bias"]
    exposure = step.exposures[0]
    rows = ((exposure.counts == 1) & (bias != 0)).nonzero()[:, 0]
    owner = exposure.active[rows].to(torch.uint8).argmax(1)
    quotient = weight[rows].double() / bias[rows].double()[:, None]
    right = ((quotient - x[owner]).abs() <= 1e-5 * (1 + x[owner].abs())) & (weight[rows] != 0)
    out = torch.zeros(x.shape, dtype=torch.int32)
    return out.index_add_(0, owner, right.int()) > 0
