"""Plants faults one by one and asks whether the tests notice: `make mutants`. Not part of the tests themselves."""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]

FAULTS = [
    (
        "exposure/record.py",
        "return self.leak.samples | self.by_differences",
        "return self.leak.samples",
        "test_faults.py",
    ),
    ("defences/policy.py", "NOISE = 3.0", "NOISE = 0.3", "test_faults.py"),
    (
        "defences/aggp.py",
        "return (count - 1) ** 2 * (settings.highest - settings.lowest) / (settings.cutoff - 2) ** 2",
        "return (count - 1) * (settings.highest - settings.lowest) / (settings.cutoff - 2)",
        "test_faults.py",
    ),
    ("attacks/pairs.py", "patience: int = 2000", "patience: int = 200", "test_faults.py"),
    (
        "attacks/pairs.py",
        "yield slice(max(0, end - self.batch_size), end)",
        "yield slice(start, min(start + self.batch_size, neurons))",
        "test_pairs.py",
    ),
    (
        "experiments/reproduce/image_cells.py",
        "chosen = split.auxiliary[: tuning_samples(cell, len(split.auxiliary))]",
        "chosen = split.batches.flatten()[: tuning_samples(cell, len(split.auxiliary))]",
        "test_faults.py",
    ),
    (
        "experiments/reproduce/text_cells.py",
        "chosen = tokens[split.auxiliary[: tuning_samples(cell, len(split.auxiliary))]]",
        "chosen = tokens[split.batches.flatten()[: tuning_samples(cell, len(split.auxiliary))]]",
        "test_faults.py",
    ),
    (
        "defences/budget/products.py",
        "ROUNDING = 8 * 2.0**-23",
        "ROUNDING = 0.0",
        "test_budget.py",
    ),
    (
        "defences/budget/products.py",
        "return values / largest[:, None, None, None], largest.double()",
        "return values, torch.ones_like(largest).double()",
        "test_budget.py",
    ),
    (
        "detection/parameters.py",
        "(rows / size[:, None]).float()",
        "rows.float()",
        "test_detection.py",
    ),
    (
        "defences/layout.py",
        "run(copied(changed))",
        "run(copied(with_another(given, sample, samples, axis)))",
        "test_zoo.py",
    ),
    (
        "defences/budget/products.py",
        '[n for n in names if n == "bias" or not by_products]',
        '[n for n in names if n == "bias" or positions > 1]',
        "test_budget.py",
    ),
    (
        "defences/budget/clipping.py",
        "except Exception as problem:",
        "except RuntimeError as problem:",
        "test_ways_past.py",
    ),
    (
        "defences/budget/per_sample.py",
        "values = values.to(weights.dtype)",
        "weights = weights.to(values.dtype)",
        "test_ways_past.py",
    ),
    (
        "auditing/slim.py",
        "return live if torch.equal(whole.features, slim.features) else {}",
        "return live",
        "test_slim.py",
    ),
    ("auditing/slim.py", "    nn.ReLU,\n", "    nn.ReLU,\n    nn.BatchNorm2d,\n", "test_slim.py"),
    (
        "auditing/shortcut.py",
        "return kept if same else None",
        "return kept",
        "test_shortcut.py",
    ),
    (
        "theory/guarantees.py",
        "return participations / (2 * noise**2 * math.log(2))",
        "return 0.9 * participations / (2 * noise**2 * math.log(2))",
        "test_guarantees.py",
    ),
    (
        "theory/guarantees.py",
        "special.ndtri(chance) + reach",
        "special.ndtri(chance) + 0.9 * reach",
        "test_guarantees.py",
    ),
    (
        "defences/budget/clipping.py",
        "value = value + self.seeing.scale * self.noise * share",
        "value = value + 0.5 * self.seeing.scale * self.noise * share",
        "test_budget.py",
    ),
    (
        "defences/budget/clipping.py",
        "(share / norms.clamp_min(1e-30)).clamp(max=1.0)",
        "(share / norms.clamp_min(1e-30)).clamp(min=1.0)",
        "test_budget.py",
    ),
    (
        "defences/budget/account.py",
        "if self.samples is not None and batch <= self._left:",
        "if batch <= self._left + 1000:",
        "test_ledger.py",
    ),
    (
        "defences/budget/ledger.py",
        "before + more > limit * (1 + 1e-9)",
        "before > limit * (1 + 1e-9)",
        "test_ledger.py",
    ),
    ("defences/round.py", "bits=min(self.bits, asked.bits),", "bits=asked.bits,", "test_flower.py"),
    ("defences/seeing.py", "self.listener(calls)", "pass", "test_budget.py"),
    (
        "auditing/result.py",
        'return "not tested" if not found or any(o.status == "not tested" for o in found) else "nothing read"',
        'return "nothing read"',
        "test_zoo.py",
    ),
    (
        "auditing/trial.py",
        "return torch.maximum(spread, FINEST",
        "return torch.ones_like(spread), SPAN\n    return torch.maximum(spread, FINEST",
        "test_zoo.py",
    ),
]


def survives(file: str, before: str, after: str, tests: str) -> bool:
    """Whether the tests pass with one fault planted in a copy."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for part in ("src", "tests", "docs", "pyproject.toml"):
            source = ROOT / part
            (shutil.copytree if source.is_dir() else shutil.copy)(source, copy / part)
        path = copy / "src/qbi" / file
        text = path.read_text(encoding="utf-8")
        if before not in text:
            raise SystemExit(f"{file}: {before!r} is no longer there; mend the list.")
        path.write_text(text.replace(before, after, 1), encoding="utf-8")
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not serial", f"tests/{tests}"]
        environment = {"PYTHONPATH": str(copy / "src"), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
        return subprocess.run(command, cwd=copy, env=environment, capture_output=True, check=False).returncode == 0


def main() -> int:
    """Plant them all; exit code 1 if one survives."""
    left = 0
    for fault in FAULTS:
        alive = survives(*fault)
        left += alive
        print("SURVIVES" if alive else "killed  ", fault[0], "|", fault[2].splitlines()[0][:90], flush=True)
    print(f"{len(FAULTS) - left} of {len(FAULTS)} killed")
    return int(left > 0)


if __name__ == "__main__":
    sys.exit(main())
