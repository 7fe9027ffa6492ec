"""A model with one of its linear maps written out as an `nn.Linear`: same outputs, same gradients, whatever it was before."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from qbi.calling import call_with
from qbi.uses.kinds import Kind
from qbi.uses.linear_view import linear_views
from qbi.uses.records import Site
from qbi.uses.sites import Following, Part


class WrittenOut(nn.Module):
    """Runs the original, with the layer in the place of every use of the map's rows.

    The rows are trained here, in the layer; in the original they are no longer. Other uses of the same numbers (a tied table, say) see
    the layer's rows too, so that gradients add up as they did.
    """

    def __init__(self, original: nn.Module, site: Site) -> None:
        super().__init__()
        self.original, self.site = original, site
        weight = _found(original, site.weight)
        neurons, width = site.rows.shape
        layer = nn.Linear(width, neurons, bias=site.bias is not None, device=weight.device, dtype=weight.dtype)
        with torch.no_grad():
            layer.weight.copy_(weight.flatten()[site.rows])
            if site.bias is not None:
                assert site.bias_rows is not None
                layer.bias.copy_(_found(original, site.bias).flatten()[site.bias_rows])
        for name in (n for n in (site.weight, site.bias) if n is not None):
            _found(original, name).requires_grad_(False)
        self.path = _attach(self, site.name, layer)

    @property
    def layer(self) -> nn.Linear:
        """The map as a layer."""
        found = self.get_submodule(self.path)
        assert isinstance(found, nn.Linear)
        return found

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """As the original."""
        site, layer = self.site, self.layer
        weight = _with(_found(self.original, site.weight), site.rows, layer.weight)
        lent = {site.weight: weight}
        tracked = [(site.weight, weight)]
        if site.bias is not None and site.bias_rows is not None:
            bias = _with(_found(self.original, site.bias), site.bias_rows, layer.bias)
            lent[site.bias] = bias
            tracked.append((site.bias, bias))
        with _Substitution(tracked, site, layer):
            return call_with(self.original, lent, inputs, named)


class _Substitution(Following):
    def __init__(self, tracked: Any, site: Site, layer: nn.Linear) -> None:
        super().__init__(tracked)
        self.site, self.layer = site, layer

    def use(self, kind: Kind, given: Tensor, out: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """The layer's products in the place of the operation's."""
        own: Part | None = None if weight is None else self.parts.get(id(weight))
        if own is None or own.name != self.site.weight:
            return out
        for view in linear_views(kind):
            if self.site.is_at(own.name, view.rows(own.index)):
                if not view.takes_bias:
                    behind = view.put(out, self.layer(view.columns(given)))
                    return behind if bias is None else behind + bias.reshape(-1, *[1] * (behind.dim() - 2))
                return view.put(out, _call(self.layer, view.columns(given), bias, view.bias))
        return out


def _call(layer: nn.Linear, columns: Tensor, bias: Tensor | None, part: slice) -> Tensor:
    """Products as the operation has them: with a bias of the layer's where the operation adds one."""
    products: Tensor = layer(columns)
    if layer.bias is None:
        return products if bias is None else products + bias[part]
    # A bias that the model adds in a line of its own stands in the layer already, and is taken off here.
    return products if bias is not None else products - layer.bias


def _with(values: Tensor, rows: Tensor, new: Tensor) -> Tensor:
    """A tensor with some of its numbers replaced, gradients included."""
    return values.detach().flatten().index_put((rows.to(values.device),), new).reshape(values.shape)


def _found(model: nn.Module, name: str) -> Tensor:
    """A parameter as it stands in the model now, lent or its own."""
    owner, _, leaf = name.rpartition(".")
    value = getattr(model.get_submodule(owner), leaf)
    assert isinstance(value, Tensor)
    return value


def _attach(root: nn.Module, path: str, layer: nn.Module) -> str:
    """Put a layer under a path of its own, through empty modules where there are none."""
    parts = [p if p != "original" else "original_" for p in path.split(".")]
    here = root
    for part in parts[:-1]:
        if not hasattr(here, part):
            here.add_module(part, nn.Module())
        here = getattr(here, part)
    here.add_module(parts[-1], layer)
    return ".".join(parts)


def written_out(model: nn.Module, site: Site) -> WrittenOut:
    """A copy of a model with one map written out."""
    return WrittenOut(copy.deepcopy(model), site).train(model.training)
