"""The layers before a layer, as a function of the input: the server sent them, so it knows them."""

import hashlib
from collections.abc import Callable

import torch
from torch import Tensor, nn

from qbi.calling import given_to
from qbi.errors import CannotRead


class Prefix:
    """From images to what arrives at a layer, one row for each; differentiable.

    Args:
        model: as the server sent it.
        layer: whose input is wanted.
        then: what is done to it, where it is read in other units.
    """

    def __init__(self, model: nn.Module, layer: str, then: Callable[[Tensor], Tensor] | None = None) -> None:
        mixing = nn.modules.batchnorm._BatchNorm
        if any(isinstance(m, mixing) and m.training for m in model.modules()):
            raise CannotRead(
                f"{layer}: batch norms before it make an image's features depend on the others of its batch."
            )
        self.model, self.layer, self.then = model, layer, then

    def __call__(self, images: Tensor) -> Tensor:
        """(k, values)."""
        found: Tensor | None = given_to(self.model, self.model.get_submodule(self.layer), images)
        if found is None:
            raise CannotRead(f"{self.layer}: the model's pass does not come to it.")
        if found.dim() != 2 or len(found) != len(images):
            raise CannotRead(f"{self.layer}: it sees positions one by one, not whole images.")
        return found if self.then is None else self.then(found)

    def fingerprint(self, images: Tensor) -> str:
        """Of the layer, of all weights, wherever they stand, and of what comes out for some images."""
        digest = hashlib.sha256(self.layer.encode())
        for name, value in (*self.model.state_dict().items(), ("features", features_of(self, images))):
            digest.update(name.encode())
            digest.update(value.detach().float().cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()[:20]


def features_of(prefix: Prefix, images: Tensor, *, at_once: int = 512) -> Tensor:
    """Of many images, without a graph."""
    with torch.no_grad():
        return torch.cat([prefix(part) for part in images.split(at_once)])
