"""From features to images, learned on images that everybody may have: a linear decoder in closed form, and stages that mend its pictures."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qbi.pictures.fitting import best_doubt
from qbi.pictures.learning import learn_stages
from qbi.pictures.linear import MOST_DIRECTIONS, QUIETEST, columns, columns_of, principal, shrinking, smaller, solve
from qbi.pictures.prefix import Prefix, features_of
from qbi.pictures.stages import Stage
from qbi.randomness import derive_seed

AT_ONCE = 2048
SET_APART, MOST_APART = 0.25, 6000
"""Images that nothing is learned on: they choose the linear decoder's strength, and show how the decoder errs."""


class Decoder(nn.Module):
    """Features to images of one shape: linear, then stage by stage.

    A stage sees what the layers before the layer make of the picture so far, since the server knows them: what its features are off by, and in
    which way they would come nearer.

    Args:
        features: how many values arrive at the layer.
        shape: channels, height and width of the images.
        width: channels inside a stage; fewer are faster.
        stages: how many; none leaves it linear.
        directions: in which it is known to err.
    """

    centre: Tensor
    spread: Tensor
    low: Tensor
    high: Tensor
    weights: Tensor
    directions: Tensor
    strays: Tensor
    """How far off the features of its pictures are, from those that it was given."""
    doubt: Tensor
    """How much of that is put down to layers that are not linear."""

    def __init__(
        self,
        features: int,
        shape: tuple[int, int, int],
        width: int = 64,
        stages: int = 0,
        directions: int = MOST_DIRECTIONS,
    ) -> None:
        super().__init__()
        self.shape, self.times = shape, shrinking(features, shape)
        channels, height, wide = shape
        small = (channels, height // self.times, wide // self.times)
        values = small[0] * small[1] * small[2]
        self.register_buffer("centre", torch.zeros(features))
        self.register_buffer("spread", torch.ones(features))
        self.register_buffer("low", torch.zeros(channels, 1, 1))
        self.register_buffer("high", torch.ones(channels, 1, 1))
        self.register_buffer("strays", torch.ones(features))
        self.register_buffer("doubt", torch.ones(()))
        self.register_buffer("weights", torch.zeros(columns_of(features), values))
        self.register_buffer("directions", torch.zeros(directions, values))
        self.stages = nn.ModuleList(Stage(features, small, width) for _ in range(stages))
        self.stages.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, features: Tensor, prefix: Prefix) -> Tensor:
        """Images, in the units of those it was learned on."""
        return self.pictures(features, prefix)[-1]

    def pictures(self, features: Tensor, prefix: Prefix) -> list[Tensor]:
        """The linear decoder's, then each stage's; stages learn from their own picture alone."""
        made = [self._whole(self.columns(features) @ self.weights)]
        half = torch.autocast(features.device.type, torch.bfloat16, enabled=features.device.type == "cuda")
        for stage in self.stages:
            before = made[-1].detach().clamp(self.low, self.high)
            missing, way = self._off(before, features, prefix)
            linear = self._whole(missing @ self.weights[: missing.shape[1]])
            maps = torch.cat([before, way, linear], 1)
            maps = F.avg_pool2d(maps, self.times) if self.times > 1 else maps
            with half:
                change = stage(
                    maps.to(memory_format=torch.channels_last),
                    torch.cat([(features - self.centre) / self.spread, missing], 1),
                )
            made.append(before + self._whole(change.float().flatten(1)))
        return made

    def columns(self, features: Tensor) -> Tensor:
        """What the linear decoder looks at."""
        return columns(features, self.centre, self.spread)

    def errors(self, along: Tensor) -> Tensor:
        """(k, c, h, w): what is added to a picture by going so far along each direction."""
        return self._whole(along @ self.directions)

    def _off(self, pictures: Tensor, features: Tensor, prefix: Prefix) -> tuple[Tensor, Tensor]:
        """What the features of pictures miss, and the way for each picture in which they come nearer, at size one."""
        with torch.enable_grad():
            moved = pictures.detach().requires_grad_()
            missing = (features - prefix(moved)) / self.spread
            (way,) = torch.autograd.grad(missing.square().sum(), moved)
        return missing.detach(), -way / way.square().mean((1, 2, 3), keepdim=True).sqrt().clamp_min(1e-12)

    def _whole(self, values: Tensor) -> Tensor:
        channels, height, width = self.shape
        small = values.unflatten(1, (channels, height // self.times, width // self.times))
        return small if self.times == 1 else F.interpolate(small, (height, width), mode="bilinear")


def learn_decoder(
    prefix: Prefix,
    images: Tensor,
    *,
    seconds: float = 0.0,
    width: int = 0,
    stages: int = 0,
    seed: int = 0,
    steps: int | None = None,
    progress: Callable[[float], None] | None = None,
) -> Decoder:
    """Learn to turn features back into images like these, mirrored ones among them.

    Args:
        prefix: from images to features.
        images: (n, c, h, w), as the model takes them, on the device to learn on; none of the client's.
        seconds: how long stages are learned, where no number of steps is given.
        width: of the stages.
        stages: how many; 0 stays with the linear decoder, which takes seconds.
        seed: of the stages' weights and batches.
        steps: how many, for results that can be repeated.
        progress: told the part that is done.
    """
    few = min(MOST_APART, int(SET_APART * len(images)))
    apart, rest = images[:few], images[few:]
    known = features_of(prefix, rest)
    shape = (int(images.shape[1]), int(images.shape[2]), int(images.shape[3]))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, "decoder") % 2**31)
        decoder = Decoder(known.shape[1], shape, width, stages, directions=0)
    decoder.to(images.device)
    decoder.centre.copy_(known.mean(0))
    spread = known.std(0)
    decoder.spread.copy_(spread.clamp_min(QUIETEST * float(spread.mean()) + 1e-12))
    decoder.low.copy_(images.amin((0, 2, 3)).view(-1, 1, 1))
    decoder.high.copy_(images.amax((0, 2, 3)).view(-1, 1, 1))
    given, wanted = features_of(prefix, apart), smaller(apart, decoder.times)
    parts = (half for part in rest.split(AT_ONCE) for half in (part, part.flip(3)))
    fit = solve(
        ((decoder.columns(features_of(prefix, part)), smaller(part, decoder.times)) for part in parts),
        decoder.columns(given),
        wanted,
    )
    decoder.weights, decoder.directions = fit.weights, fit.directions
    if stages:
        learn_stages(decoder, prefix, rest, seconds=seconds, steps=steps, seed=seed, progress=progress)
    with torch.no_grad():
        made = torch.cat([decoder(part, prefix).float() for part in given.split(512)])
    if stages:
        decoder.directions = principal(smaller(apart - made, decoder.times))
    decoder.strays.copy_((features_of(prefix, made) - given).square().mean(0).sqrt())
    decoder.doubt.copy_(best_doubt(prefix, apart, given, decoder))
    return decoder.eval()
