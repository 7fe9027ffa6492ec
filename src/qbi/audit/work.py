"""The attacks of one audit: passive, crafted, predicted for other settings, and with defences in place."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from qbi import theory
from qbi.attacks import QBI, Attack, TrapWeights
from qbi.attacks.mount import Mounted, write_rows
from qbi.audit.prediction import predict_leakage
from qbi.audit.result import AttackOutcome, Curve, DefenceOutcome
from qbi.audit.samples import Samples
from qbi.audit.survey import Finding
from qbi.audit.trials import (
    Answer,
    Client,
    Trial,
    centred,
    make_attack,
    mean_leakage,
    read_answer,
    sweep_gain,
    take_answer,
)
from qbi.carrier import Normalised, flat
from qbi.defences import Defence, DropSparse, HideReadable, NoisyRows, Pruning, Sparsify, chain
from qbi.errors import DataError
from qbi.exposure import count_leaks
from qbi.federation.client import Loss
from qbi.federation.exposed import exposed_step
from qbi.gram import gram, law, predict
from qbi.metrics import mean_interval, observe
from qbi.randomness import generator
from qbi.routing.graph import Traced
from qbi.routing.path import find_path

Progress = Callable[[str], None]

DEFENCES: Mapping[str, Defence] = {
    "none": chain(),
    "row noise 3 where readable": HideReadable(3.0),
    "row noise 3": NoisyRows(3.0),
    "AGGP": Pruning(),
    "AGGP, bias dropped": Pruning(bias="drop"),
    "drop a ≤ 15": DropSparse(15),
    "top 10 %": Sparsify(0.1),
}
GRID_BATCHES = (2, 4, 8, 16, 20, 32, 50, 64, 100, 128, 200, 256)
GRID_NEURONS = (10, 20, 50, 100, 200, 500, 1000, 2000, 5000)


class Work:
    """What stays the same over all attacks of one audit."""

    def __init__(
        self,
        model: nn.Module,
        samples: Samples,
        client: Client,
        loss: Loss,
        batches: int,
        seed: int,
        device: str,
        auxiliary: Samples | None,
        trap_scale: float,
    ) -> None:
        self.model, self.samples, self.client, self.loss = model, samples, client, loss
        self.batches, self.seed, self.device = batches, seed, device
        self.auxiliary, self.trap_scale = auxiliary, trap_scale

    def passive(self, findings: Sequence[Finding], traced: Traced) -> list[AttackOutcome]:
        """The model as it is: which samples' inputs to each layer can be divided out of the gradients of one batch."""
        reads: dict[str, list[tuple[float, float, tuple[int, ...]]]] = {f.name: [] for f in findings}
        for number in range(self.batches):
            chosen = torch.randperm(len(self.samples), generator=generator(self.seed, "batch", number))
            inputs, targets = self.samples.batch(chosen[: self.client.batch_size], self.device)
            step = exposed_step(
                self.model, inputs, targets, layers=list(reads), loss=self.loss, seed=self.seed + number
            )
            for exposure in step.exposures:
                leak = count_leaks(exposure)
                active = float((exposure.counts > 0).double().mean())
                share = float(leak.samples.double().mean())
                reads[exposure.layer].append((active, share, tuple(leak.samples.nonzero()[:, 0].tolist())))
        out = []
        for finding in findings:
            rows = reads[finding.name]
            shares = mean_interval([r[1] for r in rows])
            if shares.mean > 0 or finding is findings[0]:
                whole = finding.reach == "exact" and _sees_samples(traced, finding.name)
                positions = 1 if finding.carrier is None else finding.carrier.tokens
                active = sum(r[0] for r in rows) / len(rows)
                out.append(
                    AttackOutcome(
                        "passive",
                        finding.name,
                        whole,
                        "samples" if positions == 1 else "positions",
                        {"active": active, "recall": shares.mean},
                        {"mse<1e-10": shares},
                        None,
                        None,
                        1.0,
                        {},
                        tuple(r[2] for r in rows),
                    )
                )
        return out

    def attack(self, mounted: Mounted, finding: Finding, name: str) -> tuple[AttackOutcome, list[Trial]]:
        """One attack on one layer, on every batch with fresh rows."""
        carrier = mounted.carrier
        effective = self.client.batch_size * carrier.tokens
        attack = self._make(mounted, name)
        gain, gains = sweep_gain(
            mounted, attack, self.samples, self.client, self.loss, seed=self.seed, device=self.device
        )
        trials = []
        for number in range(self.batches):
            self._write(mounted, attack, name, number, gain)
            trials.append(read_answer(mounted, self._answer(mounted, number), self.samples, self.client))
        recovered = {
            trials[0].recoveries[i].threshold: mean_interval([t.recoveries[i].recall for t in trials])
            for i in range(len(trials[0].recoveries))
        }
        seen = trials[0].arrived[:effective].to(self.device)
        predicted = None
        if len(seen) <= 1024:
            predicted = predict_leakage(attack, seen, mounted.target.out_features, self.seed)
        neurons = mounted.target.out_features
        limit = {
            "active": theory.expected_active(effective),
            "precision": theory.expected_precision(effective),
            "recall": theory.expected_recall(neurons, effective),
        }
        outcome = AttackOutcome(
            attack.name,
            finding.name,
            trials[0].in_sample_space or (carrier.places is not None and carrier.exact),
            "samples" if carrier.tokens == 1 else "positions",
            mean_leakage(trials),
            recovered,
            predicted,
            limit if isinstance(attack, QBI) or not isinstance(attack, TrapWeights) else None,
            gain,
            gains,
            tuple(tuple(t.recoveries[0].recovered.nonzero()[:, 0].tolist()) for t in trials),
        )
        return outcome, trials

    def centre(self, mounted: Mounted, name: str) -> Mounted:
        """Rows for what arrives, by statistics of some of the data."""
        return centred(mounted, self._arrivals(mounted, self.samples, torch.arange(min(64, len(self.samples)))), name)

    def _make(self, mounted: Mounted, name: str) -> Attack:
        auxiliary = self._auxiliary(mounted) if name == "pairs" else None
        effective = self.client.batch_size * mounted.carrier.tokens
        return make_attack(name, effective, auxiliary, trap_scale=self.trap_scale)

    def _write(self, mounted: Mounted, attack: Attack, name: str, number: int, gain: float) -> None:
        rows = generator(self.seed, "rows", name, mounted.layer, number, device=self.device)
        write_rows(mounted, attack, rows, gain=gain / mounted.carrier.features**0.5)

    def _answer(self, mounted: Mounted, number: int) -> Answer:
        return take_answer(
            mounted, self.samples, self.client, self.loss, seed=self.seed, number=number, device=self.device
        )

    def _auxiliary(self, mounted: Mounted) -> Tensor:
        """Samples of the domain as they arrive at the layer: given ones, or those that are in no batch."""
        neurons = mounted.target.out_features
        if self.auxiliary is not None:
            source, order = self.auxiliary, torch.arange(len(self.auxiliary))
        else:
            used = torch.zeros(len(self.samples), dtype=torch.bool)
            for number in range(self.batches):
                drawn = torch.randperm(len(self.samples), generator=generator(self.seed, "batch", number))
                used[drawn[: self.client.samples]] = True
            source, order = self.samples, (~used).nonzero()[:, 0]
        needed = -(-neurons // mounted.carrier.tokens)
        if len(order) < needed:
            raise DataError(
                f"PAIRS: {len(order)} samples are left as auxiliary data beside the batches, but it needs one for each of "
                f"{neurons} neurons. Give more data or --aux."
            )
        return self._arrivals(mounted, source, order[:needed])[:neurons]

    def _arrivals(self, mounted: Mounted, source: Samples, chosen: Tensor) -> Tensor:
        carrier = mounted.carrier
        if carrier.exact and carrier.embedding is None and not any(isinstance(s, Normalised) for s in carrier.steps):
            # The layers before are the identity: what arrives is the sample.
            assert carrier.places is not None
            values = flat(source.inputs[carrier.source][chosen])[:, carrier.places[0]].to(self.device)
            return (values - carrier.centre) / carrier.spread_of_values
        parts = []
        for block in chosen.split(64):
            inputs, _ = source.batch(block if len(block) > 1 else block.repeat(2), self.device)
            parts.append(mounted.carrier.arrived(observe(mounted.model, mounted.layer, inputs).features))
        return torch.cat(parts)

    def curve(self, mounted: Mounted) -> Curve | None:
        """R of QBI on this data at other batch sizes and widths, by the Gram law; not where positions are seen alone."""
        if mounted.carrier.tokens > 1:
            return None
        count = min(len(self.samples), max(GRID_BATCHES))
        chosen = torch.randperm(len(self.samples), generator=generator(self.seed, "curve"))[:count]
        matrix = gram(self._arrivals(mounted, self.samples, chosen).float())[:count, :count]
        sizes = sorted({b for b in (*GRID_BATCHES, self.client.batch_size) if b <= count})
        neurons = sorted({*GRID_NEURONS, mounted.target.out_features})
        rows = []
        for size in sizes:
            draws = generator(self.seed, "curve", size, device=self.device)
            found = predict(
                law(matrix[:size, :size]), QBI(size).bias(mounted.carrier.features), neurons, draws, draws=16_384
            )
            rows.append(found.recall)
        return Curve(tuple(sizes), tuple(neurons), tuple(rows))

    def defended(self, mounted: Mounted, outcome: AttackOutcome) -> tuple[DefenceOutcome, ...]:
        """The strongest attack again, on the same batches, with each defence."""
        name = {"QBI": "qbi", "PAIRS": "pairs"}.get(outcome.attack, "trap-weights")
        attack = self._make(mounted, name)
        tried = range(min(self.batches, 3))
        found: dict[str, list[Trial]] = {label: [] for label in DEFENCES}
        for number in tried:
            self._write(mounted, attack, name, number, outcome.gain)
            answer = self._answer(mounted, number)
            for label, defence in DEFENCES.items():
                found[label].append(
                    read_answer(mounted, answer, self.samples, self.client, defence=defence, seed=self.seed + number)
                )
        return tuple(
            DefenceOutcome(
                label,
                DEFENCES[label].kind,
                {
                    trials[0].recoveries[i].threshold: sum(t.recoveries[i].recall for t in trials) / len(trials)
                    for i in range(len(trials[0].recoveries))
                },
            )
            for label, trials in found.items()
        )


def _sees_samples(traced: Traced, layer: str) -> bool:
    """Whether no weights stand between the input and the layer: then its input is the sample, even for who only looks."""
    way = find_path(traced, traced.nodes_of(layer)[0])[:-1]
    modules = [m for node in way if (m := traced.module(node)) is not None and not isinstance(m, nn.Embedding)]
    return not any(True for m in modules for _ in m.parameters())
