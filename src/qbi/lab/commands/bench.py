"""`qbi bench`: each fast path beside the naive method, in the same run."""

import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.table import Table

from qbi.cli.common import Device, Json, Seed, checked_device, console, log
from qbi.files import check_file, to_json, write_atomically

if TYPE_CHECKING:
    from torch import Tensor

    from qbi.lab.benchmarks import Comparison, Shape


def bench(
    size: Annotated[
        Literal["cifar", "honest", "wide", "imagenet", "private", "all"],
        typer.Option(help="Shapes to time; private: the private step beside a plain one and Opacus."),
    ] = "all",
    repeats: Annotated[int, typer.Option(min=1, help="Runs of ours; the median counts.")] = 3,
    out: Annotated[Path, typer.Option(help="Where the JSON goes.")] = Path("out/bench.json"),
    seed: Seed = 0,
    device: Device = "cpu",
    json: Json = False,
) -> None:
    """Time PAIRS and the evaluation of A, P, R against the naive method, as ratios.

    [bold]Examples:[/bold]

      qbi bench --size cifar

      qbi bench --size private --device cuda
    """
    from qbi.lab.benchmarks import bench_step

    check_file(out)
    where = checked_device(device)
    if size == "private":
        _private(where, seed, out, json=json)
        return
    results = _timed(size, where, seed, repeats)
    cost = bench_step(where, seed=seed, repeats=max(2, repeats))
    document = {
        "machine": _machine(where),
        "date": datetime.now(UTC).date().isoformat(),
        "peak_memory_gib": round(_peak_gib(), 2),
        "aggp_step": {"plain_seconds": cost.step, "added_seconds": cost.added, "share": cost.share},
        "results": [
            {
                "task": r.task,
                "shape": r.shape.name,
                "ours_seconds": r.ours,
                "naive_seconds": r.naive,
                "naive_extrapolated": r.extrapolated,
                "ratio": r.ratio,
                "note": r.note,
            }
            for r in results
        ],
    }
    write_atomically(out, to_json(document))
    if json:
        typer.echo(to_json(document), nl=False)
        return
    table = Table(title=f"{document['machine']}, {document['date']}")
    for title in ("task", "shape", "ours", "naive", "ratio", "naive measured as"):
        table.add_column(title, justify="right" if title in ("ours", "naive", "ratio") else "left")
    for r in results:
        how = f"extrapolated from {r.note}" if r.extrapolated else r.note
        table.add_row(r.task, r.shape.name, f"{r.ours:.3g} s", f"{r.naive:.4g} s", f"{r.ratio:,.0f}×", how)
    console.print(table)
    console.print(
        f"AGGP adds {100 * cost.share:.1f} % to a training step of the paper's CNN on CIFAR-10 at batch 64 "
        f"({1e3 * cost.added:.2f} ms on {1e3 * cost.step:.1f} ms)."
    )
    console.print(f"Peak memory of the whole run {document['peak_memory_gib']} GiB. JSON: {out}")


def _private(where: str, seed: int, out: Path, *, json: bool) -> None:
    """The private step on four models, one thread on a CPU, and what a value of noise costs."""
    import warnings

    import torch

    from qbi.lab.benchmarks.private import TASKS, bench_private, noise_nanoseconds

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    rows = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Opacus warns of hooks and of its random numbers
        for task in TASKS:
            log.print(f"{task.name} …")
            slow = not where.startswith("cuda") and task.name in ("ResNet-18-GN", "transformer")
            rows.append(bench_private(task, where, seed=seed, repeats=2 if slow else 30))
    document = {
        "machine": _machine(where),
        "date": datetime.now(UTC).date().isoformat(),
        "noise_ns": noise_nanoseconds(where),
        "rows": [{**r.__dict__, "ratios": {w: r.ratio(w) for w in r.seconds}} for r in rows],
    }
    torch.set_num_threads(threads)
    write_atomically(out, to_json(document))
    if json:
        typer.echo(to_json(document), nl=False)
        return
    table = Table(title=f"One training step, times a plain one. {document['machine']}, {document['date']}")
    for title in ("model", "plain", *(w for w in rows[0].seconds if w != "plain")):
        table.add_column(title, justify="left" if title == "model" else "right")
    for r in rows:
        ways = [f"{r.ratio(w):.2f}×" for w in r.seconds if w != "plain"]
        table.add_row(f"{r.model}, B = {r.batch_size}", f"{1e3 * r.seconds['plain']:.2f} ms", *ways)
    console.print(table)
    console.print(f"Noise: {document['noise_ns']:.1f} ns a value. JSON: {out}")


def _timed(size: str, where: str, seed: int, repeats: int) -> "list[Comparison]":
    """Every task at the chosen shapes."""
    from qbi.lab.benchmarks import Shape, attacks_for, bench_aggp, bench_evaluation, bench_pairs, bench_whole

    shapes = {
        "cifar": Shape("CIFAR-10 (200, 20)", 200, 20, 3072),
        "honest": Shape("CIFAR-10 (200, 32)", 200, 32, 3072),
        "wide": Shape("CIFAR-10 (1000, 64)", 1000, 64, 3072),
        "imagenet": Shape("ImageNet (1000, 200)", 1000, 200, 150_528),
    }
    results: list[Comparison] = []
    for shape in (s for name, s in shapes.items() if size in (name, "all")):
        log.print(f"{shape.name}: making data, then timing …")
        data = _samples(shape, seed).to(where)
        results.append(bench_evaluation(shape, data[: shape.batch_size], seed=seed, repeats=repeats))
        results.append(bench_pairs(shape, data, seed=seed, repeats=repeats))
        results += [
            bench_whole(shape, data[: shape.batch_size], attack, seed=seed, repeats=repeats)
            for attack in attacks_for(shape)
        ]
        del data
        results.append(bench_aggp(shape, where, seed=seed, repeats=repeats))
    return results


def _samples(shape: "Shape", seed: int) -> "Tensor":
    """Synthetic photos of the shape's size; large ones are painted small and enlarged, which costs less."""
    from torch.nn.functional import interpolate

    from qbi.carrier import flat
    from qbi.data.images import normalised
    from qbi.data.photos import synthetic_photos

    side = round((shape.features / 3) ** 0.5)
    painted = min(side, 56)
    small = normalised(synthetic_photos(shape.neurons, painted, seed=seed), slice(None))
    if painted == side:
        return flat(small)
    return flat(interpolate(small, size=(side, side), mode="bilinear"))


def _machine(device: str) -> str:
    import torch

    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"


def _peak_gib() -> float:
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
