"""Maps whose gradient speaks of whole sequences: behind the last attention often one position of each sample gets anything back.

A classifier that looks at the first position only sends nothing back to the others in its last layer, so the gradients there span one vector
for each sample. Each vector depends on the whole sequence: a test of it is a test of all tokens together.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from qbi.errors import CannotRead
from qbi.sentences.arrivals import Arrivals, MapGroup
from qbi.sentences.candidates import AT_ONCE
from qbi.sentences.span import Span

SKETCH = 4096
"""Numbers that are kept of what stands outside the span: those of more positions are added up, with random signs."""

SILENT = 1e-5
"""What comes back to a position, against the position that gets most, below which it is nothing but rounding."""


@dataclass(frozen=True)
class Witness:
    """A map, its span, and the positions that its gradient speaks of."""

    group: MapGroup
    span: Span
    places: Int[Tensor, " p"]
    bucket: Int[Tensor, " n"] | None = field(repr=False)
    sign: Float[Tensor, " n"] | None = field(repr=False)
    padding: int | None = None
    """The token behind the end of a sequence: nothing comes back to its positions."""

    @property
    def sequences(self) -> int | None:
        """How many different sequences there are, where each has one vector."""
        return self.span.rank if len(self.places) == 1 else None

    def rest(
        self, arrivals: Arrivals, ids: Int[Tensor, "k t"]
    ) -> tuple[Float[Tensor, "k c"], Bool[Tensor, " k"], Float[Tensor, " k"]]:
        """What stands outside the span, whether that is rounding at every position, and its share."""
        parts = []
        for own in ids.split(max(1, AT_ONCE // ids.shape[1])):
            arrived = arrivals.at(self.group, own)[:, self.places]
            outside = self.span.rest(arrived)
            passed = self.span.misses(arrived) <= self.span.times
            if self.padding is not None:
                ended = own == self.padding
                passed |= ended[:, self.places]
                outside = outside.masked_fill(ended[:, self.places, None], 0.0)
                # It stands behind the last token, and nowhere else.
                passed &= ~(ended[:, :-1] & ~ended[:, 1:]).any(1, keepdim=True)
            passed = passed.all(1)
            parts.append((self._folded(outside.flatten(1)), passed, outside.norm(dim=2).square().mean(1).sqrt()))
        rests, passes, far = (torch.cat(own) for own in zip(*parts, strict=True))
        return rests, passes, far

    def _folded(self, rest: Float[Tensor, "k n"]) -> Float[Tensor, "k c"]:
        if self.bucket is None or self.sign is None:
            return rest
        return rest.new_zeros(len(rest), SKETCH).index_add_(1, self.bucket, rest * self.sign)


def witness_of(group: MapGroup, span: Span, places: Int[Tensor, " p"], draws: torch.Generator) -> Witness:
    """With random signs, where it has many positions."""
    size = len(places) * span.width
    if size <= SKETCH:
        return Witness(group, span, places, None, None)
    bucket = torch.randint(SKETCH, (size,), generator=draws)
    sign = 2.0 * torch.randint(2, (size,), generator=draws) - 1
    return Witness(group, span, places, bucket.to(places.device), sign.to(span.basis))


def find_witness(
    arrivals: Arrivals,
    groups: list[MapGroup],
    gradients: Mapping[str, Tensor],
    probe: Int[Tensor, "k t"],
    batch_size: int,
    spanned: Callable[[Tensor], Span],
    draws: torch.Generator,
) -> Witness | None:
    """The first map that sees several positions together and whose gradient speaks of one of each sample; None where there is none."""
    heard = arrivals.returns(groups, probe[:1])
    for group in groups:
        arrived = arrivals.at(group, probe[:1])[0].double()
        for number, weight in enumerate(group.weights):
            back = heard.get(weight)
            if back is None:
                continue
            turned = group.turned[number]
            solved = (back.T if turned else back).double() @ torch.linalg.pinv(arrived, rtol=1e-6)
            size = solved.norm(dim=0)
            places = (size > SILENT * size.max()).nonzero()[:, 0]
            if len(places) != 1:
                continue
            own = replace(group, weights=(weight,), turned=(turned,))
            try:
                span = spanned(own.gradient(gradients))
            except CannotRead:
                continue
            if span.rank <= batch_size:
                return witness_of(own, span, places, draws)
    return None
