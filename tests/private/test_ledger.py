"""The ledger: never less than was spent, whatever happens to the process, the file or the clock; and totals without one."""

import os
import random
import shutil
import sqlite3
import time
from multiprocessing import get_context

import pytest
import torch
from torch import nn

from qbi import BudgetSpent, Ledger, Private
from qbi.errors import BadValue, DataError
from qbi.private.account import Account
from qbi.private.goal import LIFETIME_BITS, Budget
from qbi.theory.guarantees import bits

FORKED = get_context("fork")
"""Processes that need not load torch again: ten of them are started and killed."""

DATA = torch.linspace(-1, 1, 72).reshape(12, 6), torch.arange(12) % 2


def training(**settings):
    """A model in private training, not yet begun."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
    private = Private(model, **({"bits": 100} | settings))
    return private, torch.optim.SGD(model.parameters(), lr=0.1)


def steps(private, optimiser, times):
    for _ in range(times):
        private.step(optimiser, *DATA)


def passes(private, optimiser, epochs):
    for x, y in private.batches(DATA, 4, epochs=epochs):
        private.step(optimiser, x, y)


def weights(private):
    return torch.cat([p.detach().flatten() for p in private.model.parameters()])


def releasing(path, times, left, total):
    """Make steps, and say after each one that it has left; stop when the total is spent."""
    torch.set_num_threads(1)
    private, optimiser = training(batch_size=12, ledger=str(path), total=total)
    for _ in range(times):
        try:
            private.step(optimiser, *DATA)
        except BudgetSpent:
            return
        os.write(left, b".")


def start(path, times, total=float("inf")):
    reading, writing = os.pipe()
    process = FORKED.Process(target=releasing, args=(path, times, writing, total))
    process.start()
    os.close(writing)
    return process, reading


def all_that_left(reading, count=0):
    while part := os.read(reading, 4096):
        count += len(part)
    os.close(reading)
    return count


@pytest.mark.long
def test_killed_ten_times_it_never_holds_less_than_left(tmp_path):
    """Each dot a process writes means: this step left. At every kill, the file holds at least as many, and one more at most."""
    path, total, chance = tmp_path / "ledger", 0, random.Random(0)
    for attempt in range(10):
        process, reading = start(path, 10_000)
        seen = 0
        for _ in range(chance.randrange(1, 30)):
            seen += len(os.read(reading, 1))
        time.sleep(chance.random() / 100)
        process.kill()
        process.join()
        total += all_that_left(reading, seen)
        held = len(Ledger(path).entries())
        assert total <= held <= total + attempt + 1


def test_two_processes_at_once_lose_nothing_and_keep_the_limit(tmp_path):
    """Each alone may spend the total; together they may too, and not twice."""
    path = tmp_path / "ledger"
    both = [start(path, 60, total=50 * 100) for _ in range(2)]
    assert sum(all_that_left(reading) for _, reading in both) == 50
    for process, _ in both:
        process.join(timeout=120)
        assert process.exitcode == 0
    entries = Ledger(path).entries()
    assert [e.number for e in entries] == list(range(1, 51))
    assert sum(e.bits for e in entries) == pytest.approx(5000)


def test_the_limit_is_kept_and_the_sentence_says_where_it_went(tmp_path):
    ledger = Ledger(tmp_path / "ledger")
    for family in ("first", "first", "second"):
        ledger.spend("clinic", family, 0.1, limit=300)
    with pytest.raises(BudgetSpent, match=r"“clinic” is used up: 216.4 of 280 bits.*first: 144, second: 72.1") as said:
        ledger.spend("clinic", "second", 0.1, limit=280)
    assert "Raise the limit" in str(said.value)
    assert sum(e.bits for e in ledger.entries("clinic")) == pytest.approx(3 * bits(0.1))
    ledger.spend("other", "second", 0.1, limit=280)  # another data set has its own budget


def test_an_older_copy_is_detected_unless_its_mark_is_put_back_too(tmp_path):
    path = tmp_path / "ledger"
    ledger = Ledger(path)
    private, optimiser = training(batch_size=12, ledger=ledger)
    private.step(optimiser, *DATA)
    shutil.copy(path, tmp_path / "old")
    shutil.copy(ledger.mark, tmp_path / "old.mark")
    private.step(optimiser, *DATA)
    shutil.copy(tmp_path / "old", path)
    before = weights(private)
    with pytest.raises(DataError, match="an older copy was put back"):
        private.step(optimiser, *DATA)
    assert torch.equal(weights(private), before)
    shutil.copy(tmp_path / "old.mark", ledger.mark)
    ledger.spend("data", "family", 0.1)  # both put back: not found out, as docs/guarantees.md says
    elsewhere = Ledger(path, mark=tmp_path / "safe" / "mark")
    elsewhere.spend("data", "family", 0.1)
    path.unlink()
    with pytest.raises(DataError, match="an older copy"):
        elsewhere.spend("data", "family", 0.1)


def test_the_clock_does_not_matter(tmp_path, monkeypatch):
    ledger = Ledger(tmp_path / "ledger")
    for zone in ("UTC", "Asia/Tokyo", "America/New_York"):
        monkeypatch.setenv("TZ", zone)
        time.tzset()
        ledger.spend("data", "family", 0.1)
    with sqlite3.connect(ledger.path) as connection:
        connection.execute("UPDATE spent SET at = '1970-01-01T00:00:00+00:00' WHERE id = 3")
    assert ledger.spend("data", "family", 0.1) == pytest.approx(4 * bits(0.1))
    monkeypatch.delenv("TZ")
    time.tzset()


@pytest.mark.parametrize("content", [b"not a data base" * 100, b"SQLite format 3\x00" + os.urandom(4096)])
def test_a_damaged_file_is_refused_with_a_sentence_and_nothing_is_trained(tmp_path, content, qbi_here):
    path = tmp_path / "ledger"
    path.write_bytes(content)
    private, optimiser = training(batch_size=12, ledger=str(path))
    before = weights(private)
    with pytest.raises(DataError, match="cannot be read or written"):
        private.step(optimiser, *DATA)
    assert torch.equal(weights(private), before)
    assert private.account.participations == 0
    drawing, _ = training(ledger=str(path))
    with pytest.raises(DataError, match="cannot be read or written"):
        next(drawing.batches(DATA, 4))
    assert drawing.account.participations == 0
    code, said = qbi_here("ledger", path)
    assert code == 2
    assert "Traceback" not in said


# Totals: of a ledger, and of a run without one.


def test_training_stops_in_mid_run_and_stays_stopped_after_a_restart(tmp_path):
    private, optimiser = training(batch_size=12, ledger=str(tmp_path / "ledger"), total=450)
    steps(private, optimiser, 3)
    again, optimiser = training(batch_size=12, ledger=Ledger(tmp_path / "ledger"), total=450)
    again.step(optimiser, *DATA)
    before = weights(again)
    with pytest.raises(BudgetSpent, match="400 of 450"):
        again.step(optimiser, *DATA)
    assert torch.equal(weights(again), before)
    assert all(torch.equal(v, again.model.state_dict()[n]) for n, v in again.state_dict().items())
    assert again.steps == 1
    assert len(Ledger(tmp_path / "ledger").entries()) == 4
    other, optimiser = training(batch_size=12, ledger=Ledger(tmp_path / "ledger"), total=450, data="another clinic")
    other.step(optimiser, *DATA)


def test_a_total_ends_a_loop_over_batches_before_the_pass_it_cannot_pay():
    private, optimiser = training(total=250)
    with pytest.raises(BudgetSpent, match="200 of 250 bits about each sample have left in 2 participations"):
        passes(private, optimiser, epochs=5)
    assert (private.steps, private.account.participations) == (6, 2)


def test_without_a_ledger_a_run_of_200_steps_is_not_72_bits():
    """The default total is there without a file: 20 steps of 72 bits, and 60 bits that nothing more fits in."""
    private, optimiser = training(bits=72, batch_size=12)
    assert private.account.total == LIFETIME_BITS == 1500
    with pytest.raises(BudgetSpent, match="1440 of 1500 bits"):
        steps(private, optimiser, 200)
    assert private.steps == 20
    assert private.account.bits == pytest.approx(1440)
    assert "1440 of 1500 bits about one sample" in private.meaning()


def test_a_goal_over_several_participations_ends_with_them():
    private, optimiser = training(bits=None, epsilon=8.0, participations=2, batch_size=12)
    steps(private, optimiser, 2)
    with pytest.raises(BudgetSpent, match="2 participations"):
        private.step(optimiser, *DATA)
    assert Account(Budget.for_goal(bits=72), "family").total == LIFETIME_BITS
    assert Account(Budget.for_goal(bits=72, participations=3), "family").total == pytest.approx(72)


# Participations: counted where batches are drawn.


def test_leaving_batches_early_costs_the_whole_pass(tmp_path):
    private, optimiser = training(ledger=str(tmp_path / "ledger"))
    for x, y in private.batches(DATA, 4):
        private.step(optimiser, x, y)
        break
    assert (private.steps, private.account.participations) == (1, 1.0)
    assert [e.participations for e in Ledger(tmp_path / "ledger").entries()] == [1.0]
    passes(private, optimiser, epochs=2)
    assert (private.steps, private.account.participations) == (7, 3.0)
    unused = private.batches(DATA, 4)
    assert private.account.participations == 3.0  # nothing drawn, nothing spent
    next(unused)
    assert private.account.participations == 4.0


def test_poisson_participations_are_fractional(tmp_path):
    """Batches of 5 of 12: three of them, each sample in each by a chance of 5/12; the ledger holds 1.25 for a pass."""
    private, optimiser = training(ledger=str(tmp_path / "ledger"))
    for x, y in private.batches(DATA, 5, epochs=2, sampling="poisson"):
        private.step(optimiser, x, y)
    assert private.steps == 6
    assert private.account.participations == pytest.approx(2 * 3 * 5 / 12)
    assert private.account.bits == pytest.approx(100 * 2.5)
    assert [e.participations for e in Ledger(tmp_path / "ledger").entries()] == pytest.approx([1.25, 1.25])


def test_a_pass_holds_every_sample_once_and_poisson_does_not():
    private, _ = training(total=float("inf"))
    numbered = torch.arange(12.0)[:, None].expand(12, 6), torch.arange(12) % 2
    for _ in range(5):
        drawn = torch.cat([x[:, 0] for x, _ in private.batches(numbered, 5)])
        assert sorted(drawn.tolist()) == list(range(12))
    counts = [len(x) for x, _ in private.batches(numbered, 5, epochs=100, sampling="poisson")]
    # 300 draws of 12 with chance 5/12: mean 5, deviation of the mean 0.1.
    assert abs(sum(counts) / 300 - 5) < 0.5
    assert len(set(counts)) > 3


def test_only_drawn_samples_are_taken_once_batches_was_used():
    private, optimiser = training()
    passes(private, optimiser, epochs=1)
    before = weights(private)
    with pytest.raises(BadValue, match="4 samples, and 0 were drawn"):
        private.step(optimiser, DATA[0][:4], DATA[1][:4])
    drawing = private.batches(DATA, 4)
    x, y = next(drawing)
    with pytest.raises(BadValue, match="8 samples, and 4 were drawn"):
        private.step(optimiser, torch.cat([x, x]), torch.cat([y, y]))
    private.step(optimiser, x, y)
    with pytest.raises(BadValue, match="4 samples, and 0 were drawn"):
        private.step(optimiser, x, y)
    x, y = next(drawing)
    private.step(optimiser, x[:1], y[:1])
    with pytest.raises(BadValue, match="3 samples, and 0 were drawn"):
        private.step(optimiser, x[1:], y[1:])  # a drawn batch is for one step
    x, y = next(drawing)
    private.add(x[:1], y[:1])
    private.add(x[1:], y[1:])  # but it may come in parts
    private.step(optimiser)
    assert private.steps == 6
    assert not torch.equal(weights(private), before)
    assert private.account.participations == 2


def test_without_batches_every_step_is_a_participation_of_everybody():
    private, optimiser = training(batch_size=4)
    for _ in range(3):
        private.step(optimiser, DATA[0][:4], DATA[1][:4])
    assert private.account.participations == 3
    for _ in range(3):
        private.add(DATA[0][:4], DATA[1][:4])  # the same samples may stand in all three parts: three times the length
    private.step(optimiser)
    assert private.account.participations == 3 + 9
    nobody, optimiser = training()
    with pytest.raises(BadValue, match="how many samples make a batch"):
        nobody.step(optimiser, *DATA)


def test_the_command_shows_it(tmp_path, qbi_here):
    ledger = Ledger(tmp_path / "ledger")
    for family in ("a", "b"):
        ledger.spend("clinic", family, 0.1)
    code, said = qbi_here("ledger", ledger.path, "--plot", tmp_path / "spent.png")
    assert code == 0
    assert "clinic: at most 144.3 of 1500 bits about each sample in 2 participations" in said
    assert (tmp_path / "spent.png").read_bytes().startswith(b"\x89PNG")
    code, said = qbi_here("ledger", ledger.path, "--limit", 100, "--json")
    assert code == 1
    assert '"participations": 2' in said
    code, said = qbi_here("ledger", tmp_path / "nowhere")
    assert (code, said.count("\n")) == (2, 1)
