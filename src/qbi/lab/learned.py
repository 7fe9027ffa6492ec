"""Servers that know more than principal components: a learned code through the channel that clip and noise leave, and a list of candidates.

The server chooses the function that becomes a sample's clipped gradient: with a large encoder in front of a small head, the gradient *is*
the encoder's output. So encoder and decoder are learned together on public images, through unit power and noise σ, as in learned joint
source–channel coding. Over T participations the noise is σ/√T.
"""

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp
from torch.nn import functional as F

from qbi.lab.networks import NormedBlock
from qbi.metrics import CLEAR, RECOGNISABLE
from qbi.private.defence import PrivateStep
from qbi.private.goal import Budget
from qbi.private.planning import find_plan
from qbi.private.samples import Evaluator
from qbi.randomness import generator
from qbi.theory import guarantees

CODE = 1024
"""Values of a code; the power of one gradient is spread over them."""


class Code(nn.Module):
    """An encoder of 32×32 images into unit vectors, and a decoder of noisy ones."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        w1, w2, w3 = width, 2 * width, 4 * width
        self.encode = nn.Sequential(
            nn.Conv2d(3, w1, 3, padding=1), NormedBlock(w1),
            nn.Conv2d(w1, w2, 4, 2, 1), NormedBlock(w2), NormedBlock(w2),
            nn.Conv2d(w2, w3, 4, 2, 1), NormedBlock(w3), NormedBlock(w3),
            nn.Flatten(), nn.Linear(64 * w3, CODE),
        )  # fmt: skip
        self.decode = nn.Sequential(
            nn.Linear(CODE, 64 * w3), nn.Unflatten(1, (w3, 8, 8)), NormedBlock(w3), NormedBlock(w3),
            nn.ConvTranspose2d(w3, w2, 4, 2, 1), NormedBlock(w2), NormedBlock(w2),
            nn.ConvTranspose2d(w2, w1, 4, 2, 1), NormedBlock(w1), nn.Conv2d(w1, 3, 3, padding=1),
        )  # fmt: skip

    def through(self, x: Tensor, noise: float) -> Tensor:
        """What the server makes of an image: encoded, at unit length, with noise, decoded."""
        code = F.normalize(self.encode(x - 0.5), dim=1)
        received = code + noise * torch.randn_like(code)
        # Unit power over so many values: the decoder sees numbers of size one.
        out: Tensor = self.decode(received * (CODE**0.5) / (1 + CODE * noise**2) ** 0.5)
        return out + 0.5


@dataclass(frozen=True)
class LearnedReading:
    """What a learned server read of held-out images under one level of noise."""

    noise: float
    rounds: int
    psnr: float
    at_19: float
    at_30: float
    best_tenth: float
    """dB that one image in ten reaches."""
    seconds: float

    @property
    def bits(self) -> float:
        """About one sample, over all rounds."""
        return guarantees.bits(self.noise, self.rounds)


def learn(
    public: Tensor, held_out: Tensor, noise: float, rounds: int, *, seconds: float, seed: int = 0, batch: int = 256
) -> LearnedReading:
    """Learn a code on public images (pixels from 0 to 1) for so many seconds, and read held-out ones with it."""
    torch.manual_seed(seed)
    device = public.device
    model = Code().to(device)
    effective = noise / rounds**0.5
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-4)
    started = time.monotonic()
    while (spent := (time.monotonic() - started) / seconds) < 1:
        for group in optimiser.param_groups:
            group["lr"] = 1e-3 * max(0.01, 1 - spent) * min(1.0, 0.05 + 20 * spent)
        for _ in range(20):
            x = public[torch.randint(len(public), (batch,), device=device)]
            x = torch.where(torch.rand(batch, 1, 1, 1, device=device) < 0.5, x, x.flip(3))
            optimiser.zero_grad(set_to_none=True)
            with torch.autocast(device.type, dtype=torch.bfloat16):
                out = model.through(x, effective)
            F.mse_loss(out.float(), x).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
    model.eval()
    with torch.no_grad(), torch.autocast(device.type, dtype=torch.bfloat16):
        found = torch.cat([model.through(part, effective).float() for part in held_out.split(500)])
    errors = (found.clamp(0, 1) - held_out).square().flatten(1).mean(1).double()
    decibels = -10 * errors.log10()
    shares = [float((errors <= t.largest_error(1.0)).double().mean()) for t in (RECOGNISABLE, CLEAR)]
    mean = float(-10 * errors.mean().log10())
    tenth, seconds = float(decibels.quantile(0.9)), time.monotonic() - started
    return LearnedReading(noise, rounds, mean, shares[0], shares[1], tenth, seconds)


@dataclass(frozen=True)
class NamedCandidates:
    """How many images of a client a server names that has a list in which they stand."""

    batch_size: int
    bits: float
    named: int
    of: int
    candidates: int

    def document(self) -> dict[str, Any]:
        """As plain data."""
        return dict(self.__dict__)


def name_candidates(
    model: nn.Module, x: Tensor, y: Tensor, *, batch_size: int, batches: int, bits: float, seed: int = 0
) -> NamedCandidates:
    """A server that knows the model and a list of images with labels, and asks which of them are in a batch.

    A candidate's clipped gradient times what was released is its score; the best so many are named. The score of all candidates is one
    directional derivative of their losses.
    """
    evaluator = Evaluator(model, F.cross_entropy)
    plan = find_plan(evaluator, x, y, 256)
    norms = []
    for start in range(0, len(x), plan.at_once):
        part = slice(start, start + plan.at_once)
        scrap = {n: torch.zeros(s, dtype=torch.float64, device=x.device) for n, s in evaluator.shapes.items()}
        used = torch.ones(len(x[part]), dtype=torch.bool, device=x.device)
        norms.append(evaluator.add(scrap, x[part], y[part], used, 1.0, plan)[0].norms)
    weights = 1 / torch.cat(norms).clamp_min(1.0)
    values = {n: p.detach() for n, p in model.named_parameters()}
    defence, hits = PrivateStep(Budget.for_goal(bits=bits)), 0
    for number in range(batches):
        chosen = torch.randperm(len(x), generator=generator(seed, "candidates", number))[:batch_size].to(x.device)
        sent = defence.update(model, x[chosen], y[chosen], generator(seed, "noise", number), loss=F.cross_entropy)
        direction = {n: sent.gradients[n].to(values[n].dtype) for n in values}
        with torch.no_grad():
            scores = torch.cat(
                [_slopes(model, values, direction, a, b) for a, b in zip(x.split(500), y.split(500), strict=True)]
            )
        best = (scores * weights).topk(batch_size).indices
        hits += int(torch.isin(best, chosen).sum())
    return NamedCandidates(batch_size, bits, hits, batch_size * batches, len(x))


def _slopes(model: nn.Module, values: dict[str, Tensor], direction: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
    """How each sample's loss changes along a direction."""
    losses = lambda p: F.cross_entropy(functional_call(model, p, (x,)), y, reduction="none")  # noqa: E731
    slope: Tensor = jvp(losses, (values,), (direction,))[1]
    return slope.double()
