"""Finds the uses of parameters where they happen: at the call of a torch operation, whoever wrote the module.

Inside `torch.func.vmap` over samples, every operation that a tracked parameter takes part in is either *recognised*, and then its input
and the place of its output in the autograd graph are kept, or its parameters are *unknown*, by name. Nothing is lost in silence.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch._C._functorch import get_unwrapped, is_batchedtensor, maybe_get_bdim, maybe_get_level
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from qbi.errors import BadValue
from qbi.uses.kinds import Kind

PLAIN = (Tensor, nn.Parameter, nn.Buffer)
"""Kinds of tensors that do what torch does."""


@dataclass(frozen=True)
class Use:
    """One operation with a tracked parameter, over all samples of a batch; samples come first in every tensor."""

    kind: Kind
    weight: str | None
    bias: str | None
    given: Tensor
    """What went in: (samples, …)."""
    out: Tensor = field(repr=False)
    """The output as it stands in the autograd graph; its gradient is the backprop."""
    axis: int = 0
    """Where samples stand in `out`."""
    versions: tuple[int, int] = (0, 0)

    def is_intact(self) -> bool:
        """Whether nothing wrote over the input or the output after the operation."""
        return (self.given._version, self.out._version) == self.versions

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters whose gradients this use explains."""
        return tuple(n for n in (self.weight, self.bias) if n is not None)


class Capture(TorchFunctionMode):
    """Watches torch operations inside a function that is mapped over samples.

    Args:
        tracked: parameters by the identity of the very tensors that the function works with.
        anchor: a scalar that requires a gradient, so that every output stands in the graph.
        each: a zero for each sample, mapped over: makes values that are the same for all samples their own.
        copies: keep copies of inputs and hand out copies of outputs, where later operations write over them.
    """

    def __init__(self, tracked: Mapping[int, str], anchor: Tensor, each: Tensor, *, copies: bool) -> None:
        super().__init__()
        self.tracked, self.anchor, self.each, self.copies = tracked, anchor, each, copies
        self.level = maybe_get_level(each)
        self.uses: list[Use] = []
        self.unknown: set[str] = set()

    def _refuse_seeing_all(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Modes and kinds of tensors that run below the mapping would see all samples in one; then samples go one by one."""
        if _get_current_dispatch_mode_stack():
            raise TypeError("a dispatch mode is on, which would see all samples at once")
        other = next((v for v in flat((args, kwargs)) if isinstance(v, Tensor) and type(v) not in PLAIN), None)
        if other is not None:
            raise TypeError(f"a {type(other).__name__} takes part, which would see all samples at once")

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation; remember it if a tracked parameter takes part."""
        from qbi.uses.operations import MAPPED_IN_PARTS, OPERATIONS

        kwargs = kwargs or {}
        self._refuse_seeing_all(args, kwargs)
        names = {self.tracked[id(v)] for v in flat((args, kwargs)) if id(v) in self.tracked}
        if not names and func not in MAPPED_IN_PARTS:
            return func(*args, **kwargs)
        known = OPERATIONS.get(func)
        if known is not None:
            before = len(self.uses)
            out = known(self, *args, **kwargs)
            if out is not NotImplemented:
                explained = {n for use in self.uses[before:] for n in use.names}
                self.unknown |= names - explained
                return out
        out = func(*args, **kwargs)
        # What returns nothing may have written the parameter somewhere.
        if out is None or any(isinstance(v, Tensor) for v in flat((out,))):
            self.unknown |= names
        return out

    def refuse(self, sentence: str) -> None:
        """Nothing of this kind is trained in private."""
        raise BadValue(f"private: {sentence}")

    def name_of(self, tensor: Tensor | None) -> str | None:
        """The name of a tracked parameter."""
        return None if tensor is None else self.tracked.get(id(tensor))

    def use(self, kind: Kind, given: Tensor, out: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """Remember a use; the output to go on with."""
        if self.name_of(weight) is None and self.name_of(bias) is None:
            return out
        if (again := self.name_of(given)) is not None:
            # A parameter that also goes in: this use says only half of it.
            self.unknown.add(again)
        if not is_batchedtensor(out):
            out = out + self.each.to(out.dtype)
        if maybe_get_level(out) != self.level or (is_batchedtensor(given) and maybe_get_level(given) != self.level):
            # Inside a transformation of the model's own there is no telling whose values these are.
            self.unknown |= {n for n in (self.name_of(weight), self.name_of(bias)) if n}
            return out
        if not get_unwrapped(out).requires_grad:
            out = out + self.anchor.to(out.dtype)
        samples = get_unwrapped(self.each).shape[0]
        came = _samples_first(given.detach(), samples)
        if self.copies:
            came = came.clone()
        held, axis = get_unwrapped(out), maybe_get_bdim(out)
        self.uses.append(
            Use(kind, self.name_of(weight), self.name_of(bias), came, held, axis, (came._version, held._version))
        )
        return out.clone() if self.copies else out


def _samples_first(value: Tensor, samples: int) -> Tensor:
    if not is_batchedtensor(value):
        return value.expand(samples, *value.shape)
    return get_unwrapped(value).movedim(maybe_get_bdim(value), 0)


def flat(values: Any) -> Iterator[Any]:
    """Everything in nested tuples, lists and dictionaries."""
    for value in values.values() if isinstance(values, dict) else values:
        if isinstance(value, tuple | list | dict):
            yield from flat(value)
        else:
            yield value
