"""Samples as edges of a cone: what a rectifier hands on is never negative, and a good part of it is zero.

The rows of a layer's gradient span the space of the batch's inputs. If those inputs are rectified (or pixels of a dark image), the samples
lie in the cone of that space's vectors without a negative entry, and each on its edge: it is zero where only few mixtures are. A
linear program over the cone ends in a corner, and a corner with many more zeros than there are unknowns is a sample. Programs are
made to look away from what is known already, so that each finds another. Nothing is asked of the layer's own rectifier: this works where all
samples fire the same neurons, as in a network that was just initialised.

Memory: a few hundred columns of the gradient in float64.
"""

from collections.abc import Callable, Iterator

import numpy as np
import torch
from jaxtyping import Float, Float64
from scipy.optimize import linprog
from torch import Tensor

FEWEST_COLUMNS, COLUMNS_PER_SAMPLE = 512, 8
"""Columns that programs are made of; all are looked at before a corner is taken for a sample."""

MOST_RANK = 128
"""Samples up to which programs are tried."""

PROGRAMS_PER_SAMPLE, FRUITLESS = 8, 60
"""Programs, and how many in a row may give nothing new."""

ZERO = 1e-4
"""Entries below this part of the largest are zero, in what a program returns; a tenth of it after the fit."""

FROM_KNOWN = 0.6
"""How often a program is made from a known sample."""

SPARE = 20
"""One zero in so many columns is asked for beyond the number of unknowns."""

NEW = 1e-3
"""Part of a corner that must lie outside what the found ones span."""

ALONE = 1e-9
"""Eigenvalue above which no second direction vanishes where a corner does."""


def corners(
    space: Float[Tensor, "r w"],
    *,
    rounding: float,
    known: Float64[Tensor, "s r"] | None = None,
    accept: Callable[[Float64[Tensor, " r"]], bool] = lambda _combination: True,
    seed: int = 0,
) -> Float64[Tensor, "k r"]:
    """Combinations of the vectors in `space` that are samples: without a negative entry, and zero in many.

    Args:
        space: mixtures of the samples.
        rounding: their relative error.
        known: combinations that are samples already.
        accept: has the last word on a combination; what it refuses is not looked away from.
        seed: of the programs.

    >>> samples = torch.rand(4, 60).sub(0.5).relu()
    >>> mixed = torch.randn(4, 4) @ samples
    >>> found = corners(mixed, rounding=1e-7) @ mixed.double()
    >>> len(found), bool((found > -1e-4 * found.amax(1, keepdim=True)).all())
    (4, True)
    """
    none = torch.empty(0, len(space), dtype=torch.float64)
    wide = space.double().cpu()
    size = wide.norm(dim=0)
    alive = (size > 1e-9 * size.max()).nonzero()[:, 0]
    rank = len(space)
    fewest = rank + max(8, len(alive) // SPARE)
    if not 2 <= rank <= MOST_RANK or len(alive) < 2 * rank:
        return none
    draws = torch.Generator().manual_seed(seed)
    most = max(FEWEST_COLUMNS, COLUMNS_PER_SAMPLE * rank)
    chosen = alive[torch.randperm(len(alive), generator=draws)[:most]]
    left, values, right = torch.linalg.svd(wide[:, chosen] / size[chosen], full_matrices=False)
    if float(values[-1]) < 10 * rounding * float(values[0]):
        return none
    # From a direction of the programs' space to a combination of the vectors, and to all their columns.
    back = left / values
    whole = ((back.T @ wide[:, alive]) / size[alive]).T.numpy()
    start = np.zeros((rank, 0)) if known is None else (values[:, None] * left.T @ known.T).numpy()
    slack = 10 * rounding * float(values[0] / values[-1])
    found = list(
        _search(right.T.numpy(), whole, start, fewest, slack, seed, lambda q: accept(back @ torch.from_numpy(q)))
    )
    return torch.stack([back @ torch.from_numpy(q) for q in found]) if found else none


def _search(
    part: np.ndarray,
    whole: np.ndarray,
    known: np.ndarray,
    fewest: int,
    slack: float,
    seed: int,
    accept: Callable[[np.ndarray], bool],
) -> Iterator[np.ndarray]:
    """One program after another; each looks where those found before are not."""
    rank = part.shape[1]
    draws = np.random.default_rng(seed)
    total = part.sum(0)
    level = float(total @ total) / float(np.linalg.norm(total))
    known = known / np.linalg.norm(known, axis=0)
    fruitless = 0
    for _ in range(PROGRAMS_PER_SAMPLE * rank):
        if known.shape[1] >= rank or fruitless >= FRUITLESS:
            return
        fruitless += 1
        goal = _outside(part.T @ _wish(part, known, draws), known)
        solved = linprog(
            goal,
            A_ub=-part,
            b_ub=np.full(len(part), slack),
            A_eq=total[None],
            b_eq=[level],
            bounds=(None, None),
            method="highs-ds",
        )
        if solved.status == 2:  # no vector without a negative entry: these inputs are not rectified
            return
        corner = None if solved.x is None else _fitted(whole, np.asarray(solved.x), fewest)
        if corner is None or np.linalg.norm(_outside(corner, known)) < NEW or not accept(corner):
            continue
        yield corner
        known, fruitless = np.concatenate([known, corner[:, None]], 1), 0


def _wish(part: np.ndarray, known: np.ndarray, draws: np.random.Generator) -> np.ndarray:
    """What a program is to make small, column by column.

    Samples resemble each other: where a known one is zero, others tend to be. Before any is known, and now and then, a program asks for
    as much as possible of one column.
    """
    count = len(part)
    if known.shape[1] and draws.random() < FROM_KNOWN:
        entries = np.abs(part @ known[:, draws.integers(known.shape[1])])
        silent = (entries < ZERO * entries.max()) & (draws.random(count) < draws.uniform(0.3, 1.0))
        return np.asarray(silent, dtype=float)
    wish = np.zeros(count)
    wish[draws.integers(count)] = -1
    return wish


def _fitted(whole: np.ndarray, direction: np.ndarray, fewest: int) -> np.ndarray | None:
    """The direction that vanishes where this one does, if it is the only one, vanishes often enough and is nowhere negative."""
    entries = np.abs(whole @ direction)
    zero = whole[entries < ZERO * entries.max()]
    if len(zero) < fewest:
        return None
    values, vectors = np.linalg.eigh(zero.T @ zero)
    corner = vectors[:, 0]
    entries = whole @ corner
    entries = entries if entries.sum() > 0 else -entries
    corner = corner if (whole @ corner).sum() > 0 else -corner
    enough = (np.abs(entries) < 0.1 * ZERO * entries.max()).sum() >= fewest
    sound = enough and entries.min() > -ZERO * entries.max() and (len(values) < 2 or values[1] > ALONE)
    return corner if sound else None


def _outside(vector: np.ndarray, known: np.ndarray) -> np.ndarray:
    """The part of a vector that is orthogonal to some others."""
    if known.shape[1] == 0:
        return vector
    out: np.ndarray = vector - known @ np.linalg.lstsq(known, vector, rcond=None)[0]
    return out
