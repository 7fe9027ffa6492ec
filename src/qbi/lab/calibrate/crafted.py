"""Crafted models: every attack on trained and untrained models, and servers that have read how the detectors work."""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from qbi.attacks import ATTACKS, QBI, Attack, Knowledge, TrapWeights, mount
from qbi.carrier import flat
from qbi.data.images import normalised, unit_pixels
from qbi.detection.parameters import model_suspicion
from qbi.exposure import leakage
from qbi.lab.calibrate.judging import Judged
from qbi.lab.calibrate.models import CLASSES, NEURONS
from qbi.randomness import generator
from qbi.records import ImageData

GAINS = (0.01, 1.0, 100.0)
PARTS = (1.0, 0.25, 0.1)
"""Which part of the attacked layer's rows is crafted; the others stay as they were trained."""

TRAP_SCALE = {"trap_scale": 0.97}
"""At one scale: what is to be found does not depend on it."""

MOUNTABLE = ("MLP", "paper's CNN", "paper's CNN, BatchNorm", "wide CNN")


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
                names = list(state)
                behind = names[names.index(f"{mounted.layer}.weight") :]
                for read in (n for n in behind[2:] if state[n].shape[1:] == (NEURONS,)):
                    # What the layers behind make of rows that are not crafted stays as it was, too.
                    state[read] = torch.where(crafted, state[read], base.state_dict()[read])
                # The prefix is left out where there is one: what the layer and those behind it give away is the harder question.
                alone = {n: state[n] for n in behind}
                yield Judged(name, f"{architecture}, gain {gain:g}, {part:.0%} of the rows", model_suspicion(alone))
                if mounted.layer not in ("0", "1"):
                    yield Judged(
                        name,
                        f"{architecture} with prefix, gain {gain:g}, {part:.0%} of the rows",
                        model_suspicion(state),
                    )


def _prepared(auxiliary: Tensor, seed: int) -> Iterator[tuple[str, Attack]]:
    """Every crafting attack of the registry, for the batches at which it is to be found."""
    for attack in (a for a in ATTACKS.values() if a.crafts and not a.heads):
        for size in attack.calibrated_at:
            name = attack.name if len(attack.calibrated_at) == 1 else f"{attack.name}, B = {size}"
            yield name, attack.prepare(Knowledge(size, NEURONS, auxiliary.shape[1], auxiliary, TRAP_SCALE, seed))


@dataclass(frozen=True)
class Evasion:
    """A server that knows the detectors: what it does, how suspicious it is, and what it still reads of a batch."""

    name: str
    judged: Judged
    recall: float


def evasions(data: ImageData, seed: int, batch_size: int = 20) -> Iterator[Evasion]:
    """Servers that keep below a bound on purpose, on a two-layer network behind BatchNorm; R by who fires alone, over ten batches."""
    x = flat(normalised(data, slice(None)))
    features = x.shape[1]
    shown = x[torch.randperm(len(x), generator=generator(seed, "answers"))[: 10 * batch_size]].split(batch_size)
    batches = [nn.functional.batch_norm(batch, None, None, training=True) for batch in shown]

    def evasion(
        name: str,
        weight: Tensor,
        bias: Tensor,
        scale: float = 1.0,
        shift: float = 0.0,
        given: Sequence[Tensor] = batches,
    ) -> Evasion:
        arriving = [scale * batch + shift for batch in given]
        read = [leakage(weight @ batch.T + bias[:, None] > 0).recall for batch in arriving]
        state = {
            "norm.weight": torch.full((features,), scale),
            "norm.bias": torch.full((features,), shift),
            "fc.weight": weight,
            "fc.bias": bias,
            "head.weight": torch.randn(CLASSES, NEURONS, generator=generator(seed, "head")) / NEURONS**0.5,
        }
        judged = Judged("answer", name, model_suspicion(state))
        return Evasion(name, judged, sum(read) / len(read))

    plain = QBI(batch_size).rows(NEURONS, features, generator(seed, "answer"))
    yield evasion("QBI as it is", plain.weight, plain.bias)
    yield evasion("what arrives scaled by 0.3, rows divided by 0.3", plain.weight / 0.3, plain.bias, 0.3)
    # w·(x + 1·s) = w·x + s·Σw: the threshold moves from the bias into what arrives.
    lifted = plain.weight - plain.weight.mean(1, keepdim=True) + plain.bias[:, None] / features
    yield evasion("the threshold moved into what arrives", lifted, torch.zeros(NEURONS), 1.0, 1.0)
    low = 0.95 * plain.weight.norm(dim=1)
    yield evasion("biases kept at 0.95 of a row's norm", plain.weight, -low)
    # Trap weights are made for values between 0 and 1, without a normalisation.
    pixels = flat(unit_pixels(data, slice(0, 10 * batch_size))).split(batch_size)
    trap = TrapWeights(0.97).rows(NEURONS, features, generator(seed, "trap"))
    noise = torch.randn(trap.weight.shape, generator=generator(seed, "noise"))
    blurred = trap.weight + 0.01 * trap.weight.norm(dim=1, keepdim=True) / features**0.5 * noise
    yield evasion("trap weights as they are", trap.weight, trap.bias, given=pixels)
    yield evasion("trap weights with noise of 1 %", blurred, trap.bias, given=pixels)
    two = torch.randn(NEURONS, features, generator=generator(seed, "honest")) / features**0.5
    bias = torch.zeros(NEURONS)
    two[:2], bias[:2] = plain.weight[:2], plain.bias[:2]
    yield evasion("two crafted rows", two, bias)
