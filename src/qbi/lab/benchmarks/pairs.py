"""PAIRS against the way it is written in the paper: a full forward pass of the layer for every retry."""

import torch
from torch import Tensor

from qbi.attacks.pairs import PAIRS
from qbi.attacks.qbi import QBI
from qbi.attacks.search import search
from qbi.gram import gram, law
from qbi.lab.benchmarks.timing import Comparison, Shape, seconds
from qbi.randomness import generator

NAIVE_BUDGET = 90.0
"""Seconds up to which the naive search is run to its end; beyond that, retries are timed and multiplied."""

TIMED_RETRIES = 8


def bench_pairs(shape: Shape, auxiliary: Tensor, *, seed: int = 0, repeats: int = 3) -> Comparison:
    """Time PAIRS from loaded tensors to finished weights, and the naive method on the same data."""
    device = str(auxiliary.device)
    attack = PAIRS(shape.batch_size, auxiliary)

    def ours() -> object:
        return attack.rows(shape.neurons, shape.features, generator(seed, "bench", device=device))

    ours()  # warm-up: thread pools, handles, allocator
    fast = seconds(ours, device, repeats=repeats)
    retries = _retries(shape, auxiliary, attack, seed)
    weight = torch.empty(shape.neurons, shape.features, device=device).normal_()
    bias = QBI(shape.batch_size).bias(shape.features)
    group = auxiliary[: shape.batch_size]
    one = seconds(lambda: _naive_retries(weight, group, bias, TIMED_RETRIES), device) / TIMED_RETRIES
    if one * retries > NAIVE_BUDGET:
        return Comparison("PAIRS", shape, fast, one * retries, True, f"{retries} retries of {one * 1e3:.2f} ms")
    done = naive_pairs(weight, auxiliary, shape, bias, attack)
    slow = seconds(lambda: naive_pairs(weight, auxiliary, shape, bias, attack), device)
    return Comparison("PAIRS", shape, fast, slow, False, f"{done} retries, run to the end")


def _retries(shape: Shape, auxiliary: Tensor, attack: PAIRS, seed: int) -> int:
    """How many tries the search takes on these data: the same law for both methods."""
    bias = QBI(shape.batch_size).bias(shape.features)
    draws = generator(seed, "retries", device=auxiliary.device)
    total = 0
    for samples, count in attack.groups(shape.neurons):
        budget = attack.budget_factor * shape.batch_size * shape.neurons
        total += search(law(gram(auxiliary[samples])), bias, count, budget, attack.patience, draws).tries
    return total


def _naive_retries(weight: Tensor, x: Tensor, bias: float, count: int) -> None:
    for neuron in range(count):
        weight[neuron].normal_()
        fired = x @ weight.T > -bias
        bool(fired[:, neuron].sum() == 1)


def naive_pairs(weight: Tensor, auxiliary: Tensor, shape: Shape, bias: float, attack: PAIRS) -> int:
    """Algorithm 1 to the letter, in place; returns the number of retries. Also the tests' oracle.

    Line by line: "for each batch of B auxiliary samples", B of them whatever number of neurons is left, tune the next B neurons.
    """
    retries = 0
    budget = attack.budget_factor * shape.batch_size * shape.neurons
    for start in range(0, shape.neurons, shape.batch_size):
        stop = min(start + shape.batch_size, shape.neurons)
        end = min(start + shape.batch_size, len(auxiliary))
        x = auxiliary[max(0, end - shape.batch_size) : end]
        frozen: set[int] = set()
        spent = barren = 0
        neuron = start
        while neuron < stop and spent < budget and barren < attack.patience:
            fired = x @ weight.T > -bias
            active = fired[:, neuron].nonzero()[:, 0]
            spent += 1
            if len(active) == 1 and int(active[0]) not in frozen:
                frozen.add(int(active[0]))
                neuron += 1
                barren = 0
            else:
                weight[neuron].normal_()
                barren += 1
        retries += spent
    return retries
