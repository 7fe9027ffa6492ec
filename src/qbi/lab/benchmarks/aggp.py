"""AGGP against a loop over rows with a full sort each, and what it adds to a training step."""

from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor, nn

from qbi.defences.aggp import AGGP, keep_share, kept_entries, prune_by_outputs, prune_rows_in_place
from qbi.lab.benchmarks.timing import Comparison, Shape, seconds
from qbi.models import image_cnn
from qbi.randomness import generator

TIMED_ROWS = 20


def bench_aggp(shape: Shape, device: str, *, seed: int = 0, repeats: int = 3) -> Comparison:
    """Prune a whole gradient whose rows fire for about one sample each, as a QBI layer's do."""
    draws = generator(seed, "aggp", device=device)
    gradient = torch.randn(shape.neurons, shape.features, generator=draws, device=device)
    counts = torch.poisson(torch.ones(shape.neurons, device=device), generator=draws).long()

    def ours() -> None:
        prune_rows_in_place(gradient.clone(), counts, generator(seed, "masks"), AGGP())

    copying = seconds(lambda: gradient.clone(), device, repeats=repeats)
    ours()
    fast = max(1e-9, seconds(ours, device, repeats=repeats) - copying)
    rows = ((counts > 0) & (counts < AGGP().cutoff)).nonzero()[:, 0]
    some = rows[:TIMED_ROWS]
    one = seconds(lambda: naive_aggp(gradient.clone(), some.tolist(), counts, AGGP()), device) - copying
    total = one / len(some) * len(rows)
    return Comparison("AGGP", shape, fast, total, True, f"{len(rows)} rows of {one / len(some) * 1e3:.1f} ms")


def naive_aggp(gradient: Tensor, rows: list[int], counts: Tensor, settings: AGGP) -> None:
    """The listing, mended (errata 2, 3): one row after another, each sorted whole, in place."""
    features = gradient.shape[1]
    for row in rows:
        count = int(counts[row])
        largest, kept = int(keep_share(count, settings) * features), kept_entries(count, features, settings)
        order = gradient[row].abs().argsort(descending=True)
        lost = order[torch.randperm(largest, device=gradient.device)[kept:]]
        gradient[row, order[largest:]] = 0
        gradient[row, lost] = 0


@dataclass(frozen=True)
class StepCost:
    """Seconds of a training step of the paper's CNN on CIFAR-10 at batch 64, and what AGGP adds."""

    step: float
    added: float

    @property
    def share(self) -> float:
        """The added time relative to the plain step."""
        return self.added / self.step


def bench_step(device: str, *, seed: int = 0, repeats: int = 5) -> StepCost:
    """Time a plain step, and the counting and pruning on top of it, on random images."""
    torch.manual_seed(seed)
    model = image_cnn((3, 32, 32)).to(device)
    layer = model.get_submodule("fc1")
    assert isinstance(layer, nn.Linear)
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-5)
    x, y = torch.randn(64, 3, 32, 32, device=device), torch.randint(10, (64,), device=device)
    fired: list[Tensor] = []
    hook = layer.register_forward_hook(lambda _m, _i, out: fired.append(out.detach()))
    masks = generator(seed, "masks")

    def plain() -> None:
        fired.clear()
        optimiser.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(model(x), y).backward()
        optimiser.step()

    def protect() -> None:
        assert layer.weight.grad is not None
        prune_by_outputs(layer.weight.grad, fired[0], masks, AGGP())

    def both() -> None:
        plain()
        protect()

    # One after the other and many times: the difference is small beside what a machine does on its own.
    both()
    times = [(seconds(plain, device), seconds(both, device)) for _ in range(repeats if device == "cpu" else 100)]
    hook.remove()
    step = median(t[0] for t in times)
    return StepCost(step, median(t[1] - t[0] for t in times))
