"""Architectures of published packages in small, audited one by one in a process of its own: one line of JSON for each.

    python tests/published.py            all of them
    python tests/published.py timm       those of one package
    python tests/published.py "GPT-2"    one

The packages stand in a folder of their own (`make zoo`), which is put on the path in this process only.
"""

import json
import logging
import sys
import time
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(__file__).parents[1] / ".venv" / "zoo"
KEPT: list[torch.library.Library] = []
"""Names of operators hold as long as their library is kept."""

PACKAGES = ("timm", "torchvision", "transformers", "monai", "torch_geometric", "peft")
SIZE, ATTACKS = 8, ("passive", "measured", "one-class")


def prepare() -> None:
    """Make the packages importable in this process.

    torchvision's own operators may be missing beside this torch; no model here calls them, but importing it asks for their names.
    """
    if FOLDER.exists():
        sys.path.append(str(FOLDER))
    KEPT.append(torch.library.Library("torchvision", "DEF"))
    for name in ("nms", "qnms"):
        KEPT[0].define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)


def missing(package: str) -> bool:
    return find_spec(package) is None and not (FOLDER / package).exists()


def attacked(result: Any) -> set[str]:
    """Parameters of layers that a crafted model was tried on, read or not.

    Where what comes back to a layer adds up to nothing, rows could not be read: that is not counted as tried.
    """
    tried = {a.layer for a in result.attacks if a.crafted and not a.centred}
    names = {p: result.origins.get(p, (p,)) for o in result.outcomes for p in o.parameters}
    return {n for o in result.outcomes if o.layer in tried for p in o.parameters for n in names[p]}


def audited(name: str) -> dict[str, Any]:
    """One model's audit, and what an attack by hand gets from the layers that the audit attacked in vain."""
    from by_hand import hands_on
    from linear_weights import linear_weights
    from published_models import MODELS
    from qbi import audit
    from qbi.auditing import Client

    entry = MODELS[name]
    torch.manual_seed(0)
    model = entry.make()
    started = time.perf_counter()
    result = audit(
        model, entry.data, client=Client(SIZE), batches=1, defences=False, attacks=list(ATTACKS), **entry.more
    )
    seconds = time.perf_counter() - started
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    own = entry.more.get("loss") == "own"
    weights = linear_weights(model, entry.data, own=own)
    states = result.accounts
    tried = attacked(result)
    silent = sorted(n for n in tried & set(weights) if states[n] != "leaks")
    read, untried = hands_on(model, entry.data, silent, SIZE, own=own)
    return {
        "model": name,
        "package": entry.package,
        "status": result.status,
        "verdict": result.verdict,
        "loss": result.loss,
        "complete": set(states) == trained,
        "layers": len(weights),
        "leaks": sum(states[n] == "leaks" for n in weights),
        "not_tested": sum(states[n] == "not tested" for n in weights),
        "not_tried": sum(states[n] != "leaks" and n not in tried for n in weights),
        "open": {
            o.layer: o.reason for o in result.outcomes if o.status == "not tested" and set(o.parameters) & set(weights)
        },
        "named": sorted({p for o in result.outcomes for p in o.parameters}),
        "tried_by_hand": len(silent) - len(untried),
        "missed": read,
        "untried": untried,
        "seconds": round(seconds, 1),
    }


def main(wanted: list[str]) -> None:
    """Print a line for each model that is wanted."""
    prepare()
    from published_models import MODELS

    for name, entry in MODELS.items():
        if wanted and name not in wanted and entry.package not in wanted:
            continue
        if missing(entry.package):
            print(json.dumps({"model": name, "package": entry.package, "missing": entry.package}), flush=True)
            continue
        try:
            found = audited(name)
        except Exception as problem:
            found = {"model": name, "package": entry.package, "crash": f"{type(problem).__name__}: {problem}"}
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
