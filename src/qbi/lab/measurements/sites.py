"""Sites of NVFlare: the example, with and without the guard; resumed where it was stopped."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from qbi.lab.kept import Kept
from qbi.lab.measurements import in_clone

SEEDS = range(10, 18)
"""Of the first weights, and of which site has which images; none of them chose a rate."""
RATES = {False: 0.02, True: 0.5}
"""Of plain and of private training: clipping fixes a gradient's length. The better ones of 0.01, 0.02 and
0.04, and of 0.3 and 0.5, over three other seeds in one process."""
SETTING = ("--images", "1500", "--batch", "50", "--rounds", "20")


def nvflare(data: str) -> dict[str, Any]:
    """The example in the simulator, two sites, a benign server, over seeds: accuracy on images that no site has."""
    runs = [_trained(data, guard, rate, seed) for seed in SEEDS for guard, rate in RATES.items()]
    return {"setting": " ".join(SETTING), "runs": runs}


def _trained(data: str, guard: bool, rate: float, seed: int) -> dict[str, Any]:
    kept, key = Kept("nvflare", "cpu"), f"{'private' if guard else 'plain'}-{rate:g}-{seed}"
    if (done := kept.get(key)) is not None:
        return dict(done)
    script = in_clone("examples/nvflare-guarded/run.py")
    with tempfile.TemporaryDirectory() as folder:
        words = [*SETTING, "--rate", str(rate), "--seed", str(seed), "--out", folder]
        subprocess.run(
            [sys.executable, str(script), "simulation", *words, *([] if guard else ["--no-guard"])],
            check=True,
            env={**os.environ, "QBI_EXAMPLE_DATA": str(Path(data).resolve()), "HOME": folder},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        ended = json.loads((Path(folder) / "federation.json").read_text(encoding="utf-8"))
    run = {"guard": guard, "rate": rate, "seed": seed, "accuracy": ended["accuracy"], "ended": ended["ended"]}
    kept.put(key, run)
    print(run, flush=True)
    return run
