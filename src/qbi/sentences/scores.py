"""How much of the true sentences stands in those that were read: exact sequences, ROUGE-1 and ROUGE-2, words."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import numpy as np
from scipy.optimize import linear_sum_assignment

Token = TypeVar("Token", int, str)


def rouge(read: Sequence[Token], truth: Sequence[Token], n: int = 1) -> float:
    """ROUGE-N (Lin, 2004) as an F-score: n-grams in common, each as often as it stands in both, against those of either.

    >>> rouge(["the", "cat", "sat"], ["the", "cat", "ran", "off"]), rouge(["the", "cat"], ["the", "cat"], 2)
    (0.5714285714285714, 1.0)
    """
    mine, theirs = _grams(read, n), _grams(truth, n)
    common = sum((mine & theirs).values())
    total = sum(mine.values()) + sum(theirs.values())
    return 2 * common / total if total else 0.0


def _grams(tokens: Sequence[Token], n: int) -> Counter[tuple[Token, ...]]:
    if n == 2:
        return Counter(pairwise(tokens))
    return Counter(tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1))


@dataclass(frozen=True)
class SentenceScores:
    """Means over the sequences of a batch, each compared with one that was read."""

    exact: float
    rouge_1: float
    rouge_2: float
    words: float
    """Share of tokens that stand in their place."""
    taken: tuple[int, ...]
    """Which of the read sequences each true one was compared with; −1 for none."""


def score(read: Sequence[Sequence[int]], truth: Sequence[Sequence[int]]) -> SentenceScores:
    """Match what was read with the truth, each once, so that most words stand in their place, and take the scores."""
    if not read:
        return SentenceScores(0.0, 0.0, 0.0, 0.0, (-1,) * len(truth))
    gain = np.array([[_in_place(r, t) + 1e-3 * rouge(r, t) for r in read] for t in truth])
    rows, columns = linear_sum_assignment(gain, maximize=True)
    taken = [-1] * len(truth)
    for row, column in zip(rows, columns, strict=True):
        taken[row] = int(column)
    pairs = [(() if k < 0 else tuple(read[k]), tuple(t)) for k, t in zip(taken, truth, strict=True)]
    count = len(truth)
    return SentenceScores(
        sum(r == t for r, t in pairs) / count,
        sum(rouge(r, t, 1) for r, t in pairs) / count,
        sum(rouge(r, t, 2) for r, t in pairs) / count,
        sum(_in_place(r, t) for r, t in pairs) / count,
        tuple(taken),
    )


def _in_place(read: Sequence[int], truth: Sequence[int]) -> float:
    return sum(r == t for r, t in zip(read, truth, strict=False)) / max(1, len(truth))
