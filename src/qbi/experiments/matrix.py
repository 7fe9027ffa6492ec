"""Attacks against defences, on the same batches: what leaks, what it costs, pair by pair."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import Tensor, nn

from qbi.attacks import PAIRS, QBI, Attack, Imprint, TrapWeights, mount
from qbi.attacks.imprint import equalise_head, read_differences
from qbi.carrier import flat
from qbi.data.images import denormalised, normalised, unit_pixels
from qbi.defences import DropClose, DropDominated, DropSparse, Noise, Pruning, Sparsify, chain
from qbi.defences.base import Defence
from qbi.errors import BadValue, DataError
from qbi.extraction import read_rows
from qbi.federation.exposed import ClientStep, exposed_step
from qbi.metrics import match, ssim, thresholds_for
from qbi.randomness import derive_seed, generator
from qbi.records import Candidates, ImageData

LAYER = "0"
DEFENCES: Mapping[str, Defence] = {
    "none": chain(),
    "aggp": Pruning(),
    "aggp-no-bias": Pruning(bias="drop"),
    "drop-sparse": DropSparse(15),
    "drop-dominated": DropDominated(0.2),
    "drop-close": DropClose(16),
    "top-10": Sparsify(0.1),
    "noise-0.1": Noise(0.1),
    "noise-1": Noise(1.0),
}
ATTACKS = ("passive", "qbi", "pairs", "trap-weights", "imprint")
TRAP_SCALE = 0.97


@dataclass(frozen=True)
class Setting:
    """What is held fixed over the matrix."""

    neurons: int = 200
    batches: int = 3
    rounds: int = 1
    epochs: int = 3
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
    data: ImageData, attack: str, defence: Defence, batch_size: int, setting: Setting, batch: int
) -> tuple[dict[str, float], float, float, float]:
    name = (attack, batch_size, batch)
    order = torch.randperm(len(data), generator=generator(setting.seed, "samples", *name))
    chosen, auxiliary = order[:batch_size], order[batch_size : batch_size + setting.neurons]
    feed = unit_pixels if attack == "trap-weights" else normalised
    x = flat(feed(data, chosen))
    torch.manual_seed(derive_seed(setting.seed, "model", *name) % 2**31)
    model = nn.Sequential(nn.Linear(x.shape[1], setting.neurons), nn.ReLU(), nn.Linear(setting.neurons, 10))
    sent = _mount(model, attack, x, flat(feed(data, auxiliary)), batch_size, setting, name)
    step = exposed_step(sent, x, data.labels[chosen] % 10, layers=[LAYER])
    draws = generator(setting.seed, "defence", *name)
    found: list[Tensor] = []
    exposed = torch.zeros(x.shape, dtype=torch.bool)
    spent = 0.0
    for _ in range(setting.rounds):
        started = time.perf_counter()
        protected = defence.apply(step, draws)
        spent += time.perf_counter() - started
        found.append(_read(protected, attack).samples)
        exposed |= _exposed(protected, x)
    candidates, truth = torch.cat(found), unit_pixels(data, chosen)
    pixels = candidates if attack == "trap-weights" else flat(denormalised(data, candidates))
    recoveries = match(pixels, flat(truth), thresholds_for(1.0))
    seen = recoveries[-1].recovered
    similar = 0.0
    if seen.any():
        images = pixels[recoveries[-1].candidate[seen]].reshape(-1, *data.shape).clamp(0, 1)
        similar = float(ssim(images, truth[seen], data_range=1.0).sum()) / batch_size
    return {r.threshold: r.recall for r in recoveries}, similar, float(exposed.double().mean()), spent / setting.rounds


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
    }
    mounted = mount(model, attacks[attack](), x[:2], generator(setting.seed, "rows", *name))
    if attack == "imprint":
        equalise_head(mounted)
    return mounted.model


def _read(step: ClientStep, attack: str) -> Candidates:
    weight, bias = step.update.gradients[f"{LAYER}.weight"], step.update.gradients[f"{LAYER}.bias"]
    return read_differences(weight, bias) if attack == "imprint" else read_rows(weight, bias)


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


def accuracy_after_training(data: ImageData, defence: str, batch_size: int, setting: Setting) -> float:
    """Held-out accuracy of a small network trained with the defence on every step."""
    order = torch.randperm(len(data), generator=generator(setting.seed, "training"))
    held_out, train = order[: len(data) // 5], order[len(data) // 5 :]
    x, y = flat(normalised(data, train)), data.labels[train]
    torch.manual_seed(derive_seed(setting.seed, "trained") % 2**31)
    classes = max(10, len(data.classes))
    model = nn.Sequential(nn.Linear(x.shape[1], setting.neurons), nn.ReLU(), nn.Linear(setting.neurons, classes))
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-3)
    draws, batches = generator(setting.seed, "masks"), generator(setting.seed, "order")
    parameters = dict(model.named_parameters())
    for _ in range(setting.epochs):
        for chosen in torch.randperm(len(x), generator=batches).split(batch_size):
            step = DEFENCES[defence].apply(exposed_step(model, x[chosen], y[chosen], layers=[LAYER]), draws)
            for name, gradient in step.update.gradients.items():
                parameters[name].grad = gradient
            optimiser.step()
    with torch.no_grad():
        return float((model(flat(normalised(data, held_out))).argmax(1) == data.labels[held_out]).double().mean())


def run_matrix(
    data: ImageData,
    attacks: Sequence[str],
    defences: Sequence[str],
    batch_sizes: Sequence[int],
    setting: Setting,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[list[Outcome], dict[tuple[str, int], float]]:
    """Every attack against every defence at every batch size, and each defence's accuracy where epochs are asked for."""
    outcomes: list[Outcome] = []
    accuracy: dict[tuple[str, int], float] = {}
    total = len(batch_sizes) * len(defences) * (len(attacks) + (setting.epochs > 0))
    for batch_size in batch_sizes:
        for defence in defences:
            for attack in attacks:
                outcomes.append(judge(data, attack, defence, batch_size, setting))
                if progress is not None:
                    progress(len(outcomes) + len(accuracy), total)
            if setting.epochs:
                accuracy[defence, batch_size] = accuracy_after_training(data, defence, batch_size, setting)
    return outcomes, accuracy
