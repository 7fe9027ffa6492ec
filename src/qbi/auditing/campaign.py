"""The attacks of one audit, each tried on several batches of the user's data."""

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from qbi.attacks import Attack, Carried, Knowledge, Mounted
from qbi.attacks.mounting import as_it_is, with_attack, write
from qbi.auditing.domain import Domain
from qbi.auditing.finding import Finding, Untested
from qbi.auditing.outcomes import AttackOutcome
from qbi.auditing.sent_updates import SentUpdate
from qbi.auditing.trial import Trial, read_update
from qbi.defences import StepDefence
from qbi.errors import BadValue, CannotMount, CannotRead, QbiError, first_line
from qbi.metrics import EXACT, FAITHFUL, THRESHOLDS, mean_interval
from qbi.private.reporting import quiet_step
from qbi.randomness import generator
from qbi.records import Leakage

GAINS = (1.0, 0.01, 100.0, 10.0)
"""Joint scales of weights and bias that are tried, in units of 1/√M, the usual one first."""

MOST_PREDICTED = 1024
"""Samples or positions of a batch up to which its Gram matrix is formed."""


@dataclass(frozen=True, eq=False)
class Attempt:
    """An attack on a layer with everything that was seen of it."""

    mounted: Mounted
    finding: Finding
    outcome: AttackOutcome
    trials: tuple[Trial, ...] = field(repr=False)


@dataclass(frozen=True)
class Campaign(Domain):
    """Attacks on one model, each on every batch."""

    def on_the_model_as_it_is(self, attack: type[Attack], findings: Sequence[Finding]) -> Iterator[Attempt | Untested]:
        """An attack that crafts nothing, on every layer; one that gives nothing of a first batch gets no more."""
        for finding in findings:
            try:
                mounted = self._as_it_is(attack, finding)
                trials = [self.read(mounted, self.update(mounted, 0))]
                if any(r.recovered.any() for r in trials[0].recoveries.values()):
                    trials += self._more(mounted, 1)
            except Exception as problem:
                # Whatever a model does in one layer's trial, the audit goes on with the others.
                yield Untested(attack.name, finding.name, _said(problem))
                continue
            whole = finding.untouched and finding.reach == "exact"
            yield Attempt(mounted, finding, self._outcome(mounted, finding, trials, whole=whole), tuple(trials))

    def _more(self, mounted: Mounted, first: int, gain: float | None = None) -> list[Trial]:
        """The batches from one on; one that fails ends it, and does not undo what was read before."""
        trials = []
        for number in range(first, self.batches):
            try:
                if gain is not None:
                    self.write(mounted, number, gain)
                trials.append(self.read(mounted, self.update(mounted, number)))
            except Exception as problem:
                logging.getLogger("qbi.audit").warning("%s, batch %d: %s", mounted.layer, number, _said(problem))
                break
        return trials

    def _as_it_is(self, attack: type[Attack], finding: Finding) -> Mounted:
        target = finding.target
        prepared = attack.prepare(Knowledge(self.client.samples, target.neurons, target.width, seed=self.seed))
        if not finding.followed or not target.has_bias:
            assert finding.carrier is not None
            return with_attack(
                self.settled(Carried(finding.model or self.model, finding.name, finding.carrier)), prepared
            )
        probe = tuple(part[:2].to(self.device) for part in self.samples.inputs)
        if finding.untouched and finding.reach == "exact" and finding.carrier is not None:
            # Nothing with weights stands before the layer: what is read there is the sample itself.
            return Mounted(finding.model or self.model, finding.name, finding.carrier, probe, attack=prepared)
        known = self.traced if finding.model is None else None
        return as_it_is(finding.model or self.model, finding.name, probe, prepared, known)

    def crafted(self, attack: type[Attack], finding: Finding) -> Attempt | Untested:
        """One attack on one layer, on every batch with fresh rows."""
        try:
            mounted = self.mounted(attack, finding)
        except (CannotMount, CannotRead) as problem:
            return Untested(attack.name, finding.name, str(problem))
        except QbiError:
            raise  # the user's to mend: too little auxiliary data, a setting that cannot be
        except Exception as problem:
            return Untested(attack.name, finding.name, _said(problem))
        try:
            gain, gains, first = self._best_gain(mounted)
            trials = [] if first is None or not self.brief else [first]
            if not trials:
                self.write(mounted, 0, gain)
                trials.append(self.read(mounted, self.update(mounted, 0)))
            trials += self._more(mounted, 1, gain)
            if first is not None and not any(t.recoveries[FAITHFUL].recovered.any() for t in trials):
                # Rows that read something of the first batch were found on the way: it does not go unsaid.
                trials[0] = first
        except Exception as problem:
            return Untested(attack.name, finding.name, _said(problem))
        carrier = mounted.carrier
        whole = trials[0].in_sample_space or (carrier.places is not None and carrier.exact)
        outcome = self._outcome(mounted, finding, trials, whole=whole, gain=gain, gains=gains)
        return Attempt(mounted, finding, outcome, tuple(trials))

    def mounted(self, attack: type[Attack], finding: Finding) -> Mounted:
        """The attack prepared for a layer, with the statistics and samples of the domain that it asks for."""
        assert finding.carried is not None
        carried = self.settled(finding.carried)
        carried = carried.placed_for(attack.domain, self.arrivals(carried, *self.a_few()))
        blank = Knowledge(
            self.client.samples * carried.carrier.tokens,
            finding.target.neurons,
            carried.carrier.features,
            settings=self.settings,
            seed=self.seed,
        )
        auxiliary = self.auxiliary_for(carried, attack, blank)
        prepared = attack.prepare(
            Knowledge(blank.batch_size, blank.neurons, blank.features, auxiliary, self.settings, self.seed)
        )
        return with_attack(carried, prepared)

    def bounded(self, mounted: Mounted, sent: SentUpdate, defence: StepDefence, seed: int) -> SentUpdate:
        """The same update with a defence that works inside the step."""
        inputs, targets = self.samples.batch(sent.chosen, self.device)
        draws = generator(seed, "defence", defence.name, device=self.device)
        with quiet_step():
            update = defence.update(mounted.model, inputs, targets, draws, loss=self.loss, seed=seed)
        return replace(sent, step=replace(sent.step, update=update))

    def write(self, mounted: Mounted, number: int, gain: float) -> None:
        """Fresh rows for one batch."""
        rows = generator(self.seed, "rows", mounted.attack.key, mounted.layer, number, device=self.device)
        write(mounted, rows, gain=gain / math.sqrt(mounted.carrier.features))

    def update(self, mounted: Mounted, number: int) -> SentUpdate:
        """What the client sends of the model as it stands."""
        return self.updates.of(mounted.model, mounted.layer, number)

    def read(self, mounted: Mounted, sent: SentUpdate) -> Trial:
        """What the server reads of it."""
        others = self.elsewhere(mounted)
        return read_update(mounted, sent, self.samples, self.client, self.loss, seed=self.seed, elsewhere=others)

    def _best_gain(self, mounted: Mounted) -> tuple[float, Mapping[float, float], Trial | None]:
        """The joint scale at which most is read, so that nothing recovered is no artefact of the scale; and that trial.

        Too large saturates the loss; too small drowns in the rounding of weight differences. Where the usual one reads everything, or
        something in a first look, no other is tried.
        """
        found: dict[float, float] = {}
        trials: dict[float, Trial] = {}
        for gain in GAINS:
            rows = generator(self.seed, "gain", device=self.device)
            write(mounted, rows, gain=gain / math.sqrt(mounted.carrier.features))
            try:
                trials[gain] = self.read(mounted, self.update(mounted, 0))
                found[gain] = trials[gain].recoveries[FAITHFUL].recall
            except (CannotRead, BadValue):
                found[gain] = 0.0
            if found[gain] == 1 or (self.brief and found[gain] > 0):
                break
        best = max(found, key=lambda g: (found[g], g == GAINS[0]))
        return best, found, trials.get(best)

    def _outcome(
        self,
        mounted: Mounted,
        finding: Finding,
        trials: Sequence[Trial],
        *,
        whole: bool,
        gain: float = 1.0,
        gains: Mapping[float, float] | None = None,
    ) -> AttackOutcome:
        attack, tokens = mounted.attack, mounted.carrier.tokens
        neurons = finding.target.neurons
        return AttackOutcome(
            attack=attack.name,
            action=attack.action,
            crafted=attack.crafts,
            layer=finding.name,
            whole_samples=whole,
            unit="samples" if tokens == 1 and _one_position(trials) else "positions",
            measured=Leakage.mean([t.measured for t in trials]),
            recovered={t: mean_interval([trial.recoveries[t].recall for trial in trials]) for t in THRESHOLDS},
            predicted=self._predicted(mounted, trials[0]),
            limit=attack.limit(neurons, self.client.samples * tokens),
            gain=gain,
            gains=gains or {},
            recovered_samples=tuple(tuple(t.recoveries[EXACT].recovered.nonzero()[:, 0].tolist()) for t in trials),
            certified=_mean_certified(trials),
            guessed={t: sum(trial.guess.share[t] for trial in trials) / len(trials) for t in THRESHOLDS},
            beyond={t: sum(trial.guess.beyond[t] for trial in trials) / len(trials) for t in THRESHOLDS},
            up_to_factor=trials[0].up_to_factor,
            centred=all(trial.centred for trial in trials),
            repeats=any(trial.repeats for trial in trials),
        )

    def _predicted(self, mounted: Mounted, trial: Trial) -> Leakage | None:
        """What the attack's law expects on the very features that reached the layer."""
        attack = mounted.attack
        seen = trial.arrived[: self.client.samples * mounted.carrier.tokens].to(self.device)
        if not attack.has_law or len(seen) > MOST_PREDICTED:
            return None
        draws = generator(self.seed, "predict", device=self.device)
        return attack.expected(attack.in_gram_space(seen), [mounted.target.out_features], draws)[0]


def _said(problem: Exception) -> str:
    return (
        str(problem) if isinstance(problem, QbiError) else f"{type(problem).__name__}: {first_line(problem, most=120)}"
    )


def _one_position(trials: Sequence[Trial]) -> bool:
    return all(len(t.truth) == len(t.chosen) for t in trials)


def _mean_certified(trials: Sequence[Trial]) -> float | None:
    counts = [t.certified for t in trials if t.certified is not None]
    return sum(counts) / len(counts) if counts else None
