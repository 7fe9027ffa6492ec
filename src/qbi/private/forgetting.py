"""What a model, a loss or an augmentation keeps to itself between samples is put back: nothing is carried from one to the next.

Attributes of modules, of objects that are called, and what functions close over, as deep as it goes; random generators; Python's and
numpy's own random numbers. What stands in globals is not reached.
"""

import contextlib
import copy
import random
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

OWN = frozenset(vars(nn.Module())) - {"training"}
"""Attributes that every module has: parameters, buffers, hooks."""

FIXED = (
    int,
    float,
    complex,
    str,
    bytes,
    bool,
    type(None),
    torch.dtype,
    torch.device,
    torch.Size,
    type,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.ModuleType,
)


@contextlib.contextmanager
def forgetful(*holders: Any) -> Iterator[None]:
    """Put back what these objects keep, when the block is left."""
    modules = [m for h in holders if isinstance(h, nn.Module) for m in h.modules()]
    memo: dict[int, Any] = {id(m): m for m in modules}
    memo |= {id(p): p for m in modules for p in (*m.parameters(recurse=False), *m.buffers(recurse=False))}
    places = [vars(m) for m in modules] + [
        vars(h) for h in holders if not isinstance(h, nn.Module | types.FunctionType) and hasattr(h, "__dict__")
    ]
    kept = [(own, {k: _copied(v, memo) for k, v in own.items() if k not in OWN}) for own in places]
    cells = [c for h in holders for c in getattr(h, "__closure__", None) or ()]
    closed = [(c, _copied(c.cell_contents, memo)) for c in cells if not _is_empty(c)]
    # A loss's or an augmentation's own buffers; those of the model are copies already.
    buffers = [(b, b.detach().clone()) for h in holders[1:] if isinstance(h, nn.Module) for b in h.buffers()]
    drawn, numbers = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        for own, attributes in kept:
            for name in [k for k in own if k not in attributes and k not in OWN]:
                del own[name]
            own.update({k: _again(v) for k, v in attributes.items()})
        for cell, value in closed:
            cell.cell_contents = _again(value)
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        random.setstate(drawn)
        np.random.set_state(numbers)


class _Drawn:
    """A generator and the state that it had."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator, self.state = generator, generator.get_state()


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    if isinstance(value, FIXED) or id(value) in memo or isinstance(value, nn.Module):
        return value
    if isinstance(value, torch.Generator):
        return _Drawn(value)
    if type(value) is Tensor:
        return value.detach().clone() if value.is_leaf else value
    try:
        return copy.deepcopy(value, dict(memo))
    except Exception:
        return value  # what cannot be copied, such as an open file, is left as it is


def _again(value: Any) -> Any:
    if isinstance(value, _Drawn):
        value.generator.set_state(value.state)
        return value.generator
    return value


def _is_empty(cell: Any) -> bool:
    try:
        return cell.cell_contents is cell
    except ValueError:
        return True


def seed_all(seed: int) -> None:
    """One sample's own random numbers, of torch, Python and numpy."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
