"""Every linear layer of a model: could a sample be brought there, what would arrive, and who decides that."""

import copy
import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from qbi.attacks import Carried, carry
from qbi.auditing.finding import Finding, Untested
from qbi.carrier import Carrier, Cause, Shortfall
from qbi.errors import CannotMount, first_line
from qbi.linear_maps import others, spelled_out, untold
from qbi.routing.graph import Traced, trace
from qbi.routing.path import find_path
from qbi.routing.targets import Target, targets

MOST_POSITIONS, MOST_VALUES = 256, 2**18
"""Patches of a sample, and values of all of them, up to which a convolution is looked at as a linear layer on them."""


SMALL = 2**16
"""Values of a sample up to which a model is looked at on four of them."""


def survey(model: nn.Module, sample: tuple[Tensor, ...]) -> tuple[Traced, list[Finding], list[Untested]]:
    """Look at every layer that is a linear map. Never fails on a layer: at worst it is not tested, with the reason."""
    traced = trace(model, sample)
    findings = [_look(traced, target, sample) for target in targets(traced)]
    untested = [
        Untested(
            "every attack", name, f"a {kind} is no linear map of its input, or one in groups; nothing here reads it."
        )
        for name, kind in untold(model)
    ]
    known = {f.name for f in findings}
    hidden = [n for n, m in model.named_modules() if _is_plain(m) and n not in known]
    looked = _look_inside(model, hidden, sample)
    for name in others(model):
        looked += _look_spelled_out(traced, model, name, sample)
    findings += [f for f in looked if isinstance(f, Finding)]
    untested += [u for u in looked if isinstance(u, Untested)]
    untested += [
        Untested("crafted models", f.name, f.reason) for f in findings if not f.attackable and f.target.has_bias
    ]
    return traced, findings, untested


def _look_spelled_out(
    traced: Traced, model: nn.Module, name: str, sample: tuple[Tensor, ...]
) -> Sequence[Finding | Untested]:
    positions = max((_positions(traced.values.get(node)) for node in traced.nodes_of(name)), default=0)
    weight = next((p for p in model.get_submodule(name).parameters() if p.dim() > 1), None)
    values = 1 if weight is None else weight.numel() // len(weight)
    if positions > MOST_POSITIONS or positions * values > MOST_VALUES:
        why = f"it looks at {positions} patches of {values} values of each sample; too many to be told apart here."
        return [Untested("every attack", name, why)]
    try:
        own, inner = spelled_out(model, name)
        again = trace(own, sample)
        parts = [t for t in targets(again) if t.name.rpartition(".")[0] == inner.rpartition(".")[0]]
        inside = [n for n, m in own.get_submodule(name).named_modules(prefix=name) if _is_plain(m)] if name else []
        seen = [replace(_look(again, target, sample), model=own) for target in parts]
        return [*seen, *_look_inside(own, [n for n in inside if n not in {t.name for t in parts}], sample, own)]
    except Exception as problem:
        # A layer that cannot be spelled out in this model is not tested; the audit goes on.
        why = f"it could not be spelled out ({type(problem).__name__}: {first_line(problem, most=100)})."
        return [Untested("every attack", name, why)]


def _is_plain(module: nn.Module) -> bool:
    trained = any(p.requires_grad for p in module.parameters(recurse=False))
    return trained and isinstance(module, nn.Linear) and not isinstance(module, NonDynamicallyQuantizableLinear)


def _look_inside(
    model: nn.Module, names: Sequence[str], sample: tuple[Tensor, ...], own: nn.Module | None = None
) -> list[Finding | Untested]:
    """Linear layers inside modules that a tracer takes for one piece: attacked with all before them left as it is."""
    if not names:
        return []
    caught: dict[str, list[Tensor]] = {name: [] for name in names}
    hooks = [
        model.get_submodule(name).register_forward_pre_hook(
            lambda _m, given, name=name: caught[name].append(given[0].detach())
        )
        for name in names
    ]
    buffers = {n: b.clone() for n, b in model.named_buffers()}
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            model.train()(*sample)
            for n, b in model.named_buffers():
                b.copy_(buffers[n])
    finally:
        for hook in hooks:
            hook.remove()
    out: list[Finding | Untested] = []
    for name in names:
        layer = model.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        if len(caught[name]) != 1:
            out.append(
                Untested(
                    "every attack",
                    name,
                    f"it was called {len(caught[name])} times in one pass; its samples cannot be told apart.",
                )
            )
            continue
        target = Target(name, layer.out_features, layer.in_features, layer.bias is not None, "inside a module", 0.0)
        positions = int(math.prod(caught[name][0].shape[1:-1])) if caught[name][0].dim() > 2 else 1
        out.append(
            replace(
                _left_as_it_is(
                    model, target, sample, positions, "it stands inside a module that is one piece to the tracer.", name
                ),
                model=own,
            )
        )
    return out


def _positions(value: object) -> int:
    if not isinstance(value, Tensor) or value.dim() < 3:
        return 1
    return int(math.prod(value.shape[2:])) if value.dim() > 3 else int(value.shape[1])


def _look(traced: Traced, target: Target, sample: tuple[Tensor, ...]) -> Finding:
    model = traced.model
    tied = _tied_to(model, target.name)
    if tied:
        return Finding(target, "unreachable", f"its weights are also those of {tied}; the gradients add up.", tied)
    try:
        carried = carry(model, target.name, sample, traced=traced)
    except CannotMount as problem:
        return _as_it_arrives(traced, target, sample, str(problem), problem.at)
    except Exception as problem:
        # Whatever a model does when its parts are run on their own, the audit goes on without this layer.
        reason = f"its way could not be followed ({type(problem).__name__}: {first_line(problem, most=120)})."
        return _as_it_arrives(traced, target, sample, reason, target.name)
    _share_unchanged(carried.model, model, target.name)
    untouched = _untouched(traced, target.name)
    shortfalls = carried.carrier.shortfalls
    if not shortfalls:
        sentence = "every value of the sample can be brought here unchanged."
        return Finding(target, "exact", sentence, target.name, carried, untouched=untouched)
    first, more = shortfalls[0], len(shortfalls) - 1
    sentence = f"{first} (and {more} more)" if more else str(first)
    return Finding(target, "lossy", sentence, first.place or target.name, carried, untouched=untouched)


def left_alone(finding: Finding, model: nn.Module, sample: tuple[Tensor, ...]) -> Finding:
    """The same layer, attacked with the layers before it as they are: where what can be brought there gives nothing."""
    own = finding.model or model
    if (
        finding.carrier is not None
        and finding.carrier.shortfalls
        and finding.carrier.shortfalls[0].label == "the way to it:"
    ):
        return finding
    found = _as_it_arrives(trace(own, sample), finding.target, sample, finding.reason, finding.decided_by)
    return replace(found, model=finding.model)


def _as_it_arrives(traced: Traced, target: Target, sample: tuple[Tensor, ...], reason: str, at: str) -> Finding:
    """Where the layers before cannot be set, a server leaves them and writes its rows for what arrives."""
    if len(traced.nodes_of(target.name)) != 1:
        return Finding(target, "unreachable", reason, at)
    given = traced.nodes_of(target.name)[0].all_input_nodes[0]
    value = traced.values.get(given)
    positions = int(math.prod(value.shape[1:-1])) if isinstance(value, Tensor) and value.dim() > 2 else 1
    return _left_as_it_is(traced.model, target, sample, positions, reason, at)


def _left_as_it_is(
    model: nn.Module, target: Target, sample: tuple[Tensor, ...], positions: int, reason: str, at: str
) -> Finding:
    crafted = copy.deepcopy(model).train()
    _share_unchanged(crafted, model, target.name)
    why = f"the layers before it stay as they are, and rows are written for what arrives ({reason})"
    lost = Shortfall("the way to it:", Cause.CUT, why, at)
    carrier = Carrier((target.width,), target.width, shortfalls=(lost,), tokens=positions)
    carried = Carried(crafted, target.name, carrier, tuple(part[:2] for part in sample))
    return Finding(target, "lossy", str(lost), at, carried)


def _share_unchanged(crafted: nn.Module, model: nn.Module, layer: str) -> None:
    """Let a crafted copy use the model's own memory for what was not changed; the attacked layer stays its own."""
    original = dict(model.named_parameters())
    for name, parameter in crafted.named_parameters():
        if not name.startswith(f"{layer}.") and torch.equal(parameter, original[name]):
            parameter.data = original[name].data


def _untouched(traced: Traced, layer: str) -> bool:
    way = find_path(traced, traced.nodes_of(layer)[0])[:-1]
    modules = [m for node in way if (m := traced.module(node)) is not None and not isinstance(m, nn.Embedding)]
    return not any(True for m in modules for _ in m.parameters())


def _tied_to(model: nn.Module, name: str) -> str:
    """Another layer that shares this one's weights."""
    weight = model.get_submodule(name).weight
    for other, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            if parameter is weight and other != name:
                return str(other)
    return ""


def probe_of(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """A probe batch of two samples, or of four that are small."""
    count = 4 if all(part[:1].numel() <= SMALL for part in inputs) else 2
    return tuple(part[:count] if len(part) > 1 else torch.cat([part, part]) for part in inputs)
