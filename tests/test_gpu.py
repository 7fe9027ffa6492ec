"""What runs on an NVIDIA GPU alone: AGGP's kernel keeps the law of the slow way. Skipped elsewhere."""

import pytest
import torch

from qbi.defences.aggp import AGGP, _quotas, kept_entries, prune_by_outputs, prune_by_sorting, prune_rows_in_place
from qbi.randomness import generator

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
GPU = torch.device("cuda:0")


@pytest.fixture(scope="module")
def prune():
    return pytest.importorskip("qbi.defences.aggp_kernel").prune


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
