"""A network from features to images, learned on images that everybody may have."""

import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qbi.pictures.prefix import Prefix, features_of
from qbi.randomness import derive_seed

BATCH, BATCH_ON_GPU = 128, 256
RATE = 2e-3


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
    """Features to images of one shape: a linear layer to a small map, then blocks, twice as large each time.

    Args:
        features: how many values arrive at the layer.
        shape: channels, height and width of the images.
        width: channels inside; fewer are faster.
    """

    centre: Tensor
    spread: Tensor

    def __init__(self, features: int, shape: tuple[int, int, int], width: int = 64) -> None:
        super().__init__()
        self.shape = shape
        channels, height, wide = shape
        doublings = 0
        while doublings < 3 and height % 2 ** (doublings + 1) == 0 and wide % 2 ** (doublings + 1) == 0:
            doublings += 1
        self.start = (2 * width, height >> doublings, wide >> doublings)
        self.into = nn.Linear(features, 2 * width * self.start[1] * self.start[2])
        stages: list[nn.Module] = [ResidualBlock(2 * width)]
        for step in range(doublings):
            inside = 2 * width if step == 0 else width
            stages += [nn.Upsample(scale_factor=2), nn.Conv2d(inside, width, 3, padding=1), ResidualBlock(width)]
        last = width if doublings else 2 * width
        self.body = nn.Sequential(*stages, nn.GroupNorm(8, last), nn.SiLU(), nn.Conv2d(last, channels, 3, padding=1))
        self.register_buffer("centre", torch.zeros(features))
        self.register_buffer("spread", torch.ones(features))

    def forward(self, features: Tensor) -> Tensor:
        """Images, in the units of those it was learned on."""
        small = self.into((features - self.centre) / self.spread).unflatten(1, self.start)
        out: Tensor = self.body(small)
        return out


def learn_decoder(
    prefix: Prefix,
    images: Tensor,
    *,
    seconds: float,
    width: int = 64,
    seed: int = 0,
    steps: int | None = None,
    progress: Callable[[float], None] | None = None,
) -> Decoder:
    """Learn to turn features back into images like these, mirrored ones among them.

    Args:
        prefix: from images to features.
        images: (n, c, h, w), as the model takes them, on the device to learn on; none of the client's.
        seconds: how long, where no number of steps is given.
        width: of the decoder.
        seed: of its weights and batches.
        steps: how many, for results that can be repeated.
        progress: told the part that is done.
    """
    known = features_of(prefix, images[:4096])
    shape = (int(images.shape[1]), int(images.shape[2]), int(images.shape[3]))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, "decoder") % 2**31)
        decoder = Decoder(known.shape[1], shape, width)
    decoder.to(images.device)
    decoder.body.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    decoder.centre.copy_(known.mean(0))
    decoder.spread.copy_(known.std(0).clamp_min(1e-6 * float(known.abs().max()) + 1e-12))
    optimiser = torch.optim.AdamW(decoder.parameters(), lr=RATE, weight_decay=1e-4)
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
    return decoder.eval()


def _until(seconds: float, steps: int | None) -> Iterator[float]:
    """The part that is done, from 0 to 1."""
    if steps is not None:
        yield from (step / steps for step in range(steps))
        return
    start = time.perf_counter()
    while (part := (time.perf_counter() - start) / seconds) < 1:
        yield part
