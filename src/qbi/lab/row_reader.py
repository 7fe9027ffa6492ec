"""From what a filter lets through of a row to the image in it: a Wiener filter in principal components, and a small network behind it."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qbi.lab.networks import NormedBlock
from qbi.randomness import derive_seed, generator

WIDTH, SIZE, PASSES = 24, 64, 2
"""Of the network, of its batches, and over the public pairs."""


class Residue(nn.Module):
    """What the Wiener filter leaves, from its result and from what arrived, at half the resolution."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.PixelUnshuffle(2), nn.Conv2d(24, WIDTH, 3, padding=1), NormedBlock(WIDTH), NormedBlock(WIDTH),
            nn.Conv2d(WIDTH, 12, 3, padding=1), nn.PixelShuffle(2),
        )  # fmt: skip
        last = self.body[-2]
        assert isinstance(last, nn.Conv2d)
        nn.init.zeros_(last.weight)

    def forward(self, filtered: Tensor, arrived: Tensor) -> Tensor:
        """Flat images."""
        both = torch.cat([v.reshape(-1, 3, 32, 32) for v in (filtered, arrived.clamp(-6, 6))], 1)
        out: Tensor = filtered + self.body(both).flatten(1)
        return out


@dataclass(frozen=True)
class RowReader:
    """What was learned: size and centre of rows, the Wiener filter, the network, and how its errors show."""

    size: Tensor
    mean: Tensor
    wiener: Tensor
    network: Residue
    doubts: Tensor
    turns: bool
    """Whether a bias arrives well enough to tell the sign of its row."""

    def __call__(self, rows: Tensor, biases: Tensor) -> tuple[Tensor, Tensor]:
        """Images, flat and in the model's own units, and the logarithm of the error that each is likely to have."""
        if not len(rows):
            return rows, biases
        arrived = scaled(rows, biases, self.size, turns=self.turns)
        filtered = self.filtered(arrived)
        with torch.no_grad():
            images = torch.cat(
                [self.network(a, b) for a, b in zip(filtered.split(500), arrived.split(500), strict=True)]
            )
        return images, signs(arrived, biases / self.size, images) @ self.doubts

    def filtered(self, arrived: Tensor) -> Tensor:
        """By component, as much as public pairs bear out."""
        return self.mean + (arrived - self.mean) @ self.wiener


def scaled(rows: Tensor, biases: Tensor, size: Tensor, *, turns: bool) -> Tensor:
    """Rows as images: the server knows their size; their sign is that of the bias, or, where it does not arrive, that of most samples."""
    return (rows * torch.where(biases < 0, -1.0, 1.0)[:, None] if turns else rows) / size


def signs(arrived: Tensor, biases: Tensor, images: Tensor) -> Tensor:
    """What tells good readings from bad ones: sizes, and how far the reading is from what arrived."""
    far = (arrived - images).square().mean(1)
    parts = [arrived.square().mean(1), far, images.square().mean(1), (biases.abs() - 1).square()]
    logs = [p.clamp(1e-8, 1e8).log() for p in parts]
    return torch.stack([torch.ones_like(far), *logs, *(v.square() for v in logs)], 1)


def learn_rows(rows: Tensor, biases: Tensor, truth: Tensor, components: tuple[Tensor, Tensor], seed: int) -> RowReader:
    """From pairs of arriving rows and images, with the mean of public images and their principal components."""
    both = {turns: scaled(rows, biases, torch.ones(()), turns=turns) for turns in (True, False)}
    slopes_of = {turns: (own * truth).sum() / truth.square().sum() for turns, own in both.items()}
    turns = bool(slopes_of[True].abs() >= slopes_of[False].abs())
    turned, size = both[turns], slopes_of[turns]
    size = size if float(size.abs()) > 0 else torch.ones(())
    mean, basis = components
    given, wanted = (turned / size - mean) @ basis, (truth - mean) @ basis
    slopes = (given * wanted).sum(0) / given.square().sum(0).clamp_min(1e-30)
    wiener = (basis * slopes.clamp_min(0)) @ basis.T
    reader = RowReader(size, mean, wiener, _network(seed), torch.zeros(9), turns)
    _fit(reader, turned / size, truth, seed)
    return reader


def doubting(reader: RowReader, rows: Tensor, biases: Tensor, images: Tensor, errors: Tensor) -> RowReader:
    """The same reader, which knows how errors show: from rows of every kind, what it read of each, and how far that was from an image."""
    told = signs(scaled(rows, biases, reader.size, turns=reader.turns), biases / reader.size, images)
    ridge = 1e-3 * max(1, len(told)) * torch.eye(told.shape[1])
    wanted = errors.float().clamp_min(1e-8).log()
    return replace(reader, doubts=torch.linalg.solve(told.T @ told + ridge, told.T @ wanted))


def _network(seed: int) -> Residue:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, "row reader") % 2**31)
        return Residue()


def _fit(reader: RowReader, arrived: Tensor, truth: Tensor, seed: int) -> None:
    filtered = reader.filtered(arrived)
    network, draws = reader.network.train(), generator(seed, "row reader")
    optimiser = torch.optim.AdamW(network.parameters(), lr=1e-3)
    steps = PASSES * (len(arrived) // SIZE)
    for step in range(steps):
        for group in optimiser.param_groups:
            group["lr"] = 2e-3 * min(1.0, 0.1 + 10 * step / steps) * (1 - 0.98 * step / steps)
        chosen = torch.randint(len(arrived), (SIZE,), generator=draws)
        optimiser.zero_grad()
        F.mse_loss(network(filtered[chosen], arrived[chosen]), truth[chosen]).backward()
        optimiser.step()
    network.eval()
