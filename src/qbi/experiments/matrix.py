"""Attacks against defences, on the same batches: what leaks, what it costs, pair by pair."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from statistics import fmean
from typing import Literal

import torch
from torch import Tensor, nn

from qbi.attacks import PAIRS, QBI, Attack, Imprint, Mirrored, TrapWeights, mount
from qbi.attacks.imprint import equalise_head, read_differences
from qbi.attacks.mirrored import read_mirrored
from qbi.carrier import flat
from qbi.data.images import denormalised, normalised, unit_pixels
from qbi.defences import (
    DPSGD,
    Defence,
    DropClose,
    DropDominated,
    DropSparse,
    HideReadable,
    Noise,
    NoisyRows,
    Pruning,
    Sparsify,
    StepDefence,
    chain,
    protected_step,
)
from qbi.errors import BadValue, DataError
from qbi.extraction import read_rows
from qbi.federation.exposed import ClientStep
from qbi.metrics import match, ssim, thresholds_for
from qbi.randomness import derive_seed, generator
from qbi.records import Candidates, ImageData

LAYER = "0"
DEFENCES: Mapping[str, Defence | StepDefence] = {
    "none": chain(),
    "aggp": Pruning(),
    "aggp-no-bias": Pruning(bias="drop"),
    "drop-sparse": DropSparse(15),
    "drop-dominated": DropDominated(0.2),
    "drop-close": DropClose(16),
    "auto": HideReadable(3.0),
    "row-noise-1": NoisyRows(1.0),
    "row-noise-3": NoisyRows(3.0),
    "aggp-row-noise": chain(Pruning(), NoisyRows(1.0)),
    "top-10": Sparsify(0.1),
    "noise-0.1": Noise(0.1),
    "noise-1": Noise(1.0),
    "dp-sgd": DPSGD(clip=1.0, noise=1.0),
}
ATTACKS = ("passive", "qbi", "pairs", "trap-weights", "imprint", "mirrored")
SUBTRACTING = {"imprint": read_differences, "mirrored": read_mirrored}
"""Attacks that subtract rows, and how they are read; their head is made equal."""

TRAP_SCALE = 0.97


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
class Outcome:
    """One attack against one defence at one batch size, averaged over batches."""

    attack: str
    defence: str
    kind: str
    batch_size: int
    recall: Mapping[str, float]
    ssim: float
    exposed: float
    seconds: float


def judge(data: ImageData, attack: str, defence: str, batch_size: int, setting: Setting) -> Outcome:
    """Run the attack on several batches with the defence in place, and count."""
    if attack not in ATTACKS:
        raise BadValue(f"compare: no attack is called {attack!r}; there are {', '.join(ATTACKS)}.")
    if defence not in DEFENCES:
        raise BadValue(f"compare: no defence is called {defence!r}; there are {', '.join(DEFENCES)}.")
    if batch_size + setting.neurons > len(data):
        raise DataError(
            f"compare: {len(data)} samples are too few for a batch of {batch_size} and {setting.neurons} auxiliary ones."
        )
    each = [_one(data, attack, DEFENCES[defence], batch_size, setting, batch) for batch in range(setting.batches)]
    names = [threshold.name for threshold in thresholds_for(1.0)]
    return Outcome(
        attack=attack,
        defence=defence,
        kind=DEFENCES[defence].kind,
        batch_size=batch_size,
        recall={name: fmean(one[0][name] for one in each) for name in names},
        ssim=fmean(one[1] for one in each),
        exposed=fmean(one[2] for one in each),
        seconds=fmean(one[3] for one in each),
    )


def _one(
    data: ImageData, attack: str, defence: Defence | StepDefence, batch_size: int, setting: Setting, batch: int
) -> tuple[dict[str, float], float, float, float]:
    name = (attack, batch_size, batch)
    order = torch.randperm(len(data), generator=generator(setting.seed, "samples", *name))
    chosen, auxiliary = order[:batch_size], order[batch_size : batch_size + setting.neurons]
    feed = unit_pixels if attack == "trap-weights" else normalised
    x, y = flat(feed(data, chosen)), data.labels[chosen] % 10
    model = _network(x.shape[1], setting.neurons, 10, derive_seed(setting.seed, "model", *name))
    sent = _mount(model, attack, x, flat(feed(data, auxiliary)), batch_size, setting, name)
    draws = generator(setting.seed, "defence", *name)
    started = time.perf_counter()
    steps = [protected_step(defence, sent, x, y, draws, layers=[LAYER]) for _ in range(setting.rounds)]
    spent = (time.perf_counter() - started) / setting.rounds
    united = {part: _unite([step.update.gradients[f"{LAYER}.{part}"] for step in steps]) for part in ("weight", "bias")}
    candidates = _read(united["weight"], united["bias"], attack)
    exposed = torch.stack([_exposed(step, x) for step in steps]).any(0)
    truth = unit_pixels(data, chosen)
    pixels = candidates.samples if attack == "trap-weights" else flat(denormalised(data, candidates.samples))
    recoveries = match(pixels, flat(truth), thresholds_for(1.0))
    seen = recoveries[-1].recovered
    similar = 0.0
    if seen.any():
        images = pixels[recoveries[-1].candidate[seen]].reshape(-1, *data.shape).clamp(0, 1)
        similar = float(ssim(images, truth[seen], data_range=1.0).sum()) / batch_size
    return {r.threshold: r.recall for r in recoveries}, similar, float(exposed.double().mean()), spent


def _network(features: int, neurons: int, classes: int, seed: int) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed % 2**31)
        return nn.Sequential(nn.Linear(features, neurons), nn.ReLU(), nn.Linear(neurons, classes))


def _unite(rounds: Sequence[Tensor]) -> Tensor:
    """What a server makes of repeated rounds on one batch: each entry's mean over the rounds in which it was sent.

    Noise averages out, and entries that one round's mask took away come from another's.
    """
    sent = torch.stack([gradient != 0 for gradient in rounds]).sum(0)
    return torch.stack(list(rounds)).double().sum(0).div(sent.clamp_min(1)).to(rounds[0].dtype)


def _mount(
    model: nn.Module,
    attack: str,
    x: Tensor,
    auxiliary: Tensor,
    batch_size: int,
    setting: Setting,
    name: tuple[object, ...],
) -> nn.Module:
    if attack == "passive":
        return model
    means = auxiliary.mean(1)
    attacks: Mapping[str, Callable[[], Attack]] = {
        "qbi": lambda: QBI(batch_size),
        "pairs": lambda: PAIRS(batch_size, auxiliary),
        "trap-weights": lambda: TrapWeights(TRAP_SCALE),
        "imprint": lambda: Imprint(float(means.mean()), float(means.std())),
        "mirrored": lambda: Mirrored(batch_size),
    }
    gain = None if setting.gain is None else setting.gain / math.sqrt(x.shape[1])
    mounted = mount(model, attacks[attack](), x[:2], generator(setting.seed, "rows", *name), gain=gain)
    if attack in SUBTRACTING:
        equalise_head(mounted)
    return mounted.model


def _read(weight: Tensor, bias: Tensor, attack: str) -> Candidates:
    return SUBTRACTING.get(attack, read_rows)(weight, bias)


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


def accuracy_after_training(
    data: ImageData, defence: str, batch_size: int, setting: Setting, training: int = 0
) -> float:
    """Held-out accuracy of a small network trained with the defence on every step; one of several trainings."""
    order = torch.randperm(len(data), generator=generator(setting.seed, "training", training))
    held_out, train = order[: len(data) // 5], order[len(data) // 5 :]
    x, y = flat(normalised(data, train)), data.labels[train]
    classes = max(10, len(data.classes))
    model = _network(x.shape[1], setting.neurons, classes, derive_seed(setting.seed, "trained", training))
    optimiser: torch.optim.Optimizer
    if setting.optimiser == "adam":
        optimiser = torch.optim.Adam(model.parameters(), lr=setting.learning_rate)
    else:
        optimiser = torch.optim.SGD(model.parameters(), lr=setting.learning_rate, momentum=0.9)
    draws, batches = generator(setting.seed, "masks", training), generator(setting.seed, "order", training)
    parameters = dict(model.named_parameters())
    for _ in range(setting.epochs):
        for chosen in torch.randperm(len(x), generator=batches).split(batch_size):
            try:
                step = protected_step(DEFENCES[defence], model, x[chosen], y[chosen], draws, layers=[LAYER])
            except BadValue:
                return 1 / classes  # the training diverged: what is left guesses
            for name, gradient in step.update.gradients.items():
                parameters[name].grad = gradient
            optimiser.step()
    with torch.no_grad():
        return float((model(flat(normalised(data, held_out))).argmax(1) == data.labels[held_out]).double().mean())


@dataclass(frozen=True)
class Task:
    """One entry of the matrix: an attack against a defence, or (without an attack) one training."""

    defence: str
    batch_size: int
    attack: str | None = None
    training: int = 0


def run_matrix(
    data: ImageData,
    attacks: Sequence[str],
    defences: Sequence[str],
    batch_sizes: Sequence[int],
    setting: Setting,
    *,
    jobs: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[list[Outcome], dict[tuple[str, int], list[float]]]:
    """Every attack against every defence at every batch size, and each defence's accuracies where epochs are asked for.

    The result does not depend on the number of jobs.
    """
    pairs = [(batch_size, defence) for batch_size in batch_sizes for defence in defences]
    tasks = [Task(d, b, attack) for b, d in pairs for attack in attacks]
    if setting.epochs:
        tasks += [Task(d, b, training=t) for b, d in pairs for t in range(setting.trainings)]
    done: dict[Task, Outcome | float] = {}
    for task, result in _work(tasks, data, setting, jobs):
        done[task] = result
        if progress is not None:
            progress(len(done), len(tasks))
    outcomes = [result for task in tasks if isinstance(result := done[task], Outcome)]
    accuracy: dict[tuple[str, int], list[float]] = {}
    for task in tasks:
        if isinstance(result := done[task], float):
            accuracy.setdefault((task.defence, task.batch_size), []).append(result)
    return outcomes, accuracy


def _work(
    tasks: Sequence[Task], data: ImageData, setting: Setting, jobs: int
) -> Iterator[tuple[Task, Outcome | float]]:
    if jobs == 1:
        yield from ((task, _compute(task, data, setting)) for task in tasks)
        return
    with ProcessPoolExecutor(
        jobs, mp_context=get_context("spawn"), initializer=torch.set_num_threads, initargs=(1,)
    ) as pool:
        futures = {pool.submit(_compute, task, data, setting): task for task in tasks}
        yield from ((futures[future], future.result()) for future in as_completed(futures))


def _compute(task: Task, data: ImageData, setting: Setting) -> Outcome | float:
    if task.attack is None:
        return accuracy_after_training(data, task.defence, task.batch_size, setting, task.training)
    return judge(data, task.attack, task.defence, task.batch_size, setting)
