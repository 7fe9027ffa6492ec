"""One local step of a federated client: a forward and a backward pass on its private batch."""

from collections.abc import Callable, Collection

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qbi.calling import as_client, call_with
from qbi.errors import BadValue
from qbi.records import Update

Loss = Callable[[Tensor, Tensor], Tensor]


def default_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy over classes, or the binary form where the model has a single output."""
    if outputs.dim() == 2 and outputs.shape[1] == 1:
        return F.binary_cross_entropy_with_logits(outputs[:, 0], targets.to(outputs.dtype))
    return F.cross_entropy(outputs, targets)


def client_batch(inputs: Tensor | tuple[Tensor, ...]) -> int:
    """How many samples a batch holds, of one input or of several."""
    return len(inputs[0] if isinstance(inputs, tuple) else inputs)


def run_model(model: nn.Module, inputs: Tensor | tuple[Tensor, ...]) -> Tensor:
    """The model's output on one input or on several."""
    out = model(*inputs) if isinstance(inputs, tuple) else model(inputs)
    return prediction(out)


def prediction(out: object) -> Tensor:
    """Models that return more than a tensor have their prediction first."""
    if isinstance(out, dict):
        out = next(iter(out.values()), None)
    elif isinstance(out, tuple | list) and out:
        out = out[0]
    if not isinstance(out, Tensor):
        raise BadValue(f"client step: the model returns {type(out).__name__}; a tensor is needed for the loss.")
    return out


def client_step(
    model: nn.Module,
    inputs: Tensor | tuple[Tensor, ...],
    targets: Tensor,
    *,
    loss: Loss = default_loss,
    seed: int = 0,
    fixed: Collection[str] = (),
    as_it_is: bool = False,
) -> Update:
    """FedSGD: the gradients of the loss on one batch, in train mode, and the buffers after the pass.

    Args:
        model: what is trained; it is not changed, statistics that train mode updates in place are updated on copies.
        inputs: the batch, one tensor for each input of the model.
        targets: what the loss compares the outputs with.
        loss: a function of outputs and targets.
        seed: drives dropout and the like, apart from the global random state.
        fixed: trained parameters of which no gradient is taken all the same.
        as_it_is: leave every part of the model in the mode it is in.

    Returns:
        What the client sends.

    >>> model = nn.Linear(3, 2)
    >>> sorted(client_step(model, torch.rand(4, 3), torch.tensor([0, 1, 1, 0])).gradients)
    ['bias', 'weight']
    """
    count = client_batch(inputs)
    if count != len(targets):
        raise BadValue(f"client step: {count} inputs but {len(targets)} targets; they must agree.")
    if count == 0:
        raise BadValue("client step: the batch is empty; give at least one sample.")
    parameters = {
        name: p.detach().requires_grad_(p.requires_grad and name not in fixed) for name, p in model.named_parameters()
    }
    if not any(p.requires_grad for p in parameters.values()):
        raise BadValue("client step: no parameter is trained; set requires_grad on those that are.")
    given = inputs if isinstance(inputs, tuple) else (inputs,)
    with as_client(model, seed=seed, train=not as_it_is) as buffers:
        outputs = call_with(model, {**parameters, **buffers}, given)
        value = loss(prediction(outputs), targets)
        wanted = {name: p for name, p in parameters.items() if p.requires_grad}
        gradients = torch.autograd.grad(value, list(wanted.values()), allow_unused=True)
    if not bool(torch.isfinite(value)):
        raise BadValue(f"client step: the loss is {value.item()}; check the data and the model for NaN or overflow.")
    named = {n: g for n, g in zip(wanted, gradients, strict=True) if g is not None}
    return Update(gradients=named, buffers=buffers, batch_size=count, loss=float(value.detach()))
