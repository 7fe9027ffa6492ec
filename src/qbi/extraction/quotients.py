"""Weight gradient divided by bias gradient: the sample that stands alone in a row.

For a row that fired for one sample only, ∂L/∂w = δ·x and ∂L/∂b = δ, so the ratio is x, whatever the loss, the
learning rate or any scaling common to both. Rows that fired for several samples give a mixture.
"""

import math
from dataclasses import replace
from functools import lru_cache

import torch
from jaxtyping import Float
from torch import Tensor, nn

from qbi.carrier import Carrier, Normalised, NormBehind
from qbi.errors import CannotRead
from qbi.extraction.normalisation import PublicStatistics, undo
from qbi.finite import is_finite
from qbi.gram import gram
from qbi.records import Candidates, Update

SKETCH = 16
"""Random directions in which candidates are compared; a false match needs agreement in all of them."""

MERGE_TOLERANCE = 4.0
"""Distance, in units of the gradients' rounding error, below which two rows gave the same sample.

Kept tight: a row in which a second sample hardly counts must not stand for one that is pure.
"""

MERGE_BLOCK = 2**24
"""Distances between rows held at a time."""


def extract(
    sent: nn.Module,
    layer: str,
    carrier: Carrier,
    update: Update,
    *,
    public: PublicStatistics | None = None,
    keep_normalised: bool = False,
    rounding: float | None = None,
) -> Candidates:
    """Read every sample that an update gives away through one layer, in the space of the client's data.

    Normalisation is undone: BatchNorm exactly, from its running
    statistics before and after; LayerNorm with `public` statistics of the domain, since each sample's own are lost.

    Args:
        sent: the model as the server sent it.
        layer: the path of the linear layer that is read.
        carrier: how samples arrive there.
        update: the client's update.
        public: statistics of the domain, to undo LayerNorm.
        keep_normalised: leave the samples as the layer saw them.
        rounding: the relative error of the gradients, if it is not that of their type.

    Returns:
        Candidates, best first.

    >>> import torch
    >>> from qbi.carrier import Carrier
    >>> from qbi.federation import client_step
    >>> model = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2))
    >>> x = torch.rand(1, 6)
    >>> found = extract(model, "0", Carrier((6,), 6), client_step(model, x, torch.tensor([1])))
    >>> bool((found.samples - x).abs().max() < 1e-5)
    True
    """
    weight, bias = layer_gradients(layer, update, carrier.reference)
    found = read_rows(weight, bias, carrier=carrier, rounding=rounding)
    return found if keep_normalised else restored(found, sent, carrier, update, public)


def layer_gradients(layer: str, update: Update, reference: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The gradients of a layer's weight and bias; without a bias, those of a `reference` in its place.

    A combination c of a layer's inputs does for a row what a bias does: the gradient's product with c is Σ δ·(c·x), and the quotient of
    a row with one sample is x/(c·x): the sample up to a factor.
    """
    weight, bias = f"{layer}.weight", f"{layer}.bias"
    for name in (weight, bias)[: 2 if reference is None else 1]:
        if name not in update.gradients:
            raise CannotRead(f"{name}: the update has no gradient of this name; was this layer trained?")
    rows = update.gradients[weight]
    if reference is None:
        return rows, update.gradients[bias]
    return rows, (rows.double() @ reference.to(rows.device).double()).to(rows.dtype)


def shift_gradients(layer: str, norm: NormBehind, sent: nn.Module, update: Update) -> tuple[Tensor, Tensor]:
    """The gradients of a layer's rows, and in the place of its biases' those of the shift of a batch norm behind it.

    What comes back to a row is that of the shift times γ/√ε, where the row's variance is far below ε.
    """
    rows, shift = f"{layer}.weight", f"{norm.layer}.bias"
    for name in (rows, shift):
        if name not in update.gradients:
            raise CannotRead(f"{name}: the update has no gradient of this name; was this layer trained?")
    behind = sent.get_submodule(norm.layer)
    assert isinstance(behind, nn.modules.batchnorm._BatchNorm)
    own = norm.channels(len(update.gradients[rows]))
    scale = behind.weight.detach()[own] / behind.eps**0.5
    return update.gradients[rows], update.gradients[shift][own] * scale.to(update.gradients[shift])


def restored(
    found: Candidates, sent: nn.Module, carrier: Carrier, update: Update, public: PublicStatistics | None = None
) -> Candidates:
    """Candidates as they stand in a layer's input, in the space of the client's data: every change is undone."""
    samples = found.samples
    for step in reversed(carrier.steps):
        if isinstance(step, Normalised):
            samples = undo(samples, carrier.shape, sent, step, update, public)
        else:
            samples = (samples - step.offset.to(samples)) / step.scale.to(samples)
    return replace(found, samples=samples)


def read_rows(
    weight_gradient: Float[Tensor, "n w"],
    bias_gradient: Float[Tensor, " n"],
    *,
    carrier: Carrier | None = None,
    rounding: float | None = None,
) -> Candidates:
    """Divide row by row, leave dead rows out, merge rows that gave the same sample, rank the rest.

    `rounding` is the relative error of the gradients; their own type's if not given. Differences of weights have a
    larger one (`difference_rounding`).
    """
    if not (is_finite(weight_gradient) and is_finite(bias_gradient)):
        raise CannotRead("update: its gradients have NaN or infinite values; nothing can be read from them.")
    alive = (bias_gradient != 0).nonzero()[:, 0]
    ratios = _divide(weight_gradient, bias_gradient, alive)
    samples = ratios if carrier is None else carrier.read(ratios)
    tolerance = MERGE_TOLERANCE * (torch.finfo(weight_gradient.dtype).eps if rounding is None else rounding)
    keep, support = _merge(samples, bias_gradient[alive].abs(), tolerance)
    order = _rank(samples[keep], support)
    keep = keep[order]
    return Candidates(samples=samples[keep], rows=alive[keep], support=support[order])


def _divide(weight_gradient: Tensor, bias_gradient: Tensor, rows: Tensor) -> Tensor:
    """The quotients, in at least float32: a quotient of two float32 numbers, rounded once, is float64's rounded to float32."""
    kept = torch.promote_types(weight_gradient.dtype, torch.float32)
    divided = weight_gradient if len(rows) == len(weight_gradient) else weight_gradient[rows]
    return (divided.to(kept) / bias_gradient[rows][:, None]).to(kept)


@lru_cache(maxsize=1)
def _directions(features: int) -> Tensor:
    return torch.randn(SKETCH, features, generator=torch.Generator().manual_seed(0))


def _merge(samples: Tensor, strength: Tensor, tolerance: float) -> tuple[Tensor, Tensor]:
    """Indices of one row for each distinct sample, the one with the largest bias gradient, and how many agreed.

    Compared in a few random directions instead of all M: distances there are within a small factor of the true
    ones, and the chance that different samples agree in all of them is nil.
    """
    count, features = samples.shape
    if count == 0:
        empty = torch.empty(0, dtype=torch.long, device=samples.device)
        return empty, empty
    sketch = gram(samples, _directions(features).to(samples)) / math.sqrt(SKETCH)
    order = strength.argsort(descending=True, stable=True)
    sketch = sketch[order]
    sizes = tolerance * sketch.norm(dim=1)
    leader = torch.empty(count, dtype=torch.long, device=samples.device)
    for block in torch.arange(count, device=samples.device).split(max(1, MERGE_BLOCK // count)):
        near = torch.cdist(sketch[block], sketch, compute_mode="donot_use_mm_for_euclid_dist") <= sizes
        # The strongest row that a row agrees with stands for it.
        leader[block] = near.to(torch.uint8).argmax(1)
    leads = leader == torch.arange(count, device=samples.device)
    support = torch.bincount(leader, minlength=count)
    return order[leads], support[leads]


def _rank(samples: Tensor, support: Tensor) -> Tensor:
    """Best first, without the truth: rows that agree with others, then those of the most usual length.

    A mixture rarely repeats, and mixing shortens or inflates a sample; the usual length is the median over samples
    seen more than once, or √M, what the layer was made for.
    """
    norms: Tensor = torch.linalg.vector_norm(samples, dim=1, dtype=torch.float64)
    repeated = norms[support > 1]
    usual = repeated.median() if repeated.numel() else torch.tensor(math.sqrt(samples.shape[1])).to(norms)
    oddness = (norms.clamp_min(1e-30) / usual.clamp_min(1e-30)).log().abs()
    by_norm: Tensor = oddness.argsort(stable=True)
    return by_norm[support[by_norm].argsort(descending=True, stable=True)]
