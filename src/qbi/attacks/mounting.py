"""Put an attack on a model, as a malicious server would before sending it out: on a copy."""

import copy
import math
from dataclasses import replace

import torch
from torch import Tensor, nn

from qbi.attacks.base import Attack, Carried, Mounted
from qbi.attacks.heads import is_asleep, wake_head
from qbi.carrier import Carrier, Cause, NormBehind
from qbi.errors import BadValue, CannotMount
from qbi.finite import is_finite
from qbi.randomness import generator as named_generator
from qbi.routing.carry import DEFAULT_SHIFT, carry_to
from qbi.routing.graph import Traced, as_inputs, trace
from qbi.routing.path import in_outline
from qbi.routing.targets import Target, arriving_shape, targets
from qbi.routing.tracers import Inputs

SHIFTS = (DEFAULT_SHIFT, 32.0)
"""Tried in turn: the second one where values lie below the first."""

PROBE = 2
"""Samples that a mounted model keeps to know its clients' shape."""


def mount(
    model: nn.Module,
    attack: Attack,
    sample: Tensor | Inputs,
    seed: int | torch.Generator = 0,
    *,
    layer: str | None = None,
    gain: float | None = None,
    strict: bool = True,
) -> Mounted:
    """Copy the model, carry the sample to a linear layer, and write the attack into it.

    Args:
        model: what clients would be asked to train; it is not changed.
        attack: whose rows are written; one that crafts nothing leaves the copy as it is.
        sample: a small batch like the client's, used as a probe.
        seed: of the rows' random numbers, or a generator of one's own.
        layer: which layer to attack; the first linear layer with a ReLU behind it, if not given.
        gain: scales weights and bias together, which changes no sign and so nothing of the attack, but keeps the layers
            behind from saturating: a sample that the loss is certain of sends no gradient. The default 1/√M brings
            activations near one; 1 gives the rows as the paper has them.
        strict: require a ReLU behind the layer and the whole sample in front of it; otherwise what can be brought there
            is, and the carrier says what is lost.

    Returns:
        The crafted copy, the layer, how samples arrive there, and the attack that reads the update.

    >>> from qbi import QBI, client_step
    >>> model = nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 3))
    >>> x, y = torch.randn(8, 64), torch.arange(8) % 3
    >>> mounted = mount(model, QBI(batch_size=8), x[:2])
    >>> mounted.read(client_step(mounted.model, x, y)).samples.shape[1]
    64
    """
    if gain is not None and not 0 < gain < math.inf:
        raise BadValue(f"mount: gain is {gain}; it must be positive and finite.")
    inputs = as_inputs(sample)
    for part in inputs:
        if part.is_floating_point() and not is_finite(part):
            raise BadValue("mount: the sample has NaN or infinite values; clean the data first.")
    traced = trace(model, inputs)
    name = choose_target(traced, layer, strict=strict)
    if not attack.crafts:
        return as_it_is(model, name, inputs, attack)
    mounted = with_attack(carry(model, name, inputs, strict=strict, traced=traced), attack)
    draws = named_generator(seed, "rows") if isinstance(seed, int) else seed
    write(mounted, draws, gain=gain)
    return mounted


def carry(
    model: nn.Module, layer: str, sample: Inputs, *, strict: bool = False, traced: Traced | None = None
) -> Carried:
    """A copy of the model that carries samples to the layer. A larger shift is tried where values lie below the first.

    Who has traced the model on the sample already says so.
    """
    refused: CannotMount | None = None
    carried: Carried | None = None
    for shift in SHIFTS:
        crafted = copy.deepcopy(model).train()
        try:
            same = None if traced is None else replace(traced, model=crafted)
            carrier = carry_to(crafted, layer, sample, shift=shift, strict=strict, traced=same)
        except CannotMount as problem:
            refused = refused or problem
            if not strict:
                break
            continue
        known = None if same is None else in_outline(same)
        carried = Carried(crafted, layer, carrier, tuple(part[:PROBE] for part in sample), known)
        if not any(s.cause is Cause.SHIFT for s in carrier.shortfalls):
            return carried
    if carried is None:
        assert refused is not None
        raise refused
    return carried


def as_it_is(model: nn.Module, layer: str, sample: Inputs, attack: Attack, traced: Traced | None = None) -> Mounted:
    """A copy of the model, unchanged, with one of its layers to be read; what arrives there is what the model makes of samples."""
    sent = copy.deepcopy(model).train()
    target = sent.get_submodule(layer)
    assert isinstance(target, nn.Linear)
    width = target.in_features
    probe = tuple(part[:PROBE] for part in sample)
    known = in_outline(trace(sent, probe)) if traced is None else replace(traced, model=sent)
    shape = arriving_shape(known, layer) or (width,)
    return Mounted(sent, layer, Carrier(shape, width), probe, known, attack=attack)


def with_attack(carried: Carried, attack: Attack) -> Mounted:
    """The same model with an attack that is still to be written into it; a copy where the attack sets other layers too."""
    reaches_behind = type(attack).set_behind is not Attack.set_behind or carried.carrier.norm is not None
    touches_others = attack.crafts and (reaches_behind or is_asleep(carried))
    model = copy.deepcopy(carried.model) if touches_others else carried.model
    known = None if carried.known is None else replace(carried.known, model=model)
    return Mounted(model, carried.layer, carried.carrier, carried.probe, known, attack=attack)


def write(mounted: Mounted, generator: torch.Generator, *, gain: float | None = None) -> None:
    """Write the attack's rows, in place of those that are there, and set what stands behind them."""
    carrier, target = mounted.carrier, mounted.target
    rows = carrier.spread(mounted.attack.rows(target.out_features, carrier.features, generator))
    scale = 1 / math.sqrt(carrier.features) if gain is None else gain
    with torch.no_grad():
        target.weight.copy_(rows.weight).mul_(scale)
        if target.bias is not None:
            target.bias.copy_(rows.bias).mul_(scale)
        if carrier.norm is not None:
            _subdue(mounted.model, carrier.norm, target, rows.bias * scale)
    wake_head(mounted)
    mounted.attack.set_behind(mounted)


SUBDUED = 1e-3
"""Spread of a row's outputs, in units of √ε, at which a batch norm does no more than take the mean off."""


def _subdue(model: nn.Module, behind: NormBehind, target: nn.Linear, bias: Tensor) -> None:
    """Make the rows small against a batch norm's ε, and its scale large: what comes out is as without the norm, minus the mean."""
    norm = model.get_submodule(behind.layer)
    assert isinstance(norm, nn.modules.batchnorm._BatchNorm)
    small = SUBDUED * norm.eps**0.5
    target.weight.mul_(small)
    if target.bias is not None:
        target.bias.zero_()
    own = behind.channels(len(bias))
    norm.weight[own].fill_(1 / SUBDUED)
    norm.bias[own].copy_(bias)
    for name, start in behind.others:
        other = model.get_submodule(name)
        assert isinstance(other, nn.modules.batchnorm._BatchNorm)
        other.weight[start : start + len(bias)].zero_()


def choose_target(traced: Traced, wanted: str | None, *, strict: bool = True) -> str:
    """The layer to attack: the named one, or the first linear layer with a ReLU behind it."""
    known = targets(traced)
    if wanted is None:
        rectified = [t for t in known if t.rectified]
        if not rectified:
            raise CannotMount("model: no linear layer with a ReLU behind it; gradient sparsity needs one.")
        # Where no candidate has a bias, the first one gets to say so.
        chosen = next((t for t in rectified if t.has_bias), rectified[0])
    else:
        named = [t for t in known if t.name == wanted]
        if not named:
            _refuse_name(traced, wanted, known)
        chosen = named[0]
    _check_target(chosen, strict=strict)
    return chosen.name


def _refuse_name(traced: Traced, wanted: str, known: list[Target]) -> None:
    modules = dict(traced.model.named_modules())
    if wanted in modules and not isinstance(modules[wanted], nn.Linear):
        raise CannotMount(f"{wanted} ({type(modules[wanted]).__name__}) is not a linear layer.", at=wanted)
    names = ", ".join(t.name for t in known) or "none"
    raise CannotMount(f"model: it has no layer {wanted!r}. Its linear layers: {names}.")


def _check_target(target: Target, *, strict: bool) -> None:
    if not target.has_bias:
        raise CannotMount(
            f"{target.name} (Linear): bias is None; extraction divides by the bias gradient. Set bias=True.",
            at=target.name,
        )
    if strict and not target.rectified:
        what = "nothing" if target.activation == "none" else target.activation
        raise CannotMount(
            f"{target.name} (Linear): {what} follows instead of a ReLU; without one every sample reaches every row.",
            at=target.name,
        )
