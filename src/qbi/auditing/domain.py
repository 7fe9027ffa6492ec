"""The surroundings of an audit's attacks: what the client has, and what the server knows of the domain."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn

from qbi.attacks import Attack, Carried, Knowledge
from qbi.auditing.client import Client
from qbi.auditing.norms import norm_behind
from qbi.auditing.samples import Samples
from qbi.auditing.sent_updates import SentUpdate, SentUpdates, chosen_batch
from qbi.carrier import Carrier, Normalised, flat
from qbi.errors import BadValue, DataError
from qbi.exposure import Observation, observe
from qbi.extraction.reference import fit_reference
from qbi.federation.client import Loss
from qbi.federation.exposed import ClientStep, exposed_step
from qbi.records import Update
from qbi.routing.graph import Traced

FEW = 32
"""Samples of the domain from which a server knows how large values are; and auxiliary samples in a first look."""

HEAVY = 2e11
"""Operations of a batch's way through a model above which it is run less often."""

MOST_FITTED = 512
"""Vectors from which what stands in for a bias is fitted."""

AT_A_TIME = 16
"""Samples that are run at a time to see what arrives at a layer."""


def operations_of(traced: Traced) -> float:
    """Multiplications and additions that one sample takes: twice the weights of each layer, at every position it looks at."""
    total = 0.0
    for node in traced.graph.nodes:
        module, out = traced.module(node), traced.values.get(node)
        if module is None or not isinstance(out, Tensor) or out.dim() < 2:
            continue
        channels = out.shape[1 if isinstance(module, nn.modules.conv._ConvNd) else -1]
        weights = sum(p.numel() for p in module.parameters() if p.dim() > 1 and not isinstance(module, nn.Embedding))
        total += 2 * weights * out.numel() / len(out) / max(1, channels)
    return total


def is_heavy(operations: float, client: Client) -> bool:
    """Whether a batch's way through a model is a matter of seconds, by the operations that a sample takes."""
    return operations * client.batch_size > HEAVY


@dataclass(frozen=True)
class Domain:
    """What stays the same over all attacks of one audit: the model, the client, and the data that a server knows the domain by."""

    model: nn.Module
    samples: Samples
    client: Client
    loss: Loss
    batches: int
    seed: int
    device: str
    auxiliary: Samples | None
    settings: Mapping[str, float]
    updates: SentUpdates = field(repr=False)
    """What the client sends."""
    operations: float = 0.0
    """Of one sample's way through the model."""
    traced: Traced | None = field(default=None, repr=False)
    """The model's graph in outline."""
    brief: bool = False
    """Whether this is a first look, for which a few samples of the domain are enough."""
    _arrived: dict[tuple[object, ...], tuple[ReferenceType[nn.Module], Tensor]] = field(
        default_factory=dict, repr=False
    )

    @property
    def heavy(self) -> bool:
        """Whether one batch's way through the model is a matter of seconds, by the operations it takes."""
        return is_heavy(self.operations, self.client)

    def others(self) -> tuple[Samples, Tensor]:
        """Samples of the domain that are in no batch."""
        if self.auxiliary is not None:
            return self.auxiliary, torch.arange(len(self.auxiliary))
        used = torch.zeros(len(self.samples), dtype=torch.bool)
        for number in range(self.batches):
            used[chosen_batch(self.samples, self.client, self.seed, number)] = True
        return self.samples, (~used).nonzero()[:, 0]

    def a_few(self) -> tuple[Samples, Tensor]:
        """Some of them; of the client's own where there are none."""
        source, order = self.others()
        return source, order[:FEW] if len(order) >= 2 else torch.arange(min(FEW, len(self.samples)))

    def auxiliary_for(self, carried: Carried, attack: type[Attack], knowledge: Knowledge) -> Tensor | None:
        """Samples of the domain as they arrive at the layer: given ones, or those that are in no batch."""
        needed, useful = attack.auxiliary_needed(knowledge), attack.auxiliary_useful(knowledge)
        if useful == 0:
            return None
        source, order = self.others()
        tokens = carried.carrier.tokens
        if self.brief or (self.heavy and not carried.carrier.exact):
            useful = max(needed, min(useful, (FEW if self.brief else 2 * FEW) * tokens))
        if len(order) * tokens < needed:
            raise DataError(
                f"{attack.name}: {len(order)} samples are left as auxiliary data beside the batches, but it needs one for each "
                f"of {needed} neurons. Give more data or --aux."
            )
        if len(order) == 0:
            return None
        return self.arrivals(carried, source, order[: -(-useful // tokens)])[:useful]

    def arrivals(self, carried: Carried, source: Samples, chosen: Tensor) -> Tensor:
        """What some samples are when they reach the layer, at the positions that send gradients."""
        carrier = carried.carrier
        if carrier.exact and carrier.embedding is None and not any(isinstance(s, Normalised) for s in carrier.steps):
            # The layers before are the identity: what arrives is the sample.
            assert carrier.places is not None
            values = flat(source.inputs[carrier.source][chosen])[:, carrier.places[0]].to(self.device)
            return (values - carrier.centre) / carrier.spread_of_values
        found = self._inputs_of_layer(carried, source, chosen)
        if carrier.senders is not None:
            found = found.reshape(len(chosen), -1, found.shape[1])[:, carrier.senders].flatten(0, 1)
        return carrier.arrived(found if carrier.norm is None else found - found.mean(0))

    def _inputs_of_layer(self, carried: Carried, source: Samples, chosen: Tensor) -> Tensor:
        """Everything that the layer sees of some samples; attacks on a layer find the same way to it."""
        key = (id(carried.model), carried.layer, id(source), *chosen.tolist())
        kept = self._arrived.get(key)
        if kept is None or kept[0]() is not carried.model:  # another model may stand where one that is gone stood
            blocks = [block if len(block) > 1 else block.repeat(2) for block in chosen.split(AT_A_TIME)]
            batches = (source.batch(block, self.device)[0] for block in blocks)
            parts = [observe(carried.model, carried.layer, inputs).features for inputs in batches]
            kept = self._arrived[key] = ref(carried.model), torch.cat(parts)
        return kept[1]

    def settled(self, carried: Carried) -> Carried:
        """The same with what a server knows of the model it sends: which positions send gradients, and what stands in for a bias."""
        source, some = self.a_few()
        carrier = carried.carrier
        if carrier.tokens > 1 and carrier.senders is None:
            senders = self._senders(carried, source, some[:4])
            if senders is not None and len(senders) < carrier.tokens:
                places = None if carrier.places is None else carrier.places[senders]
                carrier = replace(carrier, senders=senders, tokens=len(senders), places=places)
        target = carried.target
        norm = norm_behind(carried.model, carried.layer, source.batch(some[:2], self.device)[0])
        if norm is not None:
            plain = Carrier((target.in_features,), target.in_features, shortfalls=carrier.shortfalls)
            carrier = replace(plain, norm=norm, tokens=carrier.tokens)
        elif carrier.reference is None and (target.bias is None or not target.bias.requires_grad):
            found = self._inputs_of_layer(carried, source, some[: max(2, MOST_FITTED // carrier.tokens)])
            plain = Carrier((target.in_features,), target.in_features, shortfalls=carrier.shortfalls)
            spread = torch.linspace(0, len(found) - 1, min(len(found), MOST_FITTED)).long()
            carrier = replace(
                plain, reference=fit_reference(found[spread]), tokens=carrier.tokens, senders=carrier.senders
            )
        return carried if carrier is carried.carrier else replace(carried, carrier=carrier)

    def _senders(self, carried: Carried, source: Samples, chosen: Tensor) -> Tensor | None:
        """Positions of a sample from which gradients come back, where they are the same for all samples."""
        inputs, targets = source.batch(chosen, self.device)
        try:
            step = exposed_step(carried.model, inputs, targets, layers=[carried.layer], loss=self.loss)
        except (BadValue, RuntimeError):
            return None
        sends = step.exposures[0].active.any(0)
        if len(sends) % len(chosen):
            return None
        each = sends.reshape(len(chosen), -1)
        alike = bool((each == each[:1]).all()) and bool(each.any())
        return each[0].nonzero()[:, 0].cpu() if alike else None

    def elsewhere(self, carried: Carried) -> SentUpdate | None:
        """Samples of no batch as the layer sees them: what somebody who read nothing could guess from."""
        source, order = self.others()
        if len(order) < 2:
            return None
        some = order[: max(2, min(AT_A_TIME, MOST_FITTED // carried.carrier.tokens))]
        seen = self._inputs_of_layer(carried, source, some)
        none = torch.zeros(0, len(seen), dtype=torch.bool)
        inputs, _ = source.batch(some, self.device)
        return SentUpdate(some, inputs, ClientStep(Update({}, {}, 0, 0.0), ()), Observation(seen, none))
