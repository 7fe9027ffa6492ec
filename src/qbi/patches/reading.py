"""From two gradients to an image: one linear system, patch by patch.

What comes back to patch p of an image is δ_p; the position that is added there gets just that, and the patch embedding gets G = Σ δ_p x_pᵀ.
For one image the δ_p stand in the update, so the x_p are the solution of a linear system: with as many patches as the embedding is wide, or
fewer, the whole image, each patch in its place. Of several images the positions get the sums, and the system has no solution.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from qbi.errors import CannotRead
from qbi.federation import client_step
from qbi.federation.client import Loss, default_loss
from qbi.finite import is_finite
from qbi.patches.embedding import PatchEmbedding

SPARE = 8
"""Rows beyond the number of patches from which a system without a rest speaks for one image."""

ROUNDING = 1e-5
"""The part of the patch embedding's gradient that may be left unexplained by rounding."""

ALIKE = 1e-3
"""Relative distance up to which what an image sends is what an update holds."""

LOST = 1e-9
"""Singular values below this part of the largest are rounding of float32 gradients, and what they stand for is lost."""


@dataclass(frozen=True)
class ReadPatches:
    """One image, as the model takes it, and how much of the gradient it explains."""

    image: Tensor
    """Flattened; pixels that are in no patch are zero."""
    patches: Tensor
    """The same patch by patch."""
    rest: float
    """The part of the patch embedding's gradient that the image leaves unexplained."""
    fits: bool
    """Whether that is rounding, with rows to spare; then one image may explain the update, or the mean of several that send the same."""


def read_patches(embedding: PatchEmbedding, gradients: Mapping[str, Tensor], pixels: int) -> ReadPatches:
    """The image that explains an update best, if it was one.

    Args:
        embedding: where patches are cut, and what is added to them.
        gradients: of the update, by the names of the parameters.
        pixels: values of a flattened image.
    """
    weight, added = (gradients.get(name) for name in (f"{embedding.layer}.weight", embedding.positions))
    if weight is None or added is None:
        raise CannotRead(f"{embedding.layer}: its gradient, or that of {embedding.positions}, is not in the update.")
    if not is_finite(weight) or not is_finite(added):
        raise CannotRead(f"{embedding.layer}: its gradient has NaN or infinite values.")
    if embedding.patches > embedding.width:
        raise CannotRead(
            f"{embedding.layer}: {embedding.patches} patches an image and a width of {embedding.width}: more unknowns than equations."
        )
    back = added.detach().double().cpu().reshape(-1, embedding.width)[embedding.rows]
    wanted = weight.detach().double().cpu().flatten(1)
    size = float(wanted.norm())
    if not size > 0 or not float(back.norm()) > 0:
        raise CannotRead(f"{embedding.layer}: nothing comes back to its patches.")
    found = torch.linalg.lstsq(back.T, wanted, rcond=LOST, driver="gelsd")
    patches = found.solution
    if int(found.rank) < embedding.patches:
        raise CannotRead(
            f"{embedding.layer}: what comes back to its {embedding.patches} patches has {int(found.rank)} dimensions; some cannot be told apart."
        )
    rest = float((back.T @ patches - wanted).norm()) / size
    image = torch.zeros(pixels, dtype=torch.float64)
    image[embedding.places] = patches
    fits = rest < ROUNDING and embedding.width >= embedding.patches + SPARE
    return ReadPatches(image.float(), patches.float(), rest, fits)


def stands_alone(
    read: ReadPatches,
    model: nn.Module,
    embedding: PatchEmbedding,
    gradients: Mapping[str, Tensor],
    sample: Tensor,
    target: Tensor,
    *,
    loss: Loss = default_loss,
) -> bool:
    """Whether the image that was read, with this label, sends what the update holds, size included. It needs no truth.

    Args:
        read: the image.
        model: as it was sent.
        embedding: where patches are cut.
        gradients: of the update.
        sample: a batch of the shape of the client's own; its values do not matter.
        target: the label, as a batch of one.
        loss: the client's.
    """
    if not read.fits:
        return False
    many = read.image.to(sample).reshape(1, *sample.shape[1:]).expand(sample.shape)
    sent = client_step(model, many, target.expand(len(many)), loss=loss).gradients
    for name in (f"{embedding.layer}.weight", embedding.positions):
        one, held = sent[name].double() / len(many), gradients[name].double()
        if not float((one - held).norm()) <= ALIKE * float(held.norm()):
            return False
    return True
