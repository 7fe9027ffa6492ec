"""What an attack is: the rows it writes, what it does behind them, how it reads an update, and its law where one is known."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar, Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from qbi.attacks.gram_space import InGramSpace
from qbi.attacks.input_range import InputRange
from qbi.carrier import Carrier
from qbi.errors import DataError
from qbi.exposure.pattern import isolated_samples, leakage
from qbi.extraction.normalisation import PublicStatistics
from qbi.extraction.quotients import layer_gradients, read_rows, restored, shift_gradients
from qbi.federation.client import Loss, default_loss
from qbi.gram import gram
from qbi.records import Candidates, CraftedRows, Leakage, Update
from qbi.routing.graph import Traced, trace
from qbi.routing.path import in_outline
from qbi.routing.untouched import sees_samples

LAYERS = 40
"""Layers drawn to estimate what an attack is expected to do, where there is no closed form."""


@runtime_checkable
class SampleSource(Protocol):
    """Auxiliary samples that can be loaded a slice at a time; a tensor is one."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: slice, /) -> Tensor: ...


@dataclass(frozen=True)
class Knowledge:
    """What a server knows when it prepares an attack: the layer, the batch it expects, samples of the domain.

    `auxiliary` are samples as they arrive at the layer, in the attack's domain. `settings` are the user's wishes by name.

    >>> known = Knowledge(batch_size=20, neurons=200, features=3072, settings={"scale": 0.97})
    """

    batch_size: int
    neurons: int
    features: int
    auxiliary: SampleSource | None = None
    settings: Mapping[str, float] = field(default_factory=dict)
    seed: int = 0


@dataclass(frozen=True)
class Reading:
    """What a server knows when it reads an update, beside the model it sent.
    `rounding` is the relative error of the gradients (their own type's if not given); `loss` is the client's loss on a batch.
    >>> Reading(rounding=2.0**-8, targets="numbers").targets
    'numbers'
    """

    rounding: float | None = None
    loss: Loss = default_loss
    targets: Literal["classes", "numbers"] = "classes"
    """What the client's targets are: classes are tried one by one, numbers are solved for."""
    seed: int = 0
    largest: float | None = None
    """The largest value, of either sign, that can arrive at the layer: nothing is certified where it is not known (`certifying.hides_nothing`)."""


@dataclass(frozen=True)
class Carried:
    """A model that carries samples to one of its layers, and how they arrive there."""

    model: nn.Module
    layer: str
    carrier: Carrier
    probe: tuple[Tensor, ...] = field(default=(), repr=False)
    """A few inputs of the client's shape; their values do not matter."""
    known: Traced | None = field(default=None, repr=False, compare=False)
    """The model's graph in outline, where somebody has traced it."""

    @cached_property
    def traced(self) -> Traced:
        """The model's graph, in outline: a server that reads many updates follows it once."""
        return in_outline(trace(self.model, self.probe)) if self.known is None else self.known

    @property
    def target(self) -> nn.Linear:
        """The attacked layer."""
        layer = self.model.get_submodule(self.layer)
        assert isinstance(layer, nn.Linear)
        return layer

    @cached_property
    def sees_samples(self) -> bool:
        """Whether the layer is handed the client's samples themselves, flattened at most."""
        return self.carrier.is_plain and sees_samples(self.traced, self.layer)

    def gradients(self, update: Update) -> tuple[Tensor, Tensor]:
        """Gradients of the layer's rows and of their biases, or of what stands in for a bias."""
        if self.carrier.norm is not None:
            return shift_gradients(self.layer, self.carrier.norm, self.model, update)
        return layer_gradients(self.layer, update, self.carrier.reference)

    def placed_for(self, domain: InputRange, arrived: Tensor) -> "Carried":
        """The same, its rows to be written for what arrives: a server knows its domain's statistics; here they are taken from data."""
        place = domain.placement(arrived)
        if place is None:
            return self
        return replace(self, carrier=replace(self.carrier, centre=place[0], spread_of_values=place[1]))


@dataclass(frozen=True)
class Mounted(Carried):
    """A model with an attack in it.

    >>> import qbi
    >>> model = nn.Sequential(nn.Linear(60, 50), nn.ReLU(), nn.Linear(50, 3))
    >>> mounted = qbi.mount(model, qbi.QBI(batch_size=4), torch.randn(2, 60), torch.Generator())
    >>> mounted.layer, mounted.attack.name
    ('0', 'QBI')
    """

    attack: "Attack" = field(kw_only=True)

    def read(self, update: Update, how: Reading | None = None, *, public: PublicStatistics | None = None) -> Candidates:
        """Every sample that the attack reads out of an update, in the space of the client's data.

        Normalisation is undone: BatchNorm by its statistics, LayerNorm with `public` ones of the domain. What is certified is what arrives at the layer:
        where anything but a change of shape stands before it, no sample is.
        """
        found = self.read_at_layer(update, how)
        if found.certified is not None and not self.sees_samples:
            found = replace(found, certified=torch.zeros_like(found.certified))
        return restored(found, self.model, self.carrier, update, public)

    def read_at_layer(self, update: Update, how: Reading | None = None) -> Candidates:
        """The same as it stands in the layer's input."""
        return self.attack.read(self, update, how or Reading())


class Attack(ABC):
    """One attack. Its rows are float32 on the generator's device; the same generator state gives the same rows.

    To add one: subclass it in a file of its own, and put it into the registry.

    >>> from qbi.attacks import ATTACKS
    >>> all(issubclass(known, Attack) for known in ATTACKS.values())
    True
    """

    key: ClassVar[str]
    """How commands and files call it."""
    name: ClassVar[str]
    """How tables and reports call it."""
    action: ClassVar[str]
    """What its server does: "a server that …"."""
    domain: ClassVar[InputRange] = InputRange.STANDARD
    crafts: ClassVar[bool] = True
    """Whether it changes the model; one that does not reads every layer of the model as it is."""
    calibrated_at: ClassVar[tuple[int, ...]] = (20,)
    """Batch sizes for which detectors are tried on it."""
    quick: ClassVar[bool] = False
    """Whether it costs so little that it is tried on every layer."""
    heads: ClassVar[bool] = False
    """Whether it is made for a layer whose outputs are the model's, and for no other."""
    has_law: ClassVar[bool] = False
    """Whether `firing` is known."""

    @classmethod
    def prepare(cls, knowledge: Knowledge) -> "Attack":  # noqa: ARG003
        """The attack for a layer and a batch of which the server knows this much."""
        return cls()

    @classmethod
    def auxiliary_needed(cls, knowledge: Knowledge) -> int:  # noqa: ARG003
        """Samples of the domain without which the attack cannot be prepared."""
        return 0

    @classmethod
    def auxiliary_useful(cls, knowledge: Knowledge) -> int:
        """Samples of the domain that it makes use of."""
        return cls.auxiliary_needed(knowledge)

    @abstractmethod
    def rows(self, neurons: int, features: int, generator: torch.Generator) -> CraftedRows:
        """Rows for a layer of `neurons` outputs that sees samples of `features` values."""

    def set_behind(self, mounted: Mounted) -> None:  # noqa: B027
        """Set the layers behind the attacked one, in place; most attacks leave them."""

    def read(self, sent: Carried, update: Update, how: Reading) -> Candidates:
        """The samples in an update, as they stand in the layer's input; by default one from each row."""
        weight, bias = sent.gradients(update)
        return read_rows(weight, bias, carrier=sent.carrier, rounding=how.rounding)

    def firing(
        self,
        batch: InGramSpace,  # noqa: ARG002
        neurons: int,  # noqa: ARG002
        generator: torch.Generator,  # noqa: ARG002
    ) -> Bool[Tensor, "n t"]:
        """The firing pattern of a fresh layer on a batch, drawn in its law without ever building weights."""
        raise DataError(f"{self.name}: its law in Gram space is not known.")

    def in_gram_space(self, x: Float[Tensor, "b m"]) -> InGramSpace:
        """What the attack's law needs to know of a batch."""
        return InGramSpace(gram(x), x.shape[1], x.double().sum(1))

    def readable(self, fired: Bool[Tensor, "n b"]) -> Bool[Tensor, " b"]:
        """Which samples the reader gets from a firing pattern: those that stand alone in a row."""
        return isolated_samples(fired)

    def expected(self, batch: InGramSpace, neurons: Sequence[int], generator: torch.Generator) -> tuple[Leakage, ...]:
        """Expected A, P, R of fresh layers on this batch, for each number of neurons."""
        out = []
        for count in neurons:
            patterns = [self.firing(batch, count, generator) for _ in range(LAYERS)]
            read = [float(self.readable(fired).double().mean()) for fired in patterns]
            seen = Leakage.mean([leakage(fired) for fired in patterns])
            out.append(replace(seen, recall=sum(read) / len(read)))
        return tuple(out)

    def limit(self, neurons: int, batch_size: int) -> Leakage | None:  # noqa: ARG002
        """A, P, R on normal data, by closed forms, where there are any."""
        return None


def loaded(source: SampleSource, rows: slice, like: Tensor) -> Float[Tensor, "a m"]:
    """Auxiliary samples as flat rows of the given kind."""
    return torch.flatten(source[rows], 1).to(device=like.device, dtype=torch.float32)
