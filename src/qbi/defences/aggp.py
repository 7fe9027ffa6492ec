"""Activation-based greedy gradient pruning: rows that few samples activate lose most of their entries.

Errata 2 and 3: a row has M entries and its count runs over the B samples; of the `p_keep` share largest entries a
random quarter stays, everything else becomes zero; rows with no sample or with at least `cutoff` samples are left.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from qbi.defences.base import Kind, change_rows
from qbi.errors import BadValue
from qbi.exposure import Exposure
from qbi.federation.exposed import ClientStep
from qbi.randomness import Draws, random_integer

ENTRIES_AT_A_TIME = 2**21
"""Gradient entries selected from at a time, by each thread: small enough to stay near the processor."""

SORTED_AT_A_TIME = 2**26
"""The same on an accelerator."""

NO_TICKET = np.iinfo(np.uint32).max


@dataclass(frozen=True)
class AGGP:
    """The paper's defence: rows that fewer than `cutoff` samples activate lose most of their entries.

    Args:
        cutoff: c, from how many samples on a row is left alone.
        lowest, highest: p_l and p_u, between which the share of a row's entries lies that may stay.
        random_part: the part of these that stays, drawn anew in every step.
        bias: the paper leaves the bias gradient, and with it the exact divisor; "drop" takes it.

    >>> from qbi.federation.exposed import exposed_step
    >>> from qbi.randomness import generator
    >>> model = nn.Sequential(nn.Linear(100, 20), nn.ReLU(), nn.Linear(20, 2))
    >>> step = exposed_step(model, torch.randn(4, 100), torch.tensor([0, 1, 0, 1]))
    >>> pruned = AGGP().apply(step, generator(0)).update
    >>> int((pruned.gradients["0.weight"] != 0).sum()) < int((step.update.gradients["0.weight"] != 0).sum())
    True
    """

    cutoff: int = 16
    lowest: float = 0.01
    highest: float = 0.95
    random_part: float = 0.25
    bias: Literal["keep", "drop"] = "keep"
    kind: Kind = "heuristic"

    def __post_init__(self) -> None:
        if self.cutoff < 3:
            raise BadValue(f"AGGP: cutoff is {self.cutoff}; it must be at least 3, Eq. 13 divides by (c − 2)².")
        if not 0 <= self.lowest <= self.highest <= 1 or not 0 <= self.random_part <= 1:
            raise BadValue(
                f"AGGP: shares are {self.lowest}, {self.highest}, {self.random_part}; they must lie between 0 and 1, "
                "the lowest not above the highest."
            )

    @property
    def name(self) -> str:
        """AGGP, and whether the bias gradient goes too."""
        return "AGGP" if self.bias == "keep" else "AGGP, bias dropped"

    def apply(self, step: ClientStep, generator: Draws) -> ClientStep:
        """Prune the weight gradients of exposed layers."""

        def change(exposure: Exposure, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
            counts = exposure.counts
            pruned = (counts > 0) & (counts < self.cutoff)
            kept = bias.masked_fill(pruned, 0) if self.bias == "drop" else bias
            return prune_rows(weight, counts, generator, self), kept

        return change_rows(step, change)


def keep_share(count: int, settings: AGGP) -> float:
    """Eq. 13: p_keep = (a − 1)²·(p_u − p_l)/(c − 2)² + p_l for a row that `count` samples activate."""
    return (count - 1) ** 2 * (settings.highest - settings.lowest) / (settings.cutoff - 2) ** 2 + settings.lowest


def kept_entries(count: int, features: int, settings: AGGP) -> int:
    """How many entries of a row stay: ⌊random_part·⌊p_keep·M⌋⌋."""
    return int(settings.random_part * int(keep_share(count, settings) * features))


def prune_rows(
    gradient: Float[Tensor, "n m"], counts: Int[Tensor, " n"], generator: Draws, settings: AGGP
) -> Float[Tensor, "n m"]:
    """A pruned copy of a weight gradient."""
    pruned = gradient.clone()
    prune_rows_in_place(pruned, counts, generator, settings)
    return pruned


def prune_rows_in_place(
    gradient: Float[Tensor, "n m"], counts: Int[Tensor, " n"], generator: Draws, settings: AGGP
) -> None:
    """Prune a weight gradient where it stands; rows that need no pruning are not touched.

    Rows with the same count are pruned together: there are at most `cutoff` − 1 such groups, however many rows.
    Memory: a few blocks of `ENTRIES_AT_A_TIME`.
    """
    if _in_one_launch(gradient, counts, generator, settings):
        return
    seed = random_integer(generator)
    if gradient.device.type == "cpu":
        _prune_on_cpu(gradient, counts, seed, settings)
    else:
        prune_by_sorting(gradient, counts, seed, settings)


def prune_by_outputs(
    gradient: Float[Tensor, "n m"], outputs: Float[Tensor, "b n"], generator: Draws, settings: AGGP
) -> None:
    """Prune in place, counting for each row the samples whose output is above zero."""
    if not _in_one_launch(gradient, outputs, generator, settings):
        prune_rows_in_place(gradient, (outputs > 0).sum(0), generator, settings)


def _prune_on_cpu(gradient: Tensor, counts: Tensor, seed: int, settings: AGGP) -> None:
    features = gradient.shape[1]
    block = max(1, ENTRIES_AT_A_TIME // features)
    tasks = [
        (rows, count)
        for count in range(1, settings.cutoff)
        for rows in (counts == count).nonzero()[:, 0].split(block)
        if len(rows)
    ]

    def prune(index: int) -> None:
        rows, count = tasks[index]
        largest, kept = int(keep_share(count, settings) * features), kept_entries(count, features, settings)
        if kept == 0:
            gradient.index_fill_(0, rows, 0)
            return
        draws = np.random.default_rng([seed, index])
        winners = _winners(gradient[rows].float().abs_().numpy(), largest, kept, draws)
        column = torch.from_numpy(winners % features)
        row = rows[torch.from_numpy(winners // features)]
        values = gradient[row, column]
        gradient.index_fill_(0, rows, 0)
        gradient[row, column] = values

    if len(tasks) == 1:
        prune(0)
    elif tasks:
        # Selection runs outside the interpreter's lock, and every block has its own random numbers.
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            list(pool.map(prune, range(len(tasks))))


@cache
def _quotas(settings: AGGP, features: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """For every count: how many entries are large, and how many of them stay."""
    pairs = [(0, 0)] + [
        (int(keep_share(a, settings) * features), kept_entries(a, features, settings))
        for a in range(1, settings.cutoff)
    ]
    largest, kept = torch.tensor(pairs, device=device).T.contiguous()
    return largest, kept


def _in_one_launch(gradient: Tensor, seen: Tensor, generator: Draws, settings: AGGP) -> bool:
    """Prune by a kernel of our own, on an NVIDIA GPU where Triton is there."""
    if not gradient.is_cuda or (kernel := _kernel()) is None:
        return False
    plain = gradient.dtype in (torch.float32, torch.float16, torch.bfloat16)
    if not plain or not gradient.is_contiguous() or not seen.is_contiguous():
        return False
    largest, kept = _quotas(settings, gradient.shape[1], gradient.device)
    kernel(gradient, seen, largest, kept, random_integer(generator) % 2**62, settings.cutoff)
    return True


@cache
def _kernel() -> Callable[..., None] | None:
    try:
        from qbi.kernels.aggp import prune
    except ImportError:
        return None
    return prune


def prune_by_sorting(gradient: Tensor, counts: Tensor, seed: int, settings: AGGP) -> None:
    """Sort the few pruned rows whole, once by size and once by lot: one transfer to the host per call, whatever the counts."""
    chosen = ((counts > 0) & (counts < settings.cutoff)).nonzero()[:, 0]
    if len(chosen) == 0:
        return
    features = gradient.shape[1]
    largest, kept = _quotas(settings, features, gradient.device)
    draws = torch.Generator(gradient.device).manual_seed(seed % 2**63)
    for rows in chosen.split(max(1, SORTED_AT_A_TIME // features)):
        values, count = gradient[rows], counts[rows, None]
        sizes = values.abs()
        # Equal entries at the bound all count as large, as on the CPU.
        bound = _last(sizes, largest[count], descending=True)
        tickets = torch.rand(values.shape, generator=draws, device=values.device).masked_fill_(sizes < bound, 2.0)
        gradient[rows] = values * (tickets <= _last(tickets, kept[count], descending=False))


def _last(values: Tensor, places: Tensor, *, descending: bool) -> Tensor:
    """The value at the given place of each sorted row; where the place is 0, one that no entry reaches."""
    ordered = values.sort(1, descending=descending).values.gather(1, (places - 1).clamp_min(0))
    return torch.where(places > 0, ordered, torch.inf if descending else -torch.inf)


def _winners(magnitudes: np.ndarray, largest: int, kept: int, draws: np.random.Generator) -> np.ndarray:
    """Flat indices of `kept` random ones of the `largest` entries of each row.

    Entries as large as the smallest of the largest count as large too: images have many equal values.
    """
    count, features = magnitudes.shape
    bound = np.partition(magnitudes, features - largest, axis=1)[:, features - largest]
    large = np.flatnonzero(magnitudes >= bound[:, None])
    row = large // features
    per_row = np.bincount(row, minlength=count)
    position = np.arange(len(large)) - np.repeat(per_row.cumsum() - per_row, per_row)
    tickets = np.full((count, per_row.max()), NO_TICKET, dtype=np.uint32)
    tickets[row, position] = draws.integers(NO_TICKET, size=len(large), dtype=np.uint32)
    winning = tickets <= np.partition(tickets, kept - 1, axis=1)[:, kept - 1, None]
    for lucky in np.flatnonzero(winning.sum(1) > kept):  # two equal tickets at the bound: about one row in 10⁵
        winning[lucky, np.flatnonzero(winning[lucky])[kept:]] = False
    return np.asarray(large[winning[row, position]])
