"""A model without reparametrised weights: from gradients of the parts of a weight, a server works out that of the weight."""

import copy
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.utils import parametrizations, parametrize, remove_spectral_norm, remove_weight_norm

from qbi.errors import BadValue, first_line


@dataclass(frozen=True)
class Plain:
    """A copy of a model whose weights are parameters, and what each stood for before."""

    model: nn.Module
    origins: dict[str, tuple[str, ...]]
    """For a weight that was put together: the trained parameters that it was made of."""


KNOWN = (parametrizations._WeightNorm, parametrizations._SpectralNorm)
"""Direction and length of each row (together they determine its gradient), and division by the largest singular value."""


def plain(model: nn.Module) -> Plain:
    """Copy a model and write weight norms and spectral norms out as the weights that they make.

    Weight norm loses nothing: the gradient of a row's direction and that of its length are the two parts of the row's gradient.
    Spectral norm takes one direction of the whole matrix away. Other reparametrisations stay as they are.
    """
    if isinstance(model, nn.DataParallel):
        model = model.module
    for name, parameter in model.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise BadValue(f"model: “{name}” has no shape yet; run the model once on data of the right shape first.")
    origins: dict[str, tuple[str, ...]] = {}
    for name, module in model.named_modules():
        if parametrize.is_parametrized(module):
            held: Any = module.parametrizations
            for what, parts in held.items():
                if all(isinstance(part, KNOWN) for part in parts):
                    made = [
                        f"{name}.parametrizations.{what}.{n}".lstrip(".")
                        for n, p in parts.named_parameters()
                        if p.requires_grad
                    ]
                    origins[f"{name}.{what}".lstrip(".")] = tuple(made)
    try:
        out = copy.deepcopy(model)
    except (RuntimeError, TypeError) as problem:
        raise BadValue(
            f"model: it cannot be copied ({first_line(problem)}). Build it anew, or use torch.nn.utils.parametrizations in the "
            "place of the older weight_norm and spectral_norm."
        ) from problem
    for name in origins:
        owner, _, what = name.rpartition(".")
        part = out.get_submodule(owner)
        all_parts: Any = part.parametrizations
        trained = any(p.requires_grad for p in all_parts[what].parameters())
        _with_class_of_its_own(part)
        parametrize.remove_parametrizations(part, what, leave_parametrized=True)
        getattr(part, what).requires_grad_(trained)
    for name, module in list(out.named_modules()):
        _without_old_norms(name, module, origins)
    return Plain(out, origins)


def _with_class_of_its_own(part: nn.Module) -> None:
    """A copy shares its class with the caller's module, and torch takes the weight off the class."""
    kind = type(part)
    own = {n: v for n, v in vars(kind).items() if n not in ("__dict__", "__weakref__")}
    part.__class__ = type(kind.__name__, kind.__bases__, own)


def _without_old_norms(name: str, module: nn.Module, origins: dict[str, tuple[str, ...]]) -> None:
    """The same for the norms that older versions of torch put on as hooks."""
    hooks = [type(h).__name__ for h in module._forward_pre_hooks.values()]
    own = dict(module.named_parameters(recurse=False))
    prefix = f"{name}." if name else ""
    if "WeightNorm" in hooks and "weight_g" in own:
        trained = own["weight_v"].requires_grad
        remove_weight_norm(module)
        origins[f"{prefix}weight"] = tuple(f"{prefix}{n}" for n in ("weight_g", "weight_v") if own[n].requires_grad)
        getattr(module, "weight").requires_grad_(trained)  # noqa: B009
    elif "SpectralNorm" in hooks and "weight_orig" in own:
        trained = own["weight_orig"].requires_grad
        remove_spectral_norm(module)
        origins[f"{prefix}weight"] = (f"{prefix}weight_orig",)
        getattr(module, "weight").requires_grad_(trained)  # noqa: B009
