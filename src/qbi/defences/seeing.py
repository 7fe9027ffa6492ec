"""Sees every backward pass to its end: which modules were called on what, and what came back to each.

When a backward pass ends, and before anything else can look at `.grad`, whoever listens gets the calls of that pass. So it does not
matter what moves the weights afterwards: an optimiser, several, a closure, a hand.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary, WeakMethod

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from qbi.calling import call_with
from qbi.defences.calls import Call, LeakRefused, Root, refuse_wrappers
from qbi.defences.layout import Place, Seen, batch_of, compare_runs, detached, leaves, random_parameters
from qbi.errors import BadValue, QbiError, first_line

Listener = Callable[[list[Call]], None]

Sizes = tuple[bool, tuple[tuple[int, ...], ...]]
"""Whether there is more than one sample, and how large one of them is."""


def weakly(method: Callable[..., None]) -> Callable[..., None]:
    """A bound method that does not keep its object alive: who listens holds the one who sees, and both hold gradients."""
    held = WeakMethod(method)

    def told(*given: Any) -> None:
        alive = held()
        if alive is None:
            raise LeakRefused("guard: it is gone, but its block is still open; keep the guard while it watches.")
        alive(*given)

    return told


class Seeing:
    """Stands between every call of a module and the module, as torch's own tracer does.

    Args:
        listener: told the calls of every backward pass that reached trainable weights, when it has ended.
        model: whose modules to watch; all of the process, if not given.
        batch_axis: the axis of the input along which samples lie.
        trial: whether to find out, by trial runs, which part of each tensor belongs to which sample.
    """

    def __init__(
        self, listener: Listener, model: nn.Module | None = None, *, batch_axis: int = 0, trial: bool = True
    ) -> None:
        self.listener, self.batch_axis, self.tries = listener, batch_axis, trial
        self.scale = 1.0
        """What the loss was multiplied with by a GradScaler."""
        self.within = None if model is None else set(model.modules())
        self.on_root: Callable[[Root], None] = lambda _root: None
        self.on_backward: Callable[[Root], None] = lambda _root: None
        self.on_exit: Callable[[], None] = lambda: None
        self._places: WeakKeyDictionary[nn.Module, dict[tuple[Sizes, tuple[str, int]], list[Place]]] = (
            WeakKeyDictionary()
        )
        self._quiet = False
        self._around: Call | None = None
        self._reached: list[Call] = []
        self._counts: dict[str, int] = {}
        self._queued = False
        self._trial: tuple[Root, Seen] | None = None

    def __enter__(self) -> "Seeing":
        before = self._unseen = nn.Module.__call__

        def seen(module: nn.Module, *given: Any, **named: Any) -> Any:
            return self._call(before, module, given, named)

        nn.Module.__call__ = seen  # type: ignore[method-assign]
        scaled = self._unscaled = torch.amp.GradScaler.scale

        def noted(scaler: torch.amp.GradScaler, outputs: Any) -> Any:
            self.scale = float(scaler.get_scale())
            return scaled(scaler, outputs)

        torch.amp.GradScaler.scale = noted  # type: ignore[method-assign, assignment]
        return self

    def __exit__(self, *_: object) -> None:
        nn.Module.__call__ = self._unseen  # type: ignore[method-assign]
        torch.amp.GradScaler.scale = self._unscaled  # type: ignore[method-assign]
        self.on_exit()
        self._reached = []

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Modules may be run again inside without being seen."""
        before, self._quiet = self._quiet, True
        try:
            yield
        finally:
            self._quiet = before

    def _call(self, run: Callable[..., Any], module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        around = self._around
        call = None if self._quiet else self._inner(around, module) if around else self._root(module, (given, named))
        if call is None:
            return run(module, *given, **named)
        self._around = call
        try:
            out = run(module, *given, **named)
        finally:
            self._around = around
        call.given = (given, named)
        if self._trial is not None:
            self._trial[1][call.key] = [*leaves(detached(call.given)), *leaves(detached(out))]
            return out
        if around is not None:
            around.parts.append(call)
        return self._watch(call, out)

    def _inner(self, around: Call, module: nn.Module) -> Call | None:
        name = around.root.names.get(module)
        if name is None:
            return None
        number = self._counts.get(name, 0)
        self._counts[name] = number + 1
        return Call(around.root, module, (name, number), None)

    def _root(self, module: nn.Module, given: Any) -> Call | None:
        if self.within is not None and module not in self.within:
            return None
        if self._trial is not None:
            return Call(self._trial[0], module, ("", 0), None)
        names = {m: name for name, m in module.named_modules() if any(p.requires_grad for p in m.parameters())}
        if not names or not torch.is_grad_enabled():
            return None
        refuse_wrappers(module)
        # What is called again inside a backward pass belongs to the call whose pass it is.
        fresh = not self._queued and not any(isinstance(v, Tensor) and v.grad_fn is not None for v in leaves(given))
        root = Root(module, detached(given), batch_of(given, self.batch_axis), fresh, names)
        if self.tries and root.samples == 0:
            raise LeakRefused(
                "guard: the model was called without a tensor that holds a batch; samples cannot be counted."
            )
        if self.tries and (self._sizes(root), ("", 0)) not in self._places_of(root):
            self.look(root)
        self._counts = {"": 1}
        self.on_root(root)
        return Call(root, module, ("", 0), None)

    def _watch(self, call: Call, out: Any) -> Any:
        """Keep what comes back to each output."""
        for number, value in enumerate(leaves(out)):
            if isinstance(value, Tensor) and value.requires_grad:
                value.register_hook(lambda g, number=number: self._came_back(call, number, g))
        call.given = detached(call.given)
        return out

    def _came_back(self, call: Call, number: int, gradient: Tensor) -> None:
        if not self._queued:
            self._queued = True
            Variable._execution_engine.queue_callback(self._finished)  # type: ignore[attr-defined]
        if not call.gradients:
            if not any(call.root is other.root for other in self._reached):
                # The output of a root is reached before any of its weights is.
                self.on_backward(call.root)
            self._reached.append(call)
        gradient = gradient.detach()
        before = call.gradients.get(number)
        call.gradients[number] = gradient if before is None else before + gradient

    def _finished(self) -> None:
        self._queued = False
        calls, self._reached = self._reached, []
        try:
            with self.quiet():
                self.listener(calls)
        finally:
            self.scale = 1.0
            for call in calls:
                call.gradients = {}

    def _sizes(self, root: Root) -> Sizes:
        """What a trial run holds for: with one token, or one window, of each sample, order shows nothing."""
        shapes = [tuple(v.shape) for v in leaves(root.given) if isinstance(v, Tensor)]
        axis = self.batch_axis
        return root.samples > 1, tuple(s[:axis] + s[axis + 1 :] for s in shapes)

    def _places_of(self, root: Root) -> dict[tuple[Sizes, tuple[str, int]], list[Place]]:
        return self._places.setdefault(root.module, {})

    def places(self, call: Call) -> list[Place]:
        """Where the samples stand in what went into a call and came out of it; a trial run shows it the first time."""
        if call.places:
            return call.places
        known, key = self._places_of(call.root), (self._sizes(call.root), call.key)
        if key not in known:
            self.look(call.root)
        if key not in known:
            raise BadValue(f"{call.name} was not called in a trial run on the same samples.")
        return known[key]

    def look_ahead(self, module: nn.Module, given: Any) -> None:
        """Find out on a few samples where samples stand in a model's tensors, so that a large batch need not be run for it."""
        names = {m: name for name, m in module.named_modules() if any(p.requires_grad for p in m.parameters())}
        self.look(Root(module, detached(given), batch_of(given, self.batch_axis), True, names))

    def look(self, root: Root) -> None:
        """Run a model with random weights twice, one sample changed, and note where samples stand."""

        quiet = self._quiet

        def run(given: Any) -> Seen:
            seen: Seen = {}
            kept, self._trial, self._quiet, self._around = self._around, (root, seen), False, None
            self._counts = {"": 1}
            try:
                with torch.random.fork_rng(devices=_devices(root.module)), torch.no_grad():
                    buffers = {n: b.clone() for n, b in root.module.named_buffers()}
                    call_with(root.module, {**weights, **buffers}, given[0], given[1])
                return seen
            except QbiError:
                raise
            except Exception as problem:
                raise BadValue(f"a trial run of the model failed ({first_line(problem)}).") from problem
            finally:
                self._trial, self._quiet, self._around = None, quiet, kept

        with torch.random.fork_rng(devices=_devices(root.module)):
            weights = random_parameters((n, p.detach()) for n, p in root.module.named_parameters())
            found = compare_runs(run, root.given, root.samples, self.batch_axis)
        self._places_of(root).update({(self._sizes(root), key): places for key, places in found.items()})


def _devices(module: nn.Module) -> list[torch.device]:
    return list({p.device for p in module.parameters() if p.device.type == "cuda"})
