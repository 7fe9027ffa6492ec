"""Steps of a client that do not run again what stands before the attacked layer.

An audit takes many steps on the same few batches, and between them only the attacked layer and what stands behind it change. So what
arrives at the layer is kept, modules before it return placeholders of the right shape, and gradients are taken from the layer on: the
same numbers for less work. Whether a model allows it is found out by trying: with placeholders its outputs must be equal to the bit.
Where they are not (a way around the layer, dropout on the way there and behind it), every step runs whole.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn

from qbi.auditing.pruned_passes import checked_live, slimmed
from qbi.calling import as_client, call_with, hooked, swapped
from qbi.federation.client import Loss
from qbi.federation.exposed import ClientStep, exposed_step

FAILURES = (RuntimeError, ValueError, TypeError, IndexError, AttributeError)
"""What a model may raise where its parts return placeholders."""


@dataclass(frozen=True)
class _Kept:
    """What one batch is when it reaches the layer."""

    arrived: Tensor
    shapes: dict[str, tuple[torch.Size, torch.dtype]]
    buffers: dict[str, Tensor]


@dataclass(frozen=True)
class _Batch:
    """A batch that a model of certain parts is trained on."""

    parts: tuple[str, ...]
    seed: int
    inputs: tuple[bytes, ...]


@dataclass(frozen=True)
class _Calls:
    """Names of modules in the order in which their calls begin and end."""

    begun: list[str]
    ended: list[str]


@dataclass
class Shortcuts:
    """Everything that was kept in one audit; a few batches as they arrive, and no gradient."""

    _calls: dict[tuple[str, ...], _Calls] = field(default_factory=dict)
    """In which order a model's parts are called."""
    _before: dict[tuple[str, tuple[str, ...]], tuple[str, ...]] = field(default_factory=dict)
    """The outermost modules that run before a layer, by the layer and the model's parts."""
    _kept: dict[tuple[str, bytes, _Batch], _Kept | None] = field(default_factory=dict)
    _live: dict[tuple[str, bytes], dict[str, Tensor]] = field(default_factory=dict)
    """Channels that matter, by the layer and everything before it."""
    _digests: dict[int, tuple[ReferenceType[Tensor], tuple[int, int], bytes]] = field(default_factory=dict)
    """Of weights that were looked at, where they lay and how often they had been written to."""

    def step(
        self, model: nn.Module, layer: str, inputs: tuple[Tensor, ...], targets: Tensor, *, loss: Loss, seed: int
    ) -> ClientStep:
        """`exposed_step` of one layer. Gradients of what stands before the layer may be missing."""
        parts = tuple(name for name, _ in model.named_modules())
        if parts not in self._calls:
            try:
                self._calls[parts] = _order_of_calls(model, inputs, seed)
            except FAILURES:
                # A model that takes no two samples, say; what is wrong shows in the whole step, if anything is.
                self._calls[parts] = _Calls([], [])
        if (layer, parts) not in self._before:
            self._before[layer, parts] = _modules_before(model, layer, self._calls[parts].ended)
        before = self._before[layer, parts]
        if not before:
            return exposed_step(model, inputs, targets, layers=[layer], loss=loss, seed=seed)
        batch = _Batch(parts, seed, tuple(_digest(part) for part in inputs))
        key = (layer, self._fingerprint(model, layer, parts), batch)
        if key not in self._kept:
            known = self._on_the_way(model, before, batch)
            live = {} if known is not None else self.live(model, layer, parts, inputs, seed)
            self._kept[key] = _keep(model, layer, before, inputs, seed, known, live)
        kept = self._kept[key]
        if kept is None:
            return exposed_step(model, inputs, targets, layers=[layer], loss=loss, seed=seed)
        fixed = [n for n, _ in model.named_parameters() if n.startswith(tuple(f"{b}." for b in before))]
        with _placeholders(model, layer, kept):
            step = exposed_step(model, inputs, targets, layers=[layer], loss=loss, seed=seed, fixed=fixed)
        return replace(step, update=replace(step.update, buffers={**step.update.buffers, **kept.buffers}))

    def live(
        self, model: nn.Module, layer: str, parts: tuple[str, ...], inputs: tuple[Tensor, ...], seed: int
    ) -> dict[str, Tensor]:
        """Channels of the convolutions before a layer that matter to what arrives there."""
        key = (layer, self._fingerprint(model, layer, parts))
        if key not in self._live:
            self._live[key] = checked_live(model, layer, inputs, seed)
        return self._live[key]

    def _fingerprint(self, model: nn.Module, layer: str, parts: tuple[str, ...]) -> bytes:
        """Of every weight that what arrives at a layer may depend on: all but those of modules first called there or behind."""
        begun = self._calls[parts].begun
        behind = set(begun) - set(begun[: begun.index(layer)]) if layer in begun else set()
        owners = (module for name, module in model.named_modules() if name not in behind)
        own = (v for m in owners for v in (*m.parameters(recurse=False), *m.buffers(recurse=False)))
        return b"".join(self.digest(value) for value in own)

    def digest(self, values: Tensor) -> bytes:
        """A digest, taken again where the tensor is another one, lies elsewhere, or was written to (not through `.data`: nobody here does)."""
        now = values.data_ptr(), values._version
        known = self._digests.get(id(values))
        if known is None or known[0]() is not values or known[1] != now:
            known = self._digests[id(values)] = ref(values), now, _digest(values)
        return known[2]

    def _on_the_way(self, model: nn.Module, before: Sequence[str], batch: _Batch) -> tuple[str, _Kept] | None:
        """An earlier layer that the same batch has already been kept at."""
        for (layer, fingerprint, other), kept in self._kept.items():
            was_there = kept is not None and other == batch and layer in before
            if was_there and fingerprint == self._fingerprint(model, layer, batch.parts):
                assert kept is not None
                return layer, kept
        return None


class _Blank(nn.Module):
    """Returns nothing of use, under the weights of the module it stands for."""

    def __init__(self, value: Tensor, module: nn.Module) -> None:
        super().__init__()
        self.value = value
        self._modules, self._parameters, self._buffers = module._modules, module._parameters, module._buffers

    def forward(self, *_given: object, **_named: object) -> Tensor:
        """Of the right shape."""
        return self.value


def _digest(values: Tensor) -> bytes:
    raw = values.detach().contiguous().cpu().flatten().view(torch.uint8).numpy()
    return hashlib.blake2b(raw.data, digest_size=16).digest()


def _order_of_calls(model: nn.Module, inputs: tuple[Tensor, ...], seed: int) -> _Calls:
    """Names of the modules in the order in which their calls begin, and end, on two samples."""
    names = {module: name for name, module in model.named_modules()}
    begun: list[str] = []
    ended: list[str] = []
    before = lambda m, _given: begun.append(names[m])  # noqa: E731
    after = lambda m, _given, _out: ended.append(names[m])  # noqa: E731
    watching = hooked(before=dict.fromkeys(names, before), after=dict.fromkeys(names, after))
    with watching, as_client(model, seed=seed), torch.no_grad():
        model(*(part[:2] for part in inputs))
    return _Calls(begun, ended)


def _modules_before(model: nn.Module, layer: str, calls: Sequence[str]) -> tuple[str, ...]:
    """The outermost modules all of whose calls end before the layer's only call; none where it is called more than once."""
    if calls.count(layer) != 1:
        return ()
    here = calls.index(layer)
    early = {n for n in calls[:here] if n not in calls[here:]}
    # A part whose module stands under another name too may run again behind the layer.
    times: dict[nn.Module, int] = {}
    for _, module in model.named_modules(remove_duplicate=False):
        times[module] = times.get(module, 0) + 1
    early = {n for n in early if calls[:here].count(n) == 1 and times[model.get_submodule(n)] == 1}
    outermost = [n for n in calls[:here] if n in early and not any(n.startswith(f"{other}.") for other in early)]
    return tuple(outermost)


def _keep(
    model: nn.Module,
    layer: str,
    before: Sequence[str],
    inputs: tuple[Tensor, ...],
    seed: int,
    known: tuple[str, _Kept] | None,
    live: Mapping[str, Tensor],
) -> _Kept | None:
    """Run a batch whole, or from a layer it is known to arrive at; keep what arrives; see whether placeholders give the same outputs."""
    shapes: dict[str, tuple[torch.Size, torch.dtype]] = {}
    arrived: list[Tensor] = []

    start = slimmed(model, live) if known is None else _placeholders(model, *known)
    with start:
        names: dict[nn.Module, str] = {model.get_submodule(name): name for name in before}

        def note(module: nn.Module, _given: object, out: object) -> None:
            if isinstance(out, Tensor):
                shapes[names[module]] = out.shape, out.dtype

        keep = {model.get_submodule(layer): lambda _m, given: arrived.append(given[0].detach())}
        watching = hooked(before=keep, after=dict.fromkeys(names, note))
        with watching, as_client(model, seed=seed) as buffers, torch.no_grad():
            whole = call_with(model, buffers, inputs)
    buffers |= {} if known is None else known[1].buffers
    moved = {n: b for n, b in buffers.items() if n.startswith(tuple(f"{name}." for name in shapes))}
    kept = _Kept(arrived[0].clone(), shapes, moved)
    try:
        with _placeholders(model, layer, kept), as_client(model, seed=seed), torch.no_grad():
            short = model(*inputs)
    except FAILURES:
        return None
    same = isinstance(whole, Tensor) and isinstance(short, Tensor) and torch.equal(whole, short)
    return kept if same else None


@contextmanager
def _placeholders(model: nn.Module, layer: str, kept: _Kept) -> Iterator[None]:
    """Modules before the layer return nothing of use, and the layer gets what was kept."""
    device = kept.arrived.device
    blanks = {
        name: _Blank(torch.zeros((), dtype=kind, device=device).expand(shape), model.get_submodule(name))
        for name, (shape, kind) in kept.shapes.items()
    }
    instead = {model.get_submodule(layer): lambda _m, given: (kept.arrived, *given[1:])}
    with swapped(model, blanks), hooked(before=instead):
        yield
