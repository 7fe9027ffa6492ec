"""What the README shows: what is needed, and the findings in ten lines."""

import tomllib

from qbi.private.goal import DEFAULT_BITS
from tables import claims
from tables.detection import crafted_found, held_out
from tables.matrix import worst
from tables.paper import trap_imagenet
from tables.pictures import draws, seen_at_16
from tables.private import read_72
from tables.reading import DOCS
from tables.speed import pairs_time

ROOT = DOCS.parent


def needs() -> str:
    """What an installation needs, as `pyproject.toml` says it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    version = project["requires-python"].removeprefix(">=")
    return f"Python {version} or later is needed. The built-in data need no download.\n"


def findings() -> str:
    """A line for each: what was found, the numbers, and the page that has the rest."""
    images = claims.agreement("imagenet-recall", "cifar10-recall", "normalisation")
    seen, flower = seen_at_16("FedAvg's CNN", "as initialised"), draws("as initialised").split(" over")[0]
    rows = [
        ("A crafted model gives whole batches away", claims.whole_batches(), "strongest-server.md"),
        ("Honest models give whole batches away", claims.honest_batches(), "strongest-server.md"),
        (
            "Features of an honest CNN become pictures",
            f"{flower} of Flower's quickstart, {seen} of FedAvg's CNN recognisable, in batches of 16 CIFAR-10 images",
            "strongest-server.md",
        ),
        (
            "A private step bounds every server",
            f"the best we built reads {read_72()}, at {DEFAULT_BITS:g} bits",
            "guarantees.md",
        ),
        ("It costs little accuracy", f"up to {claims.largest_cost()} in what we trained", "defences.md"),
        (
            "The paper's defence misses some servers",
            f"with AGGP on, imprint still reads {worst('aggp', 'imprint', 64)} of a batch of 64",
            "defences.md",
        ),
        (
            "The paper's tables are reproduced",
            f"images within {images}, text within {claims.agreement('imdb-recall')}",
            "reproduction.md",
        ),
        ("Trap weights do better than is quoted", f"{trap_imagenet()} of ImageNet samples", "reproduction.md"),
        ("PAIRS is fast in the Gram view", f"{pairs_time('bench-cpu')}, on two cores", "benchmarks.md"),
        (
            "Crafted models of known kinds are told",
            f"{crafted_found()}; of benign models of other kinds {held_out()} are reported",
            "detection.md",
        ),
    ]
    lines = "\n".join(f"| [{what}](docs/{page}) | {numbers} |" for what, numbers, page in rows)
    return f"| finding | measured |\n|---|---|\n{lines}\n"
