"""Random models, weights and data from a grammar, and how far one sample moves what leaves."""

import math
import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map

from qbi.private.planning import find_plan
from qbi.private.release import Grid, release
from qbi.private.samples import Evaluator, Plan

B = 5
CLASSES = 4


class Of(nn.Module):
    """A model from parts and a function."""

    def __init__(self, run: Any, **parts: Any) -> None:
        super().__init__()
        self.run = run
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args: Any, **named: Any) -> Any:
        return self.run(self, *args, **named)


def activation(rng: random.Random) -> nn.Module:
    return rng.choice(
        [nn.ReLU(), nn.ReLU(inplace=True), nn.GELU(), nn.Tanh(), nn.SiLU(), nn.LeakyReLU(), nn.Dropout(0.3)]
    )


def mlp(rng: random.Random) -> tuple[nn.Module, Tensor]:
    wide = rng.choice([1, 3, 20, 70])
    layers: list[nn.Module] = []
    size = wide
    for _ in range(rng.randint(0, 3)):
        high = rng.choice([1, 5, 40])
        layers += [nn.Linear(size, high, bias=rng.random() < 0.8), activation(rng)]
        if rng.random() < 0.3:
            layers.append(nn.LayerNorm(high))
        size = high
    return nn.Sequential(*layers, nn.Linear(size, CLASSES)), torch.randn(B, wide)


def convolutions(rng: random.Random) -> tuple[nn.Module, Tensor]:
    sides = rng.choice([1, 2, 2, 3])
    conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[sides - 1]
    pool = (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)[sides - 1]
    size, channels = (17, 9, 7)[sides - 1], rng.choice([1, 2, 4])
    layers: list[nn.Module] = []
    wide = channels
    for _ in range(rng.randint(1, 2)):
        groups = rng.choice([1, wide])
        high = wide * rng.choice([1, 2, 6])
        options: dict[str, Any] = {"groups": groups, "bias": rng.random() < 0.7}
        if rng.random() < 0.5:
            options |= {"padding": rng.choice([0, 1, "same", "valid"]), "dilation": rng.choice([1, 2])}
        else:
            options |= {"padding": 1, "stride": rng.choice([1, 2])}
        if options["padding"] != "valid":
            options["padding_mode"] = rng.choice(
                ["zeros", "zeros", "circular", "reflect", "replicate"]
                if sides < 3
                else ["zeros", "circular", "replicate"]
            )
        kernel = rng.choice([1, 2, 3] if sides < 3 else [1, 2])
        layers += [conv(wide, high, kernel, **options), activation(rng)]
        if rng.random() < 0.5:
            layers.append(nn.GroupNorm(rng.choice([1, wide if high % wide == 0 else 1]), high))
        wide = high
    return nn.Sequential(*layers, pool(2), nn.Flatten(), nn.Linear(wide * 2**sides, CLASSES)), torch.randn(
        B, channels, *[size] * sides
    )


def recurrent(rng: random.Random) -> tuple[nn.Module, Tensor]:
    cell = rng.choice([nn.LSTM, nn.GRU, nn.RNN])
    net = cell(
        6, 5, num_layers=rng.choice([1, 2]), batch_first=True, bidirectional=rng.random() < 0.3, bias=rng.random() < 0.8
    )
    wide = 5 * (2 if net.bidirectional else 1)
    return Of(lambda m, x: m.h(m.r(x)[0][:, -1]), r=net, h=nn.Linear(wide, CLASSES)), torch.randn(B, 4, 6)


def by_cell(_rng: random.Random) -> tuple[nn.Module, Tensor]:
    def run(m: Any, x: Tensor) -> Tensor:
        state = x.new_zeros(len(x), 5)
        for t in range(x.shape[1]):
            state = m.c(x[:, t], state)
        return m.h(state)

    return Of(run, c=nn.GRUCell(6, 5), h=nn.Linear(5, CLASSES)), torch.randn(B, 4, 6)


def attention(rng: random.Random) -> tuple[nn.Module, Tensor]:
    layer = nn.TransformerEncoderLayer(
        8,
        rng.choice([1, 2]),
        12,
        dropout=rng.choice([0.0, 0.2]),
        batch_first=rng.random() < 0.7,
        norm_first=rng.random() < 0.5,
    )
    return Of(lambda m, x: m.h(m.t(x).mean(1)), t=layer, h=nn.Linear(8, CLASSES)), torch.randn(B, 5, 8)


def crossed(rng: random.Random) -> tuple[nn.Module, Tensor]:
    part = nn.MultiheadAttention(8, 2, batch_first=True, add_zero_attn=rng.random() < 0.5, bias=rng.random() < 0.8)
    return Of(
        lambda m, x: m.h(m.a(x[:, :2], x, x, need_weights=rng.random() < 2)[0].mean(1)), a=part, h=nn.Linear(8, CLASSES)
    ), torch.randn(B, 5, 8)


def text(rng: random.Random) -> tuple[nn.Module, Tensor]:
    words = rng.choice([6, 40])
    table = nn.Embedding(
        words, 9, padding_idx=rng.choice([None, 0, -1]), scale_grad_by_freq=rng.random() < 0.2, sparse=False
    )
    place = nn.Embedding(7, 9)
    head = nn.Linear(9, words if rng.random() < 0.3 else CLASSES)
    if head.out_features == words:
        head.weight = table.weight  # tied
    run = lambda m, x: m.h((m.e(x) + m.p(torch.arange(7))).relu().mean(1))  # noqa: E731
    return Of(run, e=table, p=place, h=head), torch.randint(0, words, (B, 7))


def bags(rng: random.Random) -> tuple[nn.Module, Tensor]:
    table = nn.EmbeddingBag(20, 9, mode=rng.choice(["mean", "sum", "max"]))
    return Of(lambda m, x: m.h(m.e(x)), e=table, h=nn.Linear(9, CLASSES)), torch.randint(0, 20, (B, 7))


def adapters(rng: random.Random) -> tuple[nn.Module, Tensor]:
    base = nn.Linear(12, 10).requires_grad_(False)
    down, up = nn.Linear(12, 3, bias=False), nn.Linear(3, 10, bias=False)
    run = lambda m, x: m.h((m.base(x) + 4 * m.up(m.down(x))).relu())  # noqa: E731
    return Of(run, base=base, down=down, up=up, h=nn.Linear(10, CLASSES)), torch.randn(B, 12)


def own(rng: random.Random) -> tuple[nn.Module, Tensor]:
    """Parameters of a module's own, used as its author likes."""
    w, v = nn.Parameter(torch.randn(7, 7)), nn.Parameter(torch.randn(7))
    runs = [
        lambda m, x: (x @ m.w)[:, :CLASSES] * m.v[:CLASSES],
        lambda m, x: (x @ m.w.t() + m.v)[:, :CLASSES],
        lambda m, x: F.linear(x, m.w * m.v, m.v)[:, :CLASSES],
        lambda m, x: torch.einsum("bi,ij->bj", x, m.w)[:, :CLASSES] + m.v.sum(),
        lambda m, x: F.linear(F.linear(x, m.w), m.w, m.v)[:, :CLASSES],
        lambda m, x: F.linear(m.w, x)[:CLASSES].T + m.v.norm(),
        lambda m, x: torch.addmm(m.v, x, m.w)[:, :CLASSES],
        lambda m, x: (x / x.norm(dim=0, keepdim=True).clamp_min(1e-3)) @ m.w[:, :CLASSES] + m.v[:CLASSES],
    ]
    return Of(rng.choice(runs), w=w, v=v), torch.randn(B, 7)


def normed(rng: random.Random) -> tuple[nn.Module, Tensor]:
    wrap = rng.choice(
        [
            nn.utils.parametrizations.weight_norm,
            nn.utils.parametrizations.spectral_norm,
            nn.utils.parametrizations.orthogonal,
        ]
    )
    frozen = nn.BatchNorm1d(6).eval()
    return nn.Sequential(wrap(nn.Linear(9, 6)), frozen, nn.Tanh(), nn.Linear(6, CLASSES)), torch.randn(B, 9)


def choosing(_rng: random.Random) -> tuple[nn.Module, Tensor]:
    """Code that looks at values: one by one."""

    def run(m: Any, x: Tensor) -> Tensor:
        return m.a(x) if float(x.sum()) > 0 else m.b(x)

    return Of(run, a=nn.Linear(9, CLASSES), b=nn.Linear(9, CLASSES)), torch.randn(B, 9)


GRAMMAR = (mlp, convolutions, recurrent, by_cell, attention, crossed, text, bags, adapters, own, normed, choosing)


@dataclass
class Case:
    """A model with its weights, a batch, another sample for each place, and a clip."""

    seed: int
    kind: str
    model: nn.Module
    loss: Any
    x: Tensor
    other: Tensor
    y: Tensor
    clip: float
    noise: float
    place: int


def extreme_weights(model: nn.Module, rng: random.Random) -> None:
    """What a server that has read the source would send: huge, tiny, cancelling, dead, repeated."""
    with torch.no_grad():
        for p in model.parameters():
            how = rng.choice(["as it is"] * 4 + ["huge", "tiny", "cancel", "dead", "rows", "integers"])
            if how == "huge":
                p *= 10.0 ** rng.uniform(1, 18)
            elif how == "tiny":
                p *= 10.0 ** -rng.uniform(1, 30)
            elif how == "cancel" and p.dim() > 1 and len(p) > 1:
                p[1::2] = -p[: 2 * (len(p) // 2) : 2] * (1 + 1e-7 * rng.random())
                p *= 10.0 ** rng.uniform(0, 8)
            elif how == "dead":
                p.zero_()
            elif how == "rows" and p.dim() > 1:
                p[:] = p[:1]
            elif how == "integers":
                p.copy_(p.round())


def extreme(values: Tensor, rng: random.Random) -> Tensor:
    if not values.is_floating_point():
        return values
    out = values.clone()
    for i in range(len(out)):
        how = rng.choice(["as it is"] * 4 + ["huge", "tiny", "zero", "nan", "inf", "max", "constant"])
        if how == "huge":
            out[i] *= 10.0 ** rng.uniform(1, 30)
        elif how == "tiny":
            out[i] *= 10.0 ** -rng.uniform(1, 40)
        elif how == "zero":
            out[i] = 0
        elif how == "nan":
            out[i].view(-1)[0] = math.nan
        elif how == "inf":
            out[i].view(-1)[-1] = math.inf
        elif how == "max":
            out[i] = torch.finfo(out.dtype).max
        elif how == "constant":
            out[i] = out[i].mean()
    return out


def case(seed: int) -> Case:
    """A case from a seed."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    make = GRAMMAR[seed % len(GRAMMAR)]
    model, x = make(rng)
    extreme_weights(model, rng)
    loss, y = F.cross_entropy, torch.randint(0, CLASSES, (B,))
    if rng.random() < 0.3:
        loss, y = (
            (lambda out, target: F.mse_loss(out[..., :CLASSES], target)),
            torch.randn(B, CLASSES) * 10.0 ** rng.uniform(-3, 12),
        )
    if rng.random() < 0.15 and x.is_floating_point() and make not in (recurrent, normed):
        kind = rng.choice([torch.bfloat16, torch.float16, torch.float64])
        model, x = model.to(kind), x.to(kind)
        y = y.to(kind) if y.is_floating_point() else y
    other = (
        torch.randint(0, int(x.max()) + 1, x.shape) if not x.is_floating_point() else torch.randn(x.shape).to(x.dtype)
    )
    model.train()
    for part in model.modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm):
            part.eval()
    clip = 10.0 ** rng.uniform(-3, 3)
    return Case(
        seed,
        make.__name__,
        model,
        loss,
        extreme(x, rng),
        extreme(other, rng),
        y,
        clip,
        10.0 ** rng.uniform(-2, 0.5),
        rng.randrange(B),
    )


def evaluator_of(c: Case) -> tuple[Evaluator, Plan]:
    evaluator = Evaluator(c.model, c.loss)
    return evaluator, find_plan(evaluator, c.x, c.y, B)


def leaves(c: Case, evaluator: Evaluator, plan: Plan, x: Tensor, used: Tensor) -> tuple[Tensor, Grid]:
    """The whole numbers that leave, under one key."""
    values = sum(s.numel() for s in evaluator.shapes.values())
    grid = Grid.of(c.clip, c.noise, values)
    total = torch.zeros(values, dtype=torch.float64)
    sums = {
        n: p.view(s)
        for (n, s), p in zip(
            evaluator.shapes.items(), total.split([s.numel() for s in evaluator.shapes.values()]), strict=True
        )
    }
    torch.manual_seed(c.seed)  # dropout
    x, y = tree_map(lambda v: torch.where(used.reshape(-1, *[1] * (v.dim() - 1)), v, torch.zeros_like(v)), (x, c.y))
    evaluator.add(sums, x, y, used, c.clip, plan)
    return release(total, grid, keys=lambda: bytes(range(32))), grid


@dataclass
class Influence:
    """How far one sample moved what leaves, relative to what was stated."""

    removed: float
    replaced: float


def influence(c: Case) -> Influence:
    evaluator, plan = evaluator_of(c)
    everybody = torch.ones(B, dtype=torch.bool)
    without = everybody.clone()
    without[c.place] = False
    swapped = c.x.clone()
    swapped[c.place] = c.other[c.place]
    one, grid = leaves(c, evaluator, plan, c.x, everybody)
    none, _ = leaves(c, evaluator, plan, c.x, without)
    another, _ = leaves(c, evaluator, plan, swapped, everybody)
    assert bool(one.isfinite().all())
    assert torch.equal(one, one.round())
    rounding = math.sqrt(one.numel())
    return Influence(
        float((one - none).norm()) / grid.sensitivity,
        float((one - another).norm()) / (2 * grid.sensitivity - rounding),
    )
