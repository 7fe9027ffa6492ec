"""`qbi audit`: the main job."""

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.table import Table

from qbi.cli.common import Device, Json, Seed, checked_device, console, log, percent
from qbi.errors import BadValue
from qbi.files import to_json, write_atomically

if TYPE_CHECKING:
    from torch import nn

    from qbi.audit import AuditResult, Samples

MOST_PIXELS = 2**28
"""Pixels of synthetic photos that are painted at the most; their batch as floats takes twelve times as many bytes."""

FEWEST_PAINTED = 256
"""Photos that are painted at the least, so that curves over batch sizes have data."""


def audit(
    model: Annotated[
        str | None,
        typer.Argument(help="package.module:callable or path.py:callable; the paper's own model if left out."),
    ] = None,
    data: Annotated[
        str,
        typer.Option(
            help="'photos' or 'text' (built in), a folder or archive of images, CIFAR-10, hf:NAME, a .csv of texts, "
            "or arrays x and y in .npz, .safetensors or .pt."
        ),
    ] = "photos",
    model_arg: Annotated[list[str] | None, typer.Option(help="name=value for the callable; may be repeated.")] = None,
    attack: Annotated[
        str, typer.Option(help="What the server does, comma-separated: passive, qbi, pairs, trap-weights.")
    ] = "passive,qbi",
    layers: Annotated[str, typer.Option(help="'most exposed', 'all', or a layer's name.")] = "most exposed",
    batch_size: Annotated[int, typer.Option(min=2, help="Samples in the client's batch, B.")] = 20,
    batches: Annotated[int, typer.Option(min=1, help="Batches to try, each with fresh rows.")] = 3,
    loss: Annotated[str, typer.Option(help="auto, cross-entropy, bce, mse, or module:function.")] = "auto",
    local_steps: Annotated[
        int, typer.Option(min=0, help="Local steps before the client answers with its weights; 0: it sends a gradient.")
    ] = 0,
    optimiser: Annotated[Literal["sgd", "momentum", "adam"], typer.Option(help="Of the local steps.")] = "sgd",
    learning_rate: Annotated[float, typer.Option(help="Of the local steps.")] = 0.1,
    precision: Annotated[
        Literal["float32", "bfloat16", "float16"], typer.Option(help="Of what the client sends.")
    ] = "float32",
    aux: Annotated[str | None, typer.Option(help="Auxiliary data for PAIRS, as --data.")] = None,
    neurons: Annotated[int, typer.Option(min=1, help="Neurons of the paper's model, N; not with MODEL.")] = 200,
    norm: Annotated[
        Literal["none", "batch", "layer"], typer.Option(help="Normalisation in the paper's model; not with MODEL.")
    ] = "none",
    size: Annotated[int, typer.Option(min=4, help="Side of the images in pixels.")] = 32,
    trap_scale: Annotated[float, typer.Option(help="Scale of trap weights, below 1.")] = 0.95,
    defences: Annotated[bool, typer.Option(help="Try defences on the strongest attack.")] = True,
    fail_above: Annotated[float | None, typer.Option(min=0, max=1, help="Exit with 1 when R exceeds this.")] = None,
    no_samples: Annotated[bool, typer.Option("--no-samples", help="Leave the data out of everything written.")] = False,
    sarif: Annotated[bool, typer.Option("--sarif", help="Also write audit.sarif for code scanning.")] = False,
    junit: Annotated[bool, typer.Option("--junit", help="Also write audit.xml for a pipeline's test view.")] = False,
    out: Annotated[Path, typer.Option(help="Folder for the report, the picture and the JSON.")] = Path("out/audit"),
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Skip unreadable images instead of stopping.")] = False,
    seed: Seed = 0,
    device: Device = "cpu",
    json: Json = False,
) -> None:
    """Look into a model, attack it on your data, and say what a server would read: report.html, audit.json, a picture.

    Without MODEL: the paper's image CNN with 200 neurons on built-in synthetic photos. With one: every linear layer is
    looked at, and the most exposed one attacked, on a copy.

    [bold]Examples:[/bold]

      qbi audit

      qbi audit my_package.models:make_net --data ./photos --size 32 --batch-size 32

      qbi audit net.py:Net --model-arg width=64 --data table.npz --fail-above 0.1 --junit

      qbi audit --attack passive,qbi,pairs,trap-weights --batch-size 50
    """
    from qbi.audit import Client
    from qbi.audit import audit as run
    from qbi.audit.loading import load_callable, load_model, parse_arguments
    from qbi.federation.local import LocalTraining

    if fail_above is not None and not 0 <= fail_above <= 1:
        raise BadValue(f"--fail-above: {fail_above} is no share; R lies between 0 and 1.")
    where = checked_device(device)
    attacks = [part.strip() for part in attack.split(",") if part.strip()]
    arguments = parse_arguments(model_arg or [])
    user = None if model is None else load_model(model, arguments)
    client = Client(batch_size, local_steps, LocalTraining(optimiser, learning_rate), precision)
    spare = neurons if "pairs" in attacks and aux is None else 0
    samples = _samples(data, client.samples * batches, spare, size, seed, skip_bad, raw=user is None and norm != "none")
    net = user if user is not None else _paper_model(samples, neurons, norm, seed)
    with log.status("loading", spinner="dots") as status:
        result = run(
            net,
            samples,
            attacks=attacks,
            layers=layers,
            client=client,
            loss=load_callable(loss, "--loss") if ":" in loss else loss,
            batches=batches,
            auxiliary=None if aux is None else _samples(aux, neurons, 0, size, seed + 1, skip_bad, raw=samples.raw),
            defences=defences,
            trap_scale=trap_scale,
            name=model or "the paper's model",
            seed=seed,
            device=where,
            progress=status.update if sys.stderr.isatty() else None,
        )
    document = result.document()
    _write(result, document, out, fail_above or 0.0, no_samples=no_samples, sarif=sarif, junit=junit)
    if json:
        typer.echo(to_json(document), nl=False)
    else:
        _show(result, out)
    if fail_above is not None and result.recall > fail_above:
        raise typer.Exit(1)


def _samples(source: str, wanted: int, spare: int, size: int, seed: int, skip_bad: bool, *, raw: bool) -> "Samples":
    from qbi.audit.samples import ARRAYS, image_samples, load_arrays, text_samples
    from qbi.data.builtin_text import builtin_text
    from qbi.data.open import open_images
    from qbi.data.text import load_text, word_tokens

    path = Path(source)
    if source == "text":
        return text_samples(word_tokens(builtin_text(), length=64, vocabulary=4000))
    if path.suffix == ".csv":
        return text_samples(word_tokens(load_text(path), length=64, vocabulary=4000))
    if path.suffix in ARRAYS:
        return load_arrays(path)
    count = max(wanted + spare, FEWEST_PAINTED)
    if source == "photos" and count * size**2 > MOST_PIXELS:
        count = wanted + spare
        if count * size**2 > MOST_PIXELS:
            raise BadValue(
                f"audit: {count} photos of {size}×{size} are more than fit; lower --batch-size, --neurons or --size."
            )
    return image_samples(open_images(source, size=size, count=count, seed=seed, skip_bad=skip_bad), raw=raw)


def _paper_model(samples: "Samples", neurons: int, norm: str, seed: int) -> "nn.Module":
    import torch

    from qbi.models import image_cnn, text_model

    torch.manual_seed(seed)
    kind: Any = None if norm == "none" else norm
    if samples.images is not None:
        return image_cnn(samples.images.shape, neurons, max(2, len(samples.classes)), norm=kind)
    if samples.vocabulary:
        return text_model(len(samples.vocabulary), samples.inputs[0].shape[1], 64, neurons, norm=kind)
    raise BadValue("MODEL: arrays need a model of yours; name it as package.module:callable or path.py:callable.")


def _write(
    result: "AuditResult",
    document: dict[str, Any],
    out: Path,
    limit: float,
    *,
    no_samples: bool,
    sarif: bool,
    junit: bool,
) -> None:
    from qbi.report.audit import audit_page, to_junit, to_sarif
    from qbi.report.pictures import side_by_side

    gallery = result.gallery
    command = "qbi " + " ".join(shlex.quote(a) for a in sys.argv[1:])
    shown: dict[str, Any] = {}
    if not no_samples:
        shown = {
            "truth": gallery.truth,
            "read": gallery.read,
            "exact": gallery.exact,
            "seen": gallery.seen,
            "texts": gallery.words,
        }
    write_atomically(out / "audit.json", to_json(document))
    write_atomically(out / "report.html", audit_page(document, command=command, **shown))
    if sarif:
        write_atomically(out / "audit.sarif", to_json(to_sarif(document, limit)))
    if junit:
        write_atomically(out / "audit.xml", to_junit(document, limit))
    if not no_samples and gallery.truth is not None and gallery.read is not None:
        titles = ("what the client holds", "what the server reads")
        write_atomically(out / "audit.png", side_by_side(gallery.truth, gallery.read, titles))


def _show(result: "AuditResult", out: Path) -> None:
    table = Table(title=f"{result.model} on {result.data}, B = {result.client.batch_size}")
    for name in ("layer", "reach", "neurons", "values", "behind it"):
        table.add_column(name, overflow="fold")
    for finding in result.layers:
        values = "–" if finding.carrier is None else str(finding.carrier.features)
        target = finding.target
        table.add_row(finding.name, finding.reach, str(target.neurons), values, target.activation)
    console.print(table)
    measures = Table()
    for name in ("attack, layer", "", "A %", "P %", "R %"):
        measures.add_column(name, justify="left" if name in ("attack, layer", "") else "right")
    for attack in result.attacks:
        measured = attack.measured
        measures.add_row(
            f"{attack.attack}, {attack.layer}",
            "measured",
            percent(measured["active"]),
            percent(measured.get("precision")),
            percent(measured["recall"]),
        )
        for label, shares in (("predicted for this batch", attack.predicted), ("limit on normal data", attack.limit)):
            if shares is not None:
                measures.add_row("", label, *(percent(shares[key]) for key in ("active", "precision", "recall")))
        levels = ", ".join(f"{name}: {percent(i.mean)} %" for name, i in attack.recovered.items())
        measures.add_row("", f"read from gradients: {levels}", "", "", "")
    console.print(measures)
    console.print(result.verdict, style="bold", highlight=False)
    for line in result.advice:
        console.print(f"• {line}", highlight=False)
    for line in result.doubts:
        console.print(f"? {line}", style="yellow", highlight=False)
    console.print(f"Report: {out / 'report.html'}   JSON: {out / 'audit.json'}   ({result.seconds:.1f} s)")
