"""Which samples were recovered: candidates and truth matched one to one, at stated thresholds.

One candidate counts for one sample only, and a sample once only; the best candidate is never picked by looking at
the truth beyond this count.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Float64
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import maximum_bipartite_matching
from torch import Tensor

from qbi.gram import CHUNK
from qbi.records import Recovery

EXACT_MSE = 1e-10
"""The mean squared error below which the authors call a sample perfectly reconstructed (erratum 9)."""

PSNR_LEVELS = (60.0, 30.0, 19.0)


@dataclass(frozen=True)
class Threshold:
    """A mean squared error below which a candidate counts, with the name it is reported under."""

    name: str
    mse: float


def thresholds_for(data_range: float) -> tuple[Threshold, ...]:
    """The four thresholds of every report; PSNR needs the range of the data it is taken on."""
    levels = (Threshold(f"psnr>{level:g}", data_range**2 * 10 ** (-level / 10)) for level in PSNR_LEVELS)
    return (Threshold("mse<1e-10", EXACT_MSE), *levels)


def match(
    candidates: Float[Tensor, "k m"], truth: Float[Tensor, "b m"], thresholds: Sequence[Threshold]
) -> tuple[Recovery, ...]:
    """The largest one-to-one assignment of candidates to samples, for each threshold."""
    errors = mean_squared_errors(candidates, truth).cpu().numpy()
    return tuple(_assign(errors, threshold) for threshold in thresholds)


def mean_squared_errors(
    candidates: Float[Tensor, "k m"], truth: Float[Tensor, "b m"], *, chunk: int = CHUNK
) -> Float64[Tensor, "k b"]:
    """All pairwise errors, in float64 over chunks of columns.

    ‖c‖² + ‖x‖² − 2cx cancels to about 1e-16 of the squares, far below any threshold.
    """
    total = torch.zeros(len(candidates), len(truth), dtype=torch.float64, device=truth.device)
    for start in range(0, truth.shape[1], chunk):
        c = candidates[:, start : start + chunk].double()
        x = truth[:, start : start + chunk].double()
        total += c.square().sum(1)[:, None] + x.square().sum(1) - 2 * (c @ x.T)
    return total.clamp_min_(0) / truth.shape[1]


def _assign(errors: np.ndarray, threshold: Threshold) -> Recovery:
    near = csr_matrix(errors < threshold.mse)
    candidate = np.full(errors.shape[1], -1, dtype=np.int64)
    if near.nnz:
        candidate = maximum_bipartite_matching(near, perm_type="row").astype(np.int64)
    chosen = torch.from_numpy(candidate)
    return Recovery(threshold=threshold.name, recovered=chosen >= 0, candidate=chosen)
