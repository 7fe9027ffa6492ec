"""BERT and GPT-2 in plain PyTorch, by their published configurations: the names, sizes, norms and first weights of the originals.

Without dropout and with as many layers as are asked for. Nothing is downloaded, and no library of models is needed.
"""

import math
from collections.abc import Iterator

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

HEAD = 64
"""Values of one attention head, in every published size of both."""

SPREAD = 0.02
"""Of first weights, in both papers."""


def attend(
    queries: Tensor, keys: Tensor, values: Tensor, seen: Bool[Tensor, "b 1 _ t"] | None, *, causal: bool
) -> Float[Tensor, "b t d"]:
    """Attention with heads of `HEAD` values, over the positions that are seen."""
    q, k, v = (m.unflatten(-1, (-1, HEAD)).transpose(1, 2) for m in (queries, keys, values))
    if seen is not None and causal:
        seen = seen & torch.ones(2 * seen.shape[-1:], dtype=torch.bool, device=seen.device).tril()
    mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, is_causal=causal and seen is None)
    return mixed.transpose(1, 2).flatten(2)


def positions_seen(mask: Int[Tensor, "b t"] | None) -> Bool[Tensor, "b 1 1 t"] | None:
    """What every position may attend to: those that a mask has as ones."""
    return None if mask is None else mask[:, None, None].bool()


class BertLayer(nn.Module):
    """Attention and two linear maps, each added and then normalised (Devlin et al., arXiv 1810.04805)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.attended, self.attended_norm = nn.Linear(width, width), nn.LayerNorm(width, eps=1e-12)
        self.intermediate = nn.Linear(width, 4 * width)
        self.output, self.output_norm = nn.Linear(4 * width, width), nn.LayerNorm(width, eps=1e-12)

    def forward(self, x: Float[Tensor, "b t d"], seen: Tensor | None) -> Float[Tensor, "b t d"]:
        """The next layer's input."""
        mixed = attend(self.query(x), self.key(x), self.value(x), seen, causal=False)
        x = self.attended_norm(self.attended(mixed) + x)
        out: Tensor = self.output_norm(self.output(F.gelu(self.intermediate(x))) + x)
        return out


class Bert(nn.Module):
    """An encoder with a pooled first position and two classes."""

    def __init__(self, vocabulary: int, width: int, layers: int, positions: int = 512) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(vocabulary, width), nn.Embedding(positions, width)
        self.kinds = nn.Embedding(2, width)
        self.norm = nn.LayerNorm(width, eps=1e-12)
        self.layers = nn.ModuleList(BertLayer(width) for _ in range(layers))
        self.pooler, self.classifier = nn.Linear(width, width), nn.Linear(width, 2)
        _start(self)

    def forward(self, ids: Int[Tensor, "b t"], mask: Int[Tensor, "b t"] | None = None) -> Float[Tensor, "b 2"]:
        """Logits; the mask has a zero behind the end of each sequence."""
        places = torch.arange(ids.shape[1], device=ids.device)
        x = self.norm(self.words(ids) + self.kinds(torch.zeros_like(ids)) + self.places(places))
        for layer in self.layers:
            x = layer(x, positions_seen(mask))
        out: Tensor = self.classifier(torch.tanh(self.pooler(x[:, 0])))
        return out


class TurnedLinear(nn.Module):
    """GPT-2's linear map, whose neurons are the columns of its weight."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(inputs, outputs)), nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Float[Tensor, "b t n"]) -> Float[Tensor, "b t m"]:
        """W ᵀx + b at every position."""
        out: Tensor = torch.addmm(self.bias, x.flatten(0, -2), self.weight).unflatten(0, x.shape[:-1])
        return out


class Gpt2Layer(nn.Module):
    """Attention and two linear maps, each normalised before (Radford et al., 2019)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width, eps=1e-5), nn.LayerNorm(width, eps=1e-5)
        self.c_attn, self.attended = TurnedLinear(width, 3 * width), TurnedLinear(width, width)
        self.c_fc, self.c_proj = TurnedLinear(width, 4 * width), TurnedLinear(4 * width, width)

    def forward(self, x: Float[Tensor, "b t d"], seen: Tensor | None) -> Float[Tensor, "b t d"]:
        """The next layer's input."""
        queries, keys, values = self.c_attn(self.ln_1(x)).chunk(3, -1)
        x = x + self.attended(attend(queries, keys, values, seen, causal=True))
        out: Tensor = x + self.c_proj(F.gelu(self.c_fc(self.ln_2(x)), approximate="tanh"))
        return out


class Gpt2(nn.Module):
    """A decoder that foretells tokens by the table that it looks them up in."""

    def __init__(self, vocabulary: int, width: int, layers: int, positions: int = 1024) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(positions, width)
        self.layers = nn.ModuleList(Gpt2Layer(width) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width, eps=1e-5)
        _start(self)
        for name, weight in self.named_parameters():
            if name.endswith(("attended.weight", "c_proj.weight")):
                nn.init.normal_(weight, std=SPREAD / math.sqrt(2 * layers))

    def forward(self, ids: Int[Tensor, "b t"], mask: Int[Tensor, "b t"] | None = None) -> Float[Tensor, "b t v"]:
        """Logits at every position; the mask has a zero behind the end of each sequence."""
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.layers:
            x = layer(x, positions_seen(mask))
        return F.linear(self.ln_f(x), self.wte.weight)


class Adapted(nn.Module):
    """A frozen linear map beside LoRA's two small ones (Hu et al., arXiv 2106.09685); the second starts at zero."""

    def __init__(self, inner: nn.Module, inputs: int, outputs: int, rank: int) -> None:
        super().__init__()
        self.inner = inner
        self.lora_a, self.lora_b = nn.Linear(inputs, rank, bias=False), nn.Linear(rank, outputs, bias=False)
        nn.init.zeros_(self.lora_b.weight)

    def forward(self, x: Float[Tensor, "b t n"]) -> Float[Tensor, "b t m"]:
        """What the frozen map gives and what was learned beside it."""
        out: Tensor = self.inner(x) + self.lora_b(self.lora_a(x))
        return out


def adapt(model: Bert | Gpt2, rank: int) -> None:
    """Freeze a model and put LoRA on its attention's maps, as people do."""
    model.requires_grad_(False)
    for layer in model.layers:
        names = ("query", "key", "value") if isinstance(layer, BertLayer) else ("c_attn",)
        for name in names:
            inner = getattr(layer, name)
            width = inner.weight.shape[1] if isinstance(layer, BertLayer) else inner.weight.shape[0]
            setattr(layer, name, Adapted(inner, width, len(inner.bias), rank))


def _start(model: nn.Module) -> None:
    """Small even weights, no biases."""
    for weight in _weights(model):
        nn.init.normal_(weight, std=SPREAD)
    for part in model.modules():
        if isinstance(part, nn.Linear):
            nn.init.zeros_(part.bias)


def _weights(model: nn.Module) -> Iterator[Tensor]:
    return (p for p in model.parameters() if p.dim() == 2)
