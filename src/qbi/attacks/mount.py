"""Put an attack on a model, as a malicious server would before sending it out: on a copy."""

import copy
import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from qbi.attacks.base import Attack
from qbi.carrier import Carrier
from qbi.errors import BadValue, CannotMount
from qbi.routing.carry import DEFAULT_SHIFT, carry_to
from qbi.routing.graph import Inputs, Traced, as_inputs, trace
from qbi.routing.targets import Target, targets


@dataclass(frozen=True)
class Mounted:
    """A model with an attack in it: which layer holds it, and how samples arrive there."""

    model: nn.Module
    layer: str
    carrier: Carrier

    @property
    def target(self) -> nn.Linear:
        """The attacked layer."""
        layer = self.model.get_submodule(self.layer)
        assert isinstance(layer, nn.Linear)
        return layer


def mount(
    model: nn.Module,
    attack: Attack,
    sample: Tensor | Inputs,
    generator: torch.Generator,
    *,
    layer: str | None = None,
    gain: float | None = None,
    shift: float = DEFAULT_SHIFT,
    strict: bool = True,
) -> Mounted:
    """Copy the model, carry the sample to a linear layer, and write the attack's rows into it.

    `sample` is a small batch like the client's, used as a probe. Without `layer`, the first linear layer with a ReLU
    behind it is attacked. With `strict` the layer must have a ReLU behind it and the whole sample must arrive; without,
    what can be brought there is, and the carrier says what is lost.

    `gain` scales weights and bias together, which changes no sign and so nothing of the attack, but keeps the layers
    behind from saturating: a sample that the loss is certain of sends no gradient. The default 1/√M brings
    activations near one; 1 gives the rows as the paper has them.
    """
    if gain is not None and not 0 < gain < math.inf:
        raise BadValue(f"mount: gain is {gain}; it must be positive and finite.")
    for part in as_inputs(sample):
        if part.is_floating_point() and not bool(torch.isfinite(part).all()):
            raise BadValue("mount: the sample has NaN or infinite values; clean the data first.")
    crafted = copy.deepcopy(model).train()
    traced = trace(crafted, sample)
    name = choose_target(traced, layer, strict=strict)
    mounted = Mounted(crafted, name, carry_to(crafted, name, sample, shift=shift, strict=strict, traced=traced))
    write_rows(mounted, attack, generator, gain=gain)
    return mounted


def write_rows(mounted: Mounted, attack: Attack, generator: torch.Generator, *, gain: float | None = None) -> None:
    """Write an attack's rows into a layer to which the sample is carried already, in place of those that are there."""
    carrier, target = mounted.carrier, mounted.target
    rows = carrier.spread(attack.rows(target.out_features, carrier.features, generator))
    scale = 1 / math.sqrt(carrier.features) if gain is None else gain
    with torch.no_grad():
        target.weight.copy_(rows.weight).mul_(scale)
        target.bias.copy_(rows.bias).mul_(scale)


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
        raise CannotMount(f"{wanted} ({type(modules[wanted]).__name__}) is not a linear layer.")
    names = ", ".join(t.name for t in known) or "none"
    raise CannotMount(f"model: it has no layer {wanted!r}. Its linear layers: {names}.")


def _check_target(target: Target, *, strict: bool) -> None:
    if not target.has_bias:
        raise CannotMount(
            f"{target.name} (Linear): bias is None; extraction divides by the bias gradient. Set bias=True."
        )
    if strict and not target.rectified:
        what = "nothing" if target.activation == "none" else target.activation
        raise CannotMount(
            f"{target.name} (Linear): {what} follows instead of a ReLU; without one every sample reaches every row."
        )
