"""What a budget would mean on this data: what holds for every server, and what the best-case server reads of held-out samples."""

from dataclasses import dataclass, replace
from typing import Any

import torch

from qbi.attacks.best_case import BestCase
from qbi.auditing.samples import Samples
from qbi.carrier import flat
from qbi.metrics import RECOGNISABLE
from qbi.private.goal import Budget
from qbi.randomness import generator
from qbi.theory import guarantees
from qbi.theory.guarantees import Prior

STEPS = (0.7, 2.0, 8.0, 18.0, 32.0, 72.0, 150.0, 288.0, 800.0, 1500.0, 7200.0)
"""Bits about one sample for which it is worked out."""

MOST_KNOWN, MOST_READ = 400, 100
"""Samples that the server knows, and samples it reads, at most."""
FEWEST = 40
"""With fewer samples nothing is said of PSNR: too little is known of the domain."""


@dataclass(frozen=True)
class BoundPoint:
    """One budget: what it promises on this data, and what the best case measured."""

    bits: float
    noise: float
    epsilon: float
    guess: float
    """What a guess of 1 % becomes at most."""
    gaussian_psnr: float | None = None
    """The best on average, were the data Gaussian with the same principal components; real data may be read better."""
    read_psnr: float | None = None
    """The best case, as measured."""
    read_recognisable: float | None = None
    guessed: float | None = None
    """Share of samples that their mean passes for, at the same threshold: what was not read at all."""

    def document(self) -> dict[str, Any]:
        """As plain data."""
        return dict(self.__dict__)


def budget_points(samples: Samples, seed: int) -> tuple[BoundPoint, ...]:
    """Each budget's meaning on this data; PSNR only where samples are numbers and there are enough of them."""
    plain = [_plain(bits) for bits in STEPS]
    values = samples.inputs[0]
    if len(samples.inputs) > 1 or not values.is_floating_point() or len(values) < FEWEST:
        return tuple(plain)
    order = torch.randperm(len(values), generator=generator(seed, "bounds"))[: MOST_KNOWN + MOST_READ]
    pixels = samples.pixels(flat(values[order].float()))
    read, known = pixels[: len(order) // 5], pixels[len(order) // 5 :]
    server = BestCase.knowing(known)
    prior = Prior.of(known.double().numpy(), samples.data_range)
    near = RECOGNISABLE.largest_error(samples.data_range)
    by_mean = ((server.mean - read).square().mean(1) <= near).double().mean()
    out = []
    for point in plain:
        error = server.errors(read, point.noise, generator(seed, "best case", point.bits))
        out.append(
            replace(
                point,
                gaussian_psnr=guarantees.largest_psnr(prior, point.noise),
                read_psnr=prior.psnr(float(error.mean())),
                read_recognisable=float((error <= near).double().mean()),
                guessed=float(by_mean),
            )
        )
    return tuple(out)


def _plain(bits: float) -> BoundPoint:
    budget = Budget.for_goal(bits=bits)
    return BoundPoint(
        bits,
        budget.noise,
        guarantees.epsilon(budget.delta, budget.noise),
        guarantees.reconstruction(0.01, budget.noise),
    )
