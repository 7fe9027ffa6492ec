"""Trained parameters that no tracer brings to a layer: linear maps written out by their use, and all that is left, by name."""

import copy
import math
from collections.abc import Collection

import torch
from torch import Tensor, nn

from qbi.attacks import Carried
from qbi.auditing.finding import Finding, Untested
from qbi.carrier import Carrier, Cause, Shortfall
from qbi.exposure import observe
from qbi.routing.targets import Target
from qbi.uses.records import Site, Uses
from qbi.uses.written_out import written_out

MOST_SEEN = 2**22
"""Values of all vectors that a layer sees of one sample, up to which it is written out."""

MOST_PARTS = 4
"""Maps of one parameter (groups of a convolution, parts of a packed weight) that are tried; more are alike."""


def look_written_out(model: nn.Module, site: Site, sample: tuple[Tensor, ...]) -> Finding | None:
    """A linear map as a layer of its own, all before it left as it is; None where that cannot be done."""
    if site.group >= MOST_PARTS:
        return None
    neurons, width = site.rows.shape
    try:
        own = written_out(model, site)
        seen = observe(own, own.path, sample)
    except Exception:
        return None
    positions = math.ceil(len(seen.features) / len(sample[0]))  # experts see more of one sample than of another
    if positions * width > MOST_SEEN or positions == 0:
        return None
    often = f"It is used {site.calls} times in a pass." if site.calls > 1 else ""
    why = f"the layers before it stay as they are, and rows are written for what arrives. {often}".strip()
    lost = Shortfall("the way to it:", Cause.CUT, why, own.path)
    carrier = Carrier((width,), width, shortfalls=(lost,), tokens=positions)
    share_unchanged(own.original, model)
    crafted = copy.deepcopy(own)
    share_unchanged(crafted, own, own.path)
    carried = Carried(crafted, own.path, carrier)
    target = Target(own.path, neurons, width, site.bias is not None, "not followed", 0.0)
    names = tuple(n for n in (site.weight, site.bias) if n is not None)
    return Finding(target, "lossy", str(lost), own.path, carried, model=own, parameters=names, followed=False)


def share_unchanged(crafted: nn.Module, model: nn.Module, layer: str | None = None) -> None:
    """Let a copy use the model's own memory for what was not changed; the attacked layer stays its own."""
    original = dict(model.named_parameters())
    for name, parameter in crafted.named_parameters():
        attacked = layer is not None and name.startswith(f"{layer}.")
        if not attacked and torch.equal(parameter, original[name]):
            parameter.data = original[name].data


def unread(model: nn.Module, uses: Uses, reached: Collection[str]) -> list[Untested]:
    """Everything that is trained and not reached, one entry for each module, with the reason."""
    found: dict[str, list[str]] = {}
    looked_at = {name.rpartition(".")[0] for name in reached}
    for name in uses.trained:
        if name not in reached:
            owner = name.rpartition(".")[0]
            found.setdefault(name if not owner or owner in looked_at else owner, []).append(name)
    out = []
    for owner, names in found.items():
        said = dict.fromkeys(word for n in names for word in uses.others[n])
        reason = _reason(model, names, list(said), uses)
        out.append(Untested("every attack", owner, reason, tuple(names)))
    return out


def _reason(model: nn.Module, names: list[str], said: list[str], uses: Uses) -> str:
    own = dict(model.named_parameters())
    numbers = sum(own[n].numel() for n in names)
    sites = [s for n in names for s in uses.of(n)]
    if sites:
        return f"it could not be written out as a layer, or a sample meets it in more than {MOST_SEEN:,} values; nothing was tried on it."
    if not said:
        return "the model's output does not depend on it, or not through an operation that was seen; nothing was tried on it."
    if said == ["norm"]:
        return (
            f"scale and shift of a norm: {numbers} sums over all samples and positions of a batch, fewer equations than unknowns; "
            "no attack on them was tried."
        )
    if said == ["embedding"]:
        return "a table that is looked up, by what is the same for every sample or came from elsewhere; nothing was tried on it."
    if said == ["bias of a frozen layer"]:
        return f"the bias of a layer whose weight is frozen: {numbers} sums over a batch, with nothing to divide; no attack on them was tried."
    return f"it is used in {', '.join(said)}, for which there is no rule ({numbers} numbers); nothing was tried on it."
