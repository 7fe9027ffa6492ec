"""Learning a decoder's stages, all at once and each on its own picture: by Adam, on images that are varied anew each time they are drawn."""

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from qbi.cuda_graphs import replaying
from qbi.pictures.prefix import Prefix
from qbi.randomness import derive_seed

if TYPE_CHECKING:
    from qbi.pictures.decoder import Decoder

BATCH, BATCH_ON_GPU = 32, 256
RATE = 1e-3
SHIFTED, LIGHTER = 1 / 8, 0.1
"""How far an image is moved, as a part of its side, and how far its light and colours are changed, in spreads of the images."""
LEAST = 1e-3
"""Errors far below this part of the images' variance are not made smaller: the mean of their logarithms is."""


def learn_stages(
    decoder: "Decoder",
    prefix: Prefix,
    images: Tensor,
    *,
    seconds: float,
    steps: int | None,
    seed: int,
    progress: Callable[[float], None] | None,
) -> None:
    """Move the stages' weights; recorded as one graph on a GPU."""
    on_gpu = images.device.type == "cuda"
    rate = torch.tensor(RATE, device=images.device)
    optimiser = torch.optim.AdamW(decoder.stages.parameters(), lr=rate, weight_decay=1e-4, capturable=on_gpu)
    draws = torch.Generator().manual_seed(derive_seed(seed, "decoder", "batches") % 2**31)
    size = min(len(images), BATCH_ON_GPU if on_gpu else BATCH)
    batch, variance = torch.zeros_like(images[:size]), float(images.var())

    def step() -> None:
        with torch.no_grad():
            given = prefix(batch)
        made = decoder.pictures(given, prefix)[1:]
        errors = [(picture - batch).square().mean((1, 2, 3)) for picture in made]
        loss = torch.stack([(error + LEAST * variance).log().mean() for error in errors]).sum()
        optimiser.zero_grad(set_to_none=False)
        loss.backward()
        optimiser.step()

    work = step
    for number, done in enumerate(_until(seconds, steps)):
        rate.fill_(RATE * min(1.0, 20 * done + 0.05) * (1 - 0.98 * done))
        batch.copy_(varied(images, size, draws))
        if on_gpu and number == 0:
            work = replaying(step)
        work()
        if progress is not None:
            progress(done)


def varied(images: Tensor, size: int, draws: torch.Generator) -> Tensor:
    """So many of the images, some mirrored, half of them moved, all a little lighter or darker; within the range of the images."""
    side = round(SHIFTED * min(images.shape[2:]))
    chosen, moved = torch.randint(len(images), (size,), generator=draws), torch.rand(2, size, generator=draws) < 0.5
    down, right = torch.randint(2 * side + 1, (2,), generator=draws).tolist()
    times = 1 + LIGHTER * torch.randn(size, 1, 1, 1, generator=draws)
    lighter = LIGHTER * torch.randn(size, images.shape[1], 1, 1, generator=draws)
    chosen, moved, times, lighter = (part.to(images.device) for part in (chosen, moved, times, lighter))
    out = images[chosen]
    out = torch.where(moved[0, :, None, None, None], out.flip(3), out)
    wide = F.pad(out, (side,) * 4, mode="reflect")
    shifted = wide[:, :, down : down + out.shape[2], right : right + out.shape[3]]
    out = torch.where(moved[1, :, None, None, None], shifted, out)
    low, high = images.amin((0, 2, 3), keepdim=True), images.amax((0, 2, 3), keepdim=True)
    return (out * times + lighter * images.std()).clamp(low, high)


def _until(seconds: float, steps: int | None) -> Iterator[float]:
    """The part that is done, from 0 to 1."""
    if steps is not None:
        yield from (step / steps for step in range(steps))
        return
    start = time.perf_counter()
    while (part := (time.perf_counter() - start) / seconds) < 1:
        yield part
