"""Tokens at places, and what came back to each of them.

The vectors that arrived at the first layer are known once the tokens are, so its gradient G = Σ_u δ_u x_uᵀ is solved for what came back to
each. Tokens of one sample answer to the same attention and the same loss: their backprops point the same way.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from qbi.sentences.arrivals import Arrivals, MapGroup
from qbi.sentences.candidates import AT_ONCE, Found


@dataclass(frozen=True)
class TokenPlaces:
    """Tokens at positions."""

    token: Int[Tensor, " u"]
    place: Int[Tensor, " u"]

    def at(self, position: int) -> Int[Tensor, " k"]:
        """Which of them stand there."""
        return (self.place == position).nonzero()[:, 0]


def likely_places_of(found: Found, positions: int, most: int, *, cut: bool = True) -> TokenPlaces:
    """The likeliest tokens of each position, so many at the most; of all of them, those before the widest gap of distances."""
    tokens, places, far = [], [], []
    for position in range(positions):
        able = found.allowed[:, position].nonzero()[:, 0]
        own = found.likely[able, position]
        order = own.argsort()[:most]
        tokens.append(found.tokens[able[order]])
        far.append(own[order])
        places.append(torch.full_like(tokens[-1], position))
    token, place, distance = torch.cat(tokens), torch.cat(places), torch.cat(far)
    ranked = distance.sort().values.clamp_min(1e-12).log()
    few = min(max(positions, found.least), len(ranked) - 1)
    gaps = ranked.diff()[few - 1 :]
    limit = torch.inf
    if len(gaps) and cut:
        widest = int(gaps.argmax())
        if float(gaps[widest]) > 10 * float(gaps.mean()):
            limit = float(ranked[few - 1 + widest].exp())
    # The nearest of each position stays, however far it is.
    nearest = torch.cat([torch.arange(len(own), device=token.device) == 0 for own in tokens])
    keep = (distance <= limit) | nearest
    return TokenPlaces(token[keep], place[keep])


def backprops_of(
    arrivals: Arrivals, group: MapGroup, pairs: TokenPlaces, rows: Float[Tensor, "n d"], positions: int
) -> Float[Tensor, "u n"]:
    """What came back to each token, of unit length: G = Σ_u δ_u x_uᵀ solved for δ."""
    parts = []
    for token, place in zip(
        pairs.token.split(AT_ONCE // positions), pairs.place.split(AT_ONCE // positions), strict=True
    ):
        arrived = arrivals.at(group, token[:, None].expand(-1, positions))
        parts.append(arrived[torch.arange(len(token), device=token.device), place])
    solved = torch.linalg.pinv(torch.cat(parts).double(), rtol=1e-6).T @ rows.double().T
    unit: Tensor = solved / solved.norm(dim=1, keepdim=True).clamp_min(1e-300)
    return unit.float()
