"""Every trained parameter of a model: which linear map it belongs to, and could a sample be brought there.

The list of parameters and their uses comes from the operations that the model calls (`uses`), so that no module is missed for its
type. Layers that the tracers know are looked at as they stand, with the way that leads to them; every other linear map is
written out as a layer of its own. What is no linear map is not tested, by name.
"""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.utils._pytree import tree_leaves

from qbi.attacks import Carried, carry
from qbi.auditing.finding import Finding, Untested
from qbi.auditing.leftovers import look_written_out, share_unchanged, unread
from qbi.calling import as_client
from qbi.carrier import Carrier, Cause, Shortfall
from qbi.errors import CannotMount, first_line
from qbi.linear_maps import PART, others, with_linear_form
from qbi.routing.graph import Traced, trace
from qbi.routing.path import find_path
from qbi.routing.targets import Target, targets
from qbi.uses.records import Uses
from qbi.uses.sites import uses_of

MOST_POSITIONS, MOST_VALUES = 256, 2**18
"""Patches of a sample, and values of all of them, up to which the way to a convolution is followed."""

SMALL = 2**16
"""Values of a sample up to which a model is looked at on four of them."""


@dataclass(frozen=True)
class Survey:
    """What is known of a model before anything is tried."""

    traced: Traced
    findings: list[Finding]
    untested: list[Untested]
    uses: Uses

    @property
    def called_by_name(self) -> tuple[str, ...]:
        """Linear layers that the model itself calls: one step shows all of them."""
        linear = {n for n, m in self.traced.model.named_modules() if isinstance(m, nn.Linear)}
        return tuple(f.name for f in self.findings if f.model is None and f.name in linear)


def survey(model: nn.Module, sample: tuple[Tensor, ...]) -> Survey:
    """Look at every trained parameter. Never fails on a layer: at worst it is not tested, with the reason."""
    traced = trace(model, sample)
    uses = uses_of(model, sample)
    names = {id(p): n for n, p in model.named_parameters() if p.requires_grad}
    seen = [found for target in targets(traced) if (found := _looked_at(traced, target, sample)) is not None]
    given = _outputs(model, sample)
    for name in others(model):
        seen += _look_at_linear_form(traced, model, name, sample, given)
    findings = [found for f in seen if (found := _with_parameters(f, model, names, uses)) is not None]
    known = {p for f in findings for p in f.parameters}
    for site in uses.sites:
        if site.weight not in known:
            found = look_written_out(model, site, sample)
            if isinstance(found, Finding):
                findings.append(found)
    reached = {p for f in findings for p in f.parameters}
    return Survey(traced, findings, unread(model, uses, reached), uses)


def _with_parameters(finding: Finding, model: nn.Module, names: dict[int, str], uses: Uses) -> Finding | None:
    """The same with the trained parameters that it reads; None where they are used elsewhere too, or are frozen."""
    layer, _, last = finding.name.rpartition(".")
    owner = model.get_submodule(layer if last == PART else finding.name)
    packed = last == PART and isinstance(owner, nn.MultiheadAttention)
    own = dict(owner.named_parameters(recurse=False))
    wanted = [p for n, p in own.items() if n.startswith("in_proj") or not packed]
    found = tuple(names[id(p)] for p in wanted if id(p) in names)
    weights = [names[id(p)] for p in wanted if p.dim() > 1 and id(p) in names]
    if not weights or finding.carried is None:
        return None
    for weight in weights:
        sites = uses.of(weight)
        plain = not sites or (len(sites) == 1 and sites[0].calls == 1)
        once = not uses.others[weight] or isinstance(owner, nn.MultiheadAttention | NonDynamicallyQuantizableLinear)
        if not plain or not once:
            return None
    return replace(finding, parameters=found)


def _look_at_linear_form(
    traced: Traced, model: nn.Module, name: str, sample: tuple[Tensor, ...], given: Sequence[Tensor]
) -> Sequence[Finding]:
    positions = max((_positions(traced.values.get(node)) for node in traced.nodes_of(name)), default=0)
    weight = next((p for p in model.get_submodule(name).parameters() if p.dim() > 1), None)
    values = 1 if weight is None else weight.numel() // len(weight)
    if positions > MOST_POSITIONS or positions * values > MOST_VALUES:
        return []
    try:
        own, inner = with_linear_form(model, name)
        if not _same(_outputs(own, sample), given):
            return []
        again = trace(own, sample)
        parts = [t for t in targets(again) if t.name.rpartition(".")[0] == inner.rpartition(".")[0]]
        return [replace(_look(again, target, sample), model=own) for target in parts]
    except Exception:
        # A layer that cannot be written as a linear map in this model is written out by its use.
        return []


def _outputs(model: nn.Module, sample: tuple[Tensor, ...]) -> list[Tensor]:
    """What a model gives out for a sample, its own random numbers seeded."""
    with as_client(model, seed=0), torch.no_grad():
        return [v for v in tree_leaves(model(*sample)) if isinstance(v, Tensor) and v.is_floating_point()]


def _same(found: Sequence[Tensor], given: Sequence[Tensor]) -> bool:
    """Whether a model with a layer written as a linear map still computes the same."""
    return len(found) == len(given) and all(
        a.shape == b.shape and torch.allclose(a, b, rtol=1e-3, atol=1e-4 * float(b.abs().max()))
        for a, b in zip(found, given, strict=True)
    )


def _positions(value: object) -> int:
    if not isinstance(value, Tensor) or value.dim() < 3:
        return 1
    return int(math.prod(value.shape[2:])) if value.dim() > 3 else int(value.shape[1])


def _looked_at(traced: Traced, target: Target, sample: tuple[Tensor, ...]) -> Finding | None:
    """A layer as it stands; None where the graph does not lead to it, and it is written out by its use."""
    try:
        return _look(traced, target, sample)
    except CannotMount:
        return None


def _look(traced: Traced, target: Target, sample: tuple[Tensor, ...]) -> Finding:
    model = traced.model
    if not target.has_bias:
        return _as_it_arrives(
            traced, target, sample, "it has no bias: what is read is known up to a factor.", target.name
        )
    try:
        carried = carry(model, target.name, sample, traced=traced)
    except CannotMount as problem:
        return _as_it_arrives(traced, target, sample, str(problem), problem.at)
    except Exception as problem:
        # Whatever a model does when its parts are run on their own, the audit goes on without this layer.
        reason = f"its way could not be followed ({type(problem).__name__}: {first_line(problem, most=120)})."
        return _as_it_arrives(traced, target, sample, reason, target.name)
    share_unchanged(carried.model, model, target.name)
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
    alone = finding.carrier is not None and finding.carrier.shortfalls
    if not finding.followed or (alone and finding.carrier.shortfalls[0].label == "the way to it:"):  # type: ignore[union-attr]
        return finding
    found = _as_it_arrives(trace(own, sample), finding.target, sample, finding.reason, finding.decided_by)
    return replace(found, model=finding.model, parameters=finding.parameters)


def _as_it_arrives(traced: Traced, target: Target, sample: tuple[Tensor, ...], reason: str, at: str) -> Finding:
    """Where the layers before cannot be set, a server leaves them and writes its rows for what arrives."""
    if len(traced.nodes_of(target.name)) != 1:
        return Finding(target, "unreachable", reason, at)
    given = traced.nodes_of(target.name)[0].all_input_nodes[0]
    value = traced.values.get(given)
    positions = int(math.prod(value.shape[1:-1])) if isinstance(value, Tensor) and value.dim() > 2 else 1
    crafted = copy.deepcopy(traced.model).train()
    share_unchanged(crafted, traced.model, target.name)
    why = f"the layers before it stay as they are, and rows are written for what arrives ({reason})"
    lost = Shortfall("the way to it:", Cause.CUT, why, at)
    carrier = Carrier((target.width,), target.width, shortfalls=(lost,), tokens=positions)
    carried = Carried(crafted, target.name, carrier, tuple(part[:2] for part in sample))
    return Finding(target, "lossy", str(lost), at, carried, untouched=_untouched(traced, target.name))


def _untouched(traced: Traced, layer: str) -> bool:
    way = find_path(traced, traced.nodes_of(layer)[0])[:-1]
    modules = [m for node in way if (m := traced.module(node)) is not None and not isinstance(m, nn.Embedding)]
    return not any(True for m in modules for _ in m.parameters())


def probe_of(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """A probe batch of two samples, or of four that are small."""
    count = 4 if all(part[:1].numel() <= SMALL for part in inputs) else 2
    return tuple(part[:count] if len(part) > 1 else torch.cat([part, part]) for part in inputs)
