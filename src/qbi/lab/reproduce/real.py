"""The check on the Gram route: real weights, real forward passes, and real client steps read back."""

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from qbi.attacks import Mounted
from qbi.exposure import leakage, observe
from qbi.extraction import extract
from qbi.federation import client_step
from qbi.lab.reproduce.cells import Approach, Measured
from qbi.metrics import EXACT, match


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
    totals = {"active": 0.0, "precision": 0.0, "precision_among_active": 0.0, "recall": 0.0}
    count = 0
    for batch in batches:
        seen = leakage(observe(mounted.model, mounted.layer, batch.inputs).fired)
        recall = seen.recall
        if route == "gradients":
            update = client_step(mounted.model, batch.inputs, batch.targets)
            read = extract(mounted.model, mounted.layer, mounted.carrier, update, keep_normalised=keep_normalised)
            recall = match(read.samples, batch.truth)[EXACT].recall
        totals["active"] += seen.active
        totals["precision"] += seen.precision
        totals["precision_among_active"] += seen.precision_among_active
        totals["recall"] += recall
        count += 1
    return {name: total / count for name, total in totals.items()}
