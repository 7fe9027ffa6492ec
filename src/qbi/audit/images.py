"""Audit the paper's image model on a batch of images: mount, step, read back, count."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from qbi import theory
from qbi.attacks import PAIRS, QBI, Attack, TrapWeights, mount
from qbi.audit.prediction import predict_leakage
from qbi.carrier import describe, flat
from qbi.data.images import denormalised, normalised, take_batch, unit_pixels
from qbi.errors import BadValue, DataError
from qbi.extraction import extract
from qbi.extraction.normalisation import PublicStatistics
from qbi.federation import client_step
from qbi.metrics import leakage, match, observe, ssim, thresholds_for
from qbi.models import Norm, image_cnn
from qbi.randomness import generator
from qbi.records import ImageData, Leakage, Recovery


@dataclass(frozen=True)
class AuditResult:
    """What one batch gave away, measured, predicted and at the theoretical limit."""

    attack: str
    data: str
    neurons: int
    batch_size: int
    features: int
    layer: str
    arrival: str
    measured: Leakage
    recoveries: tuple[Recovery, ...]
    predicted: Mapping[str, float]
    limit: Mapping[str, float]
    ssim: float | None
    truth: Float[Tensor, "b c h w"]
    reconstruction: Float[Tensor, "b c h w"]
    seed: int
    seconds: float

    @property
    def recall(self) -> float:
        """R by gradients at the exact threshold: what the server holds in its hands."""
        return self.recoveries[0].recall

    def document(self) -> dict[str, Any]:
        """The result as plain data, for JSON; the samples themselves stay out."""
        return {
            "attack": self.attack,
            "data": self.data,
            "neurons": self.neurons,
            "batch_size": self.batch_size,
            "features": self.features,
            "layer": self.layer,
            "arrival": self.arrival,
            "measured": {
                "active": self.measured.active,
                "precision": self.measured.precision,
                "precision_among_active": self.measured.precision_among_active,
                "recall": self.measured.recall,
            },
            "recovered_from_gradients": {r.threshold: r.recall for r in self.recoveries},
            "recovered_samples": self.recoveries[0].recovered.nonzero()[:, 0].tolist(),
            "mean_ssim_of_recovered": self.ssim,
            "predicted": dict(self.predicted),
            "limit": dict(self.limit),
            "seed": self.seed,
            "seconds": round(self.seconds, 3),
        }


def audit_images(
    data: ImageData,
    *,
    attack: str = "qbi",
    neurons: int = 200,
    batch_size: int = 20,
    norm: Norm | None = None,
    trap_scale: float = 0.95,
    seed: int = 0,
    device: str = "cpu",
    progress: Callable[[int, int], None] | None = None,
) -> AuditResult:
    """Mount the attack on the paper's CNN, run one real client step on a random batch, read the samples back.

    With a normalisation layer in the model the data are fed as [0, 1] pixels, as the paper does; otherwise they are
    normalised with public statistics, and trap weights get [0, 1] pixels, which they are made for.
    """
    started = time.perf_counter()
    chosen = take_batch(len(data), batch_size, generator(seed, "batch"))
    raw = norm is not None or attack == "trap-weights"
    inputs = (unit_pixels if raw else normalised)(data, chosen).to(device)
    crafted = _attack(attack, data, chosen, batch_size, neurons, trap_scale, raw, norm, progress)
    torch.manual_seed(seed)
    model = image_cnn(data.shape, neurons, max(2, len(data.classes)), norm=norm).to(device)
    mounted = mount(model, crafted, inputs[:2], generator(seed, "rows", device=device))
    seen = observe(mounted.model, mounted.layer, inputs)
    update = client_step(mounted.model, inputs, data.labels[chosen].to(device), seed=seed)
    public = PublicStatistics(data.mean, data.std)
    candidates = extract(mounted.model, mounted.layer, mounted.carrier, update, public=public)
    pixels = candidates.samples.cpu()
    if not raw:
        pixels = flat(denormalised(data, pixels))
    truth = unit_pixels(data, chosen)
    recoveries = match(pixels, flat(truth), thresholds_for(1.0))
    reconstruction = _reconstruction(pixels, truth, recoveries)
    shown = recoveries[-1].recovered
    return AuditResult(
        attack=crafted.name,
        data=data.name,
        neurons=neurons,
        batch_size=batch_size,
        features=mounted.carrier.features,
        layer=mounted.layer,
        arrival=describe(mounted.carrier.steps),
        measured=leakage(seen.fired.cpu()),
        recoveries=recoveries,
        predicted=predict_leakage(crafted, seen.features, neurons, seed),
        limit=_limit(neurons, batch_size),
        ssim=float(ssim(reconstruction[shown], truth[shown], data_range=1.0).mean()) if shown.any() else None,
        truth=truth,
        reconstruction=reconstruction,
        seed=seed,
        seconds=time.perf_counter() - started,
    )


def _attack(
    name: str,
    data: ImageData,
    chosen: Tensor,
    batch_size: int,
    neurons: int,
    trap_scale: float,
    raw: bool,
    norm: Norm | None,
    progress: Callable[[int, int], None] | None,
) -> Attack:
    if name == "qbi":
        return QBI(batch_size)
    if name == "trap-weights":
        return TrapWeights(trap_scale)
    if name != "pairs":
        raise BadValue(f"audit: no attack is called {name!r}; there are qbi, pairs and trap-weights.")
    others = torch.ones(len(data), dtype=torch.bool)
    others[chosen] = False
    rest = others.nonzero()[:, 0][:neurons]
    if len(rest) < neurons:
        raise DataError(
            f"PAIRS: {len(rest)} samples are left as auxiliary data beside the batch, but it needs one for each of "
            f"{neurons} neurons."
        )
    auxiliary = (unit_pixels if raw else normalised)(data, rest)
    if norm is not None:
        # The layer sees normalised samples, so the search must too.
        over = (0, 2, 3) if norm == "batch" else (1, 2, 3)
        auxiliary = (auxiliary - auxiliary.mean(over, keepdim=True)) / auxiliary.std(over, keepdim=True)
    return PAIRS(batch_size, auxiliary, progress=progress)


def _limit(neurons: int, batch_size: int) -> dict[str, float]:
    return {
        "active": theory.expected_active(batch_size),
        "precision": theory.expected_precision(batch_size),
        "recall": theory.expected_recall(neurons, batch_size),
    }


def _reconstruction(pixels: Tensor, truth: Tensor, recoveries: tuple[Recovery, ...]) -> Tensor:
    """Each sample's matched candidate, at the loosest threshold that has one; black where there is none."""
    out = torch.zeros_like(truth)
    for recovery in reversed(recoveries):
        hit = recovery.recovered
        out[hit] = pixels[recovery.candidate[hit]].reshape(-1, *truth.shape[1:])
    return out.clamp(0, 1)
