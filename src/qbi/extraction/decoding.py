"""Cascade: a sample that was read explains its part of every row, and is taken out of all of them.

Run through the model that was sent, a candidate x with a label gives its share of *every* row's bias gradient. A true one passes
two tests that need no truth: its share of the row it was read from is that row's bias gradient, and its vector of backprops
lies in the space that the whole update spans. Then its contribution is subtracted everywhere, rows with two samples become
rows with one, and it goes on. After every step the found samples are fitted together to all rows that they explain, so
that rounding does not grow along the cascade. See `docs/strongest-server.md`.
"""

from dataclasses import replace

import torch
from jaxtyping import Bool, Float64, Int
from torch import Tensor

from qbi.extraction.recovered import Recovered, Tail, nothing
from qbi.extraction.system import System

ROW_MARGIN, SPACE_MARGIN = 20.0, 100.0
"""How many times its expected error a candidate may miss the two tests by."""

FLOOR = 170.0
"""The least by which it may miss them, in units of the gradients' rounding: 1e-5 for float32."""

LOOSEST = 0.05
"""Tests that would have to be looser than this prove nothing."""

ABOVE_NOISE = 100.0
"""How far a row must rise above its expected rounding to be read."""

EXPLAINED = 2000.0
"""Residuals below this many times the expected rounding count as explained."""

NEARLY_ALL = 0.98
"""The part of the rows that must be explained for a whole batch to be."""

SAME = 1e-2
"""Relative distance of pre-activations below which two candidates are one sample."""

REFITS, MIDWAY = 4, 2
"""Fits of all samples together: at the end, and after each step on the way there."""

SETTLED = 0.3
"""Part of a sample's expected rounding below which a fit that moves it changes nothing."""

MOST_STEPS = 200
MOST_REPEATS = 3
"""How often one sample may stand in a batch and still be recognised."""


def cascade(system: System, tail: Tail, outputs: int, *, found: Recovered | None = None) -> Recovered:
    """Read, certify, take out, fit again; until no row with a single sample is left."""
    found = nothing(system, outputs) if found is None else found
    for _ in range(MOST_STEPS):
        if len(found) >= system.rank and system.tells_samples_apart:
            break
        more = _next(system, tail, found)
        if more is None:
            break
        found = refit(system, tail, found.joined(more), times=MIDWAY)
    return refit(system, tail, found) if len(found) else found


def expected_noise(system: System, found: Recovered) -> Float64[Tensor, " n"]:
    """The rounding error of each row's residual, per value: that of the row and of what was subtracted."""
    count = system.sketch.shape[1] ** 0.5
    own: Tensor = system.sketch.norm(dim=1) / count
    if len(found):
        size = (found.coefficients @ system.sketch).norm(dim=1) / count
        own = own + (found.backprops.square().T @ size.square()).sqrt()
    return system.rounding * own


def _next(system: System, tail: Tail, found: Recovered) -> Recovered | None:
    """The certified samples of rows in which one stands alone now, the strongest of them."""
    left = system.bias - found.backprops.T @ (found.coefficients @ system.bias)
    noise = expected_noise(system, found)
    rows = (left.abs() > ABOVE_NOISE * noise).nonzero()[:, 0]
    if len(rows) == 0:
        return None
    error = noise[rows] / left[rows].abs()
    taken = found.backprops.T[rows]
    z = (system.products[rows] - taken @ (found.coefficients @ system.products)) / left[rows, None]
    labels, output_grads, miss = tail.explain(z, rows, left[rows], system)
    chosen = (miss < row_bound(system, error)).nonzero()[:, 0]
    if len(chosen) == 0:
        return None
    chosen = chosen[error[chosen].argsort()]
    chosen, support = distinct(z, chosen, found.coefficients @ system.products, error)
    if len(chosen) == 0:
        return None
    backprops = tail.backprops(z[chosen], output_grads[chosen])
    fine = certified(system, backprops, error[chosen], support, alone=tail.pins_values)
    chosen, backprops = chosen[fine], backprops[fine]
    if len(chosen) == 0:
        return None
    # Weak ones wait: what is found first makes their rows clearer.
    strong = error[chosen] <= max(1e-5, 4 * float(error[chosen].min()))
    chosen, backprops = chosen[strong], backprops[strong]
    coefficients = -taken[chosen] @ found.coefficients
    coefficients[torch.arange(len(chosen), device=rows.device), rows[chosen]] += 1
    coefficients /= left[rows[chosen], None]
    return Recovered(coefficients, backprops, labels[chosen], output_grads[chosen], rows[chosen])


def row_bound(system: System, error: Float64[Tensor, " k"]) -> Float64[Tensor, " k"]:
    """The relative miss up to which a label explains a row."""
    return (FLOOR * system.rounding + ROW_MARGIN * error).clamp_max(LOOSEST)


def certified(
    system: System,
    backprops: Float64[Tensor, "k n"],
    error: Float64[Tensor, " k"],
    support: Int[Tensor, " k"],
    *,
    alone: bool = True,
) -> Bool[Tensor, " k"]:
    """Whether each vector of backprops is one that the update allows.

    With as many samples as rows every vector is allowed; then, and where one row `alone` is not to be trusted, two rows must
    have given the same sample to within their error.
    """
    agreed = support > 1
    if not system.tells_samples_apart:
        return agreed
    bound = (FLOOR * system.rounding + SPACE_MARGIN * error).clamp_max(LOOSEST)
    return (system.outside(backprops) < bound) & (agreed | alone)


def distinct(
    z: Float64[Tensor, "r n"],
    chosen: Int[Tensor, " k"],
    known: Float64[Tensor, "s n"],
    error: Float64[Tensor, " r"],
) -> tuple[Int[Tensor, " d"], Int[Tensor, " d"]]:
    """One of each group of candidates that are the same sample, the first; none that is known; and how many agree closely."""
    of = z[chosen]
    size = of.norm(dim=1, keepdim=True).clamp_min(1e-300)
    apart = torch.cdist(of, of, compute_mode="donot_use_mm_for_euclid_dist") / size
    leader = (apart < SAME).to(torch.uint8).argmax(1)
    leads = leader == torch.arange(len(of), device=of.device)
    close = apart < 1e-7 + 2 * ROW_MARGIN * (error[chosen][:, None] + error[chosen])
    support = close.sum(1)
    if len(known):
        leads &= (torch.cdist(of, known) / size).amin(1) > SAME
    return chosen[leads], support[leads]


def refit(system: System, tail: Tail, found: Recovered, *, times: int = REFITS) -> Recovered:
    """Fit all found samples together to the rows that they explain, and take their backprops anew from the model."""
    for _ in range(times):
        fitted = _fit(system, found)
        if fitted is None:
            break
        settled = _settled(system, found, fitted)
        z = fitted @ system.products
        output_grads = tail.output_grads(z, found.labels, found.output_grads, system)
        found = replace(
            found, coefficients=fitted, output_grads=output_grads, backprops=tail.backprops(z, output_grads)
        )
        if settled:
            break
    return found


def _settled(system: System, found: Recovered, fitted: Float64[Tensor, "s n"]) -> bool:
    """Whether a fit moves every sample by less than what rounding leaves open."""
    count = system.sketch.shape[1] ** 0.5
    moved = ((fitted - found.coefficients) @ system.sketch).norm(dim=1) / count
    return bool((moved < SETTLED * (fitted.square() @ expected_noise(system, found).square()).sqrt()).all())


def _fit(system: System, found: Recovered) -> Float64[Tensor, "s n"] | None:
    """Least squares with each row weighted by its rounding; None where the rows do not determine the samples."""
    sketches = found.coefficients @ system.sketch
    noise = expected_noise(system, found)
    residual = (system.sketch - found.backprops.T @ sketches).norm(dim=1) / system.sketch.shape[1] ** 0.5
    ratio = residual / noise.clamp_min(1e-300)
    touched = (found.backprops != 0).any(0)
    whole = len(found) >= system.rank
    explained = touched if whole else touched & (ratio < EXPLAINED)
    if int(explained.sum()) < len(found):
        return None
    usual = max(1.0, float(ratio[explained].median()))
    weights = 1 / (noise * (ratio / usual).clamp_min(1.0))[explained]
    scaled = found.backprops[:, explained] * weights
    solution = _pseudo_inverse(scaled)
    if solution is None:
        return None
    out = torch.zeros_like(found.coefficients)
    out[:, explained] = solution * weights
    # The bias of a sample is one: that fixes its scale.
    return out / (out @ system.bias)[:, None]


def explains_everything(system: System, found: Recovered) -> bool:
    """Whether nothing but rounding is left of the rows; a few may hold a sample that stands on the very edge of firing."""
    left = system.sketch - found.backprops.T @ (found.coefficients @ system.sketch)
    ratio = left.norm(dim=1) / system.sketch.shape[1] ** 0.5 / expected_noise(system, found).clamp_min(1e-300)
    return bool(ratio.quantile(NEARLY_ALL) < EXPLAINED)


def _pseudo_inverse(rows: Float64[Tensor, "s e"]) -> Float64[Tensor, "s e"] | None:
    """(AᵀA)⁻¹Aᵀ for A = rowsᵀ, by Cholesky after scaling; None where A has not full rank."""
    size: Tensor = rows.norm(dim=1, keepdim=True)
    if not bool((size > 0).all()):
        return None
    unit = rows / size
    factor, failed = torch.linalg.cholesky_ex(unit @ unit.T)
    if bool(failed) or float(factor.diagonal().min()) < 1e-7:
        return None
    first = torch.cholesky_solve(unit, factor)
    # One step of refinement brings back what the square of the condition took.
    first = first + (torch.eye(len(unit)).to(unit) - first @ unit.T) @ first
    return first / size
