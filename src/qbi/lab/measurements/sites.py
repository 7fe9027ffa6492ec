"""Sites of NVFlare: the example, with and without the guard."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from qbi.lab.measurements import in_clone

SEEDS = 3
RATES = {False: (0.02, 0.1), True: (0.2, 0.5)}
"""Of plain and of private training: clipping fixes a gradient's length. Two each: beside plain training at a poor rate anything looks good."""
SETTING = ("--images", "1500", "--batch", "50", "--rounds", "20")


def nvflare(data: str) -> dict[str, Any]:
    """The example in the simulator, two sites, a benign server, over seeds: accuracy on images that no site has."""
    runs = [_trained(data, guard, rate, seed) for seed in range(SEEDS) for guard in RATES for rate in RATES[guard]]
    return {"setting": " ".join(SETTING), "runs": runs}


def _trained(data: str, guard: bool, rate: float, seed: int) -> dict[str, Any]:
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
        done = json.loads((Path(folder) / "federation.json").read_text(encoding="utf-8"))
    run = {"guard": guard, "rate": rate, "seed": seed, "accuracy": done["accuracy"], "ended": done["ended"]}
    print(run, flush=True)
    return run
