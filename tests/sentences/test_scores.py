"""ROUGE by hand."""

import pytest

from qbi.sentences import rouge, score


def test_rouge_by_hand():
    """Read: the cat sat on the mat; true: the cat lay on the mat. Five of six words, three of five pairs."""
    read, truth = ["the", "cat", "sat", "on", "the", "mat"], ["the", "cat", "lay", "on", "the", "mat"]
    assert rouge(read, truth) == pytest.approx(5 / 6)
    assert rouge(read, truth, 2) == pytest.approx(3 / 5)


def test_a_word_counts_as_often_as_it_stands_in_both():
    """Three times “the” against one: 2·1/(3 + 2)."""
    assert rouge(["the", "the", "the"], ["the", "cat"]) == pytest.approx(2 / 5)


def test_nothing_read_scores_nothing():
    assert rouge([], [1, 2]) == 0
    assert rouge([1], [1], 2) == 0
    assert score([], [[1, 2]]).exact == 0
    assert score([[3, 4]], [[1, 2]]).words == 0


def test_each_sequence_is_taken_once():
    """One reading of two equal truths counts for one of them."""
    found = score([[1, 2]], [[1, 2], [1, 2]])
    assert found.exact == 0.5
    assert sorted(found.taken) == [-1, 0]


def test_order_matters_for_words_and_not_for_rouge_1():
    found = score([[2, 1, 3]], [[1, 2, 3]])
    assert found.rouge_1 == 1
    assert found.words == pytest.approx(1 / 3)
    assert found.exact == 0
