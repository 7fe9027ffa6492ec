"""What leaves: whole numbers times a public grid, k + z with k = round(sum/grid) and z noise of its own for every value.

The sum s is over samples whose gradients have norm C at most. One sample moves s, as it is computed, by C·(1 + ROUNDING) at most
(`clipping.py` says why), and k by that over the grid plus √P for rounding. The noise is σ times this, so what is proven of a Gaussian on
real numbers holds of the whole numbers that leave; whatever is made of them afterwards (a product with the grid, float32, an optimiser)
is post-processing.
"""

import math
from dataclasses import dataclass

from torch import Tensor

from qbi.errors import BadValue
from qbi.private.clipping import ROUNDING
from qbi.private.keystream import Keys, system_key
from qbi.private.noise import SPREAD, add_noise


@dataclass(frozen=True)
class Grid:
    """The public grid of one kind of release; it depends on the clip, the noise and the number of values, never on data.

    >>> grid = Grid.of(clip=1.0, noise=0.1, values=62006)
    >>> grid.spread / grid.sensitivity > 0.1 - 1e-9
    True
    """

    step: float
    """The distance of two points, a power of two."""
    sensitivity: float
    """How far one sample, there or not, can move the whole numbers (Euclidean norm)."""
    spread: float
    """The noise's standard deviation, in whole numbers."""

    @classmethod
    def of(cls, clip: float, noise: float, values: int) -> "Grid":
        """The grid on which noise of σ·C is about `SPREAD` wide; without noise, a grid just as fine."""
        if not clip > 0 or not math.isfinite(clip) or not 1e-9 <= clip <= 1e9:
            raise BadValue(f"private: the clip is {clip}; it lies between 1e-9 and 1e9.")
        step = 2.0 ** math.floor(math.log2(clip * (noise or 1.0) / SPREAD))
        sensitivity = clip * (1 + ROUNDING) / step + math.sqrt(values)
        return cls(step, sensitivity, noise * sensitivity)


def release(total: Tensor, grid: Grid, *, keys: Keys = system_key) -> Tensor:
    """Put the whole numbers that leave in the place of a sum (flat, float64); they stand for `grid.step` times as much."""
    _add_noise(total, grid, keys)
    return total.add_(0.0)  # there is one zero: the sign of another would tell that of the sum


def _add_noise(total: Tensor, grid: Grid, keys: Keys) -> None:
    if total.device.type == "cuda" and _release_on_gpu(total, grid, keys):
        return
    total.mul_(1 / grid.step).round_()
    if grid.spread:
        noise = total.new_zeros(total.shape, device="cpu") if total.device.type != "cpu" else total
        add_noise(noise, grid.spread, keys())
        if noise is not total:
            total += noise.to(total.device)


def _release_on_gpu(total: Tensor, grid: Grid, keys: Keys) -> bool:
    """One launch, where Triton is there."""
    try:
        from qbi.kernels.grid_noise import add_grid_noise, key_words
    except ImportError:
        return False
    add_grid_noise(total, grid.step, grid.spread, key_words(keys(), total.device))
    return True
