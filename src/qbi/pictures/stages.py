"""A stage of a decoder: a small network that looks at a picture and at how its features are off, and says how the picture should change."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

MAPS = 3
"""Pictures that a stage looks at: the one so far, the way in which its features come nearer, and what the linear decoder makes of what they miss."""
SPOTS, MOST_SPOTTED = 32, 20_000_000
"""Values at each place of the coarsest map that come from all features together, and weights that this may take."""


class ResidualBlock(nn.Module):
    """Two convolutions beside what goes in; as it starts, it changes nothing."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(width, width, 3, padding=1) for _ in range(2))
        nn.init.zeros_(self.second.weight)
        nn.init.zeros_(self.second.bias)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        out: Tensor = x + self.second(F.relu(self.first(F.relu(x))))
        return out


class Stage(nn.Module):
    """Maps of the picture's size at three resolutions, and features where places are few; as it starts, it changes nothing.

    Args:
        features: how many values arrive at the layer; as many say what they miss.
        shape: channels, height and width of the maps.
        width: channels inside.
    """

    def __init__(self, features: int, shape: tuple[int, int, int], width: int) -> None:
        super().__init__()
        channels, height, wide = shape
        self.coarse = (-(-height // 4), -(-wide // 4))
        places = self.coarse[0] * self.coarse[1]
        spots = min(SPOTS, max(1, MOST_SPOTTED // (2 * features * places)))
        self.into, self.fine = nn.Conv2d(MAPS * channels, width, 3, padding=1), ResidualBlock(width)
        self.down, self.middle = nn.Conv2d(width, 2 * width, 3, 2, 1), ResidualBlock(2 * width)
        self.further, self.spread = nn.Conv2d(2 * width, 2 * width, 3, 2, 1), nn.Linear(2 * features, spots * places)
        self.meet = nn.Conv2d(2 * width + spots, 2 * width, 1)
        self.coarsest = nn.Sequential(ResidualBlock(2 * width), ResidualBlock(2 * width))
        self.up, self.back = nn.Conv2d(4 * width, 2 * width, 1), ResidualBlock(2 * width)
        self.further_up, self.last = nn.Conv2d(3 * width, width, 1), ResidualBlock(width)
        self.out = nn.Conv2d(width, channels, 3, padding=1)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)  # type: ignore[arg-type]

    def forward(self, maps: Tensor, values: Tensor) -> Tensor:
        """How the picture should change.

        Args:
            maps: (k, 3 · channels, height, width).
            values: (k, 2 · features), each of size one or so: the features that were read, and what the picture's are off by.
        """
        fine = self.fine(self.into(maps))
        middle = self.middle(self.down(fine))
        spots = self.spread(values).unflatten(1, (-1, *self.coarse))
        coarse = self.coarsest(self.meet(torch.cat([self.further(middle), spots], 1)))
        middle = self.back(self.up(torch.cat([middle, F.interpolate(coarse, middle.shape[2:])], 1)))
        fine = self.last(self.further_up(torch.cat([fine, F.interpolate(middle, fine.shape[2:])], 1)))
        out: Tensor = self.out(F.relu(fine))
        return out
