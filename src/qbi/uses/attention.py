"""Attention in one function call, written out so that each of its weights is seen."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from qbi.uses.kinds import Pairs
from qbi.uses.operations import operation
from qbi.uses.watcher import Watcher


@operation(F.multi_head_attention_forward)
def attention(
    capture: Watcher,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,  # noqa: ARG001
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,  # noqa: ARG001
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,  # noqa: ARG001
    is_causal: bool = False,
) -> Any:
    """Self-attention with packed projections, in torch's terms: time comes first."""
    unusual = (bias_k, bias_v, q_proj_weight, k_proj_weight, v_proj_weight, static_k, static_v)
    plain = not add_zero_attn and all(v is None for v in unusual)
    if query is not key or key is not value or query.dim() != 3 or in_proj_weight is None or need_weights or not plain:
        return NotImplemented
    length, batch, width = query.shape
    packed = F.linear(query, in_proj_weight, in_proj_bias)
    packed = capture.use(Pairs(tuple(in_proj_weight.shape)), query, packed, in_proj_weight, in_proj_bias)
    heads = packed.unflatten(-1, (3, num_heads, -1)).permute(2, 1, 3, 0, 4)  # 3, batch, heads, time, width
    mask = _mask(attn_mask, key_padding_mask, is_causal, batch, num_heads, length, packed)
    mixed = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], mask, dropout_p if training else 0.0)
    joined = mixed.permute(2, 0, 1, 3).reshape(length, batch, width)
    out = F.linear(joined, out_proj_weight, out_proj_bias)
    return capture.use(Pairs(tuple(out_proj_weight.shape)), joined, out, out_proj_weight, out_proj_bias), None


def _mask(
    attn_mask: Tensor | None,
    padding: Tensor | None,
    is_causal: bool,
    batch: int,
    heads: int,
    length: int,
    like: Tensor,
) -> Tensor | None:
    """What is added to the scores: both masks, as torch joins them."""
    if attn_mask is None and is_causal:
        attn_mask = torch.ones(length, length, dtype=torch.bool, device=like.device).triu(1)
    parts = []
    for mask, shape in (
        (attn_mask, (-1, heads if attn_mask is not None and attn_mask.dim() == 3 else 1, length, length)),
        (padding, (batch, 1, 1, length)),
    ):
        if mask is None:
            continue
        if mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=like.dtype).masked_fill(mask, float("-inf"))
        parts.append(mask.to(like.dtype).reshape(shape))
    return None if not parts else parts[0] if len(parts) == 1 else parts[0] + parts[1]
