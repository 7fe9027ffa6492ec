"""What a real update gives away, the truth unknown: two checkpoints or a gradient, layer by layer.

A row in which one sample stands alone gives that sample; a row with several gives a mixture. Which is which cannot be
seen from one row, and two rows that give the same vector do not prove it either: wherever samples send back the same up to a factor (one
output, two classes, a saturated loss, one with corners), mixtures agree too. So candidates are ranked by how many rows agree on them,
and nothing more is claimed. Where the weights that were sent are known and a rectifier follows, the whole batch may come apart; samples that
then send nothing through just the rows that they leave silent are right as a rule. They are no proof either: without the rest of the model
nobody can say what a mixture would have sent.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor

from qbi.attacks.states import read_states
from qbi.errors import DataError
from qbi.extraction import difference_rounding, read_rows, weight_difference
from qbi.finite import is_finite
from qbi.linear_maps import linear_rows

SEVERAL = 2
"""Rows that agree."""


@dataclass(frozen=True)
class LayerReplay:
    """What one linear layer gives away: candidates, best first."""

    layer: str
    rows: int
    moved: int
    """Rows that changed at all."""
    samples: Float[Tensor, "k m"]
    support: Int[Tensor, " k"]
    source: Int[Tensor, " k"]
    apart: int = 0
    """Candidates, the first ones, of a whole batch that came apart, silent where the sent weights say so: likely samples, not proven ones."""

    @property
    def agree(self) -> int:
        """Candidates that several rows agree on: likely samples, not proven ones."""
        return int((self.support >= SEVERAL).sum())

    def document(self) -> dict[str, Any]:
        """As plain data; the candidates themselves stay out."""
        return {
            "layer": self.layer,
            "rows": self.rows,
            "moved": self.moved,
            "candidates": len(self.support),
            "agree": self.agree,
            "apart": self.apart,
            "support": self.support.tolist(),
            "source_rows": self.source.tolist(),
        }


def difference(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights before minus weights after: a gradient up to scale, where one step was taken."""
    out = weight_difference(before, after)
    if all(not bool(v.any()) for v in out.values()):
        raise DataError("replay: the two checkpoints are the same; nothing was trained between them.")
    return out


def linear_pairs(update: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Weights and biases that belong together: by name, or by order where arrays have no names."""
    for layer, rows, bias in linear_rows(update):
        if bias is not None:
            yield layer, rows, bias


def replay(
    update: Mapping[str, Tensor],
    before: Mapping[str, Tensor] | None = None,
    *,
    shape: tuple[int, ...] = (),
) -> list[LayerReplay]:
    """Read every linear layer with a bias out of an update, the most telling layer first.

    With the weights `before`, the update is their difference to others, and rows agree up to the rounding of weights.
    """
    for name, value in update.items():
        if not is_finite(value):
            raise DataError(f"replay: {name} has NaN or infinite values; nothing can be read from it.")
    found: list[LayerReplay] = []
    signs: list[str] = []
    sent = {} if before is None else {layer: (weight, bias) for layer, weight, bias in linear_pairs(before)}
    for layer, weight, bias in linear_pairs(update):
        if _signs_only(weight):
            signs.append(layer)
            continue
        read, apart = read_rows(weight, bias), 0
        if layer in sent and before is not None:
            own = sent[layer]
            rounding = difference_rounding(own[0].float(), weight)
            read, apart = read_states(weight, bias, own[0].float(), own[1].float(), rounding=rounding, shape=shape)
        moved = int((bias != 0).sum())
        found.append(LayerReplay(layer, len(weight), moved, read.samples, read.support, read.rows, apart))
    if not found and signs:
        raise DataError(
            f"replay: every weight of “{signs[0]}” moved by the same amount, as in a first step of Adam: only signs are left, and a sign "
            "divided by a sign is no sample."
        )
    if not found:
        raise DataError("replay: no linear layer with a bias in it; there is nothing to divide by.")
    return sorted(found, key=lambda f: (f.apart, f.agree, f.samples.shape[1]), reverse=True)


ALIKE = 0.02
"""Spread of the sizes of an update's entries, relative to them, below which they are one size and differ in sign alone."""


def _signs_only(weight: Tensor) -> bool:
    sizes = weight[weight != 0].abs()
    return len(sizes) > 16 and float(sizes.std() / sizes.mean()) < ALIKE
