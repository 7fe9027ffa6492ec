"""One attack on one layer, tried on several batches: a real step of the client, and what a server reads of it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor, nn

from qbi.attacks import PAIRS, QBI, Attack, TrapWeights
from qbi.attacks.mount import Mounted, write_rows
from qbi.audit.samples import Samples
from qbi.carrier import Normalised, flat
from qbi.defences import Defence
from qbi.errors import BadValue, CannotRead, DataError
from qbi.extraction import extract, read_rows
from qbi.federation.client import Loss
from qbi.federation.exposed import ClientStep, exposed_step
from qbi.federation.local import LocalTraining, local_update
from qbi.metrics import Observation, leakage, match, observe, thresholds_for
from qbi.randomness import generator
from qbi.records import Leakage, Recovery, Update

Precision = Literal["float32", "bfloat16", "float16"]
TRAP_SCALE = 0.95


@dataclass(frozen=True)
class Client:
    """How the client works: batch, local steps (0 sends the gradient of one batch), optimiser, precision of what is sent."""

    batch_size: int = 20
    local_steps: int = 0
    training: LocalTraining = field(default_factory=LocalTraining)
    precision: Precision = "float32"

    def __post_init__(self) -> None:
        if self.batch_size < 2 or self.local_steps < 0:
            raise BadValue(
                f"client: batches of {self.batch_size}, {self.local_steps} local steps; batches need 2, steps 0 or more."
            )

    @property
    def samples(self) -> int:
        """How many samples one answer is made of."""
        return self.batch_size * max(1, self.local_steps)


@dataclass(frozen=True)
class Trial:
    """One answer of the client: who fired, who was read, and what it looked like."""

    measured: Leakage
    recoveries: tuple[Recovery, ...]
    truth: Tensor
    read: Tensor
    """For each sample (or position) what was read of it at the loosest threshold that has something; zeros else."""
    arrived: Tensor
    chosen: Tensor
    in_sample_space: bool


def centred(mounted: Mounted, arrived: Tensor, attack: str) -> Mounted:
    """The same, its rows written for what arrives: around 0 with spread 1, or between 0 and 1 for trap weights.

    A server knows its domain's statistics; here they are taken from the data, as one number each. Where data are
    normalised already, nothing changes.
    """
    values = arrived.double()
    if attack == "trap-weights":
        centre, spread = float(values.min()), float(values.max() - values.min())
        fine = centre >= 0 and centre + spread <= 1.0001
    else:
        centre, spread = float(values.mean()), float(values.std())
        fine = abs(centre) < 0.25 and 0.7 < spread < 1.4
    if fine or spread == 0:
        return mounted
    return replace(mounted, carrier=replace(mounted.carrier, centre=centre, spread_of_values=spread))


def make_attack(name: str, batch_size: int, auxiliary: Tensor | None, *, trap_scale: float = TRAP_SCALE) -> Attack:
    """An attack by name; PAIRS needs samples of the domain as they arrive at the layer."""
    if name == "qbi":
        return QBI(batch_size)
    if name == "trap-weights":
        return TrapWeights(trap_scale)
    if name == "pairs":
        if auxiliary is None:
            raise DataError("PAIRS: it tunes its rows with auxiliary data of the domain; give some (--aux).")
        return PAIRS(batch_size, auxiliary)
    raise BadValue(f"audit: no attack is called {name!r}; there are passive, qbi, pairs and trap-weights.")


@dataclass(frozen=True)
class Answer:
    """One answer of the client before anything is done to it, and what only the client knows of it."""

    chosen: Tensor
    inputs: tuple[Tensor, ...]
    step: ClientStep
    seen: Observation


def take_answer(
    mounted: Mounted, samples: Samples, client: Client, loss: Loss, *, seed: int, number: int, device: str = "cpu"
) -> Answer:
    """The client's answer on a random batch, with the rows that stand in the layer now."""
    chosen = torch.randperm(len(samples), generator=generator(seed, "batch", number))[: client.samples]
    if len(chosen) < client.samples:
        raise DataError(f"data: a batch of {client.samples} is larger than the data; there are {len(samples)} samples.")
    inputs, targets = samples.batch(chosen, device)
    if client.local_steps:
        size = client.batch_size
        batches = [
            (tuple(part[start : start + size] for part in inputs), targets[start : start + size])
            for start in range(0, client.samples, size)
        ]
        update = local_update(mounted.model, batches, client.training, loss=loss, seed=seed + number)
        seen = observe(mounted.model, mounted.layer, inputs, seed=seed + number)
        return Answer(chosen, inputs, ClientStep(update, ()), seen)
    step = exposed_step(mounted.model, inputs, targets, layers=[mounted.layer], loss=loss, seed=seed + number)
    exposure = step.exposures[0]
    assert exposure.above is not None
    return Answer(chosen, inputs, step, Observation(exposure.inputs, exposure.above))


def read_answer(
    mounted: Mounted, answer: Answer, samples: Samples, client: Client, *, defence: Defence | None = None, seed: int = 0
) -> Trial:
    """What a server reads of an answer, with a defence of the client's if there is one."""
    step = answer.step if defence is None else defence.apply(answer.step, generator(seed, "defence", defence.name))
    update = _rounded(step.update, client.precision)
    truth, read, exact = _read(mounted, update, answer.inputs, answer.seen.features, samples)
    recoveries = match(read, truth, thresholds_for(samples.data_range if exact else _range(truth)))
    shown = torch.zeros_like(truth)
    for recovery in reversed(recoveries):
        shown[recovery.recovered] = read[recovery.candidate[recovery.recovered]].to(shown)
    arrived = mounted.carrier.arrived(answer.seen.features).cpu()
    return Trial(leakage(answer.seen.fired.cpu()), recoveries, truth, shown, arrived, answer.chosen, exact)


def _rounded(update: Update, precision: Precision) -> Update:
    if precision == "float32":
        return update
    kind = {"bfloat16": torch.bfloat16, "float16": torch.float16}[precision]
    gradients = {n: g.to(kind).to(g.dtype) for n, g in update.gradients.items()}
    return Update(gradients, update.buffers, update.batch_size, update.loss)


def _read(
    mounted: Mounted, update: Update, inputs: tuple[Tensor, ...], features: Tensor, samples: Samples
) -> tuple[Tensor, Tensor, bool]:
    """Truth and candidates in one space: the client's own data where the way there is known, the layer's input else."""
    carrier = mounted.carrier
    approximate = any(
        isinstance(step, Normalised) and isinstance(mounted.model.get_submodule(step.layer), nn.LayerNorm)
        for step in carrier.steps
    )
    if carrier.places is not None and not approximate:
        source = inputs[carrier.source]
        if carrier.embedding is not None:
            with torch.no_grad():
                source = mounted.model.get_submodule(carrier.embedding)(source)
        whole = flat(source.float())
        places = carrier.places.to(whole.device)
        truth = whole[:, places].reshape(-1, places.shape[-1])
        found = extract(mounted.model, mounted.layer, carrier, update).samples
        # Judged in pixels only where every pixel came along.
        if carrier.tokens == 1 and carrier.features == whole.shape[1] and carrier.embedding is None:
            return samples.pixels(truth).cpu(), samples.pixels(found).cpu(), True
        return truth.cpu(), found.cpu(), False
    weight, bias = (update.gradients.get(f"{mounted.layer}.{part}") for part in ("weight", "bias"))
    if weight is None or bias is None:
        raise CannotRead(f"{mounted.layer}: the update has no gradient of it; was this layer trained?")
    rows = read_rows(weight, bias, carrier=carrier).samples
    known = carrier.standing
    found = (rows - known.offset.to(rows)) / known.scale.to(rows)
    return carrier.arrived(features).cpu(), found.cpu(), False


def _range(truth: Tensor) -> float:
    return float(truth.max() - truth.min()) or 1.0


def sweep_gain(
    mounted: Mounted,
    attack: Attack,
    samples: Samples,
    client: Client,
    loss: Loss,
    *,
    seed: int,
    device: str = "cpu",
) -> tuple[float, Mapping[float, float]]:
    """The joint scale of weights and bias at which most is read, so that nothing recovered is no artefact of the scale.

    Too large saturates the loss; too small drowns in the rounding of weight differences. Scales are relative to 1/√M.
    """
    found: dict[float, float] = {}
    for gain in (1.0, 0.01, 100.0):
        write_rows(
            mounted, attack, generator(seed, "gain", device=device), gain=gain / math.sqrt(mounted.carrier.features)
        )
        try:
            answer = take_answer(mounted, samples, client, loss, seed=seed, number=0, device=device)
            found[gain] = read_answer(mounted, answer, samples, client).recoveries[1].recall
        except (CannotRead, BadValue):
            found[gain] = 0.0
    return max(found, key=lambda g: (found[g], g == 1.0)), found


def mean_leakage(trials: Sequence[Trial]) -> dict[str, float]:
    """A, P and R by activations, averaged."""
    count = len(trials)
    return {
        "active": sum(t.measured.active for t in trials) / count,
        "precision": sum(t.measured.precision for t in trials) / count,
        "recall": sum(t.measured.recall for t in trials) / count,
    }
