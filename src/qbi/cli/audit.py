"""`qbi audit`: the main job."""

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from qbi.cli import audit_options as options
from qbi.cli.audit_screen import show_audit
from qbi.cli.common import (
    FASTEST,
    Device,
    Json,
    Seed,
    announce,
    checked_device,
    console,
    counted,
    some,
    stages,
    words,
)
from qbi.errors import BadValue, number_in
from qbi.files import check_place, to_json, write_atomically

NOT_TESTED = 3
"""Exit code where nothing was read, but not everything could be tried."""

if TYPE_CHECKING:
    from collections.abc import Iterable

    from qbi.attacks import Attack
    from qbi.auditing import AuditResult
    from qbi.report.formats import Format


def audit(
    model: options.Model = None,
    data: options.Data = "builtin:photos",
    model_arg: options.ModelArg = None,
    attack: options.Attack = "default",
    list_attacks: options.ListAttacks = False,
    layers: options.Layers = "most exposed",
    batch_size: options.BatchSize = 20,
    batches: options.Batches = 3,
    loss: options.Loss = "auto",
    local_steps: options.LocalSteps = 0,
    optimiser: options.Optimiser = "sgd",
    learning_rate: options.LearningRate = 0.1,
    precision: options.Precision = "float32",
    aux: options.Aux = None,
    neurons: options.Neurons = None,
    norm: options.Norm = "none",
    size: options.Size = 32,
    trap_scale: options.TrapScale = None,
    defences: options.Defences = True,
    decode: options.Decode = None,
    match: options.Match = None,
    fail_above: options.FailAbove = None,
    fail_at: options.FailAt = "recognisable",
    no_samples: options.NoSamples = False,
    sarif: options.Sarif = False,
    junit: options.Junit = False,
    pdf: options.Pdf = False,
    format: options.Format = None,
    out: options.Out = Path("out/audit"),
    skip_bad: options.SkipBad = False,
    seed: Seed = 0,
    device: Device = "cpu",
    json: Json = False,
) -> None:
    """Look into a model, attack it on your data, and say what a server would read: report.html, audit.json, a picture.

    Without MODEL: the paper's image CNN with 200 neurons on built-in synthetic photos. With one: every linear layer is
    looked at, and the most exposed one attacked, on a copy.

    [bold]Examples:[/bold]

      qbi audit

      qbi audit --attack all

      qbi audit my_package.models:make_net --data ./photos --size 32 --batch-size 32

      qbi audit net.py:Net --model-arg width=64 --data table.npz --fail-above 0.1 --junit
    """
    from qbi.attacks.registry import ATTACKS, BY_DEFAULT, select
    from qbi.auditing import Client
    from qbi.auditing import audit as run
    from qbi.auditing.loading import load_callable, load_model, parse_arguments, users_code
    from qbi.cli import audit_data
    from qbi.federation.local import LocalTraining
    from qbi.metrics import THRESHOLDS

    if list_attacks:
        _list(ATTACKS.values())
        return
    _refuse(fail_above, of_users=model is not None, shaped=neurons is not None or norm != "none")
    number_in("--learning-rate", learning_rate, most=FASTEST)
    check_place(out)
    formats = _formats(format or [], sarif=sarif, junit=junit, pdf=pdf)
    where = checked_device(device)
    width = 200 if neurons is None else neurons
    attacks = list(BY_DEFAULT) if attack == "default" else some("--attack", words(attack))
    user = None
    if model is not None:
        user = audit_data.trained_model(load_model(model, parse_arguments(model_arg or []), seed=seed), model)
    client = Client(batch_size, local_steps, LocalTraining(optimiser, learning_rate), precision)
    spare = 0 if aux is not None else _spare(select(attacks, "audit"), batch_size, width)
    raw = user is None and norm != "none"
    samples = audit_data.audited_samples(data, client.samples * batches, spare, size, seed, skip_bad, raw=raw)
    helper = None
    if aux is not None:
        helper = audit_data.auxiliary_samples(aux, width, size, seed + 1, skip_bad, raw=samples.raw)
        audit_data.check_like(samples, helper)
    announce(
        f"{counted(len(samples), 'sample')} of {'×'.join(map(str, samples.inputs[0].shape[1:]))} values, {counted(batches, 'batch', 'batches')} of "
        f"{client.samples}, {counted(len(select(attacks, 'audit')), 'attack')}."
    )
    with stages() as say, users_code(f"MODEL: {model}"):
        samples = samples if user is None else audit_data.suited(user, samples)
        result = run(
            user if user is not None else audit_data.paper_model(samples, width, norm, seed),
            samples,
            attacks=attacks,
            layers=layers,
            client=client,
            loss=load_callable(loss, "--loss") if ":" in loss else loss,
            batches=batches,
            auxiliary=helper,
            defences=defences,
            decode=decode,
            match=match,
            settings={} if trap_scale is None else {"trap_scale": trap_scale},
            at=dict(zip(options.LEVELS, THRESHOLDS, strict=True))[fail_at],
            name=model or "the paper's model",
            seed=seed,
            device=where,
            progress=say,
        )
    _write(result, out, fail_above or 0.0, formats, no_samples=no_samples)
    _end(result, out, fail_above, json=json)


def _formats(keys: list[str], **asked: bool) -> "list[Format]":
    """Those that are always written, and those that were asked for by name or by an option of their own."""
    from qbi.report.formats import select

    by_option = [key for key, wanted in asked.items() if wanted]
    return select([*keys, *by_option], f"--{by_option[-1]}" if by_option and not keys else "--format")


def _refuse(fail_above: float | None, *, of_users: bool, shaped: bool) -> None:
    """Options that say nothing."""
    if fail_above is not None and not 0 <= fail_above <= 1:
        raise BadValue(f"--fail-above: {fail_above} is no share; R lies between 0 and 1.")
    if of_users and shaped:
        raise BadValue(
            "--neurons and --norm shape the paper's model; with a MODEL of yours they do nothing. Leave them out."
        )


def _end(result: "AuditResult", out: Path, fail_above: float | None, *, json: bool) -> None:
    """What is said, and the exit code: 1 where more leaks than may, 3 where not everything could be tried."""
    if json:
        typer.echo(to_json(result.document()), nl=False)
    else:
        show_audit(result, out)
    if fail_above is not None and result.share > fail_above:
        raise typer.Exit(1)
    if result.status == "not tested" or (fail_above is not None and fail_above < 1 and result.untested_parameters):
        raise typer.Exit(NOT_TESTED)


def _list(attacks: "Iterable[type[Attack]]") -> None:
    for known in attacks:
        console.print(f"{known.key}: a server that {known.action}", markup=False, highlight=False)


def _spare(attacks: "list[type[Attack]]", batch_size: int, neurons: int) -> int:
    """Samples beside the batches that the attacks would like to have of the domain."""
    from qbi.attacks import Knowledge

    return max((a.auxiliary_useful(Knowledge(batch_size, neurons, 1)) for a in attacks), default=0)


def _write(result: "AuditResult", out: Path, limit: float, asked: "list[Format]", *, no_samples: bool) -> None:
    from qbi.report.formats import Written

    gallery = result.gallery
    pictures = {"truth": gallery.truth, "read": gallery.read, "exact": gallery.exact, "seen": gallery.seen}
    parts = {"decoded": result.decoded, "matched": result.matched, "patches": result.patches}
    images = {name: (found.truth, found.seen) for name, found in parts.items() if found is not None}
    told = () if result.sentences is None else result.sentences.marked
    shown: dict[str, Any] | None = None if no_samples else {**pictures, "made": images, "texts": gallery.words or told}
    command = "qbi " + " ".join(shlex.quote(a) for a in sys.argv[1:])
    written = Written(result.document(), limit, command, shown)
    for one in asked:
        made = one.write(written)
        if made is None:
            # A picture of an earlier run would contradict this report, or show what it was asked to keep to itself.
            (out / one.file).unlink(missing_ok=True)
        else:
            write_atomically(out / one.file, made)
