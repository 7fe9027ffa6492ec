"""Turn the layers before the attacked one into the identity, and say how the sample arrives.

Convolutions carry it by centre taps, linear layers by unit weights, residual blocks by a silenced branch. A ReLU
is passed either by a pair of channels for the positive and the negative part, or by a shift that keeps values
above zero. Normalisation layers are let through and undone after extraction. Where a layer cannot carry the sample
(stride, pooling, dropout, too few channels), the error names it.

Everything here changes the modules it is given: callers pass copies.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from qbi.carrier import Carrier, Normalised, Shift, Step, flat
from qbi.errors import CannotMount

NamedLayer = tuple[str, nn.Module]
Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d
BatchNorm = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d

DEFAULT_SHIFT = 8.0
"""Added to pass a ReLU: normalised data rarely lies below −8, and float32 still keeps six digits."""


@dataclass(frozen=True)
class _Signal:
    """The sample on its way: its units are channels before flattening, single features after it."""

    units: int
    paired: bool = False
    nonnegative: bool = False
    steps: tuple[Step, ...] = ()
    offset: float = 0.0


def carry(layers: Sequence[NamedLayer], sample: Tensor, *, shift: float = DEFAULT_SHIFT) -> Carrier:
    """Make `layers` carry a batch like `sample` unchanged to the layer behind them; returns how it arrives.

    `sample` is a batch of at least two inputs; its values serve as the probe of the final check.
    """
    embedding = None
    if layers and isinstance(layers[0][1], nn.Embedding):
        embedding = layers[0][0]
        sample = layers[0][1](sample).detach()
        layers = layers[1:]
    _silence_blocks(layers)
    inputs = _inputs_of(layers, sample)
    # A sample without channels (tabular rows, embedded tokens) is carried feature by feature.
    signal = _Signal(units=sample.shape[1])
    for index, (name, layer) in enumerate(layers):
        signal = _at_layer(name, layer, inputs[index], signal, _Ahead(layers, inputs, index), shift)
    width = flat(inputs[-1]).shape[1]
    carrier = Carrier(
        shape=tuple(sample.shape[1:]),
        width=width,
        paired=signal.paired,
        steps=signal.steps,
        offset=signal.offset,
        embedding=embedding,
    )
    _check(layers, sample, carrier)
    return carrier


def _inputs_of(layers: Sequence[NamedLayer], sample: Tensor) -> list[Tensor]:
    """The input of each layer, and the output of the last, on the sample: only shapes are used later."""
    inputs = [sample]
    with torch.no_grad():
        for name, layer in layers:
            try:
                inputs.append(layer(inputs[-1]))
            except (RuntimeError, ValueError, IndexError) as problem:
                reason = str(problem).splitlines()[0]
                raise CannotMount(
                    f"{_label(name, layer)} does not accept input of shape {tuple(inputs[-1].shape)}: {reason}"
                ) from problem
    return inputs


@dataclass(frozen=True)
class _Ahead:
    """What comes behind a layer: it decides how the layer hands the sample on."""

    layers: Sequence[NamedLayer]
    inputs: Sequence[Tensor]
    index: int

    @property
    def rectified(self) -> bool:
        """Whether a ReLU acts on this layer's output before any other layer with weights or statistics."""
        for position in range(self.index + 1, len(self.layers)):
            _, layer = self.layers[position]
            if _has_units(layer):
                return False
            if not _passes(layer, self.inputs[position], signed=True):
                return True
        return False

    @property
    def normalised(self) -> bool:
        """Whether a normalisation layer follows anywhere; pairs of channels would not survive it."""
        return any(isinstance(layer, BatchNorm | nn.LayerNorm) for _, layer in self.layers[self.index + 1 :])


def _has_units(layer: nn.Module) -> bool:
    return isinstance(layer, Convolution | nn.Linear | BatchNorm | nn.LayerNorm)


def _at_layer(name: str, layer: nn.Module, inputs: Tensor, signal: _Signal, ahead: _Ahead, shift: float) -> _Signal:
    if isinstance(layer, Convolution):
        _check_convolution(name, layer)
        return _carry_weights(name, layer, layer.out_channels, signal, ahead, shift)
    if isinstance(layer, nn.Linear):
        if inputs.dim() != 2:
            raise CannotMount(
                f"{_label(name, layer)} acts on the last of {inputs.dim() - 1} dimensions; flatten the sample before it."
            )
        return _carry_weights(name, layer, layer.out_features, signal, ahead, shift)
    if isinstance(layer, BatchNorm | nn.LayerNorm):
        return _carry_norm(name, layer, signal, ahead, shift)
    if isinstance(layer, nn.Flatten):
        return replace(signal, units=signal.units * math.prod(inputs.shape[2:]))
    if _passes(layer, inputs, signed=not signal.nonnegative):
        return signal
    raise CannotMount(f"{_label(name, layer)} {_why_not(layer, inputs)}")


def _check_convolution(name: str, layer: Convolution) -> None:
    odd = all(k % 2 for k in layer.kernel_size)
    kept = layer.padding == "same" or tuple(layer.padding) == tuple(
        d * (k - 1) // 2 for k, d in zip(layer.kernel_size, layer.dilation, strict=True)
    )
    problems = {
        f"has stride {layer.stride}; only stride 1 keeps every value": any(s != 1 for s in layer.stride),
        f"has an even kernel {layer.kernel_size}, which has no centre": not odd,
        f"has padding {layer.padding} for kernel {layer.kernel_size}, which changes the image size": odd and not kept,
        f"has {layer.groups} groups; the sample cannot be carried across them": layer.groups != 1,
    }
    for reason, holds in problems.items():
        if holds:
            raise CannotMount(f"{_label(name, layer)} {reason}. It cannot be made the identity.")


def _carry_weights(
    name: str, layer: Convolution | nn.Linear, units_out: int, signal: _Signal, ahead: _Ahead, shift: float
) -> _Signal:
    """Write unit weights for the sample into the first filters or rows; the others stay as they are."""
    n = signal.units
    must_pass = ahead.rectified and not (signal.nonnegative and not signal.paired)
    pairs = must_pass and units_out >= 2 * n and not ahead.normalised
    shifted = must_pass and not pairs
    if units_out < n:
        raise CannotMount(
            f"{_label(name, layer)} has {units_out} outputs; the sample needs {n}. It is too narrow to carry it."
        )
    if shifted and layer.bias is None:
        raise CannotMount(
            f"{_label(name, layer)} has {units_out} outputs and no bias; passing the ReLU behind it needs "
            f"{2 * n} outputs (a pair for each value's sign) or a bias (a shift)."
        )
    centre: tuple[int, ...] = tuple(k // 2 for k in layer.kernel_size) if isinstance(layer, Convolution) else ()
    unit = torch.arange(n)
    with torch.no_grad():
        layer.weight[: 2 * n if pairs else n] = 0
        # A view of the centre taps, or of the whole matrix of a linear layer.
        index: tuple[Any, ...] = (..., *centre)
        taps = layer.weight[index]
        taps[unit, unit] = 1
        if signal.paired:
            taps[unit, unit + n] = -1
        if pairs:
            layer.weight[n : 2 * n] = -layer.weight[:n]
        if layer.bias is not None:
            layer.bias[: 2 * n if pairs else n] = shift if shifted else 0
    steps = (*signal.steps, Shift(shift)) if shifted else signal.steps
    return replace(
        signal,
        paired=pairs,
        nonnegative=pairs or shifted or (signal.nonnegative and not signal.paired),
        steps=steps,
        offset=signal.offset + shift if shifted else signal.offset,
    )


def _carry_norm(name: str, layer: BatchNorm | nn.LayerNorm, signal: _Signal, ahead: _Ahead, shift: float) -> _Signal:
    """Let a normalisation layer pass, with its own offset as the shift where a ReLU follows."""
    if signal.paired:
        raise CannotMount(f"{_label(name, layer)} would normalise the two halves of the sample apart.")
    offset = shift if ahead.rectified else 0.0
    if offset and layer.bias is None:
        raise CannotMount(f"{_label(name, layer)} has no offset of its own; the ReLU behind it cuts the sample.")
    with torch.no_grad():
        if layer.weight is not None:
            layer.weight.fill_(1)
        if layer.bias is not None:
            layer.bias.fill_(offset)
    return replace(signal, nonnegative=bool(offset), steps=(*signal.steps, Normalised(name)), offset=offset)


def _silence_blocks(layers: Sequence[NamedLayer]) -> None:
    """Zero every parameter of composite blocks, so that a residual block becomes its shortcut."""
    with torch.no_grad():
        for _, layer in layers:
            if not _has_units(layer):
                for parameter in layer.parameters():
                    parameter.zero_()


def _passes(layer: nn.Module, inputs: Tensor, *, signed: bool) -> bool:
    """Whether the layer hands values on unchanged: any values, or only those above zero."""
    generator = torch.Generator().manual_seed(0)
    values = torch.rand(inputs.shape, generator=generator) + 0.5
    if signed:
        values = values * torch.where(torch.rand(inputs.shape, generator=generator) < 0.5, -1.0, 1.0)
    values = values.to(inputs)
    with torch.no_grad():
        out = layer(values.clone())
    return out.numel() == values.numel() and torch.equal(flat(out), flat(values))


def _why_not(layer: nn.Module, inputs: Tensor) -> str:
    if isinstance(layer, nn.Dropout | nn.Dropout1d | nn.Dropout2d | nn.Dropout3d | nn.AlphaDropout):
        return f"drops values at random (p = {layer.p}), which no setting of parameters undoes."
    with torch.no_grad():
        out = layer(inputs)
    if out.numel() != inputs.numel():
        return f"reduces {tuple(inputs.shape[1:])} to {tuple(out.shape[1:])}; what it drops cannot be read back."
    if any(True for _ in layer.parameters()):
        return "is a block whose shortcut is not the identity when its branch is silenced."
    if _passes(layer, inputs, signed=False):
        return "cuts values below zero, and no layer before it can shift them."
    return "changes the values it passes on."


def _check(layers: Sequence[NamedLayer], sample: Tensor, carrier: Carrier) -> None:
    """Run the sample through and compare; normalisation layers act as their affine part alone."""
    values = sample
    added = sum(step.value for step in carrier.steps if isinstance(step, Shift))
    # Convolutions on an accelerator round to ten bits by default; what is asked here is whether the layers are right.
    with torch.no_grad(), torch.backends.cudnn.flags(allow_tf32=False):
        for _, layer in layers:
            if isinstance(layer, BatchNorm | nn.LayerNorm):
                values = _affine(layer, values)
                added += 0.0 if layer.bias is None else float(layer.bias.flatten()[0])
            else:
                values = layer(values)
    error = float((carrier.read(flat(values)) - added - flat(sample)).abs().max())
    if not error <= 1e-5 * (1 + float(sample.abs().max()) + added):
        raise CannotMount(
            f"{_label(*layers[-1])}: the probe arrives with an error of {error:.2g}; the layers up to here do not act "
            "as the identity. Values below the shift are cut by a ReLU: normalise the data or raise the shift."
        )


def _affine(layer: BatchNorm | nn.LayerNorm, values: Tensor) -> Tensor:
    if layer.weight is None:
        return values
    if isinstance(layer, nn.LayerNorm):
        return values * layer.weight + (0 if layer.bias is None else layer.bias)
    view = (1, -1, *([1] * (values.dim() - 2)))
    return values * layer.weight.view(view) + layer.bias.view(view)


def _label(name: str, layer: nn.Module) -> str:
    return f"{name} ({type(layer).__name__})"
