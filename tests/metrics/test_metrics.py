import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from skimage.metrics import peak_signal_noise_ratio, structural_similarity

from qbi.errors import BadValue, CannotRead
from qbi.exposure import leakage, observe
from qbi.exposure.pattern import isolated_samples, isolation
from qbi.extraction import read_rows
from qbi.federation import client_step
from qbi.metrics import (
    CLEAR,
    EXACT,
    FAITHFUL,
    RECOGNISABLE,
    Threshold,
    l1,
    match,
    mean_interval,
    psnr,
    ssim,
)
from qbi.randomness import derive_seed, generator


@given(st.integers(1, 8), st.integers(1, 8), st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_leakage_agrees_with_counting_by_hand(neurons, batch_size, seed):
    fired = torch.rand(neurons, batch_size, generator=generator(seed)) < 0.3
    active = unique = 0
    recovered = set()
    for row in fired.tolist():
        active += any(row)
        if sum(row) == 1:
            unique += 1
            recovered.add(row.index(True))
    found = leakage(fired)
    assert (found.active, found.precision) == (active / neurons, unique / neurons)
    assert found.recall == len(recovered) / batch_size
    assert set(isolated_samples(fired).nonzero()[:, 0].tolist()) == recovered


def test_a_dead_layer_leaks_nothing():
    found = leakage(torch.zeros(5, 4, dtype=torch.bool))
    assert (found.active, found.precision, found.recall, found.precision_among_active) == (0, 0, 0, 0)


def test_isolation_over_several_layers_at_once():
    fired = torch.rand(3, 7, 5, generator=generator(1)) < 0.3
    for layer in range(3):
        assert torch.equal(isolation(fired).counts[layer], isolation(fired[layer]).counts)
        assert torch.equal(isolated_samples(fired)[layer], isolated_samples(fired[layer]))


def test_one_candidate_counts_for_one_sample():
    truth = torch.zeros(3, 10)
    truth[2] = 5
    found = match(torch.zeros(1, 10), truth)[EXACT]
    assert int(found.recovered.sum()) == 1
    found = match(torch.zeros(9, 10), truth)[EXACT]
    assert found.recovered.tolist() == [True, True, False]


def test_matching_takes_the_largest_assignment():
    """A candidate near two samples must not crowd out another that is near only one of them."""
    truth = torch.tensor([[0.0], [1.0]])
    candidates = torch.tensor([[0.5], [0.1]])
    found = match(candidates, truth, thresholds=[near := Threshold("near", "near", mse=0.3)])[near]
    assert found.recovered.all()
    assert found.candidate.tolist() == [1, 0]


def test_no_candidates_recover_nothing():
    assert match(torch.empty(0, 4), torch.zeros(2, 4))[EXACT].recall == 0


def test_thresholds_are_those_of_psnr():
    truth = torch.rand(1, 500, generator=generator(2))
    for threshold, level in ((FAITHFUL, 60), (CLEAR, 30), (RECOGNISABLE, 19)):
        bound = math.sqrt(threshold.largest_error(1.0))
        off = truth + bound * 0.999
        assert psnr(off, truth, data_range=1.0)[0] > level
        assert match(off, truth)[threshold].recall == 1
        assert match(truth + bound * 1.001, truth)[threshold].recall == 0


def test_similarity_agrees_with_another_library():
    truth = torch.rand(4, 3, 32, 40, generator=generator(3))
    noisy = (truth + 0.1 * torch.randn(truth.shape, generator=generator(4))).clamp(0, 1)
    noisy[3] = truth[3]
    ours = ssim(noisy, truth, data_range=1.0), psnr(noisy, truth, data_range=1.0)
    for i in range(4):
        a, b = truth[i].permute(1, 2, 0).numpy(), noisy[i].permute(1, 2, 0).numpy()
        settings = {"channel_axis": 2, "data_range": 1.0, "gaussian_weights": True, "sigma": 1.5}
        expected = structural_similarity(a, b, use_sample_covariance=False, **settings)
        assert float(ours[0][i]) == pytest.approx(expected, abs=2e-3)
        if i < 3:
            assert float(ours[1][i]) == pytest.approx(peak_signal_noise_ratio(a, b, data_range=1.0), abs=1e-3)
    assert ours[1][3] == math.inf
    assert float(l1(noisy, truth)[0]) == pytest.approx(float((noisy[0] - truth[0]).abs().mean()), abs=1e-6)


def test_intervals():
    values = [0.1, 0.4, 0.35, 0.2]
    found = mean_interval(values)
    assert found.mean == pytest.approx(np.mean(values))
    assert found.half_width == pytest.approx(1.96 * np.std(values, ddof=1) / 2)
    assert math.isnan(mean_interval([0.3]).low)
    for call in (lambda: mean_interval([]),):
        with pytest.raises(BadValue):
            call()


def test_reading_masks_dead_rows_merges_equal_ones_and_ranks_them_first():
    x = torch.randn(3, 400, generator=generator(5), dtype=torch.float64)
    delta = torch.tensor([[2.0, 0, 0], [0, 0, 0], [0.5, 0, 0], [0, 3.0, 0], [1.0, 1.0, 1.0]], dtype=torch.float64)
    found = read_rows(delta @ x, delta.sum(1))
    assert found.rows.tolist()[0] == 0
    assert sorted(found.rows.tolist()) == [0, 3, 4]
    assert found.support.tolist() == [2, 1, 1]
    torch.testing.assert_close(found.samples[0], x[0])
    # The mixture of three is shorter than a sample and comes last.
    assert found.rows.tolist()[-1] == 4


def test_an_almost_pure_row_does_not_stand_for_a_pure_one():
    """Seen on CIFAR-10: a strong row with a trace of a second sample hid the exact one."""
    x = torch.randn(2, 3000, generator=generator(6))
    delta = torch.tensor([[1e-3, 0.0], [1.0, 1e-4]])
    found = read_rows(delta @ x, delta.sum(1))
    assert match(found.samples, x[:1])[EXACT].recall == 1
    assert len(found.rows) == 2


def test_low_precision_gradients_are_read_and_judged_at_several_levels():
    x = torch.rand(1, 3000, generator=generator(7))
    delta = torch.tensor([[0.3], [0.7]])
    found = read_rows((delta @ x).bfloat16(), delta[:, 0].bfloat16())
    levels = match(found.samples, x)
    assert [levels[t].recall for t in (EXACT, FAITHFUL, CLEAR, RECOGNISABLE)] == [0, 0, 1, 1]


def test_updates_that_cannot_be_read_say_so():
    with pytest.raises(CannotRead, match="NaN or infinite"):
        read_rows(torch.full((2, 2), torch.inf), torch.ones(2))
    assert len(read_rows(torch.zeros(3, 4), torch.zeros(3)).rows) == 0


def test_a_client_step_gives_the_gradients_of_autograd_and_leaves_the_model_alone():
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(6, 8),
        torch.nn.BatchNorm1d(8),
        torch.nn.ReLU(),
        torch.nn.Dropout(0.5),
        torch.nn.Linear(8, 3),
    ).eval()
    x, y = torch.randn(5, 6), torch.tensor([0, 1, 2, 0, 1])
    before = {k: v.clone() for k, v in model.state_dict().items()}
    state = torch.get_rng_state()
    update = client_step(model, x, y, seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert not model.training
    torch.manual_seed(3)
    torch.nn.functional.cross_entropy(model.train()(x), y).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(update.gradients[name], parameter.grad)
    torch.testing.assert_close(update.buffers["1.running_mean"], model[1].running_mean)
    assert update.batch_size == 5


def test_a_client_step_refuses_what_it_cannot_train_on():
    model = torch.nn.Linear(4, 3)
    with pytest.raises(BadValue, match="5 inputs but 4 targets"):
        client_step(model, torch.randn(5, 4), torch.zeros(4, dtype=torch.long))
    with pytest.raises(BadValue, match="batch is empty"):
        client_step(model, torch.randn(0, 4), torch.zeros(0, dtype=torch.long))
    with pytest.raises(BadValue, match="loss is nan"):
        client_step(model, torch.full((2, 4), torch.nan), torch.zeros(2, dtype=torch.long))


def test_a_layer_that_runs_twice_sees_every_sample_twice():
    layer, x = torch.nn.Linear(4, 4), torch.randn(2, 4)
    seen = observe(torch.nn.Sequential(layer, layer), "0", x)
    torch.testing.assert_close(seen.features, torch.cat([x, layer(x).detach()]))
    assert seen.fired.shape == (4, 4)
    idle = torch.nn.ModuleDict({"used": layer, "idle": torch.nn.Linear(4, 4)})
    idle.forward = idle["used"].forward
    with pytest.raises(CannotRead, match="did not run"):
        observe(idle, "idle", x)


def test_seeds_depend_on_names_alone():
    assert derive_seed(1, "a", 2) == derive_seed(1, "a", 2)
    assert len({derive_seed(1, "a", 2), derive_seed(1, "a", 3), derive_seed(2, "a", 2), derive_seed(1, "a2")}) == 4
