"""Updates of the client, before anything is done to them: each batch is answered once for every model that is sent."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn

from qbi.auditing.client import Client, Precision
from qbi.auditing.samples import Samples
from qbi.errors import BadValue, CannotRead, DataError
from qbi.exposure import Exposure, Observation, observe
from qbi.federation.client import Loss, client_step
from qbi.federation.exposed import ClientStep, exposed_step
from qbi.federation.local import local_update
from qbi.randomness import generator
from qbi.records import Update

_Key = tuple[int, str, int, bytes]

MOST_KEPT = 2**26
"""Values of updates that are kept for those who ask again."""


@dataclass(frozen=True)
class SentUpdate:
    """One update of the client before anything is done to it, and what only the client knows of it."""

    chosen: Tensor
    inputs: tuple[Tensor, ...]
    step: ClientStep
    seen: Observation
    centred: bool = False
    """Whether what comes back to each row adds up to nothing."""


def chosen_batch(samples: Samples, client: Client, seed: int, number: int) -> Tensor:
    """Which samples the client trains on in one trial."""
    chosen = torch.randperm(len(samples), generator=generator(seed, "batch", number))[: client.samples]
    if len(chosen) < client.samples:
        raise DataError(f"data: a batch of {client.samples} is larger than the data; there are {len(samples)} samples.")
    return chosen


@dataclass
class SentUpdates:
    """The client of one audit. What it sent is kept, by the model's weights and the batch."""

    samples: Samples
    client: Client
    loss: Loss
    seed: int
    device: str
    honest: nn.Module
    """The model that is attacked as it is, in many layers: one step shows all of them."""
    layers: Sequence[str] = ()
    """Its layers, if one step is to show them."""
    _kept: dict[_Key, tuple[ReferenceType[nn.Module], SentUpdate]] = field(default_factory=dict)
    _steps: dict[int, ClientStep | None] = field(default_factory=dict)
    _digests: dict[int, tuple[ReferenceType[Tensor], tuple[int, int], bytes]] = field(default_factory=dict)
    """Of weights that were looked at, where they lay and how often they had been written to."""

    def of(self, model: nn.Module, layer: str, number: int) -> SentUpdate:
        """What the client sends after one batch, and what one layer saw of it."""
        key = id(model), layer, number, self._weights(model)
        known = self._kept.get(key)
        if known is None or known[0]() is not model:  # another model may stand where one that is gone stood
            known = self._kept[key] = ref(model), self._take(model, layer, number)
            while len(self._kept) > 1 and sum(_size(sent) for _, sent in self._kept.values()) > MOST_KEPT:
                del self._kept[next(iter(self._kept))]  # the oldest
        return known[1]

    def batch(self, number: int) -> tuple[Tensor, tuple[Tensor, ...], Tensor]:
        """Which samples one batch holds, and what the client trains on."""
        chosen = chosen_batch(self.samples, self.client, self.seed, number)
        return chosen, *self.samples.batch(chosen, self.device)

    def of_the_model_as_it_is(self, number: int) -> Update | None:
        """The whole update of the honest model, where one step showed all its layers."""
        step = self._honest_step(number)
        return None if step is None else step.update

    def whole(self, number: int) -> Update:
        """The whole update of the honest model as it arrives, in the client's precision."""
        update = self.of_the_model_as_it_is(number)
        if update is None:
            _, inputs, targets = self.batch(number)
            update = client_step(self.honest, inputs, targets, loss=self.loss, seed=self.seed + number)
        return rounded(update, self.client.precision)

    def _weights(self, model: nn.Module) -> bytes:
        return blake2b(b"".join(self._digest(p) for p in model.parameters()), digest_size=16).digest()

    def _digest(self, values: Tensor) -> bytes:
        """A digest, taken again where the tensor is another one, lies elsewhere, or was written to (not through `.data`: nobody here does)."""
        now = values.data_ptr(), values._version
        known = self._digests.get(id(values))
        if known is None or known[0]() is not values or known[1] != now:
            raw = values.detach().contiguous().cpu().flatten().view(torch.uint8).numpy()
            known = self._digests[id(values)] = ref(values), now, blake2b(raw.data, digest_size=16).digest()
        return known[2]

    def _take(self, model: nn.Module, layer: str, number: int) -> SentUpdate:
        chosen, inputs, targets = self.batch(number)
        client, seed = self.client, self.seed + number
        if client.local_steps:
            size = client.batch_size
            batches = [
                (tuple(part[start : start + size] for part in inputs), targets[start : start + size])
                for start in range(0, client.samples, size)
            ]
            update = local_update(model, batches, client.training, loss=self.loss, seed=seed)
            return SentUpdate(chosen, inputs, ClientStep(update, ()), observe(model, layer, inputs, seed=seed))
        step = self._honest_step(number) if model is self.honest and layer in self.layers else None
        if step is not None:
            exposure = next(e for e in step.exposures if e.layer == layer)
            return _sent(chosen, inputs, ClientStep(step.update, (exposure,)), exposure)
        step = exposed_step(model, inputs, targets, layers=[layer], loss=self.loss, seed=seed)
        return _sent(chosen, inputs, step, step.exposures[0])

    def _honest_step(self, number: int) -> ClientStep | None:
        """One step of the honest model, seen by all its layers; None where they cannot be watched together."""
        if number not in self._steps:
            _, inputs, targets = self.batch(number)
            try:
                self._steps[number] = (
                    exposed_step(
                        self.honest, inputs, targets, layers=self.layers, loss=self.loss, seed=self.seed + number
                    )
                    if self.layers and not self.client.local_steps
                    else None
                )
            except (BadValue, CannotRead, RuntimeError, ValueError, TypeError, IndexError, AttributeError):
                self._steps[number] = None
        return self._steps[number]


def rounded(update: Update, precision: Precision) -> Update:
    """As it arrives: in the precision in which it is sent."""
    if precision == "float32":
        return update
    kind = {"bfloat16": torch.bfloat16, "float16": torch.float16}[precision]
    return replace(update, gradients={n: g.to(kind).to(g.dtype) for n, g in update.gradients.items()})


def _size(sent: SentUpdate) -> int:
    return sum(g.numel() for g in sent.step.update.gradients.values())


def _sent(chosen: Tensor, inputs: tuple[Tensor, ...], step: ClientStep, exposure: Exposure) -> SentUpdate:
    assert exposure.above is not None
    features, above = exposure.inputs, exposure.above
    if len(features) > len(chosen):
        # Positions that send nothing back are not in the update.
        sends = exposure.active.any(0)
        sends = sends if bool(sends.any()) else torch.ones_like(sends)
        features, above = features[sends], above[:, sends]
    return SentUpdate(chosen, inputs, step, Observation(features, above), centred=_is_centred(exposure.backprops))


CENTRED = 1e-4
"""Sums of a row's backprops below this part of their sizes are rounding: a norm behind the layer takes their mean away."""


def _is_centred(backprops: Tensor) -> bool:
    size = backprops.abs().sum(1)
    alive = size > 0
    small = backprops.sum(1).abs()[alive] < CENTRED * size[alive]
    return bool(alive.any()) and backprops.shape[1] > 1 and float(small.double().mean()) > 0.9
