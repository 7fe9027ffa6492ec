"""What gradient matching sees of small batches of honest clients, and of clients that take the private step."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

from qbi.carrier import flat
from qbi.errors import CannotRead
from qbi.extraction.labels import batch_labels, classifier
from qbi.federation import client_step
from qbi.lab.networks import FedAvgNet, LeNetZhu, resnet18
from qbi.matching import Effort, GradientDistance, match_images
from qbi.metrics import CLEAR, RECOGNISABLE, Guess, match
from qbi.metrics.matching import mean_squared_errors
from qbi.private.defence import PrivateStep
from qbi.private.goal import Budget
from qbi.randomness import derive_seed, generator

NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "LeNet (Zhu)": (LeNetZhu, (1, 2, 4, 8), 10),
    "FedAvg's CNN": (FedAvgNet, (1, 2, 4, 8), 4),
    "ResNet-18": (resnet18, (1, 4), 2),
}
"""A network for 32×32 images, the sizes of its batches, and how many of each are tried; all as they are initialised."""
PUT_TO_THE_TEST, PRIVATE = "LeNet (Zhu)", 2
"""The network of which another image and the private step are tried, the latter on so many batches."""

PUBLISHED = Effort(steps=4800, restarts=1, rate=0.1, smooth=0.01)
"""The settings of Geiping et al. (arXiv 2003.14053) for an untrained LeNet."""

OTHERS = 1024
"""Images that a guess is taken from."""


@dataclass(frozen=True)
class MatchTask:
    """One batch of one setting."""

    network: str
    batch_size: int
    bits: float | None = None
    """Of the private step; none: the plain gradient."""
    other: bool = False
    """Whether what is found is compared with a batch that the gradient says nothing of."""
    batch: int = 0

    @property
    def key(self) -> str:
        """A name for a file."""
        kind = "other" if self.other else "plain" if self.bits is None else f"{self.bits:g}-bits"
        words = "".join(c if c.isalnum() else "-" for c in self.network.lower())
        return f"{words}-{self.batch_size}-{kind}-{self.batch}"


def settings() -> Iterator[MatchTask]:
    """One for each row of the table, the quick ones first."""
    for network, (_, sizes, _) in NETWORKS.items():
        yield from (MatchTask(network, size) for size in sizes)
    yield MatchTask(PUT_TO_THE_TEST, 1, other=True)
    yield from (MatchTask(PUT_TO_THE_TEST, 1, bits) for bits in (72.0, 18.0, 8.0))


def tasks() -> list[MatchTask]:
    """Every batch of every setting."""
    counts = {row: NETWORKS[row.network][2] if row.bits is None else PRIVATE for row in settings()}
    return [replace(row, batch=number) for row, count in counts.items() for number in range(count)]


def one_batch(
    task: MatchTask, pixels: Tensor, labels: Tensor, *, effort: Effort = PUBLISHED, device: str = "cpu", seed: int = 0
) -> dict[str, Any]:
    """What is seen of it. Pixels are bytes, 32×32."""
    order = torch.randperm(len(pixels), generator=generator(seed, "matched", task.batch))
    chosen, apart = order[: task.batch_size], order[task.batch_size :][:OTHERS]
    shown = pixels.float() / 255
    mean, std = (getattr(shown[apart], what)((0, 2, 3)).view(1, 3, 1, 1) for what in ("mean", "std"))
    x, y = ((shown[chosen] - mean) / std).to(device), labels[chosen].to(device)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, "weights", task.network, task.batch) % 2**31)
        model = NETWORKS[task.network][0]().to(device)
    if task.bits is None:
        gradients = client_step(model, x, y, seed=seed).gradients
    else:
        step = PrivateStep(Budget.for_goal(bits=task.bits))
        gradients = step.update(model, x, y, generator(seed, "noise", task.batch, device=device)).gradients
    last = classifier(model)
    if last is None:
        raise CannotRead(f"{task.network}: no head with a bias tells its labels.")
    read, certain = batch_labels(gradients[f"{last[0]}.bias"], task.batch_size)
    # Noise hides the labels too; a server could try them all, so it is given the right ones.
    given = read.to(device) if task.bits is None else y.sort().values
    found = match_images(
        GradientDistance(model, gradients, given),
        tuple(x.shape[1:]),
        low=(0 - mean) / std,
        high=(1 - mean) / std,
        effort=effort,
        seed=derive_seed(seed, "descent", task.batch),
    )
    truth = shown[apart[-task.batch_size :]] if task.other else shown[chosen]
    others = shown[apart[: -task.batch_size]] if task.other else shown[apart]
    made = (found.images.cpu() * std + mean).clamp(0, 1)
    scores = _scores(flat(made), flat(truth), flat(others))
    right = torch.minimum(torch.bincount(read.cpu(), minlength=10), torch.bincount(y.cpu(), minlength=10)).sum()
    return scores | {
        "labels": float(right) / task.batch_size,
        "certain": float(certain),
        "distance": found.distance,
        "seconds": found.seconds,
    }


def _scores(made: Tensor, truth: Tensor, others: Tensor) -> dict[str, float]:
    """Shares at the thresholds beside a guess's, and the mean PSNR of the assignment with the least error."""
    recoveries = match(made, truth)
    guess = Guess.of(truth, recoveries, others, 1.0)
    errors = mean_squared_errors(made, truth)
    rows, columns = linear_sum_assignment(errors.numpy())
    psnr = -10 * errors[rows, columns].clamp_min(1e-12).log10()
    return {
        "psnr": float(psnr.mean()),
        "recognisable": float(recoveries[RECOGNISABLE].recovered.double().mean()),
        "clear": float(recoveries[CLEAR].recovered.double().mean()),
        "guess": guess.share[RECOGNISABLE],
        "beyond": guess.beyond[RECOGNISABLE],
    }


def rows_from(done: dict[MatchTask, dict[str, Any]]) -> list[dict[str, Any]]:
    """Means over the batches that were done, and the spread of their PSNR."""
    rows = []
    for row in settings():
        own = [found for task, found in done.items() if replace(task, batch=0) == row]
        if own:
            means = {key: sum(found[key] for found in own) / len(own) for key in own[0]}
            spread = float(torch.tensor([found["psnr"] for found in own]).std()) if len(own) > 1 else None
            named = {"network": row.network, "batch_size": row.batch_size, "bits": row.bits, "other": row.other}
            rows.append(named | {"batches": len(own), "deviation": spread} | means)
    return rows
