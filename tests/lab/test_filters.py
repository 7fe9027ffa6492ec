"""Stock filters against servers: mean and spread over seeds, and what reading must and must not find."""

import logging
import statistics

import pytest
import torch

from qbi.carrier import flat
from qbi.data.images import normalised
from qbi.data.photos import synthetic_photos
from qbi.lab import filters, learned_filters
from qbi.lab.stock import FILTERS, StockFilter
from qbi.metrics import THRESHOLDS

NAMED = {(f.name, f.settings): f for f in FILTERS}


@pytest.fixture(scope="module")
def photos():
    logging.disable(logging.WARNING)
    yield synthetic_photos(300, 32, seed=0)
    logging.disable(logging.NOTSET)


def test_means_over_seeds_are_of_what_was_measured_to_the_last_digit():
    each = [1 / 3, 2 / 3, 0.123456789]
    run = {"filter": "f", "settings": "", "claimed": None, "accuracy": 0.0, "read": {}}
    keys = [t.key for t in THRESHOLDS]
    runs = [{**run, "accuracy": v, "read": {"qbi": dict.fromkeys(keys, 1 - v)}} for v in each]
    found = filters.summed_up(runs)
    assert found["accuracy"]["mean"] == statistics.fmean(each)
    assert found["accuracy"]["spread"] == statistics.stdev(each)
    assert found["read"]["qbi"]["psnr>30"]["each"] == [1 - v for v in each]


def test_a_server_reads_without_a_filter_and_not_through_noise_as_large_as_it_is_claimed(photos):
    plain = filters._read(photos, NAMED["none", ""], "qbi", 1)
    noisy = filters._read(photos, NAMED["LocalDpMod", "clip 1, sensitivity 1, ε 1"], "qbi", 1)
    assert plain["psnr>30"] > 0.3
    assert noisy["psnr>30"] == 0
    assert plain == filters._read(photos, NAMED["none", ""], "qbi", 1)
    assert plain != filters._read(photos, NAMED["none", ""], "qbi", 2)


@pytest.fixture
def learned(photos, monkeypatch):
    """The learned server in small, with single pixels for principal components."""
    small = {"HELD_OUT": 100, "LEARNED": 8, "DOUBTED": 3, "BATCHES": 2, "SCALES": (1.0, 100.0), "SILENT": (0.0,)}
    for name, value in small.items():
        monkeypatch.setattr(learned_filters, name, value)
    order = torch.randperm(len(photos), generator=torch.Generator().manual_seed(0))
    features = flat(normalised(photos, order[100:]))
    components = features.mean(0), torch.eye(features.shape[1])
    return lambda stock: learned_filters._against(stock, photos, order, features, components, 0)


def test_the_learned_server_reads_its_clients_and_nobody_else(learned):
    found = learned(NAMED["none", ""])
    assert found["read"]["psnr>30"] > 0.3
    assert found["control"]["psnr>30"] == 0


@pytest.mark.long
def test_the_learned_server_raises_its_scale_above_noise_that_does_not_follow_the_clip(learned):
    found = learned(NAMED["LocalDpMod", "clip 1, sensitivity 1e-4, ε 10"])
    fixed = learned(NAMED["LocalDpMod", "clip 1, sensitivity 1, ε 1"])
    assert found["read"]["psnr>19"] > 0.3
    assert fixed["read"]["psnr>30"] == 0


def test_the_learned_server_reads_nothing_where_nothing_arrives(learned):
    found = learned(StockFilter("nothing", "", lambda sent, _trained: {n: v.clone() for n, v in sent.items()}))
    assert set(found["read"].values()) == {0.0}
