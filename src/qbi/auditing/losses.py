"""The client's loss: by name, by a function of the user's, or by the shape of what the model returns."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from qbi.errors import BadValue, first_line
from qbi.federation.client import Loss

NAMED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross-entropy": lambda out, y: F.cross_entropy(out, y),
    "bce": lambda out, y: F.binary_cross_entropy_with_logits(out.reshape(y.shape), y.to(out.dtype)),
    "mse": lambda out, y: F.mse_loss(out.reshape(y.shape), y.to(out.dtype)),
}


def choose_loss(wanted: "str | Loss", output: Tensor, inputs: Tensor, targets: Tensor) -> tuple[Loss, Tensor, str]:
    """The loss, the targets it wants, and its name.

    Without a wish: a model that returns what it was given is an autoencoder, one output is a yes or no, several are
    classes, and targets with a fraction are to be met in the square.
    """
    if not isinstance(wanted, str):
        return wanted, targets, getattr(wanted, "__name__", "custom")
    if wanted != "auto":
        if wanted not in NAMED:
            raise BadValue(
                f"--loss: no loss is called {wanted!r}; there are auto, {', '.join(NAMED)}, or module:function."
            )
        return _checked(wanted, output, targets)
    if output.shape == inputs.shape and inputs.is_floating_point():
        return NAMED["mse"], inputs, "mse (reconstruction)"
    if targets.is_floating_point():
        return _checked("mse", output, targets)
    if output.dim() == 1 or (output.dim() == 2 and output.shape[1] == 1):
        return _checked("bce", output, targets)
    return _checked("cross-entropy", output, targets)


def _checked(name: str, output: Tensor, targets: Tensor) -> tuple[Loss, Tensor, str]:
    if name == "cross-entropy":
        if output.dim() < 2:
            raise BadValue(f"--loss: cross-entropy needs one output a class, the model returns {tuple(output.shape)}.")
        if output.dim() > 2 and targets.dim() == 1:
            raise BadValue(
                f"--loss: the model returns {tuple(output.shape)} and the targets are {tuple(targets.shape)}; "
                "give a loss of your own (--loss module:function)."
            )
        most, least = (int(targets.max()), int(targets.min())) if targets.numel() else (0, 0)
        if least < 0:
            raise BadValue(f"data: labels start at {least}; count classes from 0 to {output.shape[1] - 1}.")
        if most >= output.shape[1]:
            raise BadValue(
                f"data: labels go up to {most}, but the model has {output.shape[1]} outputs; check that they belong together."
            )
    elif output.numel() % max(1, targets.numel()):
        raise BadValue(
            f"--loss: {name} on outputs {tuple(output.shape)} and targets {tuple(targets.shape)} does not fit."
        )
    if name == "bce" and targets.numel() and float(targets.min()) < 0:
        raise BadValue(
            f"data: targets go from {float(targets.min()):g} to {float(targets.max()):g}, and one output asks for 0 and 1; "
            "number the two classes so, or give --loss mse."
        )
    return NAMED[name], targets, name


def check_value(loss: Loss, output: Tensor, targets: Tensor) -> None:
    """Refuse a loss that fails or is not a finite number."""
    try:
        value = loss(output, targets)
    except Exception as problem:
        # The user's own function may raise anything; what it says is passed on.
        raise BadValue(f"--loss: it fails on outputs {tuple(output.shape)} ({first_line(problem)}).") from problem
    if not isinstance(value, Tensor) or value.numel() != 1:
        raise BadValue("--loss: it must return one number.")
    if not bool(torch.isfinite(value)):
        raise BadValue(
            f"--loss: it is {float(value)} on the first batch; check data, model and loss for NaN or overflow."
        )
