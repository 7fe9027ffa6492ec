"""Models that take their inputs by name, as dictionaries of a tokeniser are: called by position without a mix-up."""

import inspect
from collections.abc import Sequence
from typing import Any

from torch import nn

from qbi.errors import BadValue


def by_place(model: nn.Module) -> nn.Module:
    """The model, whose inputs come without names; refused where it takes some by name only."""
    taken = inspect.signature(type(model).forward).parameters.values()
    named = [p.name for p in taken if p.kind is inspect.Parameter.KEYWORD_ONLY and p.default is inspect.Parameter.empty]
    if named:
        raise BadValue(
            f"data: the model takes {', '.join(named)} by name only; give a dictionary with an entry for each, and labels."
        )
    return model


def by_name(model: nn.Module, names: Sequence[str]) -> nn.Module:
    """Let a model, which is changed, take its inputs in the order of these names.

    Its class becomes one of its own with another `forward`, so that parts, parameters and their names stay.

    >>> class Masked(nn.Module):
    ...     def forward(self, x, mask=None, kinds=None):
    ...         return x if kinds is None else x + kinds
    >>> by_name(Masked(), ("x", "kinds"))(1, 2)
    3
    """
    kind = type(model)
    taken = inspect.signature(kind.forward).parameters
    free = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in taken.values())
    unknown = [n for n in names if n not in taken]
    if unknown and not free:
        known = ", ".join(n for n in taken if n != "self")
        raise BadValue(
            f"data: the model takes no input called {unknown[0]!r}; it takes {known}. Rename it, or leave it out."
        )

    def forward(self: nn.Module, *parts: Any) -> Any:
        return kind.forward(self, **dict(zip(names, parts, strict=True)))

    model.__class__ = type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})
    return model
