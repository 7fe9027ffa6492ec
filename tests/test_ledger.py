"""The ledger: never less than was spent, whatever happens to the process, the file or the clock."""

import os
import random
import shutil
import sqlite3
import time
from multiprocessing import get_context

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from qbi.defences import AmbientGuard, BudgetSpent, LeakGuard, Ledger
from qbi.defences.budget.account import Account
from qbi.defences.budget.goal import LIFETIME_BITS, Budget
from qbi.errors import BadValue, DataError
from qbi.theory.guarantees import bits

FORKED = get_context("fork")
"""Processes that need not load torch again: ten of them are started and killed."""


def spending(path, times, left):
    """Spend, and say after each one that its gradients have left."""
    ledger = Ledger(path)
    for _ in range(times):
        ledger.spend("data", "family", 0.1)
        os.write(left, b".")


def start(path, times):
    reading, writing = os.pipe()
    process = FORKED.Process(target=spending, args=(path, times, writing))
    process.start()
    os.close(writing)
    return process, reading


def all_that_left(reading, count=0):
    while part := os.read(reading, 4096):
        count += len(part)
    os.close(reading)
    return count


def test_killed_ten_times_it_never_holds_less_than_left(tmp_path):
    """Each dot a process writes means: this gradient left. At every kill, the file holds at least as many."""
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
    path = tmp_path / "ledger"
    both = [start(path, 40) for _ in range(2)]
    assert sum(all_that_left(reading) for _, reading in both) == 80
    for process, _ in both:
        process.join(timeout=120)
        assert process.exitcode == 0
    entries = Ledger(path).entries()
    assert len(entries) == 80
    assert [e.number for e in entries] == list(range(1, 81))


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
    ledger.spend("data", "family", 0.1)
    shutil.copy(path, tmp_path / "old")
    shutil.copy(ledger.mark, tmp_path / "old.mark")
    ledger.spend("data", "family", 0.1)
    shutil.copy(tmp_path / "old", path)
    with pytest.raises(DataError, match="an older copy was put back"):
        ledger.spend("data", "family", 0.1)
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
def test_a_damaged_file_is_refused_with_a_sentence(tmp_path, content, qbi_here):
    path = tmp_path / "ledger"
    path.write_bytes(content)
    with pytest.raises(DataError, match="cannot be read or written"):
        Ledger(path).spend("data", "family", 0.1)
    code, said = qbi_here("ledger", path)
    assert code == 2
    assert "Traceback" not in said


def test_participations_are_counted_by_epochs_only_where_the_size_is_known():
    budget = Budget.for_goal(bits=72)
    for samples, batches, expected in [
        (None, [20] * 5, 5),
        (100, [20] * 5, 1),
        (100, [20] * 6, 2),
        (100, [64] * 3, 3),  # a loader that drops the last batch
        (50, [20, 20, 10] * 4, 4),
    ]:
        account = Account(budget, samples)
        for batch in batches:
            account.take_part(batch, [])
        assert account.participations == expected
    with pytest.raises(BadValue, match="0 samples"):
        Account(budget, 0)


def trained(guard, steps):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    with guard:
        for _ in range(steps):
            optimiser.zero_grad()
            F.cross_entropy(model(torch.rand(4, 6)), torch.arange(4) % 2).backward()
            optimiser.step()
    return model


def test_a_guard_stops_when_its_budget_is_spent_also_after_a_restart(tmp_path):
    ledger = Ledger(tmp_path / "ledger")
    trained(AmbientGuard("budget", bits=100, ledger=ledger, limit=450), 3)
    again = AmbientGuard("budget", bits=100, ledger=Ledger(tmp_path / "ledger"), limit=450)
    with pytest.raises(BudgetSpent, match="400 of 450"):
        trained(again, 2)
    assert again.tally.steps == 1
    assert Account(Budget.for_goal(bits=72), ledger=ledger).limit == LIFETIME_BITS


def test_a_goal_over_several_participations_ends_with_them():
    model = nn.Linear(6, 2)
    guard = LeakGuard(model, "budget", epsilon=8.0, participations=2)
    for _ in range(2):
        with guard:
            F.cross_entropy(model(torch.rand(4, 6)), torch.arange(4) % 2).backward()
    with pytest.raises(BudgetSpent, match="2 participations"), guard:
        F.cross_entropy(model(torch.rand(4, 6)), torch.arange(4) % 2).backward()
    assert all(p.grad is None for p in model.parameters())


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
