"""Passes that leave out channels nobody looks at: a crafted model multiplies most of them by zero.

Convolutions that carry a sample use three of their hundreds of filters, and those behind them have zeros for the others. Leaving the
others out changes no bit of what arrives, which a trial on two samples confirms, and takes a tenth of the time. The other way, nothing
comes back to them.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, fx, nn

from qbi.calling import swapped
from qbi.errors import QbiError
from qbi.exposure import observe
from qbi.routing.tracers import by_fx

Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d

CHANNELWISE = (
    nn.ReLU,
    nn.LeakyReLU,
    nn.ReLU6,
    nn.GELU,
    nn.SiLU,
    nn.Identity,
    nn.modules.dropout._DropoutNd,
    nn.modules.pooling._MaxPoolNd,
    nn.modules.pooling._AvgPoolNd,
    nn.modules.pooling._AdaptiveAvgPoolNd,
    nn.modules.pooling._AdaptiveMaxPoolNd,
)
"""Layers that make of each channel one of the same number."""

FUNCTIONS = ("relu", "relu_", "gelu", "silu", "add", "iadd", "max_pool2d", "avg_pool2d", "adaptive_avg_pool2d")

WORTH_IT = 0.5
"""Convolutions of which more than this share of the products matters run as they are."""


def live_channels(model: nn.Module, inputs: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """Of each convolution that multiplies much by zero, or is multiplied by zero behind, the channels that matter; empty where unknown."""
    try:
        graph = by_fx(model, inputs)
    except Exception:
        # Tracing fails in any way a model can be written; then the model runs whole.
        return {}
    looked_at: dict[fx.Node, Tensor | None] = {}
    out: dict[str, Tensor] = {}
    times = [n.target for n in graph.nodes if n.op == "call_module"]
    for node in reversed(graph.nodes):
        needs = [_needed(model, user, looked_at) for user in node.users]
        whole = not needs or any(n is None for n in needs) or len({len(n) for n in needs if n is not None}) > 1
        looked_at[node] = None if whole else torch.stack([n for n in needs if n is not None]).any(0)
        module = model.get_submodule(str(node.target)) if node.op == "call_module" else None
        if _plain(module) and times.count(node.target) == 1:
            assert isinstance(module, Convolution)
            all_of_them = torch.ones(module.out_channels, dtype=torch.bool)
            live = looked_at[node]
            live = all_of_them if live is None or len(live) != len(all_of_them) else live
            used = _used(module.weight.detach()[live.to(module.weight.device)])
            if float(live.double().mean()) * float(used.double().mean()) <= WORTH_IT:
                out[str(node.target)] = live
    return out


def _used(rows: Tensor) -> Tensor:
    """Channels that some filter does not multiply by zero."""
    return (rows != 0).flatten(2).any(2).any(0)


def _needed(model: nn.Module, user: fx.Node, looked_at: Mapping[fx.Node, Tensor | None]) -> Tensor | None:
    """Which channels of what goes into a node matter; None: all, or it cannot be told."""
    behind = looked_at[user]
    if user.op == "call_module":
        module = model.get_submodule(str(user.target))
        if _plain(module):
            assert isinstance(module, Convolution)
            weight = module.weight.detach()
            rows = weight if behind is None or len(behind) != len(weight) else weight[behind.to(weight.device)]
            return _used(rows).cpu()
        return behind if isinstance(module, CHANNELWISE) else None
    name = user.target if isinstance(user.target, str) else str(getattr(user.target, "__name__", ""))
    return behind if user.op in ("call_function", "call_method") and name in FUNCTIONS else None


def _plain(module: nn.Module | None) -> bool:
    """A convolution that does what torch's own does: no subclass, nothing put in the place of its forward or before it."""
    if not isinstance(module, Convolution) or type(module) not in (nn.Conv1d, nn.Conv2d, nn.Conv3d):
        return False
    return "forward" not in vars(module) and not module._forward_pre_hooks and module.groups == 1


class _Pruned(nn.Module):
    """A convolution on its live channels alone; the others come out as zeros. Its weights keep their names."""

    def __init__(self, module: Convolution, live: Tensor) -> None:
        super().__init__()
        self._parameters = module._parameters
        weight = module.weight.detach()[live]
        used = _used(weight)
        used[0] |= not bool(used.any())
        self.module, self.live, self.used = (module,), live, used
        self.slim, self.shift = weight[:, used], None if module.bias is None else module.bias.detach()[live]

    def forward(self, given: Tensor) -> Tensor:
        """As the convolution's own."""
        (module,) = self.module
        part: Tensor = module._conv_forward(given[:, self.used], self.slim, self.shift)
        if bool(self.live.all()):
            return part
        out: Tensor = part.new_zeros(len(part), module.out_channels, *part.shape[2:])
        out[:, self.live] = part
        return out


def slimmed(model: nn.Module, live: Mapping[str, Tensor]) -> AbstractContextManager[None]:
    """Convolutions work on their live channels alone inside the block; the others are zero."""
    found = {name: model.get_submodule(name) for name in live}
    return swapped(
        model, {n: _Pruned(m, live[n].to(m.weight.device)) for n, m in found.items() if isinstance(m, Convolution)}
    )


class _Convolved(torch.autograd.Function):
    """A convolution whose backward pass works on the channels that something comes back to."""

    @staticmethod
    def forward(ctx: Any, given: Tensor, weight: Tensor, bias: Tensor | None, module: Convolution) -> Tensor:
        ctx.save_for_backward(given, weight)
        ctx.module, ctx.has_bias = module, bias is not None
        out: Tensor = module._conv_forward(given, weight, bias)
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        (given, weight), module, back = ctx.saved_tensors, ctx.module, grad_outputs[0]
        live = back.flatten(2).any(2).any(0)
        if not bool(live.any()) or float(live.double().mean()) > WORTH_IT:
            live = torch.ones_like(live)
        down, found, bias = torch.ops.aten.convolution_backward(
            back if bool(live.all()) else back[:, live],
            given,
            weight[live],
            [int(live.sum())],
            module.stride,
            module.padding,
            module.dilation,
            False,
            [0] * len(module.stride),
            module.groups,
            [*ctx.needs_input_grad[:2], ctx.has_bias],
        )
        gradients = []
        for part, like in ((found, weight), (bias, back.new_empty(len(live)))):
            whole = None if part is None else like.new_zeros(like.shape)
            if whole is not None:
                whole[live] = part
            gradients.append(whole)
        return down, *gradients, None


class _Sparse(nn.Module):
    """A convolution that does no work for channels that nothing comes back to. Its weights keep their names."""

    def __init__(self, module: Convolution) -> None:
        super().__init__()
        self.weight, self.bias = module.weight, module.bias
        self.module = (module,)

    def forward(self, given: Tensor) -> Tensor:
        """As the convolution's own."""
        out: Tensor = _Convolved.apply(given, self.weight, self.bias, self.module[0])  # type: ignore[no-untyped-call]
        return out


def sparse_backward(model: nn.Module) -> AbstractContextManager[None]:
    """Convolutions do no work for channels that nothing comes back to; copies of the model made inside the block neither."""
    plain = {
        n: m
        for n, m in model.named_modules()
        if _plain(m) and isinstance(m, Convolution) and m.padding_mode == "zeros" and not isinstance(m.padding, str)
    }
    return swapped(model, {n: _Sparse(m) for n, m in plain.items()})


def checked_live(model: nn.Module, layer: str, inputs: tuple[Tensor, ...], seed: int) -> dict[str, Tensor]:
    """Live channels, if without the others two samples arrive at a layer equal to the bit."""
    two = tuple(part[:2] for part in inputs)
    live = live_channels(model, two)
    if not live:
        return {}
    try:
        whole = observe(model, layer, two, seed=seed)
        with slimmed(model, live):
            slim = observe(model, layer, two, seed=seed)
    except (QbiError, RuntimeError, ValueError, TypeError, IndexError):
        return {}
    return live if torch.equal(whole.features, slim.features) else {}
