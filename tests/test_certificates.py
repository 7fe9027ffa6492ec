"""Certificates are never false: over precisions, losses and batches that invite mistakes."""

import pytest
import torch
from certificates import LOSSES, PRECISIONS, Tally, drawn
from qbi.errors import CannotRead


def tallied(numbers):
    tally = Tally()
    for number in numbers:
        try:
            tally.add(drawn(number))
        except CannotRead as problem:
            assert "infinite" in str(problem)  # half precision overflowed
    return tally


def test_no_certificate_is_wrong():
    tally = tallied(range(60))
    assert tally.certified > 20
    assert tally.wrong == 0, tally.cases
    assert tally.too_many == 0, tally.cases


@pytest.mark.long
@pytest.mark.parametrize("part", range(8))
def test_no_certificate_of_ten_thousand_is_wrong(part):
    """About 0.75 a case; all parts together certify ten thousand."""
    tally = tallied(range(1000 + 1700 * part, 1000 + 1700 * (part + 1)))
    assert tally.certified >= 1000
    assert tally.wrong == 0, tally.cases
    assert tally.too_many == 0, tally.cases


def test_every_kind_of_case_is_drawn():
    cases = [drawn(number) for number in range(300)]
    assert {c.precision for c in cases} == set(PRECISIONS)
    assert {c.loss for c in cases} == set(LOSSES)
    assert torch.tensor([c.batch for c in cases]).unique().numel() > 3
