"""What a model and a loss hold beside their weights, as it was when training began: whatever the owner's own passes leave there is undone.

An evaluation between two steps may move a running centre, fill a cache or write a buffer. The next step would be taken with it, and so with
samples that nobody paid for. Tensors, arrays and numbers are put back, in attributes and in lists, tuples, sets and dictionaries of them. Switches
(true or false), texts and other objects are the owner's.
"""

import logging
from collections import deque
from typing import Any

import numpy as np
from torch import Tensor, nn

from qbi.private.forgetting import OWN, holders_of, same_bits

log = logging.getLogger("qbi.private")


class Beginning:
    """An image of what these objects hold."""

    def __init__(self, *holders: Any) -> None:
        found = list(holders_of(holders))
        self.modules = [m for h in found if isinstance(h, nn.Module) for m in h.modules()]
        others = [h for h in found if not isinstance(h, nn.Module) and hasattr(h, "__dict__")]
        self.places = [
            (vars(h), {k: _image(v) for k, v in vars(h).items() if k not in OWN}) for h in (*self.modules, *others)
        ]
        self.tensors: list[tuple[dict[str, Any], str, Tensor | None]] = [
            (own, name, tensor)
            for m in self.modules
            for own in (m._buffers, m._parameters)
            for name, tensor in own.items()
        ]
        self.said: set[str] = set()

    def put_back(self) -> None:
        """Everything as it was; says once what was changed."""
        for own, name, tensor in self.tensors:
            if own.get(name) is not tensor:
                own[name] = tensor
        for place, image in self.places:
            for name in [k for k, v in place.items() if k not in OWN and k not in image and _carries(v)]:
                del place[name]
                self._say(name)
            for name, before in image.items():
                if (_carries(before) or _carries(place.get(name))) and not _same(place.get(name), before):
                    place[name] = _original(before)
                    self._say(name)

    def _say(self, name: str) -> None:
        if name not in self.said:
            self.said.add(name)
            log.warning(
                "“%s” was changed since the training began, and is put back: create Private anew to change it.", name
            )


class _Image:
    """Something that can be written into, and what was in it."""

    def __init__(self, value: Any, inside: Any) -> None:
        self.value, self.inside = value, inside


def _image(value: Any) -> Any:
    if isinstance(value, Tensor):
        return _Image(value, value.detach().clone())
    if isinstance(value, np.ndarray | set | bytearray):
        return _Image(value, value.copy())
    if isinstance(value, dict):
        return _Image(value, {k: _image(v) for k, v in value.items()})
    if isinstance(value, list | deque):
        return _Image(value, [_image(v) for v in value])
    return tuple(_image(v) for v in value) if type(value) is tuple else value


def _carries(value: Any) -> bool:
    if isinstance(value, _Image):
        return _carries(value.inside)
    if isinstance(value, dict):
        return any(_carries(v) for v in value.values())
    if isinstance(value, list | tuple | deque | set | frozenset):
        return any(_carries(v) for v in value)
    carriers = Tensor | np.ndarray | int | float | complex | bytes | bytearray
    return isinstance(value, carriers) and not isinstance(value, bool)


def _same(now: Any, before: Any) -> bool:
    if not isinstance(before, _Image):
        if type(now) is not type(before):
            return False
        if type(before) is tuple:
            return len(now) == len(before) and all(_same(a, b) for a, b in zip(now, before, strict=True))
        # As it is written: zeros of both signs are equal.
        return now is before or (isinstance(before, int | float | complex | bytes) and repr(now) == repr(before))
    inside = before.inside
    if now is not before.value:
        return False
    if isinstance(now, Tensor):
        return now.shape == inside.shape and now.dtype == inside.dtype and same_bits(now, inside)
    if isinstance(now, np.ndarray):
        return bool(now.shape == inside.shape and now.dtype == inside.dtype and now.tobytes() == inside.tobytes())
    if isinstance(now, dict):
        return now.keys() == inside.keys() and all(_same(now[k], inside[k]) for k in inside)
    if isinstance(now, list | deque):
        return len(now) == len(inside) and all(_same(a, b) for a, b in zip(now, inside, strict=True))
    return bool(now == inside)


def _original(before: Any) -> Any:
    """The very object, with what was in it."""
    if not isinstance(before, _Image):
        return tuple(_original(v) for v in before) if type(before) is tuple else before
    value, inside = before.value, before.inside
    if isinstance(value, Tensor):
        value.data = inside.clone()
    elif isinstance(value, np.ndarray):
        if value.shape != inside.shape:
            return np.array(inside)
        value[...] = inside
    elif isinstance(value, dict):
        items = {k: _original(v) for k, v in inside.items()}
        value.clear()
        value.update(items)
    elif isinstance(value, list | deque):
        items_in_order = [_original(v) for v in inside]
        value.clear()
        value.extend(items_in_order)
    elif isinstance(value, set):
        value.clear()
        value.update(inside)
    else:
        value[:] = inside
    return value
