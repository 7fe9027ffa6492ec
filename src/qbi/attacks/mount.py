"""Put an attack on a model, as a malicious server would before sending it out: on a copy."""

import copy
import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from qbi.attacks.base import Attack
from qbi.attacks.passthrough import DEFAULT_SHIFT, NamedLayer, carry
from qbi.carrier import Carrier
from qbi.errors import BadValue, CannotMount


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
    sample: Tensor,
    generator: torch.Generator,
    *,
    layer: str | None = None,
    gain: float | None = None,
    shift: float = DEFAULT_SHIFT,
) -> Mounted:
    """Copy the model, carry the sample to a linear layer, and write the attack's rows into it.

    `sample` is a small batch like the client's, used as a probe. Without `layer`, the first linear layer with a
    ReLU behind it is attacked. The model must be an `nn.Sequential` (nested ones are followed).

    `gain` scales weights and bias together, which changes no sign and so nothing of the attack, but keeps the layers
    behind from saturating: a sample that the loss is certain of sends no gradient. The default 1/√M brings
    activations near one; 1 gives the rows as the paper has them.
    """
    if gain is not None and not 0 < gain < math.inf:
        raise BadValue(f"mount: gain is {gain}; it must be positive and finite.")
    if sample.is_floating_point() and not bool(torch.isfinite(sample).all()):
        raise BadValue("mount: the sample has NaN or infinite values; clean the data first.")
    crafted = copy.deepcopy(model).train()
    layers = linear_order(crafted)
    index = _find_target(layers, layer)
    name, target = layers[index]
    assert isinstance(target, nn.Linear)
    _check_target(name, target, layers[index + 1 :])
    carrier = carry(layers[:index], sample, shift=shift)
    rows = carrier.spread(attack.rows(target.out_features, carrier.features, generator))
    scale = 1 / math.sqrt(carrier.features) if gain is None else gain
    with torch.no_grad():
        target.weight.copy_(rows.weight).mul_(scale)
        target.bias.copy_(rows.bias).mul_(scale)
    return Mounted(model=crafted, layer=name, carrier=carrier)


def linear_order(model: nn.Module, prefix: str = "") -> list[NamedLayer]:
    """The layers of nested `nn.Sequential`s in the order in which data meet them."""
    if not isinstance(model, nn.Sequential):
        raise CannotMount(
            f"{prefix or 'model'} ({type(model).__name__}) is not an nn.Sequential; the order of its layers is unknown."
        )
    layers: list[NamedLayer] = []
    for name, child in model.named_children():
        path = f"{prefix}.{name}" if prefix else name
        layers += linear_order(child, path) if isinstance(child, nn.Sequential) else [(path, child)]
    return layers


def _find_target(layers: list[NamedLayer], wanted: str | None) -> int:
    linear = [i for i, (_, layer) in enumerate(layers) if isinstance(layer, nn.Linear)]
    if wanted is None:
        rectified = [i for i in linear if i + 1 < len(layers) and isinstance(layers[i + 1][1], nn.ReLU)]
        if not rectified:
            raise CannotMount("model: no linear layer with a ReLU behind it; gradient sparsity needs one.")
        # Where no candidate has a bias, the first one gets to say so.
        return next((i for i in rectified if layers[i][1].bias is not None), rectified[0])
    names = [name for name, _ in layers]
    if wanted not in names:
        known = ", ".join(names[i] for i in linear) or "none"
        raise CannotMount(f"model: it has no layer {wanted!r}. Its linear layers: {known}.")
    index = names.index(wanted)
    if index not in linear:
        raise CannotMount(f"{wanted} ({type(layers[index][1]).__name__}) is not a linear layer.")
    return index


def _check_target(name: str, target: nn.Linear, behind: list[NamedLayer]) -> None:
    if target.bias is None:
        raise CannotMount(f"{name} (Linear): bias is None; extraction divides by the bias gradient. Set bias=True.")
    if not behind or not isinstance(behind[0][1], nn.ReLU):
        what = type(behind[0][1]).__name__ if behind else "nothing"
        raise CannotMount(
            f"{name} (Linear): {what} follows instead of a ReLU; without one every sample reaches every row."
        )
