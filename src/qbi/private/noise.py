"""Whole-number noise: P(z = k) = Φ((k+½)/τ) − Φ((k−½)/τ), a Gaussian of spread τ rounded to whole numbers.

Box and Muller's transform of two 64-bit words, in float64, then rounded. Pairs share their two words, and the claim is about pairs: the
probability of every cell (k₁, k₂) is right to a relative η (`CELL_ERROR`), because each boundary of a cell, one wide, is displaced by less than
η/4. So for P values the joint likelihood of any outcome is right to a factor exp(±Pη), and a ratio of two to exp(±2Pη). See
`docs/guarantees.md`; `tests/private/test_noise.py` has the law in the middle and in the tails.
"""

import math

from torch import Tensor

from qbi.private.keystream import AesStream

SPREAD = 2.0**16
"""τ, the noise in units of the grid."""

SMALL = 2**47
"""A radius word of 63 bits below this, one of 65,536, gets 64 bits more: the tail is not cut off, nor coarse."""

ULP = 2.0**-53
RADIUS = math.sqrt(2 * 127 * math.log(2))
"""The largest radius that 127 bits can give."""

DISPLACED = SPREAD * RADIUS * (2 * math.pi + 16) * ULP
"""How far a cell's boundary can be off, in units of the grid: the angle's own spacing 2π·2⁻⁵³, and 16 units in the last place for the
roundings of log, square root, sine, cosine and three products. torch states no bound; 4 units each is allowed for, and tested."""

CELL_ERROR = 4.2 * DISPLACED
"""η. Four sides of a cell, each displaced by less than `DISPLACED`; the density changes by less than 1 % across a cell's neighbours."""

BLOCK = 2**15
"""Pairs that are worked on at once: what a core's cache holds."""


def noise_slack(values: int, spread: float = SPREAD) -> float:
    """2Pη: what the sampler's inexactness adds to ε, and, divided by ln 2, to bits; η grows with the spread."""
    return 2 * values * CELL_ERROR * spread / SPREAD


def pairs_of(stream: AesStream, pairs: int, spread: float) -> tuple[Tensor, Tensor]:
    """So many pairs of whole numbers, as float64, from the next words of a stream."""
    word = stream.uniform(pairs)
    angle = stream.words(pairs).double().mul_(math.pi * 2.0**-63)
    uniform = word.double()
    small = (word < SMALL).nonzero()[:, 0]
    if len(small):
        uniform[small] += stream.uniform(len(small)).double() * 2.0**-63
    radius = uniform.add_(2.0**-64).mul_(2.0**-63).log_().mul_(-2).sqrt_().mul_(spread)
    first = angle.cos().mul_(radius).round_()
    return first, angle.sin_().mul_(radius).round_()


def add_noise(whole: Tensor, spread: float, key: bytes) -> None:
    """Add a rounded Gaussian of its own to every one of these numbers, in place; a block at a time, under one key."""
    stream, half = AesStream(key), (whole.numel() + 1) // 2
    for start in range(0, half, BLOCK):
        stop = min(half, start + BLOCK)
        first, second = pairs_of(stream, stop - start, spread)
        whole[start:stop] += first
        rest = whole[half + start : half + stop]
        rest += second[: len(rest)]
