"""Numbers that stand in sentences."""

import json
import re
import statistics
from typing import Any

from scipy import stats

from qbi import theory
from tables.private import SMALL, compared, learned_at
from tables.reading import DOCS, load

TRAINING = DOCS.parent / "src/qbi/lab/reproduce/published/training_full.json"

BEYOND = {"QBI": "QBI", "PAIRS": "PAIRS", "cascade": "cascade, exact", "unmixing": "unmixing, exact"}
"""Columns of the tables of `qbi reproduce beyond`; of the two readers, those that are exact."""


def _beyond(data: str, setting: str, reader: str) -> dict[str, Any]:
    found = load(f"beyond-{data}")["tables"][0]
    place = found["columns"].index(BEYOND[reader])
    entry: dict[str, Any] = next(r for r in found["rows"] if r["label"] == setting)["entries"][place]
    return entry


def _range(values: list[float]) -> str:
    low, high = f"{min(values):.0f}", f"{max(values):.0f}"
    return f"{high} %" if low == high else f"{low} to {high} %"


def whole_batches() -> str:
    """The cascade beside the paper's attacks."""
    both = ("imagenet", "cifar10")
    few, many = ([_beyond(d, f"(1000, {b})", "cascade")["ours"] for d in both] for b in (200, 500))
    paper = [_beyond(d, "(1000, 200)", reader)["ours"] for d in both for reader in ("QBI", "PAIRS")]
    return (
        f"{_range(few)} of a batch of 200 at 1,000 neurons on ImageNet and CIFAR-10, where the paper's attacks reach {_range(paper)}, "
        f"and {_range(many)} of 500"
    )


def honest_batches() -> str:
    """Unmixing of honest models."""
    rows = {(r["side"], r["neurons"], r["size"]): r for r in load("unmixing")["rows"]}
    said = [f"{100 * rows[32, n, b]['exact']:.0f} % of {b} images at {n} neurons" for n, b in ((200, 120), (500, 300))]
    return f"{' and '.join(said)} exactly, of CIFAR-10"


def at_full_rank() -> str:
    """The cascade where there are as many samples as rows."""
    cells = {(d, r): _beyond(d, "(200, 200)", r)["ours"] for d in ("imagenet", "cifar10") for r in ("cascade", "QBI")}
    return (
        f"{cells['imagenet', 'cascade']:.1f} % of ImageNet and {cells['cifar10', 'cascade']:.1f} % of CIFAR-10 at N = B = 200, where single rows "
        f"(QBI) give {cells['imagenet', 'QBI']:.1f} and {cells['cifar10', 'QBI']:.1f} %"
    )


def agreement(*tables: str) -> str:
    """How far QBI and PAIRS lie from the paper, over the cells that are compared with it."""
    found = [
        abs(entry["difference"])
        for t in load("reproduction")["tables"]
        if t["name"] in tables
        for row in t["rows"]
        for column, entry in zip(t["columns"], row["entries"], strict=True)
        if entry["difference"] is not None and (t["name"] == "normalisation" or column in _judged(t["name"]))
    ]
    return f"{max(found):.1f} points ({statistics.fmean(found):.1f} on average)"


def _judged(table: str) -> tuple[str, ...]:
    return ("qbi", "pairs, two embeddings") if table == "imdb-recall" else ("qbi", "pairs")


def layer_norm_similarity() -> str:
    """SSIM after LayerNorm was undone with public statistics."""
    caption = next(f for f in load("reproduction")["figures"] if f["name"] == "figure-layernorm")["caption"]
    found = re.search(r"from ([\d.]+) to [\d.]+, mean ([\d.]+)", caption)
    assert found
    return f"SSIM {found[2]} on average, but a low-contrast image can fall to {found[1]}"


def _training() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(TRAINING.read_text(encoding="utf-8"))
    return found


def aggp_accuracy() -> str:
    """The last epoch's accuracy with AGGP less that without, in points, over the same seeds."""
    found = _training()
    pairs = zip(found["base"], found["aggp"], strict=True)
    apart = [100 * (aggp[-1] - base[-1]) for base, aggp in pairs]
    half = stats.t.ppf(0.975, len(apart) - 1) * statistics.stdev(apart) / len(apart) ** 0.5
    return f"{statistics.fmean(apart):+.2f} ± {half:.2f} points after {found['epochs']} epochs, {len(apart)} seeds"


def aggp_rows() -> str:
    """How many rows AGGP touches in training."""
    found = _training()
    return f"{100 * found['pruned_row_share']:.1f} % of rows over {found['epochs']} epochs"


def costs() -> list[float]:
    """Points that the default costs, in every comparison there is: by network, on all images, in a federation."""
    found = []
    for network, epochs, images in {(n, e, SMALL) for n, e in compared()} | {("quickstart", 10, 60_000)}:
        cells = [
            c
            for c in load("frontier")["cells"]
            if (c["network"], c["epochs"], c["images"]) == (network, epochs, images)
        ]
        best = {noise: max(c["accuracy"] for c in cells if c["noise"] == noise) for noise in (-1.0, 0.1)}
        found.append(best[-1.0] - best[0.1])
    runs = load("flower")["runs"]
    plain, private = (statistics.fmean(100 * r["accuracy"] for r in runs if r["guard"] is g) for g in (False, True))
    return [*found, plain - private]


def largest_cost() -> str:
    """The most of them."""
    return f"{max(costs()):.1f} points"


def cost_on_all_images() -> str:
    """On all of CIFAR-10."""
    cells = [c for c in load("frontier")["cells"] if c["images"] == 60_000 and c["epochs"] == 10]
    plain = max(c["accuracy"] for c in cells if c["noise"] < 0)
    bare, *rest = (c for c in cells if c["noise"] == 0.1)
    said = ", ".join(f"{plain - c['accuracy']:.1f} {c['remedy']}" for c in sorted(rest, key=lambda c: -c["accuracy"]))
    return f"{plain - bare['accuracy']:.1f} points ({bare['accuracy']:.1f} against {plain:.1f} %, {bare['seeds']} seeds; {said})"


def guess_recognised() -> str:
    """How many images the mean image alone comes near to."""
    found = load("best-case")
    return f"{100 * found['guessed'] / found['held out']:.1f} % at 19 dB"


def learned_data() -> str:
    """What the learned code was learned and tried on."""
    found = load("learned")
    return f"{found['public']:,} public CIFAR-10 images and tried on {found['held out']:,} others"


def candidates() -> str:
    """How long the list is."""
    return f"{load('learned')['candidates'][0]['candidates']:,}"


def default_reading() -> str:
    """What the learned code reads at the default, in one participation and in sixteen."""
    once, often = learned_at(0.1, 1), learned_at(0.1, 16)
    return (
        f"in one participation {100 * once['at_30']:.0f} % at 30 dB and {100 * once['at_19']:.0f} % recognisably; after sixteen "
        f"{100 * often['at_30']:.1f} % and {100 * often['at_19']:.1f} %"
    )


def fires_too_often() -> str:
    """The paper's bias against the exact one."""
    size = 200
    few, many = (size * theory.fire_probability(theory.optimal_bias(size, m), m) for m in (10, 3072))
    return f"{few:.2f} times too often at M = 10 and B = {size}, {many:.3f} times at M = 3072"
