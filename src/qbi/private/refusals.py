"""What no private step can train, or promise, as it is: each refusal names the cause and the remedy."""

from collections.abc import Iterable, Mapping
from typing import NoReturn

import torch
from torch import Tensor, nn

from qbi.errors import BadValue
from qbi.private.allowed import NotReleased
from qbi.private.goal import Goal
from qbi.private.ledger import BudgetSpent


def refuse_mixing(model: nn.Module) -> None:
    """Batch statistics join samples, and their buffers leave without noise."""
    for name, part in model.named_modules():
        statistics = isinstance(part, nn.modules.batchnorm._BatchNorm) or (
            isinstance(part, nn.modules.instancenorm._InstanceNorm) and part.track_running_stats
        )
        if statistics and part.training:
            raise BadValue(
                f"private: “{name}” ({type(part).__name__}) is in training mode: it joins the samples of a batch, and its statistics would leave "
                "without noise. Use GroupNorm (qbi.with_group_norm(model) converts a model), or put it into eval()."
            )


def refuse_odd_weights(parameters: Mapping[str, Tensor]) -> None:
    """Weights whose gradients the step would not form as training expects."""
    for name, parameter in parameters.items():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise BadValue(
                f"private: “{name}” has no shape yet; run the model once on data of the right shape, then create Private."
            )
        if parameter.is_complex() or parameter.is_sparse:
            kind = "complex" if parameter.is_complex() else "sparse"
            raise BadValue(
                f"private: “{name}” is {kind}; store it as plain numbers (torch.view_as_real), or freeze it."
            )
        if parameter._backward_hooks:
            raise BadValue(
                f"private: “{name}” has a hook on its gradient, which the step does not run; freeze the weights that are not to move."
            )


def refuse_scripts(model: nn.Module) -> None:
    """Compiled scripts hide where their weights are used."""
    for name, part in model.named_modules():
        if isinstance(part, torch.jit.ScriptModule):
            raise BadValue(
                f"private: “{name}” is a compiled script, whose weights cannot be followed; use the plain module."
            )


def with_group_norm(model: nn.Module) -> nn.Module:
    """A copy in which Opacus' fixer has put what keeps samples apart in the place of what mixes them.

    >>> type(with_group_norm(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)))[1]).__name__
    'GroupNorm'
    """
    from opacus.validators import ModuleValidator

    fixed: nn.Module = ModuleValidator.fix(model)
    return fixed


def refuse_average(goal: Goal, sampling: str) -> None:
    """Goals that hold for so many participations do not hold for so many on average."""
    fixed = "max_reconstruction" in goal or ("epsilon" in goal and "sampled" not in goal)
    if sampling == "poisson" and fixed:
        raise BadValue(
            "private: this goal was stated for a number of participations, and Poisson samples have a random one. State epsilon= with "
            "sampled=(rate, steps), or bits=."
        )


def refuse_other_sampling(goal: Goal, sampling: str, rate: float, steps: int) -> None:
    """ε that was stated for Poisson samples holds for those, at that rate, in so many steps."""
    if "epsilon" not in goal or "sampled" not in goal:
        return
    stated, most = goal["sampled"]
    if sampling != "poisson" or rate > stated * (1 + 1e-9):
        raise BadValue(
            f'private: ε was stated for Poisson samples of rate {stated:g}, and these are {sampling} of rate {rate:g}; draw with sampling="poisson" '
            "and such a batch size, or state another goal."
        )
    if steps > most:
        raise BudgetSpent(
            f"ε was stated for {most} steps, and these would be {steps}; state sampled=({stated:g}, {steps}), or stop here."
        )


def refuse_nameless(parameters: Iterable[str], named: Iterable[str]) -> None:
    """A trained weight that the model's state does not name cannot be compared with what was sent, and would steer what leaves."""
    missing = sorted(set(parameters) - set(named))
    if missing:
        raise NotReleased(
            f"private: “{missing[0]}” is trained, and model.state_dict() does not have it, so nobody can say that it is what the server sent. "
            "Freeze it, or leave it in the state."
        )


def refuse_repeating() -> NoReturn:
    """Noise that can be drawn again protects nothing."""
    raise NotReleased("private: noise from a seed protects nothing; in a client's round it comes from the system.")
