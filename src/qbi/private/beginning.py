"""What a model and a loss hold beside their weights, as it was when training began: whatever the owner's own passes leave there is undone.

An evaluation between two steps may move a running centre, fill a cache or write a buffer. The next step would be taken with it, and so with
samples that nobody paid for. Tensors, arrays and numbers are put back, in attributes and in lists, tuples and dictionaries of them. Switches
(true or false), texts and other objects are the owner's.
"""

import logging
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from qbi.private.forgetting import OWN, holders_of

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
    """A tensor or an array, and what was in it."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.inside = value.detach().clone() if isinstance(value, Tensor) else value.copy()


def _image(value: Any) -> Any:
    if isinstance(value, Tensor | np.ndarray):
        return _Image(value)
    if type(value) in (list, tuple):
        return type(value)(_image(v) for v in value)
    return {k: _image(v) for k, v in value.items()} if type(value) is dict else value


def _carries(value: Any) -> bool:
    if type(value) in (list, tuple, set, frozenset):
        return any(_carries(v) for v in value)
    if type(value) is dict:
        return any(_carries(v) for v in value.values())
    return isinstance(value, _Image | Tensor | np.ndarray | int | float | complex | bytes) and not isinstance(
        value, bool
    )


def _same(now: Any, before: Any) -> bool:
    if isinstance(before, _Image):
        if now is not before.value or now.shape != before.inside.shape or now.dtype != before.inside.dtype:
            return False
        return bool(torch.equal(now, before.inside) if isinstance(now, Tensor) else np.array_equal(now, before.inside))
    if type(now) is not type(before):
        return False
    if isinstance(before, list | tuple):
        return len(now) == len(before) and all(_same(a, b) for a, b in zip(now, before, strict=True))
    if isinstance(before, dict):
        return now.keys() == before.keys() and all(_same(now[k], before[k]) for k in before)
    return now is before or (isinstance(before, int | float | complex | bytes) and now == before)


def _original(before: Any) -> Any:
    if isinstance(before, _Image):
        value = before.value
        if isinstance(value, Tensor):
            with torch.no_grad():
                value.data = before.inside.clone()
        elif value.shape == before.inside.shape:
            value[...] = before.inside
        else:
            return np.array(before.inside)
        return value
    if type(before) in (list, tuple):
        return type(before)(_original(v) for v in before)
    return {k: _original(v) for k, v in before.items()} if type(before) is dict else before
