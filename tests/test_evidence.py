"""Faults that once went unnoticed: each test here fails where one is planted (`tests/mutants.py` plants them)."""

import json
import sqlite3
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import mutants
import qbi.private.ledger
from qbi import Ledger, Private
from qbi.attacks import QBI
from qbi.auditing.trial import ROUNDINGS
from qbi.detection import inspect_parameters
from qbi.errors import DataError
from qbi.lab.reproduce.cells import Cell
from qbi.lab.reproduce.run import run_cells
from qbi.lab.reproduce.store import Store
from qbi.lab.reproduce.workplace import Workplace
from qbi.metrics.guess import best_guess
from qbi.private.site import Reply, SiteSettings, guarded_round
from qbi.randomness import generator


def test_every_planted_fault_can_still_be_planted():
    """A list that has gone stale tests nothing."""
    here = Path(__file__).parent
    for file, before, after, tests in mutants.FAULTS:
        assert before in (here.parent / "src/qbi" / file).read_text(encoding="utf-8"), (file, before)
        assert before != after
        assert list(here.rglob(tests.split("/")[-1].split("::")[0])), tests


# The ledger.


@contextmanager
def held(path):
    """Another process that writes and does not end."""
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    try:
        yield
    finally:
        other.close()


def locked(path, _monkeypatch):
    return held(path)


@contextmanager
def full(path, _monkeypatch):
    """The file can be read, and takes no entry."""
    with sqlite3.connect(path) as other:
        other.execute("CREATE TRIGGER full BEFORE INSERT ON spent BEGIN SELECT RAISE(ABORT, 'disk is full'); END")
    yield
    with sqlite3.connect(path) as other:
        other.execute("DROP TRIGGER full")


@contextmanager
def unmarked(path, monkeypatch):
    """The entry can be written, its mark cannot."""

    def refuse(*_):
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(qbi.private.ledger, "write_atomically", refuse)
        yield


def a_step(path):
    torch.manual_seed(0)
    model = nn.Linear(6, 2)
    private = Private(model, nn.functional.cross_entropy, bits=100, ledger=str(path), batch_size=4)
    before = [p.detach().clone() for p in model.parameters()]

    def go():
        private.step(torch.optim.SGD(model.parameters(), 0.1), torch.ones(4, 6), torch.arange(4) % 2)

    return go, lambda: all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


def a_guarded_round(path):
    sent = {"w": torch.zeros(3, 4)}
    settings = SiteSettings(policy="update", ledger=str(path), inspect="off")
    left = []

    def go():
        passed = guarded_round(settings, sent, lambda: Reply({"arrays": {"w": torch.ones(3, 4)}}, {}), trains=True)
        left.append(passed)

    return go, lambda: not left


@pytest.mark.parametrize("trouble", [locked, full, unmarked])
@pytest.mark.parametrize("work", [a_step, a_guarded_round])
def test_what_cannot_be_written_down_does_not_leave(tmp_path, monkeypatch, work, trouble):
    """A ledger in trouble stops a private step and a guarded round alike; afterwards they go on."""
    path = tmp_path / "ledger"
    Ledger(path).spend("data", "before", 0.1)
    monkeypatch.setattr(qbi.private.ledger, "WAIT", 0.05)
    go, nothing_left = work(path)
    with trouble(path, monkeypatch), pytest.raises((DataError, OSError)):
        go()
    assert nothing_left()
    go()
    assert not nothing_left()
    assert Ledger(path).entries()[-1].family != "before"


@pytest.mark.parametrize(("beyond", "code"), [(-1.0, 1), (0.0, 1), (1.0, 0)])
def test_a_budget_that_is_spent_to_the_last_bit_is_used_up(tmp_path, qbi_here, beyond, code):
    spent = Ledger(tmp_path / "ledger").spend("clinic", "model", 0.1)
    assert qbi_here("ledger", tmp_path / "ledger", "--limit", repr(spent + beyond))[0] == code


# What a pipeline sees.


def test_an_error_stands_in_sarif_wherever_the_exit_code_is_one(tmp_path, qbi_here, monkeypatch):
    """One ordering for the exit code and the level: above the limit, at it, below it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(
        "from torch import nn\n\n"
        "def make():\n    return nn.Sequential(nn.Linear(20, 60), nn.ReLU(), nn.Linear(60, 3))\n"
    )
    table = torch.randn(200, 20, generator=generator(0, "table"))
    np.savez(tmp_path / "table.npz", x=table.numpy(), y=(torch.arange(200) % 3).numpy())
    quick = ("net.py:make", "--data", "table.npz", "--attack", "qbi", "--no-defences", "--batches", 1, "--sarif")

    def outcome(limit):
        code, said = qbi_here("audit", *quick, "--fail-above", limit, "--out", "out")
        assert code in (0, 1, 3), said  # 3: part of the model was not tested
        levels = {r["level"] for r in json.loads((tmp_path / "out/audit.sarif").read_text())["runs"][0]["results"]}
        assert ("error" in levels) == (code == 1)
        assert levels & {"error", "note"}
        return code

    assert outcome(0.05) == 1
    share = json.loads((tmp_path / "out/audit.json").read_text())["verdict"]["share"]
    assert 0.05 < share < 1
    assert outcome(repr(share)) == 3  # no more is read, and part of the model was not tested
    assert outcome(repr(share - 1e-6)) == 1
    assert outcome(1.0) == 0


# Detection.


@pytest.mark.parametrize(("batch_size", "found"), [(6, False), (7, True), (8, True)])
def test_the_bound_on_biases_lies_between_batches_of_six_and_of_seven(batch_size, found):
    """Φ⁻¹(1/B) is −0.97 at B = 6, −1.07 at 7 and −1.15 at 8; `docs/detection.md` says where the bound lies."""
    rows = QBI(batch_size).rows(100, 3072, generator(0, "rows"))
    signs = inspect_parameters({"fc.weight": rows.weight, "fc.bias": rows.bias})
    assert [(s.detector, len(s.rows)) for s in signs] == ([("negative bias", 100)] if found else [])


# Results that are kept.


def test_a_run_goes_on_from_cells_of_its_own_seed_and_route_only(tmp_path):
    """In a file that holds another seed's results, a run gives what it gives in an empty one."""
    place = Workplace({})
    mixed, alone = Store(tmp_path / "mixed.sqlite"), Store(tmp_path / "alone.sqlite")
    first, second = (Cell("synthetic", 200, 20, 0, seed=seed) for seed in (0, 1))
    run_cells([first], place, mixed)
    others = [second, Cell("synthetic", 200, 20, 0, route="direct"), Cell("synthetic", 200, 20, 1)]
    assert mixed.missing([first, *others]) == others
    run_cells([second], place, mixed)
    run_cells([second], place, alone)
    assert mixed.results("synthetic", 1, "gram") == alone.results("synthetic", 1, "gram")
    assert mixed.results("synthetic", 1, "gram")[second] != mixed.results("synthetic", 0, "gram")[first]
    assert set(mixed.results("synthetic", 0, "gram")) == {first}


# What is no better than a guess.


@pytest.mark.parametrize("outside", [False, True])
def test_a_guess_takes_the_nearest_other_sample_or_the_mean_of_the_others(outside):
    """Near twins: the mean says nothing, a twin nearly everything. A heap around one point: the mean is nearer than any other."""
    draws = generator(0, "guess")
    far = torch.randn(6, 40, generator=draws)
    near = far + 1e-3 * torch.randn(6, 40, generator=draws)
    heap, more = (torch.randn(200, 400, generator=draws) for _ in range(2))
    everyone, some = torch.arange(6), torch.arange(20)
    if outside:
        by_twin = best_guess(far, everyone, near)
        alone = best_guess(far, everyone, near.flip(1))
        by_mean = best_guess(heap, some, more)
    else:
        by_twin = best_guess(torch.cat([far, near]), everyone, None)
        alone = best_guess(far, everyone, None)
        by_mean = best_guess(heap, some, None)
    assert by_twin.max() < 1e-5
    assert alone.min() > 0.3
    assert by_mean.numpy() == pytest.approx(heap[:20].square().mean(1).numpy(), rel=0.1)  # others lie twice as far


def test_a_copy_in_the_same_batch_is_no_guess():
    """Who reads one has not guessed the other."""
    far = torch.randn(6, 40, generator=generator(0, "guess"))
    assert best_guess(torch.cat([far, far]), torch.arange(6), None).min() > 0.3


@pytest.mark.parametrize(("name", "kind"), [("bfloat16", torch.bfloat16), ("float16", torch.float16)])
def test_the_stated_rounding_is_that_of_the_type(name, kind):
    """Root mean square of the relative error over many values, a fifth allowed for how they are spread; float32 states none."""
    values = torch.randn(200_000, generator=generator(0, "rounding"), dtype=torch.float64)
    values = values[values.abs() > 0.01]
    error = float(((values.to(kind).double() - values) / values).square().mean().sqrt())
    assert error <= ROUNDINGS[name] <= 1.5 * error
    assert ROUNDINGS["float32"] is None
