"""What arrives at the linear maps of a model that is given token ids: the server runs the model that it sent."""

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from qbi.calling import as_client
from qbi.errors import CannotRead
from qbi.uses.kinds import Kind, Pairs
from qbi.uses.sites import Following, Part

Feed = Callable[[Tensor], tuple[Tensor, ...]]
"""From token ids (k, t) to everything that the model is given."""


@dataclass(frozen=True)
class MapGroup:
    """Linear maps that see the same vectors: queries, keys and values of one attention layer."""

    weights: tuple[str, ...]
    turned: tuple[bool, ...]
    """Whether the columns of a weight, not its rows, are its neurons."""
    first: int
    """Which use of a weight in a pass is the first of them."""
    width: int

    @property
    def name(self) -> str:
        """As reports call it: what the names of its weights have in common."""
        names = [w.removesuffix(".weight") for w in self.weights]
        return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"

    def gradient(self, gradients: Mapping[str, Tensor]) -> Float[Tensor, "n d"]:
        """All rows: one for each neuron, as wide as what arrives."""
        pairs = zip(self.weights, self.turned, strict=True)
        return torch.cat([gradients[w].T if turned else gradients[w] for w, turned in pairs])


class _Enough(Exception):
    """What was looked for has arrived."""


_GIVEN: dict[Callable[..., Any], int] = {
    F.linear: 0,
    torch.addmm: 1,
    torch.matmul: 0,
    torch.mm: 0,
    Tensor.matmul: 0,
    Tensor.mm: 0,
}
"""Where the usual linear maps have their input: the last one of a pass need not be computed."""


class _Catching(Following):
    """Keeps what arrives at linear maps that see positions one by one; stops a pass when the wanted one has come."""

    def __init__(self, parts: Mapping[int, Part], shape: tuple[int, int], wanted: int | None) -> None:
        super().__init__(())
        self.parts = dict(parts)
        self.shape, self.wanted = shape, wanted
        self.met: list[tuple[str, bool, Tensor]] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation, or end the pass before it where it is the wanted one."""
        place = _GIVEN.get(func)
        if place is not None and len(self.met) == self.wanted and len(args) > place + 1:
            own = self.parts.get(id(args[place + 1]))
            arrived = None if own is None else _by_position(args[place].detach(), self.shape)
            if own is not None and arrived is not None:
                self.met.append((own.name, func is not F.linear, arrived))
                raise _Enough
        return super().__torch_function__(func, types, args, kwargs)

    def use(self, kind: Kind, given: Tensor, out: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:  # noqa: ARG002
        own = None if weight is None else self.parts.get(id(weight))
        if own is None or not isinstance(kind, Pairs) or own.index.shape != kind.shape:
            return out
        arrived = _by_position(given.detach(), self.shape)
        if arrived is None:
            return out
        self.met.append((own.name, kind.transposed, arrived))
        if self.wanted is not None and len(self.met) > self.wanted:
            raise _Enough
        return out


class Arrivals:
    """Runs a model up to a linear map.

    Args:
        model: as the server sent it.
        feed: how token ids become the model's inputs.
    """

    def __init__(self, model: nn.Module, feed: Feed) -> None:
        self.model, self.feed = model, feed
        weights = ((n, p) for n, p in model.named_parameters() if p.requires_grad and p.dim() == 2)
        self.parts = Following(weights).parts
        """Numbering every weight takes longer than a pass over few tokens: it is done once."""

    def _run(self, ids: Tensor, wanted: int | None) -> list[tuple[str, bool, Tensor]]:
        catching = _Catching(self.parts, (ids.shape[0], ids.shape[1]), wanted)
        with torch.no_grad(), as_client(self.model), catching, suppress(_Enough):
            self.model(*self.feed(ids))
        return catching.met

    def groups(self, ids: Int[Tensor, "k t"]) -> list[MapGroup]:
        """Every group of maps in the order of a pass; weights that are used more than once are left out."""
        met = self._run(ids, None)
        often = Counter(name for name, _, _ in met)
        found: list[tuple[list[int], Tensor]] = []
        for place, (name, _, given) in enumerate(met):
            if often[name] > 1:
                continue
            same = next((own for own, seen in found if seen.shape == given.shape and torch.equal(seen, given)), None)
            if same is None:
                found.append(([place], given))
            else:
                same.append(place)
        return [
            MapGroup(tuple(met[i][0] for i in own), tuple(met[i][1] for i in own), own[0], given.shape[-1])
            for own, given in found
        ]

    def returns(self, groups: list[MapGroup], ids: Int[Tensor, "k t"]) -> dict[str, Tensor]:
        """The gradients of their weights for some loss of the model's first output: which positions get anything back is the same for all."""
        held = {part.name: part.held for part in self.parts.values()}
        names = [name for group in groups for name in group.weights]
        if not names:
            return {}
        with as_client(self.model, seed=0), torch.enable_grad():
            out = self.model(*self.feed(ids))
            while not isinstance(out, Tensor):
                out = next(iter(out.values() if isinstance(out, Mapping) else out))
            draws = torch.Generator().manual_seed(0)
            total = (out * torch.randn(out.shape, generator=draws).to(out)).sum()
            found = torch.autograd.grad(total, [held[name] for name in names], allow_unused=True)
        return {name: g for name, g in zip(names, found, strict=True) if g is not None}

    def at(self, group: MapGroup, ids: Int[Tensor, "k t"]) -> Float[Tensor, "k t d"]:
        """What arrives there, position by position."""
        met = self._run(ids, group.first)
        if len(met) <= group.first or met[-1][0] != group.weights[0]:
            raise CannotRead(f"{group.name}: the model takes another way for other tokens.")
        return met[-1][2]


def _by_position(given: Tensor, shape: tuple[int, int]) -> Tensor | None:
    """(k, t, d), however a model arranges it; None where it is not one vector for each position."""
    samples, positions = shape
    if given.dim() == 3 and given.shape[:2] == (samples, positions):
        return given
    if given.dim() == 3 and given.shape[:2] == (positions, samples):
        return given.transpose(0, 1)
    if given.dim() == 2 and len(given) == samples * positions:
        return given.reshape(samples, positions, -1)
    return None
