"""Certificates are never false: over precisions, losses and batches that invite mistakes."""

import pytest
import torch

from certificates import LOSSES, PRECISIONS, Tally, drawn
from qbi.errors import CannotRead


def tallied(cases):
    tally = Tally()
    for case in cases:
        try:
            tally.add(case)
        except CannotRead as problem:
            assert "infinite" in str(problem)  # noqa: PT017  (half precision overflowed)
    return tally


def test_no_certificate_is_wrong():
    tally = tallied(drawn(number, sure=number % 3 == 0) for number in range(45))
    assert tally.certified > 20
    assert tally.wrong == 0, tally.cases
    assert tally.too_many == 0, tally.cases


@pytest.mark.long
@pytest.mark.parametrize("part", range(8))
def test_no_certificate_of_ten_thousand_is_wrong(part):
    """Each part certifies at least 1,250 samples, and looks at cases in which nothing may be certified."""
    tally = tallied(drawn(10_000 * part + number, sure=number % 4 > 0) for number in range(180))
    assert tally.certified >= 1250
    assert tally.wrong == 0, tally.cases
    assert tally.too_many == 0, tally.cases


def test_every_kind_of_case_is_drawn():
    cases = [drawn(number) for number in range(300)]
    assert {c.precision for c in cases} == set(PRECISIONS)
    assert {c.loss for c in cases} == set(LOSSES)
    assert torch.tensor([c.batch for c in cases]).unique().numel() > 3
