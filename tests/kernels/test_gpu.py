"""What runs on an NVIDIA GPU alone: AGGP's kernel keeps the law of the slow way; the private step is that of a CPU. Skipped elsewhere."""

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from qbi.defences.aggp import AGGP, _quotas, kept_entries, prune_by_outputs, prune_by_sorting, prune_rows_in_place
from qbi.lab.benchmarks.private import TASKS
from qbi.private import Private
from qbi.private.release import Grid, release
from qbi.randomness import generator

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
GPU = torch.device("cuda:0")


@pytest.fixture(scope="module")
def prune():
    return pytest.importorskip("qbi.kernels.aggp").prune


@pytest.mark.parametrize(
    ("features", "dtype"),
    [
        *((size, torch.float32) for size in (1, 50, 3072, 4096, 5000, 150_528)),
        (3072, torch.float16),
        (3072, torch.bfloat16),
    ],
)
def test_the_kernel_keeps_as_many_of_the_largest_as_the_rule_says(prune, features, dtype):
    rows = 60
    gradient = torch.randn(rows, features, device=GPU).to(dtype)
    counts = torch.randint(0, 20, (rows,), device=GPU)
    largest, kept = _quotas(AGGP(), features, GPU)
    pruned = gradient.clone()
    prune(pruned, counts, largest, kept, 12345678901234, 16)
    sizes = gradient.abs().float()
    for row, count in enumerate(counts.tolist()):
        stays = pruned[row] != 0
        assert bool(((pruned[row] == gradient[row]) | ~stays).all())
        if not 0 < count < 16:
            assert torch.equal(pruned[row], gradient[row])
            continue
        assert int(stays.sum()) == kept_entries(count, features, AGGP())
        if largest[count]:
            assert bool((sizes[row][stays] >= sizes[row].sort(descending=True).values[largest[count] - 1]).all())


@pytest.mark.parametrize("way", ["kernel", "sorting"])
def test_every_large_entry_is_as_likely_to_stay(prune, way):
    """4,000 equal rows: shares within 5 standard errors, and pairs no more alike than drawing without putting back makes them."""
    gradient = torch.arange(1, 401, device=GPU).float().repeat(4000, 1)
    counts = torch.full((4000,), 8, device=GPU)
    largest, kept = _quotas(AGGP(), 400, GPU)
    if way == "kernel":
        prune(gradient, counts, largest, kept, 99, 16)
    else:
        prune_by_sorting(gradient, counts, 99, AGGP())
    large = int(largest[8])
    stays = (gradient != 0).double()
    share = int(kept[8]) / large
    assert stays[:, :-large].sum() == 0
    assert float((stays[:, -large:].mean(0) - share).abs().max()) < 5 * (share * (1 - share) / 4000) ** 0.5
    alike = torch.corrcoef(stays[:, -large:].T)[~torch.eye(large, dtype=torch.bool, device=GPU)]
    assert float(alike.mean()) == pytest.approx(-1 / (large - 1), abs=1e-3)
    assert float(alike.std()) == pytest.approx(4000**-0.5, rel=0.1)


def test_outputs_are_counted_by_the_kernel_itself(prune):
    for samples in (1, 37, 64):
        outputs = torch.randn(samples, 700, device=GPU) - 1.5
        one, two = torch.randn(700, 300, device=GPU).expand(2, -1, -1).clone()
        prune_by_outputs(one, outputs, generator(5), AGGP())
        prune_rows_in_place(two, (outputs > 0).sum(0), generator(5), AGGP())
        assert torch.equal(one, two)


def test_the_seed_decides(prune):
    gradient, counts = torch.randn(50, 400, device=GPU), torch.full((50,), 8, device=GPU)
    masks = []
    for seed in (1, 1, 2):
        pruned = gradient.clone()
        prune_rows_in_place(pruned, counts, generator(seed), AGGP())
        masks.append(pruned != 0)
    assert torch.equal(masks[0], masks[1])
    assert not torch.equal(masks[0], masks[2])


@pytest.fixture(scope="module")
def kernel():
    return pytest.importorskip("qbi.kernels.grid_noise")


RFC = "e4e7f110 15593bd1 1fdd0f50 c47120a3 c7f4d1c7 0368c033 9aaa2204 4e6cd4c3 466482d2 09aa9f07 05d7c214 a2028bd9 d19c12b5 b94e16de e883d0cb 4e3c50a2"


def test_the_keystream_is_chacha20_by_the_rfc(kernel):
    """RFC 8439, 2.3.2, and the block after it by its counter."""
    words = kernel._keystream_words(bytes(range(32)), 1, (0x09000000, 0x4A000000, 0), 2, GPU)
    assert " ".join(f"{w:08x}" for w in words[:16].tolist()) == RFC
    alone = kernel._keystream_words(bytes(range(32)), 2, (0x09000000, 0x4A000000, 0), 1, GPU)
    assert torch.equal(words[16:].cpu(), alone.cpu())


def test_noise_has_the_law_that_a_cpu_has(kernel):
    """Ten million fixed values in 100 cells of equal chance, the tails apart; pairs independent; whole numbers all."""
    stats = pytest.importorskip("scipy.stats")
    spread, count = 65536.0, 10_000_001
    total = torch.zeros(count, dtype=torch.float64, device=GPU)
    kernel.add_grid_noise(total, 1.0, spread, kernel.key_words(bytes(range(32)), GPU))
    assert torch.equal(total, total.round())
    edges = torch.tensor(
        [round(spread * float(stats.norm.ppf(i / 100))) + 0.5 for i in range(1, 100)], device=GPU
    ).double()
    counted = torch.bincount(torch.bucketize(total, edges), minlength=100).double().cpu().numpy()
    chances = [0.0, *stats.norm.cdf(edges.cpu().numpy() / spread), 1.0]
    expected = [count * (b - a) for a, b in itertools.pairwise(chances)]
    assert stats.chisquare(counted, expected).pvalue > 1e-4
    beyond = float((total.abs() > 4.5 * spread).sum())
    assert abs(beyond - 2 * count * stats.norm.sf(4.5)) < 5 * (2 * count * stats.norm.sf(4.5)) ** 0.5
    half = (count + 1) // 2
    first, second = total[: half - 1], total[half : 2 * half - 1]
    assert abs(float((first.abs() * second.abs()).mean() / (first.abs().mean() * second.abs().mean())) - 1) < 5e-3


def test_sums_are_rounded_to_the_grid_and_fresh_keys_are_used(kernel):
    grid = Grid.of(1.0, 0.1, 1001)
    total = torch.linspace(-1, 1, 1001, dtype=torch.float64, device=GPU)
    one, two = release(total.clone(), grid), release(total.clone(), grid)
    assert not torch.equal(one, two)
    key = bytes(range(32))
    same = release(total.clone(), grid, keys=lambda: key), release(torch.zeros_like(total), grid, keys=lambda: key)
    assert torch.equal((same[0] - same[1]).cpu(), (total / grid.step).round().cpu())


@pytest.mark.parametrize("task", TASKS, ids=lambda t: t.name)
def test_steps_on_a_gpu_are_those_of_a_cpu_but_for_the_noise(task):
    """The same clipped sums, with a graph and without. In float64, since in float32 another order of sums decides some ReLUs otherwise."""
    torch.manual_seed(0)
    model = task.make().double()
    x = torch.randint(10_000, (6, task.tokens)) if task.tokens else torch.randn(6, 3, 32, 32).double()
    y = torch.arange(6) % 2
    sums = []
    for device in ("cpu", GPU, GPU):
        private = Private(model.to(device), F.cross_entropy, batch_size=6, clip=0.5, graphs=True)
        if len(sums) == 1:
            private._sums._graphed = lambda work, *batch: work(*batch)
        private.add(x.to(device), y.to(device))
        sums.append(private._sums.total.cpu())
    assert float((sums[1] - sums[0]).norm() / sums[0].norm()) < 1e-5
    assert float((sums[2] - sums[1]).norm() / sums[1].norm()) < 1e-6


def test_training_on_a_gpu_goes_on_from_step_to_step():
    """A graph reads the weights as they are now, the learning rate's schedule and dropout included."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(48, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 4)).to(GPU)
    x = torch.randn(256, 3, 4, 4)
    y = (x.flatten(1) @ torch.randn(48, 4)).argmax(1)
    private = Private(model, F.cross_entropy, bits=1e6, batch_size=64, total=1e12, graphs=True)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    losses = []
    for number in range(120):
        part = slice(64 * (number % 4), 64 * (number % 4) + 64)
        losses.append(private.step(optimiser, x[part].to(GPU), y[part].to(GPU)).loss)
    assert sum(losses[-8:]) < 0.5 * sum(losses[:8])
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert private.step(optimiser, x[:64].to(GPU), y[:64].to(GPU)).samples == 64
