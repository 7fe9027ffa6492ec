"""Faults that once survived the tests, each with a test of its own; `make mutants` plants them and more."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from qbi.attacks import PAIRS, Imprint, mount
from qbi.carrier import flat
from qbi.data.images import unit_pixels
from qbi.data.photos import synthetic_photos
from qbi.defences import AGGP, defended_step, keep_share
from qbi.defences.policy import decide, policy_named
from qbi.federation.exposed import exposed_step
from qbi.lab.reproduce.cells import Cell
from qbi.lab.reproduce.channel_grams import channel_grams
from qbi.lab.reproduce.image_cells import attack_cell
from qbi.lab.reproduce.split import split_half
from qbi.lab.reproduce.text_cells import text_cell
from qbi.models import two_layer
from qbi.randomness import generator
from qbi.records import TextData


def imprinted():
    """A step in which hardly anybody stands alone in a row, and most do in the difference of two."""
    photos = synthetic_photos(200, 16, seed=0)
    x = flat(unit_pixels(photos, slice(0, 24)))
    means = flat(unit_pixels(photos, slice(40, 200))).mean(1)
    attack = Imprint(float(means.mean()), float(means.std()))
    model = mount(two_layer(768, 100, 4, seed=0), attack, x[:2], generator(0)).model
    return model, x, torch.arange(24) % 4


def test_auto_acts_on_differences_of_rows():
    model, x, y = imprinted()
    step = exposed_step(model, x, y, layers=["0"])
    exposure = step.exposures[0]
    alone, apart = int(exposure.leak.samples.sum()), int(exposure.by_differences.sum())
    assert apart > alone
    assert int(exposure.readable.sum()) >= apart
    decision = decide(policy_named("auto", "test"), step, generator(0))
    assert decision.by_differences == apart
    assert decision.readable[0] >= apart
    raw, sent = step.update.gradients["0.weight"], decision.gradients["0.weight"]
    moved = (sent - raw).square().mean(1).sqrt() / raw.square().mean(1).sqrt().clamp_min(1e-30)
    assert float(moved[raw.any(1)].median()) == pytest.approx(3.0, rel=0.1)


@pytest.mark.parametrize("policy", ["noise", "auto"])
def test_row_noise_is_three_times_a_rows_size(policy):
    model, x, y = imprinted()
    model.zero_grad()
    F.cross_entropy(model(x), y).backward()
    raw = model[0].weight.grad.clone()
    defended_step(model, x, y, policy)
    noise = (model[0].weight.grad - raw).square().mean(1).sqrt() / raw.square().mean(1).sqrt().clamp_min(1e-30)
    assert float(noise[raw.any(1)].median()) == pytest.approx(3.0, rel=0.1)


def test_aggp_keeps_the_square_of_the_share_in_between():
    """Eq. 13 at a = 8 with c = 16: (7/14)² = a quarter of the way from 1 to 95 %."""
    assert keep_share(8, AGGP()) == pytest.approx(0.01 + 0.25 * 0.94)
    assert keep_share(1, AGGP()) == pytest.approx(0.01)
    assert keep_share(15, AGGP()) == pytest.approx(0.95)


def test_pairs_gives_up_as_erratum_six_says():
    attack = PAIRS(8, torch.randn(40, 64))
    assert (attack.patience, attack.budget_factor) == (2000, 5)


def scale_of_trap_weights(pixels, photos):
    data = replace(photos, pixels=pixels)
    return attack_cell(Cell("cifar10", 60, 20, 0), data, channel_grams(pixels))["trap-weights"]["scale"]


def test_the_scale_of_trap_weights_is_not_chosen_on_the_images_that_are_attacked():
    photos = synthetic_photos(400, 12, seed=0)
    split = split_half(Cell("cifar10", 60, 20, 0), len(photos))
    before = scale_of_trap_weights(photos.pixels, photos)
    darker = photos.pixels // 4
    for half, moves in ((split.batches.flatten(), False), (split.auxiliary, True)):
        changed = photos.pixels.clone()
        changed[half] = darker[half] + 180
        assert (scale_of_trap_weights(changed, photos) != before) is moves


def test_the_scale_of_trap_weights_is_not_chosen_on_the_texts_that_are_attacked():
    cell = Cell("imdb", 60, 20, 0)
    words = tuple(str(i) for i in range(40))
    tokens = torch.randint(40, (400, 12), generator=generator(0))
    split = split_half(cell, 400)

    def scale(tokens):
        return text_cell(
            cell, TextData("words", tokens, torch.zeros(400, dtype=torch.long), ("no", "yes"), words), "cpu"
        )["trap-weights"]["scale"]

    before = scale(tokens)
    for half, moves in ((split.batches.flatten(), False), (split.auxiliary, True)):
        changed = tokens.clone()
        changed[half] = tokens[half] % 2
        assert (scale(changed) != before) is moves
