"""In which space something is read: the client's own samples where the way back is known, a layer's input else."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from qbi.attacks import Mounted, Reading
from qbi.auditing.samples import Samples
from qbi.carrier import Normalised, flat
from qbi.records import Candidates, Update


def in_sample_space(mounted: Mounted, inputs: tuple[Tensor, ...]) -> bool:
    """Whether what is read are whole samples as the client has them, every value of them."""
    carrier = mounted.carrier
    whole = _is_placed(mounted) and carrier.tokens == 1 and carrier.embedding is None
    return whole and carrier.features == inputs[carrier.source][0].numel()


def _is_placed(mounted: Mounted) -> bool:
    """Whether it is known where in a sample each value stands, and every change on the way can be undone."""
    carrier = mounted.carrier
    approximate = any(
        isinstance(step, Normalised) and isinstance(mounted.model.get_submodule(step.layer), nn.LayerNorm)
        for step in carrier.steps
    )
    return carrier.places is not None and not approximate and carrier.reference is None


def truth_of(
    mounted: Mounted, inputs: tuple[Tensor, ...], features: Tensor, samples: Samples, *, exact: bool
) -> Tensor:
    """What there is to be read: the client's own data where the way there is known, the layer's input else."""
    carrier = mounted.carrier
    if carrier.reference is not None:
        return _up_to_factor(features, carrier.reference).cpu()
    if not _is_placed(mounted):
        return carrier.arrived(features if carrier.norm is None else features - features.mean(0)).cpu()
    assert carrier.places is not None
    source = inputs[carrier.source]
    if carrier.embedding is not None:
        with torch.no_grad():
            source = mounted.model.get_submodule(carrier.embedding)(source)
    whole = flat(source.float())
    places = carrier.places.to(whole.device)
    truth = whole[:, places].reshape(-1, places.shape[-1])
    return (samples.pixels(truth) if exact else truth).cpu()


def read_in_space(mounted: Mounted, update: Update, samples: Samples, how: Reading, *, exact: bool) -> Candidates:
    """Candidates in the space of the truth."""
    carrier = mounted.carrier
    if _is_placed(mounted):
        found = mounted.read(update, how)
        values = samples.pixels(found.samples) if exact else found.samples
        return replace(found, samples=values.cpu())
    found = mounted.read_at_layer(update, how)
    if carrier.reference is not None:
        return replace(found, samples=_up_to_factor(found.samples, carrier.reference).cpu())
    known = carrier.standing
    values = (found.samples - known.offset.to(found.samples)) / known.scale.to(found.samples)
    return replace(found, samples=values.cpu())


def _up_to_factor(values: Tensor, reference: Tensor) -> Tensor:
    """Vectors of one length, on the reference's side: all that a layer without a bias gives away."""
    values = values.float()
    size = values.norm(dim=1, keepdim=True).clamp_min(1e-30) / values.shape[1] ** 0.5
    side = torch.where(values @ reference.to(values) < 0, -1.0, 1.0)[:, None]
    out: Tensor = values / size * side
    return out
