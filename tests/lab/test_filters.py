"""Stock filters against servers: mean and spread over seeds, and what reading must and must not find."""

import logging
import statistics

import pytest

from qbi.data.photos import synthetic_photos
from qbi.lab import filters
from qbi.lab.stock import FILTERS

NAMED = {(f.name, f.settings): f for f in FILTERS}


@pytest.fixture(scope="module")
def photos():
    logging.disable(logging.WARNING)
    yield synthetic_photos(300, 32, seed=0)
    logging.disable(logging.NOTSET)


def test_means_over_seeds_are_of_what_was_measured_to_the_last_digit():
    each = [1 / 3, 2 / 3, 0.123456789]
    run = {"filter": "f", "settings": "", "claimed": None, "accuracy": 0.0, "read": {}}
    keys = [t.key for t in filters.THRESHOLDS]
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
