"""An attack in a hundred lines, written without this package's readers: the oracle against which "nothing read" must stand.

For one weight of a model: what meets it is caught where torch is called; the server writes random rows with biases at the quantile of
what arrives of other samples, and compares quotients of the weight's and the bias's gradient with what arrived. A weight without a bias
gets a direction that is nearly the same for all vectors in its place, and only directions are compared.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

NEAR, FAR = 1e-3, 1e-2
"""Distances, in spreads of each value: of what is read, and up to which a known vector would have been a fair guess."""

MOST = 4096
"""Vectors that are compared, at most."""

CONVOLUTIONS = {torch.conv1d: 1, torch.conv2d: 2, torch.conv3d: 3, F.conv1d: 1, F.conv2d: 2, F.conv3d: 3}
TRANSPOSED = (torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d)
TURNED = (torch.matmul, Tensor.matmul, Tensor.__matmul__, Tensor.mm, torch.mm)


class Caught(TorchFunctionMode):
    """What met one weight in a pass: vectors (positions, width), and what they became."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = weight
        self.vectors: list[Tensor] = []
        self.outs: list[Tensor] = []
        self.bias: Tensor | None = None
        self.turned = False
        self.parts = 1
        self.strange: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not any(a is self.weight for a in (*args, *kwargs.values())):
            return func(*args, **kwargs)
        out = func(*args, **kwargs)
        given = kwargs.get("input", args[0] if args else None)
        bias = kwargs.get("bias", args[2] if len(args) > 2 and func not in TURNED else None)
        if func is F.linear:
            self._note(given, out, bias)
        elif func in CONVOLUTIONS:
            self._note(self._patches(given, CONVOLUTIONS[func], args, kwargs), out.movedim(1, -1), bias)
        elif func in (torch.addmm, Tensor.addmm) and args[2] is self.weight:
            self.turned = True
            self._note(args[1], out, args[0])
        elif func in TURNED and args[1] is self.weight and self.weight.dim() == 2:
            self.turned = True
            self._note(args[0], out, None)
        elif func is F.multi_head_attention_forward:
            self._packed(out[0], args, kwargs)
        elif func in TRANSPOSED and kwargs.get("groups", args[6] if len(args) > 6 else 1) == 1:
            self.turned = True
            self._note(given.movedim(1, -1), given.movedim(1, -1), None)
        elif isinstance(out, Tensor):
            self.strange.append(getattr(func, "__name__", str(func)))
        return out

    def _packed(self, out: Tensor, args: Any, kwargs: Any) -> None:
        """Self-attention: the packed projections meet what comes in. What the last one meets is not seen from here."""
        if self.weight is args[5]:
            self._note(args[0], out, args[6])
        else:
            self.strange.append("attention")

    def _note(self, vectors: Tensor, out: Tensor, bias: Tensor | None) -> None:
        self.vectors.append(vectors.detach().reshape(-1, vectors.shape[-1]))
        if out.requires_grad:
            out.retain_grad()
        self.outs.append(out)
        self.bias = bias if bias is not None and bias.requires_grad and bias.is_leaf else None

    def _patches(self, x: Tensor, sides: int, args: Any, kwargs: Any) -> Tensor:
        names = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
        how = dict(zip(names, args, strict=False)) | kwargs
        stride, pad, wide = (_each(how.get(n, d), sides) for n, d in (("stride", 1), ("padding", 0), ("dilation", 1)))
        kernel, self.parts = self.weight.shape[2:], how.get("groups", 1)
        if how.get("padding") == "same":
            total = [w * (k - 1) for w, k in zip(wide, kernel, strict=True)]
            x = F.pad(x, [p for t in reversed(total) for p in (t // 2, t - t // 2)])
        else:
            x = F.pad(x, [p for side in reversed(pad) for p in (side, side)])
        for axis in range(sides):
            reach = wide[axis] * (kernel[axis] - 1) + 1
            x = x.unfold(2 + axis, reach, stride[axis])[..., :: wide[axis]]
        return x.movedim(1, 1 + sides).flatten(1 + sides)


def _each(value: Any, sides: int) -> tuple[int, ...]:
    if isinstance(value, str):
        return (0,) * sides
    value = tuple(value) if not isinstance(value, int) else (value,)
    return value * sides if len(value) == 1 else value


def loss_of(out: Any, targets: Tensor) -> Tensor:
    """As a user would write it for each of these models."""
    out = next(iter(out.values())) if isinstance(out, dict) else out[0] if isinstance(out, tuple | list) else out
    if out.dim() == 0:
        return out
    if targets.is_floating_point():
        return F.mse_loss(out.reshape(targets.shape), targets)
    if out.dim() == 3 and targets.dim() == 2 and out.shape[:2] == targets.shape:
        return F.cross_entropy(out.flatten(0, 1), targets.flatten())
    return F.cross_entropy(out, targets)


def run(model: nn.Module, batch: Any, weight: Tensor) -> Caught:
    """One step of a client, in train mode, with what met the weight."""
    inputs, targets = batch
    torch.manual_seed(1)
    model.train().zero_grad()
    with Caught(weight) as caught:
        out = model(**inputs) if isinstance(inputs, dict) else model(*inputs)
    loss_of(out, targets).backward()
    return caught


def read(model: nn.Module, name: str, mine: Any, others: Any, gain: float) -> tuple[int, str]:
    """How many vectors of a batch are read through a weight that a guess would miss; and why it could not be tried, if so."""
    model = copy.deepcopy(model)
    weight = dict(model.named_parameters()).get(name)
    if weight is None:
        return 0, "a weight that is put together from others"
    known_pass = run(model, others, weight)
    if known_pass.strange or not known_pass.vectors:
        return 0, f"used in {', '.join(known_pass.strange)}" if known_pass.strange else "never used"
    known = _of_senders(known_pass)
    rows = weight.detach().flatten(1).T if known_pass.turned else weight.detach().flatten(1)
    craft(weight, known_pass, known, rows.shape, gain)
    caught = run(model, mine, weight)
    if weight.grad is None:
        return 0, "no gradient"
    arrived = _of_senders(caught)
    gradient = weight.grad.flatten(1).T if caught.turned else weight.grad.flatten(1)
    each, count = rows.shape[1], len(rows) // caught.parts
    hits = 0
    for part in range(caught.parts):
        span, own = slice(part * each, (part + 1) * each), slice(part * count, (part + 1) * count)
        bias = caught.bias.grad[own] if caught.bias is not None and caught.bias.grad is not None else None
        hits = max(hits, compare(gradient[own], bias, arrived[:, span], known[:, span]))
    return hits, ""


def craft(weight: Tensor, met: Caught, known: Tensor, shape: torch.Size, gain: float) -> None:
    """Random rows, each silent for all but one of a batch's vectors."""
    draws = torch.Generator().manual_seed(3)
    count = shape[0] // met.parts
    rows, shifts = [], []
    for part in range(met.parts):
        seen = known[:, part * shape[1] : (part + 1) * shape[1]]
        wide = torch.randn(count, shape[1], generator=draws) / seen.std(0).clamp_min(1e-6) * gain / shape[1] ** 0.5
        standing = torch.ones(len(seen))
        if met.bias is None:
            same = torch.linalg.lstsq(seen.double(), torch.ones(len(seen), 1).double(), driver="gelsd").solution.float()
            standing = (seen @ same)[:, 0]
        reach = (seen @ wide.T) / torch.where(standing.abs() < 0.1, torch.ones(1), standing)[:, None]
        place = max(1, len(seen) // 32)
        shift = reach.topk(min(place + 1, len(seen)), 0).values[-2:].mean(0)
        rows.append(wide if met.bias is not None else wide - shift[:, None] * same.T)
        shifts.append(-shift)
    with torch.no_grad():
        made = torch.cat(rows)
        weight.copy_((made.T if met.turned else made).reshape(weight.shape))
        if met.bias is not None:
            met.bias.copy_(torch.cat(shifts))


def _of_senders(met: Caught) -> Tensor:
    """Vectors whose products matter for the loss."""
    out = []
    for vectors, products in zip(met.vectors, met.outs, strict=True):
        back = products.grad
        alive = None if back is None else back.reshape(len(vectors), -1).abs().amax(1) > 0
        out.append(vectors if alive is None or not bool(alive.any()) else vectors[alive])
    return torch.cat(out)


def compare(gradient: Tensor, bias: Tensor | None, arrived: Tensor, known: Tensor) -> int:
    """Arrived vectors that a row's quotient equals, or its direction where there is no bias; repeated and known ones apart."""
    alive = gradient.abs().amax(1) > 0
    gradient, bias = gradient[alive], None if bias is None else bias[alive]
    if not len(gradient) or arrived.shape[1] < 3:
        return 0
    if bias is not None:
        return _hit((gradient / bias[:, None]).nan_to_num(1e9, 1e9, 1e9), arrived, known)
    candidates = torch.cat([_direction(gradient), -_direction(gradient)])
    middle = arrived.mean(0)  # a norm behind takes it off
    centred = _hit(candidates, _direction(arrived - middle), _direction(known - middle))
    return max(centred, _hit(candidates, _direction(arrived), _direction(known)))


def _hit(candidates: Tensor, arrived: Tensor, known: Tensor) -> int:
    arrived, known = arrived[:MOST].double(), known[:MOST].double()
    spread = arrived.std(0).clamp_min(1e-6) * arrived.shape[1] ** 0.5
    arrived, known, candidates = arrived / spread, known / spread, candidates.double() / spread
    near = (torch.cdist(arrived, candidates) < NEAR).any(1)
    if not bool(near.any()):
        return 0
    again = (torch.cdist(arrived[near], arrived) < FAR).sum(1) > 1
    guessed = (torch.cdist(arrived[near], known) < FAR).any(1)
    return int((~again & ~guessed).sum())


def _direction(values: Tensor) -> Tensor:
    return values / values.norm(dim=1, keepdim=True).clamp_min(1e-30)


def hands_on(
    model: nn.Module, data: Any, weights: list[str], size: int, *, own: bool = False
) -> tuple[dict[str, int], dict[str, str]]:
    """For each weight how much is read by hand, where something is; and those on which this attack could not be tried."""
    mine, others = cut(data, slice(0, size), own), cut(data, slice(size, None), own)
    found, untried = {}, {}
    for name in weights:
        for gain in (1.0, 10.0, 100.0):
            hits, why = read(model, name, mine, others, gain)
            if hits:
                found[name] = max(hits, found.get(name, 0))
            if why:
                untried[name] = why
    return found, untried


def cut(data: Any, part: slice, own: bool = False) -> tuple[Any, Tensor]:
    """Some samples: inputs by name or by place, and their targets, which a model that returns its own loss takes too."""
    if isinstance(data, dict):
        return {n: v[part] for n, v in data.items() if own or n != "labels"}, data["labels"][part]
    return tuple(v[part] for v in data[:-1]), data[-1][part]
