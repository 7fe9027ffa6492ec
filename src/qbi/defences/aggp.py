"""Activation-based greedy gradient pruning: rows that few samples activate lose most of their entries.

Errata 2 and 3: a row has M entries and its count runs over the B samples; of the `p_keep` share largest entries a
random quarter stays, everything else becomes zero; rows with no sample or with at least `cutoff` samples are left.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from qbi.errors import BadValue

ENTRIES_AT_A_TIME = 2**21
"""Gradient entries selected from at a time, by each thread: small enough to stay near the processor."""

NO_TICKET = np.iinfo(np.uint32).max


@dataclass(frozen=True)
class AGGP:
    """The paper's parameters: cut-off c, bounds p_l and p_u of the kept share, and the random part kept of it."""

    cutoff: int = 16
    lowest: float = 0.01
    highest: float = 0.95
    random_part: float = 0.25

    def __post_init__(self) -> None:
        if self.cutoff < 3:
            raise BadValue(f"AGGP: cutoff is {self.cutoff}; it must be at least 3, Eq. 13 divides by (c − 2)².")
        if not 0 <= self.lowest <= self.highest <= 1 or not 0 <= self.random_part <= 1:
            raise BadValue(
                f"AGGP: shares are {self.lowest}, {self.highest}, {self.random_part}; they must lie between 0 and 1, "
                "the lowest not above the highest."
            )


def keep_share(count: int, settings: AGGP) -> float:
    """Eq. 13: p_keep = (a − 1)²·(p_u − p_l)/(c − 2)² + p_l for a row that `count` samples activate."""
    return (count - 1) ** 2 * (settings.highest - settings.lowest) / (settings.cutoff - 2) ** 2 + settings.lowest


def kept_entries(count: int, features: int, settings: AGGP) -> int:
    """How many entries of a row stay: ⌊random_part·⌊p_keep·M⌋⌋."""
    return int(settings.random_part * int(keep_share(count, settings) * features))


def prune_rows(
    gradient: Float[Tensor, "n m"], counts: Int[Tensor, " n"], generator: torch.Generator, settings: AGGP
) -> Float[Tensor, "n m"]:
    """A pruned copy of a weight gradient."""
    pruned = gradient.clone()
    prune_rows_in_place(pruned, counts, generator, settings)
    return pruned


def prune_rows_in_place(
    gradient: Float[Tensor, "n m"], counts: Int[Tensor, " n"], generator: torch.Generator, settings: AGGP
) -> None:
    """Prune a weight gradient where it stands; rows that need no pruning are not touched.

    Rows with the same count are pruned together: there are at most `cutoff` − 1 such groups, however many rows.
    Memory: a few blocks of `ENTRIES_AT_A_TIME`.
    """
    features = gradient.shape[1]
    block = max(1, ENTRIES_AT_A_TIME // features)
    seed = int(torch.randint(2**62, (), generator=generator, device=generator.device))
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
            gradient[rows] = 0
        elif gradient.device.type == "cpu":
            draws = np.random.default_rng([seed, index])
            winners = _winners(gradient[rows].float().abs_().numpy(), largest, kept, draws)
            column = torch.from_numpy(winners % features)
            row = rows[torch.from_numpy(winners // features)]
            values = gradient[row, column]
            gradient.index_fill_(0, rows, 0)
            gradient[row, column] = values
        else:
            draws_there = torch.Generator(gradient.device).manual_seed(seed + index)
            gradient[rows] = _survivors_by_topk(gradient[rows], largest, kept, draws_there)

    if gradient.device.type == "cpu" and len(tasks) > 1:
        # Selection runs outside the interpreter's lock, and every block has its own random numbers.
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            list(pool.map(prune, range(len(tasks))))
    else:
        for index in range(len(tasks)):
            prune(index)


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


def _survivors_by_topk(values: Tensor, largest: int, kept: int, draws: torch.Generator) -> Tensor:
    """The same on an accelerator, where a selection of indices is cheap."""
    top = values.abs().topk(largest, dim=1, sorted=False).indices
    lottery = torch.rand(top.shape, generator=draws, device=values.device)
    winners = top.gather(1, lottery.topk(kept, dim=1, sorted=False).indices)
    return torch.zeros_like(values).scatter_(1, winners, values.gather(1, winners))
