"""How far the gradient of a batch of images is from the one that a client sent."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from qbi.calling import as_client, call_with
from qbi.errors import BadValue, CannotRead
from qbi.federation.client import Loss, default_loss, prediction
from qbi.finite import is_finite


class GradientDistance:
    """One less the cosine of two gradients, over all parameters together: 0 where they point the same way.

    Args:
        model: as the server sent it; it is run as a client runs it, in train mode.
        sent: the client's gradients, by the names of the parameters.
        labels: of the batch, in any order; images are found in the order of their labels.
        loss: the client's.
        seed: of dropout and the like. The client's own draws are not known to a server.

    >>> model, x, y = nn.Linear(3, 2), torch.rand(4, 3), torch.tensor([0, 1, 1, 0])
    >>> from qbi.federation import client_step
    >>> sought = GradientDistance(model, client_step(model, x, y).gradients, y)
    >>> with sought.running():
    ...     float(sought(x).detach()) < 1e-6
    True
    """

    def __init__(
        self, model: nn.Module, sent: Mapping[str, Tensor], labels: Tensor, *, loss: Loss = default_loss, seed: int = 0
    ) -> None:
        trained = {n: p for n, p in model.named_parameters() if n in sent}
        if not trained:
            raise BadValue(
                "gradient matching: the gradients name no parameter of the model; give those of the model that was sent."
            )
        wrong = [n for n, p in trained.items() if p.shape != sent[n].shape]
        if wrong:
            raise BadValue(
                f"gradient matching: {wrong[0]} has shape {tuple(trained[wrong[0]].shape)} in the model and "
                f"{tuple(sent[wrong[0]].shape)} in the gradients; give those of the model that was sent."
            )
        if not all(is_finite(sent[n]) for n in trained):
            raise CannotRead("the gradient has NaN or infinite values; nothing can be matched with it.")
        self.model, self.labels, self.loss, self.seed = model, labels, loss, seed
        self.wanted = {n: sent[n].detach().to(p) for n, p in trained.items()}
        self.size = _norm(self.wanted.values())
        if not bool(self.size > 0):
            raise CannotRead("the gradient is zero everywhere; nothing can be matched with it.")
        self._own = {n: p.detach().requires_grad_(n in trained) for n, p in model.named_parameters()}
        self._buffers: dict[str, Tensor] | None = None

    @contextmanager
    def running(self) -> Iterator[None]:
        """The model runs as a client's inside; afterwards it is as it was. Attention is computed in a form that has second derivatives."""
        with as_client(self.model, seed=self.seed) as buffers, sdpa_kernel(SDPBackend.MATH), torch.enable_grad():
            self._buffers = buffers
            try:
                yield
            finally:
                self._buffers = None

    def __call__(self, images: Tensor) -> Tensor:
        """For a batch of images; differentiable by them."""
        assert self._buffers is not None, "inside running()"
        out = prediction(call_with(self.model, {**self._own, **self._buffers}, (images,)))
        lent = [self._own[n] for n in self.wanted]
        found = torch.autograd.grad(self.loss(out, self.labels), lent, create_graph=True, materialize_grads=True)
        shared = torch.stack([(f * w).sum() for f, w in zip(found, self.wanted.values(), strict=True)]).sum()
        return 1 - shared / (self.size * _norm(found)).clamp_min(torch.finfo(shared.dtype).tiny)


def _norm(parts: Iterable[Tensor]) -> Tensor:
    return torch.stack([part.square().sum() for part in parts]).sum().sqrt()
