"""The check on the Gram route: real weights, real forward passes, and real client steps read back."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace

from torch import Tensor

from qbi.attacks import Mounted
from qbi.exposure import leakage, observe
from qbi.extraction import extract
from qbi.federation import client_step
from qbi.lab.reproduce.cells import Approach, Measured
from qbi.metrics import EXACT, match
from qbi.records import Leakage


@dataclass(frozen=True)
class TrainedOn:
    """What the client trains on, and what the server would have to read to have read it exactly."""

    inputs: Tensor
    targets: Tensor
    truth: Tensor


def real_measured(
    mounted: Mounted, batches: Iterable[TrainedOn], route: Approach, *, keep_normalised: bool = False
) -> Measured:
    """A, P, R over the batches: R by activations (`direct`), or by what extraction recovers (`gradients`)."""
    each = []
    for batch in batches:
        seen = leakage(observe(mounted.model, mounted.layer, batch.inputs).fired)
        if route == "gradients":
            update = client_step(mounted.model, batch.inputs, batch.targets)
            read = extract(mounted.model, mounted.layer, mounted.carrier, update, keep_normalised=keep_normalised)
            seen = replace(seen, recall=match(read.samples, batch.truth)[EXACT].recall)
        each.append(seen)
    return asdict(Leakage.mean(each))
