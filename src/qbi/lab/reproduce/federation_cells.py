"""What R becomes in a federation: local steps, optimisers, aggregation, sybils, shared noise. One run per cell."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qbi.attacks import QBI, InGramSpace, Mounted, mount
from qbi.carrier import flat
from qbi.data.images import normalised
from qbi.federation import LocalTraining, client_step, local_update
from qbi.federation.aggregation import (
    clipped,
    noise_share,
    participating,
    secure_sum,
    sybil,
    update_norm,
    weighted_mean,
)
from qbi.gram import gram
from qbi.lab.reproduce.cells import Cell, Result
from qbi.metrics import CLEAR, EXACT, RECOGNISABLE, match
from qbi.models import two_layer
from qbi.randomness import generator
from qbi.records import ImageData, Update

CLASSES = 10
CLIENTS = 10


@dataclass(frozen=True)
class Scenario:
    """One line of the federation's table."""

    name: str
    group: str
    update: Callable[["Round"], tuple[Update, Tensor]]
    mixed: int = 1
    """How many clients' samples the server sees mixed; QBI is made for that many batches."""
    gain: float = 1.0


class Round:
    """One round: the crafted model, the data, and clients that answer."""

    def __init__(self, cell: Cell, data: ImageData, scenario: Scenario) -> None:
        self.cell, self.data, self.scenario = cell, data, scenario
        self.batch_size = cell.batch_size
        draws = generator(cell.seed_for("samples"))
        self.order = torch.randperm(len(data), generator=draws)
        features = math.prod(data.shape)
        model = two_layer(features, cell.neurons, CLASSES, seed=cell.seed_for("model"))
        probe = flat(normalised(data, self.order[:2]))
        attack = QBI(self.batch_size * scenario.mixed)
        gain = scenario.gain / math.sqrt(features)
        self.mounted: Mounted = mount(model, attack, probe, generator(cell.seed_for("rows")), gain=gain)
        self.draws = generator(cell.seed_for("noise", scenario.name))

    def batch(self, number: int) -> tuple[Tensor, Tensor]:
        """The samples of one client, or of one local step."""
        chosen = self.order[number * self.batch_size : (number + 1) * self.batch_size]
        return flat(normalised(self.data, chosen)), self.data.labels[chosen] % CLASSES

    def updates(self, clients: Sequence[int]) -> tuple[list[Update], Tensor]:
        """A gradient of each client, and all their samples."""
        batches = [self.batch(number) for number in clients]
        return [client_step(self.mounted.model, x, y) for x, y in batches], torch.cat([x for x, _ in batches])

    def trained(self, steps: int, training: LocalTraining) -> tuple[Update, Tensor]:
        """A client that takes several local steps, and all its samples."""
        batches = [self.batch(number) for number in range(steps)]
        update = local_update(self.mounted.model, batches, training, seed=self.cell.seed_for("training") % 2**31)
        return update, torch.cat([x for x, _ in batches])


def _local(steps: int, training: LocalTraining) -> Callable[[Round], tuple[Update, Tensor]]:
    return lambda round_: round_.trained(steps, training)


def _summed(clients: int) -> Callable[[Round], tuple[Update, Tensor]]:
    def update(round_: Round) -> tuple[Update, Tensor]:
        updates, samples = round_.updates(range(clients))
        return secure_sum(updates), samples

    return update


def _averaged(clients: int) -> Callable[[Round], tuple[Update, Tensor]]:
    def update(round_: Round) -> tuple[Update, Tensor]:
        updates, samples = round_.updates(range(clients))
        return weighted_mean(updates), samples

    return update


def _sybils(honest: int) -> Callable[[Round], tuple[Update, Tensor]]:
    def update(round_: Round) -> tuple[Update, Tensor]:
        updates, samples = round_.updates(range(honest))
        return secure_sum(updates + [sybil(updates[0])] * (CLIENTS - honest)), samples

    return update


def _participating(share: float) -> Callable[[Round], tuple[Update, Tensor]]:
    def update(round_: Round) -> tuple[Update, Tensor]:
        asked = participating(CLIENTS, share, round_.draws).tolist()
        updates, samples = round_.updates(asked)
        return secure_sum(updates), samples

    return update


def _shared_noise(multiplier: float, honest: int) -> Callable[[Round], tuple[Update, Tensor]]:
    """Noise of `multiplier` times the clip on the sum of ten clients, of whom only some are honest."""

    def update(round_: Round) -> tuple[Update, Tensor]:
        updates, samples = round_.updates(range(honest))
        bound = min(update_norm(u.gradients) for u in updates)
        noisy = [noise_share(clipped(u, bound), multiplier * bound, CLIENTS, round_.draws) for u in updates]
        return secure_sum(noisy + [sybil(updates[0])] * (CLIENTS - honest)), samples

    return update


SGD, MOMENTUM, ADAM = LocalTraining("sgd", 0.1), LocalTraining("momentum", 0.1), LocalTraining("adam", 1e-3)

SCENARIOS: tuple[Scenario, ...] = (
    Scenario("FedSGD: one gradient", "local", lambda r: (r.updates([0])[0][0], r.updates([0])[1])),
    *(Scenario(f"FedAvg: {k} step{'s' * (k > 1)} of SGD, rate 0.1", "local", _local(k, SGD)) for k in (1, 2, 5, 10)),
    Scenario("FedAvg: 2 epochs of one batch, SGD", "local", _local(1, LocalTraining("sgd", 0.1, epochs=2))),
    Scenario("FedAvg: 5 steps of SGD with momentum", "local", _local(5, MOMENTUM)),
    Scenario("FedAvg: 1 step of Adam, rate 0.001", "local", _local(1, ADAM)),
    Scenario("FedAvg: 5 steps of Adam, rate 0.001", "local", _local(5, ADAM)),
    *(
        Scenario(
            f"FedAvg: 1 step of SGD, rate 0.001, rows scaled by {g:g}",
            "rounding",
            _local(1, LocalTraining("sgd", 1e-3)),
            gain=g,
        )
        for g in (0.01, 1.0, 100.0)
    ),
    *(Scenario(f"weighted mean of {k} clients", "aggregate", _averaged(k), mixed=k) for k in (2, 5, 10)),
    *(Scenario(f"secure sum of {k} clients", "aggregate", _summed(k), mixed=k) for k in (2, 5, 10)),
    *(Scenario(f"secure sum of 10, of whom {10 - h} are sybils", "sybils", _sybils(h), mixed=h) for h in (5, 2, 1)),
    *(
        Scenario(
            f"secure sum, {s:.0%} of 10 clients take part", "participation", _participating(s), mixed=round(10 * s)
        )
        for s in (0.2, 0.5)
    ),
    *(
        Scenario(f"shared noise {z:g} of the clip, {h} of 10 honest", "noise", _shared_noise(z, h), mixed=h)
        for z in (0.001, 0.01, 0.1, 1.0)
        for h in (10, 1)
    ),
)


def federation_cell(cell: Cell, data: ImageData) -> Result:
    """R of every scenario: exact, at 30 dB, at 19 dB; and what the Gram law predicts for the samples that are mixed."""
    return {scenario.name: _measured(cell, data, scenario) for scenario in SCENARIOS}


def _measured(cell: Cell, data: ImageData, scenario: Scenario) -> dict[str, float]:
    round_ = Round(cell, data, scenario)
    update, truth = scenario.update(round_)
    # Normalised images have a deviation of one; a range of four of them stands for that of the pixels.
    found = match(round_.mounted.read(update).samples, truth, data_range=4.0)
    draws = generator(cell.seed_for("prediction", scenario.name))
    attack = QBI(cell.batch_size * scenario.mixed)
    (expected,) = attack.expected(InGramSpace(gram(truth), truth.shape[1]), [cell.neurons], draws, draws=16_384)
    return {
        "recall": found[EXACT].recall,
        "clear": found[CLEAR].recall,
        "rough": found[RECOGNISABLE].recall,
        "predicted": expected.recall,
    }


def scenario_names() -> Iterator[str]:
    """The lines of the table, in order."""
    yield from (scenario.name for scenario in SCENARIOS)
