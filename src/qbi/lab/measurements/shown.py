"""Pictures that the site shows, with their numbers: what is left of a batch at each level of the private step."""

from typing import Any

import torch
from torch import Tensor

import qbi
from qbi.attacks import QBI, Attack, Cascade, Knowledge
from qbi.attacks.best_case import BestCase
from qbi.attacks.copies import Copies
from qbi.carrier import flat
from qbi.data.images import denormalised, normalised, unit_pixels
from qbi.data.open import open_images
from qbi.errors import CannotRead
from qbi.lab.measurements import in_clone
from qbi.lab.networks import two_layers
from qbi.lab.tiles import save_tiles
from qbi.metrics import CLEAR, RECOGNISABLE
from qbi.metrics.matching import mean_squared_errors
from qbi.private.defence import PrivateStep
from qbi.private.goal import Budget
from qbi.randomness import generator
from qbi.records import ImageData
from qbi.theory import guarantees

SIDE, SHOWN, HELD_OUT, OTHERS = 32, 8, 1000, 5000
LEVELS = (1152.0, 288.0, 72.0, 18.0, 8.0)
"""Bits about one sample; the first is sixteen participations at the default."""
CRAFTED = tuple((attack, gain) for attack in (Cascade, QBI, Copies) for gain in (0.1, 1.0, 10.0))
"""Attacks that are run through the private step, with rows scaled by so much; the one that reads most is shown."""


def levels(data: str) -> dict[str, Any]:
    """What a crafted layer and the best linear server read of photos, without a guard and at each level; writes the pictures beside."""
    figures = in_clone("docs/figures")
    images = open_images(data, size=SIDE, count=SHOWN + HELD_OUT + OTHERS, seed=0)
    values = flat(unit_pixels(images, slice(None)))
    truth, held_out = values[:SHOWN], values[SHOWN : SHOWN + HELD_OUT]
    server = BestCase.knowing(values[SHOWN + HELD_OUT :])
    strips = [truth]
    rows: list[dict[str, Any]] = []
    for bits in (None, *LEVELS):
        tried = [_crafted(images, attack, gain, bits) for attack, gain in CRAFTED]
        name, seen = max(tried, key=lambda found: _mean(found[1], truth))
        row: dict[str, Any] = {"bits": bits, "crafted": {"attack": name, **_judged(seen, truth)}, "linear": None}
        strips.append(seen)
        if bits is not None:
            noise = guarantees.noise_for_bits(bits)
            read = server.read(held_out, noise, generator(0, "held out", bits))
            row["linear"] = _judged(read, held_out)
            strips.append(server.read(truth, noise, generator(0, "shown", bits)))
        rows.append(row)
    by_mean = _judged(server.mean.expand_as(held_out), held_out)
    save_tiles(figures / "levels.png", torch.stack(strips).unflatten(2, images.shape))
    said = f"{images.name}; a batch of {SHOWN} for crafted layers; {HELD_OUT:,} photos, {OTHERS:,} others known, for the linear server"
    return {"provenance": said, "shown": SHOWN, "held out": HELD_OUT, "guess": by_mean, "rows": rows}


def _crafted(images: ImageData, kind: type[Attack], gain: float, bits: float | None) -> tuple[str, Tensor]:
    """The name of an attack, and for each sample of a batch the candidate that is nearest: chosen by who knows the truth."""
    x, y = normalised(images, slice(0, SHOWN)), images.labels[:SHOWN]
    features = flat(x).shape[1]
    torch.manual_seed(0)
    attack = kind.prepare(Knowledge(SHOWN, neurons=200, features=features))
    mounted = qbi.mount(two_layers(), attack, x[:2], generator(0, kind.key), gain=gain * features**-0.5)
    if bits is None:
        update = qbi.client_step(mounted.model, x, y)
    else:
        step = PrivateStep(Budget.for_goal(bits=bits))
        update = step.update(mounted.model, x, y, generator(0, kind.key, gain, bits))
    truth = flat(unit_pixels(images, slice(0, SHOWN)))
    try:
        read = flat(denormalised(images, mounted.read(update).samples)).nan_to_num(0.0).clamp(0, 1)
    except CannotRead:
        read = truth[:0]
    if not len(read):
        read = torch.zeros_like(truth[:1])  # black: nothing was read
    return attack.name, read[mean_squared_errors(read, truth).argmin(0)]


def _mean(seen: Tensor, truth: Tensor) -> float:
    errors = (seen.clamp(0, 1) - truth).square().mean(1).double()
    return float(-10 * errors.clamp_min(1e-12).log10().mean())


def _judged(seen: Tensor, truth: Tensor) -> dict[str, float]:
    errors = (seen.clamp(0, 1) - truth).square().mean(1).double()
    shares = {f"{t.key}": float((errors <= t.largest_error(1.0)).double().mean()) for t in (RECOGNISABLE, CLEAR)}
    return {"psnr": _mean(seen, truth), **shares}
