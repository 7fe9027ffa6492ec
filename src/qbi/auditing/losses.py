"""The client's loss: by name, by a function of the user's, or by the shape of what the model returns."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from qbi.errors import BadValue, first_line
from qbi.federation.client import Loss

NAMED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross-entropy": lambda out, y: F.cross_entropy(
        out if out.dim() != 3 or _by_position(out, y) is None else out.mT, y
    ),
    "bce": lambda out, y: F.binary_cross_entropy_with_logits(out.reshape(y.shape), y.to(out.dtype)),
    "mse": lambda out, y: F.mse_loss(out.reshape(y.shape), y.to(out.dtype)),
}
ON_INPUTS = "reconstruction"
NEXT = "next token"
OWN = "own"
IGNORED = -100
"""A label of torch's and of language models that counts for nothing."""


def choose_loss(wanted: "str | Loss", output: Tensor, inputs: Tensor, targets: Tensor) -> tuple[Loss, Tensor, str]:
    """The loss, the targets it wants, and its name.

    Without a wish: a model that returns one number for a batch returns its loss, one that returns what it was given is an
    autoencoder (unless the labels could be classes just as well: then it asks), one output is a yes or no, several are
    classes, and targets with a fraction are to be met in the square. Labels that are the tokens themselves are those of a language
    model: each position is to say the next.
    """
    if not isinstance(wanted, str):
        return wanted, targets, getattr(wanted, "__name__", "custom")
    if wanted == "auto":
        wanted = _fitting(output, inputs, targets)
    if wanted == OWN:
        if output.dim():
            raise BadValue(
                f"--loss own: the model returns {tuple(output.shape)} and no loss when it is given its targets; say --loss auto."
            )
        return _own, targets, "the model's own"
    if wanted == ON_INPUTS:
        return NAMED["mse"], inputs, "mse (reconstruction)"
    if wanted == NEXT:
        return _next_token, targets, "cross-entropy (next token)"
    if wanted not in NAMED:
        raise BadValue(
            f"--loss: no loss is called {wanted!r}; there are auto, {', '.join(NAMED)}, {ON_INPUTS}, {OWN}, or module:function."
        )
    return _checked(wanted, output, targets)


def _fitting(output: Tensor, inputs: Tensor, targets: Tensor) -> str:
    """The name of the loss that shapes and types speak for."""
    if output.dim() == 0:
        return OWN
    whole = not targets.is_floating_point()
    if output.shape == inputs.shape and inputs.is_floating_point():
        if output.dim() == 2 and whole and targets.dim() == 1 and 0 < int(targets.max()) < output.shape[1]:
            raise BadValue(
                f"--loss: {output.shape[1]} features go in, as many outputs come out, and the labels would do as classes; is it a "
                f"classifier or an autoencoder? Say --loss cross-entropy or --loss {ON_INPUTS}."
            )
        return ON_INPUTS
    if not whole:
        return "mse"
    if output.dim() == 3 and targets.shape == inputs.shape and bool((targets == inputs)[targets != IGNORED].all()):
        return NEXT
    return "bce" if output.dim() == 1 or (output.dim() == 2 and output.shape[1] == 1) else "cross-entropy"


def _own(output: Tensor, targets: Tensor) -> Tensor:  # noqa: ARG001
    return output


def _next_token(output: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(output[:, :-1].flatten(0, 1), targets[:, 1:].flatten())


def _by_position(output: Tensor, targets: Tensor) -> int | None:
    """Classes of each position, where a model returns (samples, positions, classes) as those of language do."""
    positions = output.dim() == 3 and targets.dim() == 2 and output.shape[1] == targets.shape[1]
    return output.shape[2] if positions and output.shape[2] != targets.shape[1] else None


def _checked(name: str, output: Tensor, targets: Tensor) -> tuple[Loss, Tensor, str]:
    if output.dim() == 0:
        raise BadValue(
            f"--loss: the model returns one number, its loss; {name} cannot be taken of it. Say --loss auto."
        )
    if name == "cross-entropy":
        _check_classes(output, targets)
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


def _check_classes(output: Tensor, targets: Tensor) -> None:
    if output.dim() < 2:
        raise BadValue(f"--loss: cross-entropy needs one output a class, the model returns {tuple(output.shape)}.")
    if output.dim() > 2 and targets.dim() == 1:
        raise BadValue(
            f"--loss: the model returns {tuple(output.shape)} and the targets are {tuple(targets.shape)}; "
            "give a loss of your own (--loss module:function)."
        )
    if targets.is_floating_point():
        return
    classes = _by_position(output, targets) or output.shape[1]
    counted = targets[targets != IGNORED]
    most, least = (int(counted.max()), int(counted.min())) if counted.numel() else (0, 0)
    if least < 0:
        raise BadValue(f"data: labels start at {least}; count classes from 0 to {classes - 1}.")
    if most >= classes:
        raise BadValue(
            f"data: labels go up to {most}, but the model has {classes} outputs; check that they belong together."
        )


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
