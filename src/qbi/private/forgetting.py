"""What a model, a loss or an augmentation keeps to itself between samples is put back: nothing is carried from one to the next.

Attributes of modules, of objects that are called, and what functions close over, as deep as it goes; random generators; Python's and
numpy's own random numbers. What stands in globals is not reached; `planning` notices it on random samples.
"""

import contextlib
import copy
import functools
import random
import types
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from qbi.errors import BadValue, first_line

OWN = frozenset(k for k, v in vars(nn.Module()).items() if isinstance(v, dict | set))
"""Attributes in which every module keeps parameters, buffers, other modules and hooks: which these are is put back, and not what they hold."""

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
def forgetful(*holders: Any, weights: bool = True) -> Iterator[None]:
    """Put back what these objects keep, when the block is left; the weights of the first of them too, if asked to."""
    holders = tuple(holders_of(holders))
    modules = [m for h in holders if isinstance(h, nn.Module) for m in h.modules()]
    memo: dict[int, Any] = {id(m): m for m in modules}
    memo |= {id(p): p for m in modules for p in (*m.parameters(recurse=False), *m.buffers(recurse=False))}
    places = [vars(m) for m in modules] + [
        vars(h) for h in holders if not isinstance(h, nn.Module | types.FunctionType) and hasattr(h, "__dict__")
    ]
    kept = [(place, {k: _kept(k, v, memo) for k, v in place.items()}) for place in places]
    functions = [*holders, *(f for own in places for f in _functions(own))]
    written = [f for f in functions if isinstance(f, types.FunctionType)]
    defaults = [
        (f, f.__defaults__, [_kept("a default argument", v, memo) for v in f.__defaults__])
        for f in written
        if f.__defaults__
    ]
    named = [
        (f.__kwdefaults__, {k: _kept(k, v, memo) for k, v in f.__kwdefaults__.items()})
        for f in written
        if f.__kwdefaults__
    ]
    kept += named + [(vars(f), {k: _kept(k, v, memo) for k, v in vars(f).items()}) for f in written]
    cells = list({id(c): c for f in functions for c in getattr(f, "__closure__", None) or ()}.values())
    closed = [(c, _kept("a variable of a function", c.cell_contents, memo)) for c in cells if not _is_empty(c)]
    # Those of the model only where samples go one by one: it runs on copies of its own, but a loss may hold the model and write it.
    left = {id(m) for m in holders[0].modules()} if not weights and isinstance(holders[0], nn.Module) else set()
    tensors = [t for m in modules if id(m) not in left for t in (*m._parameters.values(), *m._buffers.values())]
    buffers = [(t, t.detach().clone()) for t in tensors if t is not None]
    drawn, numbers = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        for own, attributes in kept:
            for name in [k for k in own if k not in attributes]:
                del own[name]
            own.update({k: _again(v) for k, v in attributes.items()})
        for cell, value in closed:
            cell.cell_contents = _again(value)
        with torch.no_grad():
            for buffer, value in buffers:
                if not same_bits(buffer, value):  # torch counts writes
                    buffer.copy_(value)
        for changed, before, values in defaults:
            changed.__defaults__ = tuple(b if isinstance(b, FIXED) else v for b, v in zip(before, values, strict=True))
        for function in functions:
            if callable(forget := getattr(function, "cache_clear", None)):
                forget()
        random.setstate(drawn)
        np.random.set_state(numbers)


def holders_of(holders: Iterable[Any]) -> Iterator[Any]:
    """Each, and what it is made of: the object of a bound method, the function and arguments of a partial one, hooks, what functions close over."""
    seen: set[int] = set()
    left = list(holders)
    while left:
        one = left.pop(0)
        if id(one) in seen or isinstance(one, type | types.ModuleType) or one is None:
            continue
        seen.add(id(one))
        yield one
        if isinstance(one, types.MethodType):
            left += [one.__self__, one.__func__]
        elif isinstance(one, functools.partial):
            left += [one.func, *one.args, *one.keywords.values()]
        elif isinstance(one, types.FunctionType):
            left += [c.cell_contents for c in one.__closure__ or () if not _is_empty(c) and callable(c.cell_contents)]
        elif isinstance(one, nn.Module):
            held = [
                v
                for m in one.modules()
                for k, v in vars(m).items()
                if k in OWN and "hooks" in k and isinstance(v, dict)
            ]
            left += [hook for hooks in held for hook in hooks.values()]


def _functions(own: dict[str, Any]) -> Iterator[Any]:
    """What an object calls that closes over something, or remembers what it was called with: attributes, and the hooks of a module."""
    for value in own.values():
        for one in value.values() if isinstance(value, dict) else (value,):
            if isinstance(one, types.FunctionType) or hasattr(one, "cache_clear"):
                yield one


class _Drawn:
    """A generator and the state that it had."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator, self.state = generator, generator.get_state()


class _Held:
    """A dictionary or set of a module's own, and what was in it."""

    def __init__(self, place: Any) -> None:
        self.place, self.inside = place, place.copy()

    def again(self) -> Any:
        """The same one, with the same in it."""
        self.place.clear()
        self.place.update(self.inside)
        return self.place


def _kept(name: str, value: Any, memo: dict[int, Any]) -> Any:
    if name in OWN and isinstance(value, dict | set):
        return _Held(value)
    try:
        return _copied(value, memo)
    except Exception as problem:
        raise BadValue(
            f"private: what the model or the loss keeps as “{name}” ({type(value).__name__}) cannot be copied ({first_line(problem)}), so nobody could "
            "put back what one sample left there for the next. Keep it outside of them."
        ) from problem


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    if isinstance(value, FIXED):
        return value
    if id(value) not in memo:
        memo[id(value)] = _copy(value, memo)
    return memo[id(value)]


def _copy(value: Any, memo: dict[int, Any]) -> Any:
    if isinstance(value, torch.Generator):
        return _Drawn(value)
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict | list | tuple):
        found, form = tree_flatten(value)
        return tree_unflatten([_copied(v, memo) if v is not value else copy.deepcopy(v, memo) for v in found], form)
    return copy.deepcopy(value, memo)


def _again(value: Any) -> Any:
    if isinstance(value, _Held):
        return value.again()
    if isinstance(value, _Drawn):
        value.generator.set_state(value.state)
        return value.generator
    if isinstance(value, dict | list | tuple) and any(isinstance(v, _Drawn) for v in tree_leaves(value)):
        return tree_map(lambda v: _again(v) if isinstance(v, _Drawn) else v, value)
    return value


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Zeros of both signs are equal, and not the same."""
    signs = one.is_floating_point()
    return torch.equal(one, other) and (not signs or torch.equal(one.signbit(), other.signbit()))


def _is_empty(cell: Any) -> bool:
    try:
        return cell.cell_contents is cell
    except ValueError:
        return True


def seed_all(seed: int) -> None:
    """One sample's own random numbers, of torch, Python and numpy; inside of what puts them back."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def seed_others() -> None:
    """Python's and numpy's random numbers, by torch's."""
    drawn = int(torch.randint(2**32, ()))
    random.seed(drawn)
    np.random.seed(drawn)


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Random numbers from a seed; afterwards, those that would have come."""
    drawn, numbers = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            seed_all(seed)
            yield
    finally:
        random.setstate(drawn)
        np.random.set_state(numbers)
