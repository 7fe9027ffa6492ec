"""Every layer that is a linear map of its input, whatever it is called: one definition for the audit, detection and replay.

A convolution multiplies patches, GPT-2's `Conv1D` keeps its matrix the other way round, attention packs three projections into one.
Spelled out, each is an `nn.Linear` between reshapes, with the same rows, the same biases and the same gradients.
"""

import copy
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d
PART = "patches"
"""The linear layer inside a convolution that was written as a linear map."""


class SpelledConvolution(nn.Module):
    """A convolution as a linear layer on its patches."""

    def __init__(self, layer: Convolution) -> None:
        super().__init__()
        self.kernel, self.stride = layer.kernel_size, layer.stride
        self.dilation, self.pad = layer.dilation, list(getattr(layer, "_reversed_padding_repeated_twice"))  # noqa: B009
        setattr(self, PART, _linear(layer.weight.flatten(1), layer.bias))

    def forward(self, x: Tensor) -> Tensor:
        """The same outputs."""
        x = F.pad(x, self.pad)
        sides = len(self.kernel)
        for side in range(sides):
            reach = self.dilation[side] * (self.kernel[side] - 1) + 1
            x = x.unfold(2 + side, reach, self.stride[side])[..., :: self.dilation[side]]
        # batch, channels, positions…, kernel… → batch, positions…, channels, kernel…
        x = x.movedim(1, 1 + sides)
        x = getattr(self, PART)(x.flatten(1 + sides))
        return x.movedim(-1, 1)


class SpelledTransposed(nn.Module):
    """A linear layer that keeps its matrix the other way round."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        setattr(self, PART, _linear(weight.T, bias))

    def forward(self, x: Tensor) -> Tensor:
        """The same outputs."""
        out: Tensor = getattr(self, PART)(x)
        return out


class SpelledAttention(nn.Module):
    """Self-attention with its packed projections as one linear layer."""

    def __init__(self, layer: nn.MultiheadAttention) -> None:
        super().__init__()
        assert layer.in_proj_weight is not None
        self.heads, self.batch_first, self.dropout = layer.num_heads, layer.batch_first, layer.dropout
        self.num_heads, self._qkv_same_embed_dim = layer.num_heads, False  # torch's layers around it ask for these
        self.in_proj_weight, self.in_proj_bias = None, None
        setattr(self, PART, _linear(layer.in_proj_weight, layer.in_proj_bias))
        self.out_proj = _linear(layer.out_proj.weight, layer.out_proj.bias)

    def forward(
        self, query: Tensor, _key: Any = None, _value: Any = None, attn_mask: Any = None, **_more: Any
    ) -> tuple[Tensor, None]:
        """The same outputs, where query, key and value are one."""
        x = query if self.batch_first else query.transpose(0, 1)
        width = x.shape[-1]
        parts = getattr(self, PART)(x).unflatten(-1, (3, self.heads, width // self.heads))
        q, k, v = (parts[..., i, :, :].transpose(1, 2) for i in range(3))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask, self.dropout if self.training else 0.0)
        out = self.out_proj(out.transpose(1, 2).flatten(2))
        return (out if self.batch_first else out.transpose(0, 1)), None


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    out = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device=weight.device, dtype=weight.dtype)
    with torch.no_grad():
        out.weight.copy_(weight)
        if bias is not None:
            out.bias.copy_(bias)
    out.requires_grad_(weight.requires_grad)
    return out


def linear_form(module: nn.Module) -> nn.Module | None:
    """The same layer with its linear map as an `nn.Linear`; None where it is none, or is one already."""
    plain = type(module) in (nn.Conv1d, nn.Conv2d, nn.Conv3d)  # a subclass may do more than its parent
    if plain and isinstance(module, Convolution) and module.groups == 1 and module.padding_mode == "zeros":
        return SpelledConvolution(module)
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    if type(module).__name__ == "Conv1D" and isinstance(weight, Tensor) and weight.dim() == 2:
        return SpelledTransposed(weight, bias)
    own = type(module) is nn.MultiheadAttention
    if (
        own
        and isinstance(module, nn.MultiheadAttention)
        and module.in_proj_weight is not None
        and module.bias_k is None
    ):
        return SpelledAttention(module)
    return None


def others(model: nn.Module) -> Iterator[str]:
    """Names of trained layers that are linear maps under another name."""
    for name, module in model.named_modules():
        if any(p.requires_grad for p in module.parameters(recurse=False)) and linear_form(module) is not None:
            yield name


def with_linear_form(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """A copy of the model with one layer written as a linear map, and the name of the linear layer inside it."""
    out = copy.deepcopy(model)
    made = linear_form(out.get_submodule(name))
    assert made is not None
    if not name:
        return made, PART
    parent, _, last = name.rpartition(".")
    setattr(out.get_submodule(parent), last, made.train(model.training))
    return out, f"{name}.{PART}"


WIDE_KERNEL = 8
"""Kernels from this side on are taken for whole patches or images: the stride does not stand in a file of weights."""


def linear_rows(state: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor, Tensor | None]]:
    """Rows and biases of all linear maps in a file of weights or gradients: matrices, kernels of one tap or of whole patches."""
    names = list(state)
    for position, name in enumerate(names):
        weight = state[name]
        packed = name.endswith("in_proj_weight")
        unnamed = name.removeprefix("arr_").isdigit()
        if not (name.endswith("weight") or unnamed) or not weight.is_floating_point() or weight.dim() < 2:
            continue
        bias = state.get(name.removesuffix("weight") + "bias")
        if bias is None and unnamed and position + 1 < len(names):
            bias = state[names[position + 1]]
        side = math.prod(weight.shape[2:])
        if weight.dim() > 2 and side != 1 and min(weight.shape[2:]) < WIDE_KERNEL:
            continue
        rows = weight.flatten(1)
        if (
            bias is not None
            and bias.dim() == 1
            and len(bias) != len(rows)
            and weight.dim() == 2
            and len(bias) == rows.shape[1]
        ):
            rows = rows.T
        layer = name.removesuffix("weight").removesuffix("_" if packed else ".") or name
        yield layer, rows, bias if bias is not None and bias.shape == rows.shape[:1] else None
