"""Random batches, models, losses and precisions; what a reader certifies of them, put against the truth."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from qbi import client_step, mount
from qbi.attacks import Reading
from qbi.attacks.registry import ATTACKS
from qbi.carrier import flat
from qbi.randomness import generator

PRECISIONS = {"float32": (None, None), "bfloat16": (torch.bfloat16, 2.0**-9), "float16": (torch.float16, 2.0**-12)}


@dataclass(frozen=True)
class Case:
    """One batch and one reading of it."""

    seed: int
    precision: str
    loss: str
    attack: str
    neurons: int
    batch: int
    features: int
    twist: str


LOSSES = ("cross-entropy", "two classes", "weighted", "smoothed", "margins", "mse", "one number", "yes or no")
TWISTS = ("none", "none", "repeated", "nearly repeated", "dead rows", "on a line", "scaled", "bytes")


def drawn(seed: int, *, sure: bool = False) -> Case:
    """A case for a number; `sure` ones are of the kinds in which something may be certified at all."""
    draws = generator(seed, "certificates")

    def pick(choices):
        return choices[int(torch.randint(len(choices), (1,), generator=draws))]

    batch = pick((24, 32, 40) if sure else (4, 8, 16, 24))
    if sure:
        loss = pick((*["cross-entropy"] * 9, "smoothed", "two classes", "margins"))
        twist = pick((*["none"] * 4, *["dead rows"] * 3, "scaled", "on a line", "nearly repeated", "repeated", "bytes"))
        attack = "passive" if twist == "bytes" else "cascade"
        return Case(seed, "float32", loss, attack, 6 * batch, batch, pick((60, 90, 120)), twist)
    return Case(
        seed,
        pick(("float32", "float32", "bfloat16", "float16")),
        pick(LOSSES),
        pick(("passive", "cascade", "qbi" if batch > 1 else "cascade")),
        pick((3 * batch, 5 * batch, 8 * batch)),
        batch,
        pick((30, 60, 120)),
        pick(TWISTS),
    )


def loss_and_targets(case: Case, draws: torch.Generator):
    """The loss, the targets, the number of outputs, and what the server knows of the targets."""
    labels = torch.randint(10, (case.batch,), generator=draws)
    numbers = torch.randn(case.batch, 4, generator=draws)
    weights = torch.linspace(0.5, 2.0, 10)
    return {
        "cross-entropy": (F.cross_entropy, labels, 10, "classes"),
        "two classes": (F.cross_entropy, labels % 2, 2, "classes"),
        "weighted": (lambda o, y: F.cross_entropy(o, y, weight=weights.to(o)), labels, 10, "classes"),
        "smoothed": (lambda o, y: F.cross_entropy(o, y, label_smoothing=0.1), labels, 10, "classes"),
        "margins": (F.multi_margin_loss, labels % 4, 4, "classes"),
        "mse": (F.mse_loss, numbers, 4, "numbers"),
        "one number": (lambda o, y: F.mse_loss(o[:, 0], y.to(o)), numbers[:, 0], 1, "numbers"),
        "yes or no": (lambda o, y: F.binary_cross_entropy_with_logits(o[:, 0], y.to(o)), labels % 2, 1, "classes"),
    }[case.loss]


def twisted(x: torch.Tensor, case: Case) -> torch.Tensor:
    """Batches that invite mistakes."""
    half = case.batch // 2
    if case.twist == "repeated":
        x[half:] = x[: case.batch - half]
    if case.twist == "nearly repeated":
        x[half:] = x[: case.batch - half] + 1e-3 * x[half:]
    if case.twist == "on a line":
        x = x[:1] + torch.linspace(-1, 1, case.batch)[:, None] * x[1:2] + 0.05 * x
    if case.twist == "bytes":  # positive and large: losses saturate, and samples fire the same rows
        return (torch.rand(x.shape[1], generator=generator(case.seed, "mean")) + 1 + 0.3 * x) * 255
    return 1000 * x if case.twist == "scaled" else x


def sent(case: Case):
    """The batch, the model, the client's update, and what the server knows."""
    draws = generator(case.seed, "batch")
    x = twisted(torch.randn(case.batch, case.features, generator=draws), case)
    loss, y, outputs, targets = loss_and_targets(case, draws)
    torch.manual_seed(case.seed)
    model = nn.Sequential(nn.Linear(case.features, case.neurons), nn.ReLU(), nn.Linear(case.neurons, outputs))
    if case.twist == "dead rows":
        with torch.no_grad():
            model[0].bias[::2] -= 1e3
    attack: Any = ATTACKS[case.attack]
    made = attack() if case.attack == "passive" else attack(case.batch)
    mounted = mount(model, made, x[:2], generator(case.seed, "rows"), layer="0")
    update = client_step(mounted.model, x, y, loss=loss)
    kind, rounding = PRECISIONS[case.precision]
    if kind is not None:
        update = replace(update, gradients={n: g.to(kind).float() for n, g in update.gradients.items()})
    how = Reading(rounding=rounding, loss=loss, targets=targets, seed=case.seed, largest=float(x.abs().max()))
    return x, mounted, update, how


def read(case: Case):
    """The batch and what was read of it."""
    x, mounted, update, how = sent(case)
    return x, mounted.read(update, how)


@dataclass
class Tally:
    """What came of many cases."""

    certified: int = 0
    wrong: int = 0
    too_many: int = 0
    cases: list = None

    def add(self, case: Case) -> None:
        """Read one, and judge every certificate: within a thousandth of the sample's spread, and within what is stated."""
        self.cases = self.cases or []
        x, found = read(case)
        if found.certified is None or not bool(found.certified.any()):
            return
        own = found.samples[found.certified].double()
        apart = torch.cdist(own, flat(x).double(), compute_mode="donot_use_mm_for_euclid_dist")
        spread = x.double().std() * x.shape[1] ** 0.5
        error = apart.amin(1) / spread
        bad = int((error > 0.03).sum())
        self.certified += len(own)
        self.wrong += bad
        distinct = len(torch.unique(x, dim=0))
        self.too_many += int(len(own) > distinct)
        if bad or len(own) > distinct:
            self.cases.append((case, len(own), bad, float(error.max())))
