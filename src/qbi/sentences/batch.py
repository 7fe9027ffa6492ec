"""What a server holds of one batch of sentences, and what it makes of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from jaxtyping import Int
from torch import Tensor

from qbi.sentences.arrivals import Arrivals, MapGroup
from qbi.sentences.candidates import Found
from qbi.sentences.joining import Joined, join_likely
from qbi.sentences.witnesses import Witness


@dataclass(frozen=True)
class ReadSentences:
    """What was read of a batch."""

    sequences: tuple[tuple[int, ...], ...]
    proven: tuple[bool, ...]
    """Which of them lie in every span at every position."""
    tokens: tuple[int, ...]
    """Every token that was found in the batch, whether it found its place or not."""
    layers: tuple[str, ...]
    """The layers whose gradients were used."""
    rank: int
    width: int
    causal: bool
    seconds: float = field(compare=False)


@dataclass(frozen=True)
class SentBatch:
    """The gradient of a batch, and the model that it is of."""

    arrivals: Arrivals
    gradients: Mapping[str, Tensor]
    singles: list[MapGroup]
    """Maps that see single tokens."""
    mixing: list[MapGroup]
    """Maps behind them that see several together."""
    behind: list[MapGroup]
    """These, and all later ones."""
    probe: Int[Tensor, "k t"]
    vocabulary: int
    batch_size: int
    padding: int | None
    rounding: float
    draws: torch.Generator

    @property
    def length(self) -> int:
        """Positions of a sequence."""
        return self.probe.shape[1]

    @cached_property
    def causal(self) -> bool:
        """Whether positions see only those before them."""
        if not self.mixing:
            return False
        changed = self.probe.clone()
        changed[:, -1] = self.probe[:, -1].roll(1)
        before, after = (self.arrivals.at(self.mixing[0], ids)[:, :-1] for ids in (self.probe, changed))
        return bool((before - after).abs().max() <= 1e-5 * before.abs().max())

    def joined(self, witness: Witness, found: Found) -> Joined:
        """Whole sequences of an encoder."""
        padded = replace(witness, padding=self.padding)
        return join_likely(self.arrivals, padded, found, self.length, self.batch_size, self.draws)
