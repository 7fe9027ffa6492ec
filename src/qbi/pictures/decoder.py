"""From features to images, learned on images that everybody may have: a linear decoder in closed form, and a network for what it leaves."""

import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qbi.pictures.fitting import best_doubt
from qbi.pictures.linear import MOST_DIRECTIONS, QUIETEST, columns, columns_of, principal, shrinking, smaller, solve
from qbi.pictures.prefix import Prefix, features_of
from qbi.randomness import derive_seed

AT_ONCE, BATCH, BATCH_ON_GPU = 2048, 128, 256
RATE = 2e-3
SET_APART, MOST_APART = 0.25, 6000
"""Images that nothing is learned on: they choose the linear decoder's strength, and show how the decoder errs."""


class ResidualBlock(nn.Module):
    """Two convolutions beside what goes in."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.run = nn.Sequential(
            nn.GroupNorm(8, width),
            nn.SiLU(),
            nn.Conv2d(width, width, 3, padding=1),
            nn.GroupNorm(8, width),
            nn.SiLU(),
            nn.Conv2d(width, width, 3, padding=1),
        )

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        out: Tensor = x + self.run(x)
        return out


class Decoder(nn.Module):
    """Features to images of one shape: linear, and what a network adds to that.

    The network is a linear layer to a small map, then blocks, twice as large each time.

    Args:
        features: how many values arrive at the layer.
        shape: channels, height and width of the images.
        width: channels inside the network; fewer are faster, none leaves the network out.
        directions: in which it is known to err.
    """

    centre: Tensor
    spread: Tensor
    weights: Tensor
    directions: Tensor
    strays: Tensor
    """How far off the features of its pictures are, from those that it was given."""
    doubt: Tensor
    """How much of that is put down to layers that are not linear."""

    def __init__(
        self, features: int, shape: tuple[int, int, int], width: int = 64, directions: int = MOST_DIRECTIONS
    ) -> None:
        super().__init__()
        self.shape, self.times = shape, shrinking(features, shape)
        channels, height, wide = shape
        values = channels * (height // self.times) * (wide // self.times)
        self.register_buffer("centre", torch.zeros(features))
        self.register_buffer("spread", torch.ones(features))
        self.register_buffer("strays", torch.ones(features))
        self.register_buffer("doubt", torch.ones(()))
        self.register_buffer("weights", torch.zeros(columns_of(features), values))
        self.register_buffer("directions", torch.zeros(directions, values))
        self.network = _network(features, shape, width) if width else None

    def forward(self, features: Tensor) -> Tensor:
        """Images, in the units of those it was learned on."""
        out = self._whole(self.columns(features) @ self.weights)
        return out if self.network is None else out + self.network((features - self.centre) / self.spread)

    def columns(self, features: Tensor) -> Tensor:
        """What the linear decoder looks at."""
        return columns(features, self.centre, self.spread)

    def errors(self, along: Tensor) -> Tensor:
        """(k, c, h, w): what is added to a picture by going so far along each direction."""
        return self._whole(along @ self.directions)

    def _whole(self, values: Tensor) -> Tensor:
        channels, height, width = self.shape
        small = values.unflatten(1, (channels, height // self.times, width // self.times))
        return small if self.times == 1 else F.interpolate(small, (height, width), mode="bilinear")


def _network(features: int, shape: tuple[int, int, int], width: int) -> nn.Sequential:
    channels, height, wide = shape
    doublings = 0
    while doublings < 3 and height % 2 ** (doublings + 1) == 0 and wide % 2 ** (doublings + 1) == 0:
        doublings += 1
    start = (2 * width, height >> doublings, wide >> doublings)
    stages: list[nn.Module] = [ResidualBlock(2 * width)]
    for step in range(doublings):
        inside = 2 * width if step == 0 else width
        stages += [nn.Upsample(scale_factor=2), nn.Conv2d(inside, width, 3, padding=1), ResidualBlock(width)]
    last = nn.Conv2d(width if doublings else 2 * width, channels, 3, padding=1)
    nn.init.zeros_(last.weight)
    nn.init.zeros_(last.bias)  # type: ignore[arg-type]
    into = nn.Linear(features, start[0] * start[1] * start[2])
    out = nn.Sequential(into, nn.Unflatten(1, start), *stages, nn.GroupNorm(8, last.in_channels), nn.SiLU(), last)
    return out.to(memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]


def learn_decoder(
    prefix: Prefix,
    images: Tensor,
    *,
    seconds: float = 0.0,
    width: int = 0,
    seed: int = 0,
    steps: int | None = None,
    progress: Callable[[float], None] | None = None,
) -> Decoder:
    """Learn to turn features back into images like these, mirrored ones among them.

    Args:
        prefix: from images to features.
        images: (n, c, h, w), as the model takes them, on the device to learn on; none of the client's.
        seconds: how long a network is learned, where no number of steps is given.
        width: of that network; 0 stays with the linear decoder, which takes seconds.
        seed: of the network's weights and batches.
        steps: how many, for results that can be repeated.
        progress: told the part that is done.
    """
    few = min(MOST_APART, int(SET_APART * len(images)))
    apart, rest = images[:few], images[few:]
    known = features_of(prefix, rest)
    shape = (int(images.shape[1]), int(images.shape[2]), int(images.shape[3]))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, "decoder") % 2**31)
        decoder = Decoder(known.shape[1], shape, width, directions=0)
    decoder.to(images.device)
    decoder.centre.copy_(known.mean(0))
    spread = known.std(0)
    decoder.spread.copy_(spread.clamp_min(QUIETEST * float(spread.mean()) + 1e-12))
    given, wanted = features_of(prefix, apart), smaller(apart, decoder.times)
    parts = (half for part in rest.split(AT_ONCE) for half in (part, part.flip(3)))
    fit = solve(
        ((decoder.columns(features_of(prefix, part)), smaller(part, decoder.times)) for part in parts),
        decoder.columns(given),
        wanted,
    )
    decoder.weights, decoder.directions = fit.weights, fit.directions
    if decoder.network is not None:
        _learn_network(decoder, prefix, rest, seconds, steps, seed, progress)
    with torch.no_grad():
        made = torch.cat([decoder(part).float() for part in given.split(512)])
    if decoder.network is not None:
        decoder.directions = principal(smaller(apart - made, decoder.times))
    decoder.strays.copy_((features_of(prefix, made) - given).square().mean(0).sqrt())
    decoder.doubt.copy_(best_doubt(prefix, apart, given, decoder))
    return decoder.eval()


def _learn_network(
    decoder: Decoder,
    prefix: Prefix,
    images: Tensor,
    seconds: float,
    steps: int | None,
    seed: int,
    progress: Callable[[float], None] | None,
) -> None:
    """By Adam, on what the linear decoder leaves."""
    assert decoder.network is not None
    optimiser = torch.optim.AdamW(decoder.network.parameters(), lr=RATE, weight_decay=1e-4)
    draws = torch.Generator().manual_seed(derive_seed(seed, "decoder", "batches") % 2**31)
    size = BATCH_ON_GPU if images.device.type == "cuda" else BATCH
    half = torch.autocast(images.device.type, torch.bfloat16, enabled=images.device.type == "cuda")
    for done in _until(seconds, steps):
        for group in optimiser.param_groups:
            group["lr"] = RATE * min(1.0, 20 * done + 0.05) * (1 - 0.98 * done)
        chosen = torch.randint(len(images), (size,), generator=draws)
        batch = images[chosen.to(images.device)]
        flipped = (torch.rand(size, generator=draws) < 0.5).to(images.device)
        batch = torch.where(flipped[:, None, None, None], batch.flip(3), batch)
        with torch.no_grad():
            given = prefix(batch)
        optimiser.zero_grad()
        with half:
            loss = F.mse_loss(decoder(given).float(), batch)
        loss.backward()
        optimiser.step()
        if progress is not None:
            progress(done)


def _until(seconds: float, steps: int | None) -> Iterator[float]:
    """The part that is done, from 0 to 1."""
    if steps is not None:
        yield from (step / steps for step in range(steps))
        return
    start = time.perf_counter()
    while (part := (time.perf_counter() - start) / seconds) < 1:
        yield part
