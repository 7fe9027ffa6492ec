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
    (
        "defences/registry.py",
        '"auto": HideReadable(3.0)',
        '"auto": HideReadable(0.3)',
        "test_faults.py",
    ),
    (
        "defences/aggp.py",
        "return (count - 1) ** 2 * (settings.highest - settings.lowest) / (settings.cutoff - 2) ** 2",
        "return (count - 1) * (settings.highest - settings.lowest) / (settings.cutoff - 2)",
        "test_faults.py",
    ),
    (
        "attacks/pairs.py",
        "patience: int = 2000",
        "patience: int = 200",
        "test_faults.py",
    ),
    (
        "attacks/pairs.py",
        "yield slice(max(0, end - self.batch_size), end)",
        "yield slice(start, min(start + self.batch_size, neurons))",
        "test_pairs.py",
    ),
    (
        "lab/reproduce/image_cells.py",
        "chosen = split.auxiliary[: tuning_samples(cell, len(split.auxiliary))]",
        "chosen = split.batches.flatten()[: tuning_samples(cell, len(split.auxiliary))]",
        "test_faults.py",
    ),
    (
        "lab/reproduce/text_cells.py",
        "chosen = tokens[split.auxiliary[: tuning_samples(cell, len(split.auxiliary))]]",
        "chosen = tokens[split.batches.flatten()[: tuning_samples(cell, len(split.auxiliary))]]",
        "test_faults.py",
    ),
    (
        "detection/parameters.py",
        "(rows / size[:, None]).float()",
        "rows.float()",
        "test_detection.py",
    ),
    (
        "auditing/sent_updates.py",
        " or known[1] != now:",
        ":",
        "test_sent_updates.py",
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
        "auditing/result.py",
        'return "leaks" if leaks else "not tested"',
        'return "not tested"',
        "test_verdicts.py",
    ),
    (
        "auditing/trial.py",
        "return torch.maximum(spread, FINEST",
        "return torch.ones_like(spread), SPAN\n    return torch.maximum(spread, FINEST",
        "test_zoo.py",
    ),
    (
        "private/refusals.py",
        "if statistics and part.training:",
        "if statistics and part.training and False:",
        "test_zoo.py::test_the_private_step_sees_every_one_of_them",
    ),
    (
        "private/samples.py",
        "x, y = tree_map(lambda v, number=number: v[number].clone(), (inputs, targets))",
        "x, y = tree_map(lambda v, number=number: v[0].clone(), (inputs, targets))",
        "test_zoo.py::test_the_private_step_sees_every_one_of_them",
    ),
    (
        "private/planning.py",
        "unknown = disagreeing(evaluator, x, y, plan) if uses else set()",
        "unknown = set()",
        "private/test_ways_past.py",
    ),
    (
        "private/clipping.py",
        "weights = torch.where(fine & used, clip / norms.clamp_min(clip), 0.0)",
        "weights = torch.where(fine & used, clip / norms.clamp_max(clip), 0.0)",
        "test_zoo.py::test_the_private_step_sees_every_one_of_them",
    ),
    (
        "private/clipping.py",
        "return {name for name, times in roles.items() if times > 1}",
        "return set()",
        "test_zoo.py::test_the_private_step_sees_every_one_of_them",
    ),
    (
        "private/clipping.py",
        "    for part in products:\n        squares += product_squares(part)\n",
        "",
        "test_zoo.py::test_the_private_step_sees_every_one_of_them",
    ),
    (
        "private/release.py",
        "return cls(step, sensitivity, noise * sensitivity)",
        "return cls(step, sensitivity, 0.9 * noise * sensitivity)",
        "test_policy.py",
    ),
    (
        "private/keystream.py",
        "return os.urandom(KEY_BYTES)",
        "return bytes(KEY_BYTES)",
        "test_policy.py",
    ),
    (
        "private/account.py",
        "if self.bits + more > self.total * (1 + 1e-9):",
        "if self.bits > self.total * (1 + 1e-9):",
        "test_ledger.py",
    ),
    (
        "private/account.py",
        "LIFETIME_BITS\n",
        "float('inf')\n",
        "test_ledger.py",
    ),
    (
        "private/ledger.py",
        "before + more > limit * (1 + 1e-9)",
        "before > limit * (1 + 1e-9)",
        "test_ledger.py",
    ),
    (
        "private/ledger.py",
        "        if found < last:",
        "        if found < last - 1:",
        "test_ledger.py",
    ),
    (
        "private/drawing.py",
        "list(permutation(count).split(batch_size))",
        "list(torch.randint(count, (count,)).split(batch_size))",
        "test_ledger.py",
    ),
    (
        "private/drawing.py",
        "math.ceil(count / batch_size) * batch_size / count",
        "1.0",
        "test_ledger.py",
    ),
    (
        "private/step.py",
        "            times = max(1, self._sums.parts) ** 2\n",
        "            times = 1\n",
        "test_ledger.py",
    ),
    (
        "private/passes.py",
        "self.left = None if self.left is None else 0",
        "pass",
        "test_ledger.py",
    ),
    (
        "private/passes.py",
        "        if count > self.left:",
        "        if count > self.left + 1000:",
        "test_ledger.py",
    ),
    (
        "private/boundary.py",
        "if not start or not any(all(_same(k if n in k else known, n, v) for n, v in start.items()) for k in public):",
        "if not public:",
        "test_policy.py",
    ),
    (
        "private/boundary.py",
        "            (stays or say_once)(name)\n",
        "            out[name] = values[name]\n",
        "test_boundary.py",
    ),
    (
        "private/boundary.py",
        "_same(released if n in released else self.known, n, v)",
        "(_same(released, n, v) or _same(self.sent, n, v))",
        "test_gate.py",
    ),
    ("private/step.py", "        self.account.settle()\n", "", "test_gate.py"),
    ("private/passes.py", "if os.getpid() != self._process:", "if False:", "test_gate.py"),
    (
        "private/receipts.py",
        "digest(sent) + digest(state) + self.payee.encode()",
        "digest(sent) + digest(state)",
        "test_gate.py",
    ),
    ("auditing/claim_records.py", "or self.defeated or", "or", "test_claims.py"),
    (
        "federation/local.py",
        "steps, len(batches))",
        "steps, 1)",
        "test_joint.py::test_the_server_counts_the_samples_of_all_steps",
    ),
    (
        "private/site.py",
        "Boundary(sent, metrics, settings.total - spent, pay=pay)",
        "Boundary(sent, metrics, settings.total, pay=pay)",
        "test_policy.py",
    ),
    (
        "private/site.py",
        "            boundary.charge(budget.bits(1))\n",
        "",
        "test_policy.py",
    ),
    (
        "private/update.py",
        "difference *= clip / torch.linalg.vector_norm(difference).clamp_min(clip)",
        "difference *= 1.0",
        "test_policy.py",
    ),
    (
        "defences/applying.py",
        "        parameter.grad = None\n",
        "        pass\n",
        "test_policy.py",
    ),
    (
        "defences/applying.py",
        'if found.act == "refuse":',
        'if found.act == "refuse" and not found.readable:',
        "test_policy.py",
    ),
    (
        "defences/applying.py",
        "if not all(is_finite(g) for g in step.update.gradients.values()):",
        "if not step.update.gradients:",
        "test_policy.py",
    ),
    (
        "defences/applying.py",
        "seed=seed, as_it_is=True)",
        "seed=seed)",
        "test_policy.py",
    ),
    (
        "defences/applying.py",
        "own = SystemEntropy() if draws is None else draws",
        "own = torch.Generator().manual_seed(0) if draws is None else draws",
        "test_policy.py",
    ),
    (
        "private/ledger.py",
        '            connection.execute("COMMIT")\n        except sqlite3.Error as problem:',
        '            connection.execute("COMMIT")\n        except sqlite3.IntegrityError:\n            pass\n'
        "        except sqlite3.Error as problem:",
        "test_evidence.py",
    ),
    (
        "private/account.py",
        "            self.ledger.spend(self.data, self.family, self.budget.noise, participations, limit=self.total)\n",
        "            try:\n"
        "                self.ledger.spend(self.data, self.family, self.budget.noise, participations, limit=self.total)\n"
        "            except OSError:\n                pass\n",
        "test_evidence.py",
    ),
    (
        "private/site.py",
        "            ledger.spend(settings.data, family, guarantees.noise_for_bits(bits), limit=settings.total)\n",
        "            try:\n"
        "                ledger.spend(settings.data, family, guarantees.noise_for_bits(bits), limit=settings.total)\n"
        "            except Exception as problem:\n"
        '                if "used up" in str(problem):\n                    raise\n',
        "test_evidence.py",
    ),
    (
        "cli/ledger.py",
        "one.bits >= one.limit",
        "one.bits > one.limit",
        "test_evidence.py",
    ),
    (
        "report/audit.py",
        '"level": "error" if share > limit else "note"',
        '"level": "note"',
        "test_evidence.py",
    ),
    (
        "report/audit.py",
        '"level": "error" if share > limit else "note"',
        '"level": "error" if share >= limit else "note"',
        "test_evidence.py",
    ),
    (
        "detection/detectors.py",
        '"negative bias", 1.0',
        '"negative bias", 1.2',
        "test_evidence.py",
    ),
    (
        "detection/detectors.py",
        '"negative bias", 1.0',
        '"negative bias", 0.95',
        "test_evidence.py",
    ),
    (
        "lab/reproduce/cells.py",
        "{self.run}/{self.seed}/{self.route}",
        "{self.run}/{self.route}",
        "test_evidence.py",
    ),
    (
        "lab/reproduce/store.py",
        "(c.item, c.seed, c.route) == (item, seed, route)",
        "(c.item, c.route) == (item, route)",
        "test_evidence.py",
    ),
    (
        "metrics/guess.py",
        "return torch.minimum(apart.amin(1).square() / truth.shape[1], (known.mean(0) - mine).square().mean(1))",
        "return (known.mean(0) - mine).square().mean(1)",
        "test_evidence.py",
    ),
    (
        "metrics/guess.py",
        "return torch.minimum(apart.amin(1).square() / truth.shape[1], (mean - mine).square().mean(1))",
        "return (mean - mine).square().mean(1)",
        "test_evidence.py",
    ),
    (
        "metrics/guess.py",
        "return torch.minimum(apart.amin(1).square() / truth.shape[1], (mean - mine).square().mean(1))",
        "return apart.amin(1).square() / truth.shape[1]",
        "test_evidence.py",
    ),
    (
        "auditing/trial.py",
        '"bfloat16": 2.0**-9',
        '"bfloat16": 2.0**-8',
        "test_evidence.py",
    ),
    (
        "auditing/trial.py",
        '"bfloat16": 2.0**-9',
        '"bfloat16": 2.0**-12',
        "test_evidence.py",
    ),
    ("attacks/certifying.py", "COARSEST = 2.0**-20", "COARSEST = 1.0", "test_certifying.py"),
    ("attacks/certifying.py", "SENDS = 1e-6", "SENDS = 1e-30", "test_third_review.py"),
    ("attacks/base.py", "not self.sees_samples", "False", "test_third_review.py"),
    ("routing/untouched.py", "not _reshapes(traced, node)", "False", "test_third_review.py"),
    ("report/comparison.py", 'one.change == "better" and more', "False", "test_third_review.py"),
    ("integrations/judging.py", "fail_above < 1 and result.untested_parameters", "False", "test_third_review.py"),
    ("auditing/trial.py", "        control=control,\n", "", "test_third_review.py"),
    ("patches/reading.py", "ALIKE = 1e-3", "ALIKE = 1e9", "test_patches.py"),
    ("private/weights.py", "        self.beginning.put_back()\n", "", "test_beginning.py"),
    ("private/beginning.py", "own[name] = tensor", "pass", "test_beginning.py"),
    ("private/summing.py", "self.failed = first_line(problem)", "pass", "test_beginning.py"),
    (
        "private/planning.py",
        "each(others, torch.ones_like)\n        yield each(floats, torch.ones_like), each(others, torch.zeros_like)",
        "each(others, torch.zeros_like)",
        "test_beginning.py",
    ),
    ("private/drawing.py", "if rate >= 1:", "if False:", "test_beginning.py"),
    ("private/refusals.py", 'sampling != "poisson" or rate', "rate", "test_beginning.py"),
    ("private/forgetting.py", "    random.seed(drawn)\n    np.random.seed(drawn)\n", "", "test_beginning.py"),
    ("attacks/certifying.py", "FEWEST_OUTPUTS = 3", "FEWEST_OUTPUTS = 1", "test_certifying.py"),
    (
        "attacks/certifying.py",
        "single = tail.single(z, found.labels.clamp_min(0))",
        "single = found.output_grads",
        "test_certifying.py",
    ),
    ("extraction/decoding.py", "FLOOR = 170.0", "FLOOR = 1700.0", "test_certifying.py"),
    ("extraction/directions.py", "float(values[1]) > ALONE", "True", "test_certifying.py"),
    ("attacks/certifying.py", "(outside[:, 1] > OTHERS_OUTSIDE) & sends", "sends", "test_certifying.py"),
    ("attacks/behind.py", "every[0] if bool(same.all()) else None", "every[0]", "test_certifying.py"),
    (
        "attacks/weighing.py",
        "torch.arange(outputs, device=like.device).repeat_interleave(len(PROBED))",
        "torch.ones(len(out), dtype=torch.long)",
        "test_certifying.py",
    ),
    (
        "attacks/explaining.py",
        "sure = parts is not None and is_cross_entropy",
        "sure = parts is not None or is_cross_entropy",
        "test_certifying.py",
    ),
    (
        "private/weights.py",
        "            vars(self).update(before)\n",
        "            pass\n",
        "test_boundary.py",
    ),
    (
        "private/boundary.py",
        "        if training is self.training:\n            self.released = list(states)\n",
        "        self.released += states\n",
        "test_boundary.py",
    ),
    ("integrations/flower/supernode.py", "while self.asked:", "for _ in range(2):", "test_enforcement.py"),
    (
        "attacks/explaining.py",
        "scale=tail.scale / factor, is_sure=False)",
        "scale=tail.scale / factor, is_sure=True)",
        "test_certifying.py",
    ),
    ("attacks/behind.py", "                self._check(carried.layer)\n", "", "test_certifying.py"),
    ("extraction/directions.py", "(met >= fewest) & alone", "alone", "test_directions.py"),
    ("extraction/directions.py", "(met >= fewest) & alone", "met >= fewest", "test_directions.py"),
    (
        "attacks/states.py",
        "return ((fires == (z > 0)) | ~clear).all(1)",
        "return torch.ones(len(z), dtype=torch.bool)",
        "test_certifying.py",
    ),
    (
        "attacks/certifying.py",
        "return moved > SHARPLY * bound * mine.abs()",
        "return moved >= 0",
        "test_certifying.py",
    ),
    ("auditing/attempts.py", "if a.outcome.reads or (", "if (", "test_verdicts.py"),
    ("auditing/result.py", "+ [s.share for s in self.tokens]", "", "test_verdicts.py"),
    ("private/weights.py", "            known.put_back(optimiser)\n", "            pass\n", "test_ways_past.py"),
    (
        "private/clipping.py",
        "for name in (use.weight, use.bias) if name is not None",
        "for name in (use.weight,) if name is not None",
        "test_influence.py",
    ),
    ("private/release.py", "return total.add_(0.0)", "return total", "test_noise.py"),
    ("private/forgetting.py", "return _Held(value)", "return value", "test_forgetting.py"),
    (
        "private/samples.py",
        "with quietly(), attention, self.forgetful(weights=False), shut:",
        "with quietly(), attention, shut:",
        "test_ways_past.py",
    ),
    ("private/boundary.py", "if known is self.sent and _unnamed", "if _unnamed", "test_boundary.py"),
    (
        "private/account.py",
        "            self.ledger.check(self.data, more, self.total)\n",
        "            pass\n",
        "test_boundary.py",
    ),
    ("private/passes.py", '1 if kind == "passes" else steps', "1", "test_step.py"),
    (
        "private/step.py",
        "with self._lock:\n            return self._step",
        "if True:\n            return self._step",
        "test_ways_past.py",
    ),
    (
        "auditing/outcomes.py",
        "return self.reads, self.share_at(wanted), exact,",
        "return False, self.share_at(wanted), exact,",
        "test_nothing_read.py",
    ),
    (
        "attacks/certifying.py",
        "longest = math.inf if largest is None else",
        "longest = 0.0 if largest is None else 0.0 *",
        "test_certifying.py",
    ),
    (
        "private/incoming.py",
        "    return torch.cat([values, values.new_zeros((missing, *values.shape[1:]))])",
        "    return torch.cat([values, values.new_zeros((missing, *values.shape[1:]))]) if missing else values",
        "test_forgetting.py",
    ),
    (
        "private/planning.py",
        "if carried := _unlike(before, after, frozenset(before)):",
        "if carried := set():",
        "test_forgetting.py",
    ),
    ("private/forgetting.py", "left += [one.__self__, one.__func__]", "pass", "test_forgetting.py"),
    ("uses/capture.py", "        self._refuse_seeing_all(args, kwargs)\n", "", "test_forgetting.py"),
    (
        "private/samples.py",
        "self.forgetful(weights=False), shut:",
        "self.forgetful(weights=False):",
        "test_forgetting.py",
    ),
    (
        "private/update.py",
        "return {theirs[n]: out[n] for n in sent}",
        "return {theirs[n]: out[n] for n in named}",
        "test_boundary.py",
    ),
    (
        "sentences/rough.py",
        "proven[number] = not bool(witness.rest(batch.arrivals, others[kept])[1].any())",
        "pass",
        "test_reading.py",
    ),
    ("sentences/rough.py", "if not bool(joined.proven.any()):", "if False:", "test_reading.py"),
    (
        "sentences/rough.py",
        "off = choices.open & (mean > tried + math.log(FAR_OFF))",
        "off = torch.zeros_like(choices.open)",
        "test_reading.py",
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
        file_name, *one = tests.split("/")[-1].split("::")
        found = ["::".join([str(path), *one]) for path in (copy / "tests").rglob(file_name)]
        # A test that is named is run wherever it belongs.
        which = "not serial" if one else "not serial and not long"
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", which, *found]
        environment = {"PYTHONPATH": str(copy / "src"), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
        code = subprocess.run(command, cwd=copy, env=environment, capture_output=True, check=False).returncode
        if code not in (0, 1):
            raise SystemExit(f"{tests}: pytest ended with {code}, so nothing was tested; mend the list.")
        return code == 0


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
