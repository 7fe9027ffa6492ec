"""Servers that read noise: shared Box–Muller pairs, dead rows, repeated rows, constant features, known other samples.

The old arithmetic, float32 noise added to float32 sums, falls to the first of them; whole numbers on a grid do not.
"""

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from qbi.private import Private
from qbi.private.keystream import AesStream, repeated_keys
from qbi.private.noise import SMALL, SPREAD, pairs_of

LEVELS = 256


def old_normal(count: int, generator: np.random.Generator) -> Tensor:
    """Noise as it was: 32-bit words, Box and Muller's transform in float32, two values a pair."""
    pairs = count // 2
    words = torch.from_numpy(generator.integers(0, 2**32, (2, pairs)).astype(np.float64))
    uniform = words.add_(2.0**-33).mul_(2.0**-32).float()
    return old_transform(uniform[0], uniform[1])


def old_transform(radius: Tensor, angle: Tensor) -> Tensor:
    r = radius.clamp_max(1.0).log().mul(-2).sqrt()
    a = angle * (2 * math.pi)
    return torch.cat([r * a.cos(), r * a.sin()])


def old_pairs_exist(first: Tensor, second: Tensor) -> Tensor:
    """Whether some words near the inverse give just these two float32 values."""
    f, s = first.double(), second.double()
    radius = torch.exp(-(f * f + s * s) / 2)
    angle = torch.atan2(s, f) / (2 * math.pi) % 1.0
    found = torch.zeros(first.shape, dtype=torch.bool)
    for i in range(-6, 7):
        near = (radius.float().double() * (1 + i * 2.0**-24)).float()
        for j in range(-6, 7):
            turn = (angle + j * angle.clamp_min(2.0**-8) * 2.0**-24).float()
            made = old_transform(near.reshape(-1), turn.reshape(-1)).reshape(2, *first.shape)
            found |= (made[0] == first) & (made[1] == second)
    return found


def test_the_old_noise_falls_to_a_server_with_dead_rows():
    """Half of the values are known to be zero: their noise is read, and tells which pixel value lies under its twin.

    One pixel in 300 rows, σ far above it: the true level is consistent with every pair, a wrong one with far fewer.
    """
    draws = np.random.default_rng(0)
    scale, pixel = 1e-3, 173
    alive = torch.full((300,), pixel / 255 * scale)
    left = torch.cat([alive, torch.zeros(300)]) + 1.0 * old_normal(600, draws)
    first, second = left[:300], left[300:]
    candidates = torch.tensor([pixel, 12, 90, 172, 174, 255])
    kept = []
    for level in candidates.tolist():
        noise = first - level / 255 * scale
        kept.append(float(old_pairs_exist(noise, second).double().mean()))
    assert kept[0] == max(kept)
    assert kept[0] > max(kept[1:]) + 5 * math.sqrt(0.25 / 300)  # five standard errors: read exactly


def new_pairs_exist(first: Tensor, second: Tensor) -> Tensor:
    """Whether some words of the keystream give just these two whole numbers: inverted and run forward by the sampler itself."""
    radius = torch.exp(-(first.square() + second.square()) / (2 * SPREAD**2))
    word = (radius * 2.0**63).round().long().clamp(SMALL, 2**63 - 1)
    angle = (torch.atan2(second, first) / math.pi * 2.0**63).round().clamp(-(2.0**63), 2.0**63 - 1025).long()

    class Words(AesStream):
        def __init__(self) -> None:
            self.queue = [word, angle]

        def words(self, count: int) -> Tensor:
            assert count == len(self.queue[0])
            return self.queue.pop(0)

    a, b = pairs_of(Words(), len(word), SPREAD)
    return (a == first) & (b == second)


def test_on_the_grid_every_candidate_is_as_consistent_as_the_true_one():
    """The same server against whole numbers: no pair of numbers is impossible, so nothing is told by which ones occur."""
    total = torch.zeros(600, dtype=torch.float64)
    level = lambda v: round(v / 255 * 1e-3 * SPREAD)  # noqa: E731
    total[:300] = level(173)
    from qbi.private.noise import add_noise

    add_noise(total, SPREAD, bytes(range(32)))
    for candidate in (173, 12, 90, 172, 174, 255):
        assert bool(new_pairs_exist(total[:300] - level(candidate), total[300:]).all())


class Spreads(nn.Module):
    """A layer whose rows all get the sample, over and over, or nothing: what the server chose."""

    def __init__(self, pixels: int, rows: int, alive: int, constant: float) -> None:
        super().__init__()
        self.layer = nn.Linear(pixels, rows, bias=False)
        nn.init.zeros_(self.layer.weight)
        self.register_buffer("pull", torch.cat([torch.ones(alive), torch.zeros(rows - alive)]))
        self.constant = constant

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x + self.constant) * self.pull).sum(1, keepdim=True)


@pytest.mark.parametrize(
    ("rows", "alive", "constant", "others"),
    [(2, 1, 0.0, 0), (64, 64, 0.0, 0), (64, 1, 0.0, 7), (8, 8, 30.0, 7)],
    ids=["dead rows", "repeated rows", "known others", "constant features"],
)
def test_servers_that_know_everything_else_read_no_pixel(rows, alive, constant, others):
    """Pixel values of one sample, all else known and subtracted, the best estimate rounded to levels: as good as the best guess.

    At 72 bits over 1,024 pixels nobody reads levels; the same servers without noise read every one.
    """
    draws = torch.Generator().manual_seed(0)
    levels = torch.randint(0, LEVELS, (1 + others, 1024), generator=draws)
    x = levels / 255
    read = {}
    for bits in (72.0, 1e12):
        model = Spreads(1024, rows, alive, constant)
        private = Private(model, lambda out, _y: out.sum(), bits=bits, batch_size=1 + others, total=math.inf)
        private._keys = repeated_keys(5)
        private.step(torch.optim.SGD(model.parameters(), lr=1.0), x, torch.zeros(1 + others))
        received = model.layer.weight.grad.double() * (1 + others)
        clipped = lambda v: (v + constant) / ((v + constant).norm() * math.sqrt(alive)).clamp_min(1.0)  # noqa: E731
        rest = received[:alive].mean(0) - sum(clipped(v.double()) for v in x[1:])
        # The server even knows the sample's length.
        estimate = rest * (x[0].double() + constant).norm() * math.sqrt(alive) - constant
        read[bits] = float((estimate * 255).round().clamp(0, 255).eq(levels[0]).double().mean())
    guess = float(levels[0].bincount(minlength=LEVELS).max()) / 1024
    assert read[72.0] <= guess + 5 * math.sqrt(guess / 1024)
    assert read[1e12] > 0.95
