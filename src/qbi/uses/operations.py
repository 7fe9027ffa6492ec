"""The operations whose gradients are known, by the torch function that is called. A new one is one function and one line.

    @operation(torch.nn.functional.linear)
    def linear(capture, input, weight, bias=None): ...

Each runs the operation and tells the capture what went in and what came out. `NotImplemented` leaves its parameters unknown.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from qbi.uses.kinds import Adjoint, Convolution, LookUp, Pairs, ScaleAndShift, padding_of, several
from qbi.uses.watcher import Watcher

Handler = Callable[..., Any]
OPERATIONS: dict[Callable[..., Any], Handler] = {}
MAPPED_IN_PARTS: set[Callable[..., Any]] = set()
"""Operations that torch cannot map over samples as a whole: their handlers are used whoever's weights they have."""


def operation(*functions: Callable[..., Any]) -> Callable[[Handler], Handler]:
    """Register a handler for torch functions."""

    def register(handler: Handler) -> Handler:
        OPERATIONS.update(dict.fromkeys(functions, handler))
        return handler

    return register


@operation(F.linear)
def linear(capture: Watcher, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    """x·Wᵀ + b."""
    if weight.dim() != 2 or (bias is not None and bias.shape != weight.shape[:1]):
        return NotImplemented
    out = F.linear(input, weight, bias)
    return capture.use(Pairs(tuple(weight.shape)), input, out, weight, bias)


@operation(torch.addmm, Tensor.addmm)
def addmm(capture: Watcher, bias: Tensor, input: Tensor, weight: Tensor, **options: Any) -> Any:
    """b + x·W, as GPT-2 writes its linear layers."""
    if options or bias.shape != weight.shape[1:] or input.dim() != 2:
        return NotImplemented
    out = torch.addmm(bias, input, weight)
    return capture.use(Pairs(tuple(weight.shape), transposed=True), input, out, weight, bias)


@operation(torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm)
def matmul(capture: Watcher, input: Tensor, other: Tensor) -> Any:
    """x·W, or W·x as Mamba has it."""
    if capture.name_of(other) is None and input.dim() == 2 and other.dim() >= 2:
        columns = other.mT
        return capture.use(Pairs(tuple(input.shape)), columns, F.linear(columns, input), input, None).mT
    if capture.name_of(other) is None or other.dim() != 2 or input.dim() < 2:
        return NotImplemented
    return capture.use(Pairs(tuple(other.shape), transposed=True), input, torch.matmul(input, other), other, None)


def _convolution(function: Callable[..., Tensor], sides: int) -> None:
    @operation(function)
    def convolution(
        capture: Watcher,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Any:
        out = function(input, weight, bias, stride, padding, dilation, groups)
        spread = several(dilation, sides)
        around = padding_of(padding, tuple(weight.shape[2:]), spread)
        kind = Convolution(tuple(weight.shape), several(stride, sides), around, spread, groups)
        return capture.use(kind, input, out, weight, bias)


for _function, _sides in ((F.conv1d, 1), (F.conv2d, 2), (F.conv3d, 3)):
    _convolution(_function, _sides)


def _transposed(function: Callable[..., Tensor], sides: int) -> None:
    @operation(function)
    def transposed(
        capture: Watcher,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        output_padding: Any = 0,
        groups: int = 1,
        dilation: Any = 1,
    ) -> Any:
        out = function(input, weight, bias, stride, padding, output_padding, groups, dilation)
        spread = several(dilation, sides)
        around = padding_of(padding, tuple(weight.shape[2:]), spread)
        forward = Convolution(tuple(weight.shape), several(stride, sides), around, spread, groups)
        return capture.use(Adjoint(forward, several(output_padding, sides)), input, out, weight, bias)


_transposed(F.conv_transpose1d, 1)
_transposed(F.conv_transpose2d, 2)
_transposed(F.conv_transpose3d, 3)


@operation(torch.einsum)
def einsum(capture: Watcher, equation: str, *operands: Any) -> Any:
    """Two operands of which the second, or the first, is a matrix that is summed over one index: x·W in other letters."""
    terms = equation.replace(" ", "").split("->")
    given = terms[0].split(",")
    if len(terms) != 2 or len(given) != 2 or len(operands) != 2 or "." in equation:
        return NotImplemented
    first = capture.name_of(operands[1]) is None
    weight, other = (operands[0], operands[1]) if first else (operands[1], operands[0])
    own, theirs = (given[0], given[1]) if first else (given[1], given[0])
    summed = [letter for letter in own if letter in theirs and letter not in terms[1]]
    kept = [letter for letter in own if letter in terms[1] and letter not in theirs]
    plain = len(own) == 2 and len(set(theirs)) == len(theirs) and set(theirs) - set(own) <= set(terms[1])
    if not plain or len(summed) != 1 or len(kept) != 1 or capture.name_of(other) is not None:
        return NotImplemented
    x = other.movedim(theirs.index(summed[0]), -1)
    matrix_is_turned = own[0] == summed[0]
    product = torch.matmul(x, weight if matrix_is_turned else weight.T)
    out = capture.use(Pairs(tuple(weight.shape), transposed=matrix_is_turned), x, product, weight, None)
    letters = [letter for letter in theirs if letter != summed[0]] + kept
    return out.permute([letters.index(letter) for letter in terms[1]])


@operation(F.embedding, torch.embedding)
def embedding(
    capture: Watcher,
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    """Rows of a table."""
    if input.is_floating_point():  # `torch.embedding` has the table first
        return NotImplemented
    if max_norm is not None:
        capture.refuse(
            f"the embedding “{capture.name_of(weight)}” has max_norm={max_norm:g}, which rescales the rows of the tokens it "
            "meets, in place: the tokens would leave with the weights. Build it without max_norm."
        )
    out = F.embedding(input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
    if padding_idx is not None and padding_idx < 0:
        padding_idx += weight.shape[0]
    return capture.use(LookUp(tuple(weight.shape), padding_idx, scale_grad_by_freq), input, out, weight, None)


@operation(F.layer_norm)
def layer_norm(
    capture: Watcher,
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Any:
    """Normalise, then scale and shift."""
    shape = tuple(normalized_shape)
    return _affine(capture, F.layer_norm(input, shape, eps=eps), weight, bias, tuple(range(-len(shape), 0)))


@operation(F.rms_norm)
def rms_norm(
    capture: Watcher, input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None
) -> Any:
    """Divide by the root mean square, then scale."""
    shape = tuple(normalized_shape)
    return _affine(capture, F.rms_norm(input, shape, eps=eps), weight, None, tuple(range(-len(shape), 0)))


@operation(F.group_norm)
def group_norm(
    capture: Watcher,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Any:
    """Normalise groups of channels, then scale and shift each channel."""
    return _affine(capture, F.group_norm(input, num_groups, eps=eps), weight, bias, (1 - input.dim(),))


def _affine(
    capture: Watcher, normal: Tensor, weight: Tensor | None, bias: Tensor | None, axes: tuple[int, ...]
) -> Tensor:
    tail = [1] * (-axes[-1] - 1)
    out = normal
    given = [v for v in (weight, bias) if v is not None]
    if weight is not None:
        out = out * weight.reshape(*weight.shape, *tail)
    if bias is not None:
        out = out + bias.reshape(*bias.shape, *tail)
    return capture.use(ScaleAndShift(tuple(given[0].shape), axes), normal, out, weight, bias)
