"""Evaluating A, P, R of fresh layers: draws in Gram space against real weights and a forward pass each."""

import torch
from torch import Tensor

from qbi.attacks.qbi import QBI
from qbi.exposure import leakage
from qbi.gram import gram, law
from qbi.lab.benchmarks.timing import Comparison, Shape, seconds
from qbi.randomness import generator

LAYERS = 100
"""Fresh layers that a table's cell evaluates: ten runs on ten batches."""

TIMED_LAYERS = 2


def bench_evaluation(shape: Shape, batch: Tensor, *, seed: int = 0, repeats: int = 3) -> Comparison:
    """Time the A, P, R of a hundred fresh QBI layers on one batch, from the loaded tensor."""
    device = str(batch.device)
    bias = QBI(shape.batch_size).bias(shape.features)

    def ours() -> None:
        draws = generator(seed, "bench", device=device)
        known = law(gram(batch))
        for _ in range(LAYERS):
            leakage(known.sample(shape.neurons, draws) > -bias)

    def naive() -> None:
        weight = torch.empty(shape.neurons, shape.features, device=device)
        for _ in range(TIMED_LAYERS):
            leakage(weight.normal_() @ batch.T > -bias)

    ours()
    fast = seconds(ours, device, repeats=repeats)
    naive()
    one = seconds(naive, device, repeats=repeats) / TIMED_LAYERS
    return Comparison("A, P, R", shape, fast, one * LAYERS, True, f"{LAYERS} layers of {one * 1e3:.1f} ms")
