"""Which weights of a model are those of linear layers, by what they meet; told without this package."""

import copy
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from by_hand import cut

LINEAR = {
    "linear",
    "matmul",
    "__matmul__",
    "mm",
    "addmm",
    "bmm",
    "einsum",
    "multi_head_attention_forward",
    "_weight_norm",
}
LINEAR |= {f"conv{sides}d" for sides in (1, 2, 3)} | {f"conv_transpose{sides}d" for sides in (1, 2, 3)}
LINEAR |= {"grouped_mm", "_grouped_mm"}


VIEWS = (Tensor.transpose, Tensor.t, Tensor.__getitem__, Tensor.permute, Tensor.reshape, Tensor.view)


class Told(TorchFunctionMode):
    """The names of the operations that each parameter goes into."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.names = {id(p): n for n, p in model.named_parameters()}
        self.used: dict[str, set[str]] = {}
        self.kept: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in (*args, *(kwargs or {}).values()):
            if id(value) in self.names:
                self.used.setdefault(self.names[id(value)], set()).add(getattr(func, "__name__", ""))
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and args and id(args[0]) in self.names and func in VIEWS:
            self.names[id(out)] = self.names[id(args[0])]
            self.kept.append(out)
        return out


def linear_weights(model: nn.Module, data: Any, *, own: bool = False) -> list[str]:
    """Trained weights of linear layers: those that meet something in a product, whatever module they stand in."""
    inputs, _ = cut(data, slice(0, 4), own)
    model = copy.deepcopy(model).train()
    with Told(model) as told:
        _ = model(**inputs) if isinstance(inputs, dict) else model(*inputs)
    parameters = dict(model.named_parameters())
    return [
        n for n, said in told.used.items() if said & LINEAR and parameters[n].dim() > 1 and parameters[n].requires_grad
    ]
