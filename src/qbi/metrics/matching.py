"""Which samples were recovered: candidates and truth matched one to one, at stated thresholds.

One candidate counts for one sample only, and a sample once only; the best candidate is never picked by looking at
the truth beyond this count.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from jaxtyping import Float, Float64
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import maximum_bipartite_matching
from torch import Tensor

from qbi.gram import CHUNK
from qbi.metrics.thresholds import THRESHOLDS, Threshold
from qbi.records import Recovery

Recoveries = Mapping[Threshold, Recovery]


def match(
    candidates: Float[Tensor, "k m"],
    truth: Float[Tensor, "b m"],
    *,
    data_range: float = 1.0,
    thresholds: Sequence[Threshold] = THRESHOLDS,
) -> Recoveries:
    """The largest one-to-one assignment of candidates to samples, for each threshold.

    Args:
        candidates: what was read, one row each.
        truth: the client's samples, one row each.
        data_range: the range of the data on which a PSNR is taken.
        thresholds: the levels to count at.

    Returns:
        For each threshold which samples were recovered, and by which candidate.

    >>> import torch
    >>> from qbi.metrics import EXACT
    >>> match(torch.eye(3)[:2], torch.eye(3))[EXACT].recovered.tolist()
    [True, True, False]
    """
    errors = mean_squared_errors(candidates, truth).cpu().numpy()
    return {threshold: _assign(errors, threshold.largest_error(data_range)) for threshold in thresholds}


def shares(recoveries: Recoveries) -> dict[Threshold, float]:
    """The share of samples recovered at each threshold."""
    return {threshold: recovery.recall for threshold, recovery in recoveries.items()}


def nearest_shown(
    recoveries: Recoveries, candidates: Float[Tensor, "k m"], blank: Float[Tensor, "b m"]
) -> Float[Tensor, "b m"]:
    """For each sample what was read of it at the strictest threshold that has something; `blank` where nothing was."""
    out = blank.clone()
    for threshold in reversed(THRESHOLDS):
        found = recoveries[threshold]
        out[found.recovered] = candidates[found.candidate[found.recovered]].to(out)
    return out


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


def _assign(errors: np.ndarray, largest: float) -> Recovery:
    near = csr_matrix(errors < largest)
    candidate = np.full(errors.shape[1], -1, dtype=np.int64)
    if near.nnz:
        candidate = maximum_bipartite_matching(near, perm_type="row").astype(np.int64)
    chosen = torch.from_numpy(candidate)
    return Recovery(recovered=chosen >= 0, candidate=chosen)
