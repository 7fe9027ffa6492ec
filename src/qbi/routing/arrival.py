"""Where the sample stands when it has come to the layer, and the check that it is the same."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from qbi.calling import Hook, as_client, hooked
from qbi.carrier import Affine, Carrier, Cause, Change, Normalised, Shortfall, flat
from qbi.errors import CannotMount
from qbi.routing.path import BatchNorm, Unreachable
from qbi.routing.route import Route, first_places, noted
from qbi.routing.tracers import Inputs


def arrive(target: nn.Module, route: Route) -> Carrier:
    """Where the sample stands in the input of the layer."""
    assert isinstance(target, nn.Linear)
    if not isinstance(route.plus, Tensor):
        raise Unreachable("the layer takes several tensors at once.")
    if route.plus.dim() > 1 and route.plus.numel() == route.plus.shape[-1]:
        alone = {k: getattr(route, k).reshape(-1) for k in ("plus", "scale", "offset")}
        route = replace(route, **alone, minus=None if route.minus is None else route.minus.reshape(-1))
    if route.plus.dim() > 1:
        return _arrive_by_token(target, route)
    places = first_places(route.plus, route.count)
    kept = (places >= 0).nonzero()[:, 0]
    columns = places[kept]
    negative = None if route.minus is None else first_places(route.minus, route.count)[kept]
    affine = Affine(route.scale.flatten()[columns], route.offset.flatten()[columns])
    steps = tuple(_kept(step, kept) for step in route.steps) + noted(affine)
    plain = negative is None and torch.equal(columns, torch.arange(target.in_features)) and len(kept) == route.count
    shape = route.shape if len(kept) == route.count else (len(kept),)
    return Carrier(
        shape=shape,
        width=target.in_features,
        columns=None if plain else columns,
        negative=negative,
        steps=steps,
        embedding=route.embedding,
        shortfalls=route.shortfalls,
        places=kept[None] if route.whole else None,
    )


def _kept(step: Change, kept: Tensor) -> Change:
    if isinstance(step, Normalised):
        return replace(step, channel=step.channel[kept])
    return Affine(step.scale[kept], step.offset[kept])


def _arrive_by_token(target: nn.Linear, route: Route) -> Carrier:
    """A layer that acts on each position by itself reads positions, not samples."""
    plus = route.plus.reshape(-1, route.plus.shape[-1])
    full = (plus > 0).all(0)
    if not bool(full.any()):
        full = (plus > 0).any(0)
    columns = full.nonzero()[:, 0]
    minus = None
    if route.minus is not None:
        second = route.minus.reshape(-1, plus.shape[-1])
        where = {tuple(second[:, c].tolist()): c for c in range(second.shape[1]) if bool(second[:, c].any())}
        minus = torch.tensor([where[tuple(plus[:, c].tolist())] for c in columns.tolist()])
    scale = route.scale.reshape(-1, plus.shape[-1])[:, columns]
    offset = route.offset.reshape(-1, plus.shape[-1])[:, columns] + route.base * scale
    count = len(plus)
    reason = (
        f"it sees {count} positions of {len(columns)} values one by one: single positions are read, not whole samples."
    )
    return Carrier(
        shape=(len(columns),),
        width=target.in_features,
        columns=columns,
        negative=minus,
        # What stood on the values before a normalisation differs by position and is not undone here.
        steps=noted(Affine(scale[0], offset[0])),
        embedding=route.embedding,
        shortfalls=(*route.shortfalls, Shortfall("the layer itself:", Cause.POSITIONS, reason)),
        places=plus[:, columns] - 1 if route.whole and not route.steps else None,
        tokens=count,
    )


def check_arrival(model: nn.Module, layer: str, inputs: Inputs, sample: Tensor, carrier: Carrier) -> None:
    """Run the probe through and compare, where the sample is still the client's own.

    Normalisation layers act as their affine part alone: what they take away is undone later, from statistics.
    """
    if carrier.places is None or (carrier.embedding is not None and sample.is_floating_point()):
        return
    caught: list[Tensor] = []
    norms = [model.get_submodule(s.layer) for s in carrier.steps if isinstance(s, Normalised)]
    after: dict[nn.Module, Hook] = {norm: lambda m, given, _out: _affine(m, given[0]) for norm in norms}
    embedded: list[Tensor] = []
    if carrier.embedding is not None:
        after[model.get_submodule(carrier.embedding)] = lambda _m, _g, out: embedded.append(out.detach())
    before: dict[nn.Module, Hook] = {model.get_submodule(layer): lambda _m, given: caught.append(given[0].detach())}
    # Convolutions on an accelerator round to ten bits by default; what is asked here is whether the layers are right.
    exact = torch.backends.cudnn.flags(allow_tf32=False)
    with hooked(before=before, after=after), as_client(model), torch.no_grad(), exact:
        model(*inputs)
    truth = flat(embedded[0] if carrier.embedding is not None else sample)
    places = carrier.places.to(truth.device)
    expected = truth[:, places].reshape(-1, places.shape[-1])
    arrived = carrier.read(caught[0].reshape(-1, caught[0].shape[-1]))
    for step in reversed(carrier.steps):
        if isinstance(step, Affine):
            arrived = (arrived - step.offset.to(arrived)) / step.scale.to(arrived)
        else:
            norm = model.get_submodule(step.layer)
            beta = getattr(norm, "bias", None)
            arrived = arrived - (0.0 if beta is None else float(beta.detach().flatten()[0]))
    added = max((float(s.offset.abs().max()) for s in carrier.steps if isinstance(s, Affine)), default=0.0)
    error = float((arrived - expected).abs().max())
    if not error <= 1e-5 * (1 + float(truth.abs().max()) + added):
        raise CannotMount(
            f"{layer}: the probe arrives with an error of {error:.2g}; the layers up to here do not act "
            "as the identity. Values below the shift are cut by a ReLU: normalise the data or raise the shift.",
            at=layer,
        )


def _affine(layer: nn.Module, values: Tensor) -> Tensor:
    assert isinstance(layer, BatchNorm | nn.LayerNorm)
    if layer.weight is None:
        return values
    if isinstance(layer, nn.LayerNorm):
        return values * layer.weight + (0 if layer.bias is None else layer.bias)
    view = (1, -1, *([1] * (values.dim() - 2)))
    return values * layer.weight.view(view) + layer.bias.view(view)
