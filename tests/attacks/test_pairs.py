"""The search in Gram space against the sequential algorithm it replaces."""

import pytest
import torch

from qbi.attacks import PAIRS
from qbi.attacks.search import BLOCK, search
from qbi.gram import Law, gram, law
from qbi.randomness import generator


def sequential(draws, bias, neurons, budget, patience):
    """Algorithm 1 for one group on given draws: indices of the successful tries, and the tries spent."""
    frozen, successes, barren, spent = set(), [], 0, 0
    for index, z in enumerate(draws):
        if len(successes) == neurons or spent == budget or barren == patience:
            break
        spent += 1
        active = (z > -bias).nonzero()[:, 0].tolist()
        if len(active) == 1 and active[0] not in frozen:
            frozen.add(active[0])
            successes.append(index)
            barren = 0
        else:
            barren += 1
    return successes, spent


@pytest.mark.parametrize(
    ("batch_size", "neurons", "budget", "patience"),
    [
        (8, 8, 10**6, 2000),
        (30, 30, 10**6, 2000),
        (30, 30, 10**6, 60),
        (30, 12, 10**6, 2000),
        (30, 30, 150, 2000),
        (30, 30, 9000, 8500),
        (100, 100, 20_000, 2000),
        (3, 3, 10**6, 1),
    ],
)
@pytest.mark.parametrize("seed", range(4))
def test_blocks_follow_the_sequential_rules_exactly(batch_size, neurons, budget, patience, seed):
    x = torch.randn(batch_size, 64, generator=generator(seed, "x"))
    # Unequal norms: some samples are found late or never, as in real data.
    x *= torch.linspace(0.5, 1.5, batch_size)[:, None]
    known, bias = law(gram(x)), -16.0
    draws_from = generator(seed, "draws")
    draws = torch.cat([known.sample(BLOCK, draws_from) for _ in range(6)])
    successes, spent = sequential(draws, bias, neurons, budget, patience)
    found = search(known, bias, neurons, budget, patience, generator(seed, "draws"))
    assert torch.equal(found.found, draws[successes])
    assert found.tries == spent


def test_nothing_is_found_where_nothing_can_be():
    known = law(gram(torch.ones(5, 20)))
    assert len(search(known, -5.0, 5, 10**6, 300, generator(0)).found) == 0


def test_tuned_rows_isolate_their_samples_and_the_rest_are_plain(cifar):
    from qbi.data.images import normalised

    x = normalised(cifar, slice(0, 60)).flatten(1)
    rows = PAIRS(20, x).rows(60, x.shape[1], generator(1))
    for start in range(0, 60, 20):
        group = slice(start, start + 20)
        fired = rows.weight[group] @ x[group].T + rows.bias[group, None] > 0
        owners = [int(row.nonzero()) if row.sum() == 1 else None for row in fired]
        # Successes come first, one sample each; what was not reached is a plain row, which may isolate one again by chance.
        reached = next((i for i, owner in enumerate(owners) if owner is None or owner in owners[:i]), len(owners))
        assert reached >= 14
    assert rows.weight.std() == pytest.approx(1, abs=0.01)


def test_auxiliary_data_are_loaded_group_by_group():
    class Source:
        loaded: tuple[tuple[int, int], ...] = ()

        def __len__(self):
            return 50

        def __getitem__(self, index):
            self.loaded += ((index.start, index.stop),)
            return torch.randn(index.stop - index.start, 30, generator=generator(index.start))

    source, seen = Source(), []
    PAIRS(20, source, progress=lambda done, total: seen.append((done, total))).rows(50, 30, generator(0))
    assert source.loaded == ((0, 20), (20, 40), (30, 50))
    assert seen == [(1, 3), (2, 3), (3, 3)]


def test_the_law_is_used_as_it_is():
    """A search on a law that never isolates sample 0 never claims it."""
    factor = torch.eye(4, dtype=torch.float64)
    factor[0] = factor[1]
    found = search(Law(factor, triangular=False), -1.0, 4, 10**5, 2000, generator(0)).found
    fired = found > 1.0
    assert not (fired[:, 0] & (fired.sum(1) == 1)).any()
    assert len(found) == 2


def test_groups_searched_side_by_side_give_the_rows_of_groups_searched_alone():
    class Loaded:
        """The same samples from somewhere they must be loaded from, which is done a group at a time."""

        def __init__(self, x):
            self.x = x

        def __len__(self):
            return len(self.x)

        def __getitem__(self, index):
            return self.x[index]

    x = torch.randn(130, 40, generator=generator(3))
    together = PAIRS(20, x).rows(130, 40, generator(4))
    alone = PAIRS(20, Loaded(x)).rows(130, 40, generator(4))
    assert torch.equal(together.weight, alone.weight)
