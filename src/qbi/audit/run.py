"""The audit: look into the model, attack it on the user's data, doubt the result, and say what would help."""

import copy
import platform
import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

import qbi
from qbi import theory
from qbi.attacks import QBI, Attack, TrapWeights
from qbi.attacks.mount import Mounted, write_rows
from qbi.audit.doubts import find_doubts
from qbi.audit.losses import check_value, choose_loss
from qbi.audit.prediction import predict_leakage
from qbi.audit.result import AttackOutcome, AuditResult, Curve, DefenceOutcome, Gallery
from qbi.audit.samples import Samples, image_samples, tensor_samples, text_samples
from qbi.audit.survey import Finding, mounted_for, scrambled, survey
from qbi.audit.trials import (
    TRAP_SCALE,
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
from qbi.defences import Defence, DropSparse, NoisyRows, Pruning, Sparsify
from qbi.errors import BadValue, DataError
from qbi.exposure import count_leaks
from qbi.extraction.tokens import nearest_tokens
from qbi.federation.client import Loss, run_model
from qbi.federation.exposed import exposed_step
from qbi.gram import gram, law, predict
from qbi.metrics import mean_interval, observe
from qbi.randomness import generator
from qbi.records import ImageData, Interval, TextData
from qbi.routing.graph import Traced
from qbi.routing.path import find_path

Data = Samples | ImageData | TextData | Tensor | tuple[Tensor, ...]
Progress = Callable[[str], None]

DEFENCES: Mapping[str, Defence] = {
    "row noise 3": NoisyRows(3.0),
    "AGGP": Pruning(),
    "AGGP, bias dropped": Pruning(bias="drop"),
    "drop a ≤ 15": DropSparse(15),
    "top 10 %": Sparsify(0.1),
}
ATTACKS = ("passive", "qbi", "pairs", "trap-weights")
GRID_BATCHES = (2, 4, 8, 16, 20, 32, 50, 64, 100, 128, 200, 256)
GRID_NEURONS = (10, 20, 50, 100, 200, 500, 1000, 2000, 5000)
MOST_SHOWN = 24
"""Samples of the first batch that are shown."""


def audit(
    model: nn.Module,
    data: Data,
    *,
    attacks: Sequence[str] = ("passive", "qbi"),
    layers: str = "most exposed",
    client: Client | None = None,
    loss: str | Loss = "auto",
    batches: int = 3,
    auxiliary: Data | None = None,
    defences: bool = True,
    trap_scale: float = TRAP_SCALE,
    name: str | None = None,
    seed: int = 0,
    device: str = "cpu",
    progress: Progress | None = None,
) -> AuditResult:
    """Audit a model on data of one's own. The model is not changed.

    `data` are images or texts of this package, tensors (x, y), or prepared `Samples`. `layers` is "most exposed",
    "all", or one layer's name. `auxiliary` is what PAIRS tunes its rows with; without it, samples of `data` that are in no
    batch serve.
    """
    started = time.perf_counter()
    client = client or Client()
    unknown = [a for a in attacks if a not in ATTACKS]
    if unknown:
        raise BadValue(f"audit: no attack is called {unknown[0]!r}; there are {', '.join(ATTACKS)}.")
    if batches < 1:
        raise BadValue(f"audit: {batches} batches; at least one is needed.")
    samples = as_samples(data)
    _check_data(samples, client)
    say = progress or (lambda _what: None)
    sent = copy.deepcopy(model).to(device).train()
    _check_parameters(sent)
    probe = scrambled(tuple(part.to(device) for part in samples.inputs))
    say("looking into the model")
    traced, findings = survey(sent, probe)
    value, samples, loss_name = _prepared_loss(sent, samples, probe, loss, device)
    helper = as_samples(auxiliary) if auxiliary is not None else None
    work = _Work(sent, samples, client, value, batches, seed, device, helper, trap_scale, say)
    outcomes: list[AttackOutcome] = []
    first: Trial | None = None
    shown: Mounted | None = None
    strongest: tuple[Mounted, AttackOutcome] | None = None
    all_trials: list[Trial] = []
    if "passive" in attacks:
        say("passive server")
        outcomes += work.passive([f for f in findings if f.target.has_bias], traced)
    for finding in _chosen(findings, layers):
        carried = mounted_for(sent, finding.name, probe)
        for attack in (a for a in attacks if a != "passive"):
            say(f"{attack} on {finding.name}")
            mounted = work.centre(carried, attack)
            outcome, trials = work.attack(mounted, finding, attack)
            outcomes.append(outcome)
            all_trials += trials
            if strongest is None or outcome.recall > strongest[1].recall:
                strongest = (mounted, outcome)
                first, shown = trials[0], mounted
    curve: Curve | None = None
    after: tuple[DefenceOutcome, ...] = ()
    if strongest is not None:
        say("predicting other settings")
        curve = work.curve(strongest[0])
        if defences and not client.local_steps:
            say("trying defences")
            after = work.defended(strongest[0], strongest[1])
    path = _path(traced, strongest[1].layer) if strongest is not None else ()
    result = AuditResult(
        model=name or type(model).__name__,
        parameters=sum(p.numel() for p in model.parameters()),
        traced_by=traced.how,
        trace_note=traced.note,
        data=samples.name,
        kind=samples.kind,
        samples=len(samples),
        shape=tuple(tuple(part.shape[1:]) for part in samples.inputs),
        client=client,
        loss=loss_name,
        batches=batches,
        layers=tuple(findings),
        path=path,
        attacks=tuple(outcomes),
        defences=after,
        curve=curve,
        advice=_advice(outcomes, after, curve, client, findings),
        doubts=find_doubts(findings, outcomes, all_trials, traced, samples, client, batches),
        gallery=_gallery(first, shown, samples) if first is not None and shown is not None else Gallery(),
        seed=seed,
        versions={"qbi": qbi.__version__, "torch": torch.__version__, "python": platform.python_version()},
        seconds=time.perf_counter() - started,
    )
    say("done")
    return result


def as_samples(data: Data) -> Samples:
    """Whatever a user has, as samples."""
    if isinstance(data, Samples):
        return data
    if isinstance(data, ImageData):
        return image_samples(data)
    if isinstance(data, TextData):
        return text_samples(data)
    if isinstance(data, Tensor):
        return tensor_samples(data)
    if len(data) == 2:
        return tensor_samples(data[0], data[1])
    return tensor_samples(data[:-1], data[-1])


def _check_data(samples: Samples, client: Client) -> None:
    for part in samples.inputs:
        if part.is_floating_point() and not bool(torch.isfinite(part).all()):
            raise DataError(f"{samples.name}: it has NaN or infinite values; clean the data first.")
    if len(samples) < client.samples:
        raise DataError(f"data: a batch of {client.samples} is larger than the data; there are {len(samples)} samples.")


def _check_parameters(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and not bool(torch.isfinite(parameter).all()):
            raise BadValue(f"model: {name} has NaN or infinite values; load sound weights first.")
    if not any(True for _ in model.parameters()):
        raise BadValue("model: it has no parameters; there is nothing to train and nothing to read.")


def _prepared_loss(
    model: nn.Module, samples: Samples, probe: tuple[Tensor, ...], wanted: str | Loss, device: str
) -> tuple[Loss, Samples, str]:
    state = {n: b.clone() for n, b in model.named_buffers()}
    with torch.no_grad():
        output = run_model(model, probe)
        for n, b in model.named_buffers():
            b.copy_(state[n])
    value, targets, name = choose_loss(wanted, _like(output, len(samples)), samples.inputs[0], samples.targets)
    check_value(value, output, targets[: len(output)].to(device))
    return (
        value,
        Samples(
            samples.name, samples.inputs, targets, samples.classes, samples.images, samples.raw, samples.vocabulary
        ),
        name,
    )


def _like(output: Tensor, count: int) -> Tensor:
    """An output of the whole data's shape, without its values."""
    return output.new_empty(1).expand(count, *output.shape[1:]) if output.dim() else output


def _chosen(findings: Sequence[Finding], wanted: str) -> list[Finding]:
    able = sorted((f for f in findings if f.attackable), key=lambda f: f.rank, reverse=True)
    if wanted == "all":
        return [f for f in able if f.target.slope_below != 1]
    if wanted == "most exposed":
        return able[:1]
    named = [f for f in findings if f.name == wanted]
    if not named:
        known = ", ".join(f.name for f in findings) or "none"
        raise BadValue(f"--layers: the model has no linear layer {wanted!r}; it has {known}.")
    if not named[0].attackable:
        raise BadValue(f"--layers: {wanted} cannot be attacked: {named[0].reason}")
    return named


class _Work:
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
        say: Progress,
    ) -> None:
        self.model, self.samples, self.client, self.loss = model, samples, client, loss
        self.batches, self.seed, self.device, self.say = batches, seed, device, say
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


def _path(traced: Traced, layer: str) -> tuple[str, ...]:
    nodes = traced.nodes_of(layer)
    return tuple(traced.label(node) for node in find_path(traced, nodes[0])[1:]) if nodes else ()


def _advice(
    outcomes: Sequence[AttackOutcome],
    defences: Sequence[DefenceOutcome],
    curve: Curve | None,
    client: Client,
    findings: Sequence[Finding],
) -> tuple[str, ...]:
    """What would help on this model and data, with the number that says how much."""
    worst = max(outcomes, key=lambda o: o.recall, default=None)
    if worst is None or worst.recall == 0:
        return ()
    out = []
    if defences:
        # In the order of what they withstand (docs/defences.md): the first that does the job here.
        good = [d for d in defences if d.recall["psnr>19"] <= 0.05]
        best = good[0] if good else min(defences, key=lambda d: d.recall["psnr>19"])
        out.append(
            f"Switch on “{best.name}” on the clients: R falls from {100 * worst.recall:.0f} % to "
            f"{100 * best.recall['mse<1e-10']:.0f} % exact, {100 * best.recall['psnr>19']:.0f} % recognisable (measured here)."
        )
    if curve is not None and worst.attack == "QBI":
        neurons = next(f.target.neurons for f in findings if f.name == worst.layer)
        now = _at(curve, client.batch_size, neurons)
        larger = [b for b in curve.batch_sizes if b >= 4 * client.batch_size]
        if larger:
            out.append(
                f"Train with batches of {larger[0]} instead of {client.batch_size}: R falls from {100 * now:.0f} % to "
                f"{100 * _at(curve, larger[0], neurons):.0f} % (predicted for this data)."
            )
        narrower = [n for n in curve.neurons if n <= neurons / 4]
        if narrower:
            out.append(
                f"Make {worst.layer} narrower, {narrower[-1]} neurons instead of {neurons}: "
                f"{100 * _at(curve, client.batch_size, narrower[-1]):.0f} % (predicted for this data)."
            )
    exposed = [f for f in findings if f.reach == "exact" and f.target.rectified and f.target.has_bias]
    if exposed:
        names = ", ".join(f.name for f in exposed)
        out.append(
            f"Take the bias out of {names}, or put pooling in front of it: without a bias gradient there is nothing to "
            "divide by, and pooling leaves only what it keeps."
        )
    return tuple(out)


def _at(curve: Curve, batch_size: int, neurons: int) -> float:
    return curve.recall[curve.batch_sizes.index(batch_size)][curve.neurons.index(neurons)]


def _gallery(trial: Trial, mounted: Mounted, samples: Samples) -> Gallery:
    """The first batch for the eye; nothing where positions are read one by one."""
    carrier = mounted.carrier
    exact = tuple(bool(v) for v in trial.recoveries[0].recovered[:MOST_SHOWN])
    seen = tuple(bool(v) for v in trial.recoveries[-1].recovered[:MOST_SHOWN])
    if carrier.tokens > 1:
        return Gallery()
    if samples.kind == "images" and samples.images is not None:
        shape = samples.images.shape
        truth = _unit(samples, trial.chosen[:MOST_SHOWN])
        if trial.in_sample_space:
            return Gallery(truth, trial.read[:MOST_SHOWN].reshape(-1, *shape).clamp(0, 1), exact, seen)
        if len(carrier.shape) == 3 and carrier.shape[0] == shape[0]:
            small = trial.read[:MOST_SHOWN].reshape(-1, *carrier.shape)
            if not samples.raw:
                mean, std = (torch.tensor(v).view(-1, 1, 1) for v in (samples.images.mean, samples.images.std))
                small = torch.where(small == 0, small, small * std + mean)
            return Gallery(truth, small.clamp(0, 1), exact, seen)
        return Gallery()
    if samples.kind == "text" and carrier.embedding is not None and carrier.places is not None and carrier.exact:
        table = mounted.model.get_submodule(carrier.embedding).weight
        assert isinstance(table, Tensor)
        true = samples.inputs[0][trial.chosen[:MOST_SHOWN]]
        found = nearest_tokens(trial.read[:MOST_SHOWN].to(table), table.detach())
        words = []
        for row in range(len(true)):
            kept = [(int(t), bool(seen[row] and t == f)) for t, f in zip(true[row], found[row], strict=True)]
            words.append(tuple((samples.vocabulary[t], right) for t, right in kept if t != 0))
        return Gallery(exact=exact, seen=seen, words=tuple(words))
    return Gallery()


def _unit(samples: Samples, chosen: Tensor) -> Tensor:
    from qbi.data.images import unit_pixels

    assert samples.images is not None
    return unit_pixels(samples.images, chosen)


def interval_text(interval: Interval) -> str:
    """Percent with its interval."""
    width = "" if interval.low != interval.low else f" ± {100 * interval.half_width:.1f}"
    return f"{100 * interval.mean:.1f}{width}"
