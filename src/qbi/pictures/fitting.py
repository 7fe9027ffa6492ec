"""Pictures whose features are the ones that were read: the decoder's own, moved along the directions in which it is known to err.

The decoder's error is taken for Gaussian, with the spread that it has on images set apart. The layers before the layer are known, so is how
features follow when a picture moves; with rectifiers and pooling that is linear in pieces. So a few steps of Gauss and Newton give the
likeliest picture: one linear system each, in as many unknowns as there are directions.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from qbi.pictures.prefix import Prefix

if TYPE_CHECKING:
    from qbi.pictures.decoder import Decoder

STEPS = 4
DAMPING = 0.6
"""The part of a step that is taken, after the first: pieces change on the way."""
DOUBTS, LEAST_DOUBT = (0.3, 1.0, 3.0, 10.0, torch.inf), 1e-5
"""What is put down to pieces that change: so many times how far off the features of the decoder's pictures are, squared, and at least a part
of the mean feature's variance, since one that was silent on every image may speak now; without end, where the decoder's own pictures are best left alone. Which of them a
decoder takes is found on images that it was not learned on."""
TRIED_ON, FEW_STEPS, FEW_DIRECTIONS = 16, 2, 256
"""Images that choose it, and a fit that takes a fraction of a second for each."""
AT_ONCE = 1024
"""Images that pass the layers at a time."""


def fit_pictures(
    prefix: Prefix,
    features: Tensor,
    decoder: "Decoder",
    *,
    low: Tensor,
    high: Tensor,
    steps: int = STEPS,
    directions: int | None = None,
) -> Tensor:
    """Start from what the decoder makes of features, and move it until its own features are those.

    Memory: for one picture at a time, directions × features and directions² numbers.

    Args:
        prefix: from images to features.
        features: (k, values), as they were read.
        decoder: where to start, and how it errs.
        low, high: the range of the images, broadcast over them.
        steps: of Gauss and Newton.
        directions: how many of the decoder's are followed, those in which it errs most; all of them unless said. Time grows with them.
    """
    with torch.no_grad():
        start: Tensor = decoder(features, prefix).float().clamp(low, high)
        if bool(decoder.doubt.isinf()):
            return start
        unit = torch.eye(len(decoder.directions), device=start.device)
        moves = decoder.errors(unit[:directions])
        certain = 1 / (decoder.doubt * decoder.strays.square() + LEAST_DOUBT * decoder.spread.square().mean())
        each = zip(features[:, None], start[:, None], strict=True)
        return torch.cat([_moved(prefix, f, s, moves, certain, low, high, steps) for f, s in each])


def best_doubt(prefix: Prefix, images: Tensor, features: Tensor, decoder: "Decoder") -> Tensor:
    """The doubt with which pictures of these images come nearest to them."""
    low, high = (getattr(images, most)((0, 2, 3), keepdim=True) for most in ("amin", "amax"))
    tried = []
    for doubt in DOUBTS:
        decoder.doubt.fill_(doubt)
        made = fit_pictures(
            prefix, features[:TRIED_ON], decoder, low=low, high=high, steps=FEW_STEPS, directions=FEW_DIRECTIONS
        )
        tried.append((float((made - images[:TRIED_ON]).square().mean()), doubt))
    return torch.tensor(min(tried)[1], device=images.device)


def _moved(
    prefix: Prefix, wanted: Tensor, start: Tensor, moves: Tensor, certain: Tensor, low: Tensor, high: Tensor, steps: int
) -> Tensor:
    """One picture; the likeliest of those on the way."""
    unit = torch.eye(len(moves), device=start.device)
    along = start.new_zeros(len(moves))
    found = best = start
    least = torch.inf
    for step in range(steps + 1):
        missing = (wanted - prefix(found))[0]
        unlikely = float(along.square().sum() + (missing.square() * certain).sum())
        if unlikely < least:
            best, least = found, unlikely
        if step == steps:
            break
        slopes = _slopes(prefix, found, moves)
        weighed = slopes * certain
        to = torch.linalg.solve(unit + weighed @ slopes.T, weighed @ (missing + along @ slopes))
        along = along + (DAMPING if step else 1.0) * (to - along)
        found = (start + torch.tensordot(along, moves, 1)).clamp(low, high)
    return best


def _slopes(prefix: Prefix, picture: Tensor, moves: Tensor) -> Tensor:
    """(directions, features): how features change along each, from a spread before to a spread behind; no layer must have a derivative."""
    return torch.cat([(prefix(picture + part) - prefix(picture - part)) / 2 for part in moves.split(AT_ONCE)])
