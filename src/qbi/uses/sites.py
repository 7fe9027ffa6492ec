"""Every trained parameter of a model and what it is used for, found where the operations are called.

A *site* is one linear map: rows of a weight and the vectors that meet them, however often in a pass. A parameter that is
only looked up, scaled with, or used in a way that nobody has a rule for is listed too, with that use's name. So nothing
that is trained is missing from the list, whoever wrote the module.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from qbi.calling import as_client
from qbi.uses.capture import flat
from qbi.uses.kinds import Kind, LookUp, ScaleAndShift
from qbi.uses.linear_view import LinearView, linear_views
from qbi.uses.records import Site, Uses
from qbi.uses.views import places

NORMS = ("batch_norm", "instance_norm", "native_batch_norm")


@dataclass(frozen=True)
class Part:
    """Some of a parameter's numbers, wherever they were moved to."""

    name: str
    index: Tensor
    held: Tensor
    """The tensor itself: while it is held, no other one has its identity."""


class Following(TorchFunctionMode):
    """Follows parameters through operations that only rearrange them, and hands their uses to whoever inherits."""

    def __init__(self, tracked: Iterable[tuple[str, Tensor]]) -> None:
        super().__init__()
        self.parts: dict[int, Part] = {}
        for name, tensor in tracked:
            self.parts[id(tensor)] = Part(name, _numbers(tensor), tensor)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation; follow the parameters in it."""
        from qbi.uses.operations import OPERATIONS

        kwargs = kwargs or {}
        held = [self.parts[id(v)] for v in flat((args, kwargs)) if id(v) in self.parts]
        if not held:
            return func(*args, **kwargs)
        if args and id(args[0]) in self.parts and len(held) == 1:
            moved = places(func, held[0].index, args, kwargs)
            if moved is not None:
                out = func(*args, **kwargs)
                for value, index in zip(flat((out,)), flat((moved,)), strict=True):
                    self.parts[id(value)] = Part(held[0].name, index, value)
                return out
        known = OPERATIONS.get(func)
        out = NotImplemented if known is None else known(self, *args, **kwargs)
        if out is not NotImplemented:
            return out
        out = func(*args, **kwargs)
        if out is None or any(isinstance(v, Tensor) for v in flat((out,))):
            self.other(held, getattr(func, "__name__", str(func)))
        return out

    def name_of(self, tensor: Tensor | None) -> str | None:
        """The name of a tracked parameter."""
        part = None if tensor is None else self.parts.get(id(tensor))
        return None if part is None else part.name

    def refuse(self, sentence: str) -> None:
        """An audit looks at every model."""

    def other(self, parts: Sequence[Part], what: str) -> None:
        """A use that is no linear map."""

    def use(self, kind: Kind, given: Tensor, out: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """A use of a known kind."""
        raise NotImplementedError


class _Listing(Following):
    def __init__(self, tracked: Iterable[tuple[str, Tensor]]) -> None:
        super().__init__(tracked)
        self.sites: list[Site] = []
        self.sums: list[list[Tensor]] = []
        """For each site, the outputs of its calls, in which products stand on their own."""
        self.others: dict[str, list[str]] = {}

    def other(self, parts: Sequence[Part], what: str) -> None:
        what = "norm" if what in NORMS else what
        for part in parts:
            said = self.others.setdefault(part.name, [])
            if what not in said:
                said.append(what)

    def use(self, kind: Kind, given: Tensor, out: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        own = None if weight is None else self.parts.get(id(weight))
        views = [] if own is None else linear_views(kind)
        if id(given) in self.parts:
            self.other([self.parts[id(given)]], "as an input")
        added = None if bias is None else self.parts.get(id(bias))
        if own is None or not views:
            norm = isinstance(kind, ScaleAndShift)
            what = _word(kind) if own is not None or weight is None or norm else "bias of a frozen layer"
            self.other([p for p in (own, added) if p is not None], what)
            return out
        if added is not None and not views[0].takes_bias:
            self.other([added], "added behind")
            added = None
        for view in views:
            self._note(own, view, added, out)
        return out

    def _note(self, own: Part, view: LinearView, added: Part | None, out: Tensor) -> None:
        rows = view.rows(own.index)
        for place, site in enumerate(self.sites):
            if site.is_at(own.name, rows):
                self.sites[place] = replace(site, calls=site.calls + 1)
                self.sums[place].append(out)
                return
        bias = None if added is None else added.name
        self.sites.append(Site(own.name, rows, bias, None if added is None else added.index[view.bias]))
        self.sums.append([out])


def _word(kind: Kind) -> str:
    if isinstance(kind, LookUp):
        return "embedding"
    return "norm" if isinstance(kind, ScaleAndShift) else "transposed convolution in groups"


def _numbers(tensor: Tensor) -> Tensor:
    return torch.arange(tensor.numel()).reshape(tensor.shape)


def uses_of(model: nn.Module, inputs: tuple[Any, ...]) -> Uses:
    """Run a model once on a probe, in train mode, and list what becomes of every trained parameter."""
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    listing = _Listing(trained.items())
    with as_client(model), torch.enable_grad():
        with listing:
            out = model(*inputs)
        sites = _numbered(_with_paired_biases(listing, out, trained))
    others = {name: tuple(listing.others.get(name, ())) for name in trained}
    taken = {s.bias for s in sites}
    others = {n: () if n in taken and said == ("add",) else said for n, said in others.items()}
    return Uses(tuple(sites), others, tuple(trained))


def _numbered(sites: Sequence[Site]) -> list[Site]:
    """Sites that are parts of one parameter, told apart by a number."""
    seen: Counter[str] = Counter()
    parts = Counter(site.weight for site in sites)
    out = []
    for site in sites:
        out.append(replace(site, group=seen[site.weight], groups=parts[site.weight]))
        seen[site.weight] += 1
    return out


def _with_paired_biases(listing: _Listing, out: Any, trained: Mapping[str, Tensor]) -> list[Site]:
    """A bias that is added in a line of its own is found by its gradient: the sum of what comes back to the products."""
    paired = {site.bias for site in listing.sites}
    spare = {n: p for n, p in trained.items() if p.dim() == 1 and n not in paired}
    spare = {n: p for n, p in spare.items() if len(listing.others.get(n, ())) == 1}
    sizes = {len(p) for p in spare.values()}
    lone = [(i, s) for i, s in enumerate(listing.sites) if s.bias is None and len(s.rows) in sizes]
    values = [v for v in _tensors(out) if v.requires_grad]
    if not spare or not lone or not values:
        return listing.sites
    draws = torch.Generator().manual_seed(0)
    total = sum((v * torch.randn(v.shape, generator=draws).to(v)).sum() for v in values)
    assert isinstance(total, Tensor)
    outs = [o for i, _ in lone for o in listing.sums[i]]
    try:
        found = torch.autograd.grad(total, [*spare.values(), *outs], allow_unused=True)
    except RuntimeError:  # an output that autograd does not know, inside a function with its own backward pass
        return listing.sites
    slopes: dict[str, Tensor | None] = dict(zip(spare, found, strict=False))
    backs = list(found[len(spare) :])
    sites = list(listing.sites)
    for place, site in lone:
        own, backs = backs[: len(listing.sums[place])], backs[len(listing.sums[place]) :]
        if any(b is None or b.shape[-1] != len(site.rows) for b in own):
            continue
        summed = torch.stack([b.reshape(-1, b.shape[-1]).sum(0) for b in own]).sum(0)
        name = next((n for n, slope in slopes.items() if slope is not None and _same(slope, summed)), None)
        if name is not None:
            sites[place] = replace(site, bias=name, bias_rows=torch.arange(len(summed)))
            slopes[name] = None
    return sites


def _same(slope: Tensor, summed: Tensor) -> bool:
    size = float(slope.abs().max())
    return slope.shape == summed.shape and size > 0 and torch.allclose(slope, summed, rtol=1e-3, atol=1e-5 * size)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = tuple(value.values())
    return [t for v in value for t in _tensors(v)] if isinstance(value, tuple | list) else []
