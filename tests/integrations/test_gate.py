"""A site's gate, outside the trainer's process: what it lets out, whatever it is told."""

import enum
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import qbi
from qbi.errors import BadValue, DataError
from qbi.private import BudgetSpent, Ledger, NotReleased
from qbi.private.gate import Gate
from qbi.private.owner import OwnersSite
from qbi.private.receipts import Receipts, digest
from qbi.private.trainer import private_round

X, Y = torch.randn(16, 6, generator=torch.Generator().manual_seed(0)), torch.arange(16) % 3


def make():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    model.register_buffer("count", torch.zeros((), dtype=torch.long))
    return model


SENT = {n: v.clone() for n, v in make().state_dict().items()}
STOLEN = {n: torch.full_like(v, 47) for n, v in SENT.items()}


def owner(folder, text='policy = "private"', ledger='ledger = "clinic.ledger"\n'):
    place = folder / "qbi-site.toml"
    place.write_text(ledger + text)
    return OwnersSite.read(place)


def trained(site, answer=True):
    with private_round(SENT, site) as here:
        model = make()
        model.load_state_dict(here.sent)
        private = qbi.Private(model, bits=18)
        for x, y in private.batches((X, Y), batch_size=16):
            private.step(torch.optim.SGD(model.parameters(), lr=0.1), x, y)
        return here.answer(private.state_dict()) if answer else private.state_dict()


# The owner's file


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "policy is missing"),
        ('policy = "none"', "there are private, update"),
        ('policy = "update"\nbit = 3', "no setting 'bit'"),
        ('policy = "update"\nbits = -1', "positive number"),
        ('policy = "update"\nlimit = nan', "positive number"),
        ('policy = "update"\nwait = "long"', "positive number"),
        ('policy = "update"\nmetrics = "accuracy:7"', "lists of words"),
        ('policy = "update"\nmetrics = ["accuracy:77"]', "bits go from 1 to 32"),
        ("policy = ", "cannot be read"),
        ('policy = "update"\nwait = true', "positive number"),
        ('policy = "update"\nreceipts = 5', "word in quotes"),
        ('policy = "update"\nlog = true', "word in quotes"),
        ('policy = "update"\ndata = ["a"]', "word in quotes"),
        ('policy = "update"\nmetrics = ["a:7:inf"]', "positive and finite"),
        ('policy = "update"\nmetrics = ["a=nan"]', "name=constant"),
    ],
)
def test_an_owners_file_that_makes_no_sense_is_refused(tmp_path, text, says):
    with pytest.raises((BadValue, DataError), match=says):
        owner(tmp_path, text)


def test_an_owners_file_without_a_ledger_is_refused(tmp_path):
    with pytest.raises(BadValue, match="ledger is missing"):
        owner(tmp_path, ledger="")


def test_an_owners_file_that_others_may_write_is_refused(tmp_path):
    owner(tmp_path)
    (tmp_path / "qbi-site.toml").chmod(0o666)
    with pytest.raises(DataError, match="chmod go-w"):
        OwnersSite.read(tmp_path / "qbi-site.toml")


def test_without_a_file_the_variable_is_named(monkeypatch):
    monkeypatch.delenv("QBI_SITE", raising=False)
    with pytest.raises(DataError, match="QBI_SITE="):
        OwnersSite.read()


# Receipts


def test_a_receipt_is_good_once_for_that_state_after_that_model(tmp_path):
    receipts = Receipts(tmp_path / "receipts")
    receipts.write(SENT, STOLEN)
    assert not receipts.redeem(STOLEN, STOLEN)
    assert not receipts.redeem(SENT, SENT)
    assert receipts.redeem(SENT, STOLEN)
    assert not receipts.redeem(SENT, STOLEN)


def test_nobody_else_can_read_the_key(tmp_path):
    receipts = Receipts(tmp_path / "receipts")
    receipts.write(SENT, STOLEN)
    assert (tmp_path / "receipts").stat().st_mode & 0o777 == 0o700
    assert all(p.stat().st_mode & 0o077 == 0 for p in (tmp_path / "receipts").iterdir())
    (tmp_path / "receipts").chmod(0o755)
    with pytest.raises(DataError, match="chmod 700"):
        receipts.redeem(SENT, STOLEN)


def test_another_key_makes_another_receipt(tmp_path):
    one, other = Receipts(tmp_path / "one"), Receipts(tmp_path / "other")
    one.write(SENT, STOLEN)
    other.write(SENT, STOLEN)
    names = [{p.name for p in r.folder.iterdir()} - {"key"} for r in (one, other)]
    assert names[0] != names[1]


@pytest.mark.parametrize(
    "other",
    [
        {**SENT, "2.bias": SENT["2.bias"].double()},
        {**SENT, "2.bias": SENT["2.bias"][:2]},
        {**SENT, "2.bias": -SENT["2.bias"]},
        {n: v for n, v in SENT.items() if n != "2.bias"},
        {("3.bias" if n == "2.bias" else n): v for n, v in SENT.items()},
    ],
    ids=["type", "shape", "value", "missing", "name"],
)
def test_a_digest_is_of_names_types_shapes_and_values(other):
    assert digest(SENT) != digest(other)
    assert digest(SENT) == digest(dict(reversed(SENT.items())))


# What leaves


def test_what_a_private_round_released_leaves_once_and_was_paid_for(tmp_path):
    site = owner(tmp_path)
    gate = Gate(site)
    state = trained(site)
    left = gate.judge(SENT, dict(reversed(state.items())), {})
    assert list(left.arrays) == list(SENT)  # in one order, whatever the reply's
    assert all(torch.equal(v, state[n]) for n, v in left.arrays.items())
    assert sum(e.bits for e in Ledger(site.settings.ledger).entries()) == pytest.approx(18)
    with pytest.raises(NotReleased):
        gate.judge(SENT, state, {})


def test_the_difference_of_a_released_state_leaves_too(tmp_path):
    site = owner(tmp_path)
    state = trained(site)
    difference = {n: v - SENT[n] for n, v in state.items()}
    left = Gate(site).judge(SENT, difference, {})
    assert all(torch.equal(v, difference[n]) for n, v in left.arrays.items())


def test_a_training_that_asks_for_no_receipt_does_not_leave(tmp_path):
    site = owner(tmp_path)
    with pytest.raises(NotReleased, match="nor released"):
        Gate(site).judge(SENT, trained(site, answer=False), {})


def test_a_private_training_that_began_elsewhere_gets_no_receipt(tmp_path):
    model = make()
    with torch.no_grad():
        model[0].weight += 1
    with private_round(SENT, owner(tmp_path)), pytest.raises(NotReleased, match="not what the server sent"):
        qbi.Private(model, bits=18)


def test_what_was_sent_leaves_as_it_came_and_in_full(tmp_path):
    gate = Gate(owner(tmp_path))
    floats = {n: v for n, v in SENT.items() if v.is_floating_point()}
    for reply in (SENT, floats, dict(reversed(SENT.items()))):
        left = gate.judge(SENT, reply, {})
        assert list(left.arrays) == list(SENT)
        assert all(torch.equal(v, SENT[n]) for n, v in left.arrays.items())


@pytest.mark.parametrize(
    "reply",
    [
        STOLEN,
        {**SENT, "more": torch.ones(2)},
        {n: v.double() * float("nan") for n, v in SENT.items()},
        {n: torch.ones(3) for n in SENT},
        {},
    ],
    ids=["another", "more", "NaN", "shapes", "empty"],
)
def test_nothing_else_leaves(tmp_path, reply):
    with pytest.raises(NotReleased):
        Gate(owner(tmp_path)).judge(SENT, reply, {})


def test_the_gates_own_update_is_clipped_noise_whatever_came(tmp_path):
    """Two replies that could not be more different: what leaves differs by the clip and noise of a known spread."""
    gate = Gate(owner(tmp_path, 'policy = "update"\nbits = 0.72\nlimit = 1e6'))
    moved = {}
    for name, size in (("up", 1e6), ("down", -1e6)):
        reply = {n: v + size if v.is_floating_point() else v + 47 for n, v in SENT.items()}
        runs = [gate.judge(SENT, reply, {}).arrays for _ in range(40)]
        assert all(int(run["count"]) == 0 for run in runs)
        moved[name] = torch.stack(
            [torch.cat([(run[n] - SENT[n]).flatten() for n in SENT if n != "count"]) for run in runs]
        )
    total = moved["up"].shape[1]
    assert float(moved["up"].std(0).mean()) == pytest.approx(1.0, rel=0.1)
    apart = float((moved["up"].mean() - moved["down"].mean()) * total**0.5)
    assert apart == pytest.approx(2.0, abs=4 * (2 / 40) ** 0.5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_values_that_are_no_numbers_leave_as_noise_alone(tmp_path, bad):
    gate = Gate(owner(tmp_path, 'policy = "update"\nbits = 18'))
    left = gate.judge(SENT, {n: torch.full_like(v, bad) if v.is_floating_point() else v for n, v in SENT.items()}, {})
    assert all(torch.isfinite(v.double()).all() for v in left.arrays.values())


def test_numbers_leave_by_name_in_one_order_at_their_price(tmp_path):
    gate = Gate(owner(tmp_path, 'policy = "update"\nmetrics = ["loss:8:10", "accuracy:7", "note"]'))
    said = {"note": "ab", "secret": 4711, "loss": 5, "accuracy": 0.5, "text": "4711", "num-examples": 4711}
    left = gate.judge(SENT, None, said)
    assert list(left.numbers) == ["accuracy", "loss", "note", "num-examples"]
    assert left.numbers["num-examples"] == 1
    assert left.bits == pytest.approx(7 + 8 + 64 + 16 + 3 + 8)  # and one bit each for being there
    assert gate.judge(SENT, None, {}).bits == pytest.approx(3)


def test_an_earlier_state_does_not_leave(tmp_path):
    """Which of several released states to send could be chosen by the data: a new receipt voids those before it, one reply uses all up."""
    receipts = Receipts(tmp_path / "receipts")
    first, second = ({n: v + k for n, v in SENT.items()} for k in (1, 2))
    receipts.write(SENT, first)
    receipts.write(SENT, second, {n: v - SENT[n] for n, v in second.items()})
    assert not receipts.redeem(SENT, first)
    assert receipts.redeem(SENT, second)
    assert not receipts.redeem(SENT, {n: v - SENT[n] for n, v in second.items()})


def test_how_many_there_are_costs_too(tmp_path):
    """Empty texts between others could carry anything in their number."""
    gate = Gate(owner(tmp_path, 'policy = "update"\nmetrics = ["note"]\nlimit = 1000000'))
    coded = [""] * 300 + ["x"]
    assert gate.judge(SENT, None, {"note": coded}).bits >= 64 * len(coded)
    assert gate.judge(SENT, None, {"note": ""}).bits >= 64


def test_a_limit_ends_it_over_restarts(tmp_path):
    site = owner(tmp_path, 'policy = "update"\nbits = 18\nlimit = 40')
    for _ in range(2):
        Gate(site).judge(SENT, STOLEN, {})
    with pytest.raises(BudgetSpent):
        Gate(OwnersSite.read(site.path)).judge(SENT, STOLEN, {})


FULL = """
import resource, sys, torch
from qbi.private.gate import Gate
from qbi.private.owner import OwnersSite
gate = Gate(OwnersSite.read(sys.argv[1]))
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
try:
    gate.judge({"a": torch.zeros(4)}, {"a": torch.ones(4)}, {})
except Exception as problem:
    print(type(problem).__name__)
"""


def test_a_disk_that_takes_nothing_more_lets_nothing_out(tmp_path):
    site = owner(tmp_path, 'policy = "update"')
    command = [sys.executable, "-c", FULL, site.path]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "DataError", done.stderr


def test_a_log_that_cannot_be_written_lets_nothing_out_and_stops_nothing(tmp_path):
    site = owner(tmp_path, 'policy = "private"\nlog = "/dev/full"')
    Gate(site).refuse(ValueError("sample 47"))
    with pytest.raises(NotReleased):
        Gate(site).judge(SENT, STOLEN, {})


def test_a_crafted_model_is_refused_before_anything(tmp_path):
    rows = torch.randn(40, 64, generator=torch.Generator().manual_seed(0))
    crafted = {"0.weight": rows, "0.bias": torch.full((40,), -40.0)}
    with pytest.raises(BadValue, match="looks crafted"):
        Gate(owner(tmp_path)).look(crafted)


KILLED = """
import os, sys, torch
from qbi.private.gate import Gate
from qbi.private.owner import OwnersSite
from qbi.private import gate as module
sent = {"a": torch.zeros(4)}
module.ReleasedUpdate.release = lambda *_: os.kill(os.getpid(), 9)
Gate(OwnersSite.read(sys.argv[1])).judge(sent, sent, {})
"""


def test_killed_before_it_leaves_it_was_paid_for(tmp_path):
    site = owner(tmp_path, 'policy = "update"\nbits = 18')
    done = subprocess.run([sys.executable, "-c", KILLED, site.path], check=False, env=os.environ, timeout=120)
    assert done.returncode == -9
    assert sum(e.bits for e in Ledger(site.settings.ledger).entries()) == pytest.approx(18)


# Each release is paid where it is released


def step(private):
    return torch.optim.SGD(private.model.parameters(), lr=0.1)


def spent(site):
    return sum(entry.bits for entry in Ledger(site.settings.ledger).entries())


def test_a_pass_that_began_outside_of_any_round_is_paid_in_the_first(tmp_path):
    site = owner(tmp_path)
    model = make()
    private = qbi.Private(model, bits=72)
    optimiser, left = step(private), 0
    for x, y in private.batches((X, Y), batch_size=4):  # a round for each batch
        with private_round(SENT, site) as here:
            private.load_state_dict(here.sent)
            private.step(optimiser, x, y)
            reply = here.answer(private.state_dict())
        Gate(site).judge(SENT, reply, {})
        left += 1
    assert left == 4
    assert spent(site) == pytest.approx(72)


def test_passes_that_begin_between_rounds_end_at_the_owners_limit(tmp_path):
    site = owner(tmp_path, 'policy = "private"\nlimit = 100')
    model = make()
    private = qbi.Private(model, bits=72, total=1e9)
    left = 0

    def rounds():
        nonlocal left
        for x, y in private.batches((X, Y), batch_size=16, epochs=5):
            with private_round(SENT, site) as here:
                private.load_state_dict(here.sent)
                private.step(step(private), x, y)
                here.answer(private.state_dict())
            left += 1

    with pytest.raises(BudgetSpent):
        rounds()
    assert left == 1


def test_one_payment_is_for_one_process(tmp_path):
    """A fork would release the same samples again, with noise of its own."""
    private = qbi.Private(make(), bits=72)
    x, y = next(private.batches((X, Y), batch_size=16))
    child = os.fork()
    if child == 0:
        try:
            private.step(step(private), x, y)
        except BadValue:
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    private.step(step(private), x, y)


def test_receipts_of_other_processes_and_other_ledgers_are_void(tmp_path):
    site = owner(tmp_path)
    trainer = "import sys; sys.path[:0] = sys.argv[2:]; import torch, test_gate as t\n"
    trainer += "torch.save(t.trained(t.OwnersSite.read(sys.argv[1])), sys.argv[1] + '.' + sys.argv[2][-1])"
    states = []
    for k in "ab":
        place = tmp_path / k
        place.mkdir()
        command = [sys.executable, "-c", trainer, str(site.path), str(place), str(Path(__file__).parent)]
        subprocess.run(command, check=True, timeout=120)
        states.append(torch.load(f"{site.path}.{k}", weights_only=True))
    gate = Gate(site)
    with pytest.raises(NotReleased):
        gate.judge(SENT, states[0], {})
    assert gate.judge(SENT, states[1], {}).arrays is not None

    elsewhere = tmp_path / "elsewhere.toml"
    elsewhere.write_text('policy = "private"\nledger = "other.ledger"\nlimit = 1e9')
    with pytest.raises(NotReleased):
        gate.judge(SENT, trained(OwnersSite.read(elsewhere)), {})


def test_which_arrays_come_back_unmoved_cannot_be_chosen(tmp_path):
    site = owner(tmp_path)
    for unmoved in ("0.weight", "2.bias"):
        with private_round(SENT, site) as here:
            private = qbi.Private(make(), bits=18)
            for x, y in private.batches((X, Y), batch_size=16):
                private.step(step(private), x, y)
            state = private.state_dict()
            with pytest.raises(NotReleased):
                here.answer({**state, unmoved: SENT[unmoved]})
            here.answer(state)


def test_the_order_of_memory_says_nothing(tmp_path):
    """NVFlare's wire tells in which order an array lies."""
    pytest.importorskip("nvflare")
    from nvflare.apis.dxo import DXO, DataKind, from_shareable
    from nvflare.apis.fl_context import FLContext

    from qbi.integrations.nvflare import SiteData, SiteResults

    site = owner(tmp_path)
    reply = {n: np.array(v.numpy(), order="F") for n, v in trained(site).items()}
    context = FLContext()
    task = DXO(DataKind.WEIGHTS, {n: np.array(v.numpy(), order="F") for n, v in SENT.items()})
    SiteData(str(site.path)).process(task.to_shareable(), context)
    out = SiteResults(str(site.path)).process(DXO(DataKind.WEIGHTS, reply).to_shareable(), context)
    assert all(v.flags.c_contiguous for v in from_shareable(out).data.values())


def test_a_model_with_a_mask_can_answer(tmp_path):
    site = owner(tmp_path)
    model = make()
    model.register_buffer("mask", torch.ones(3, dtype=torch.bool))
    sent = {n: v.clone() for n, v in model.state_dict().items()}
    with private_round(sent, site) as here:
        private = qbi.Private(model, bits=18)
        for x, y in private.batches((X, Y), batch_size=16):
            private.step(step(private), x, y)
        reply = here.answer(private.state_dict())
    assert Gate(site).judge(sent, reply, {}).arrays is not None


def test_a_number_of_another_kind_is_no_number(tmp_path):
    class Ward(enum.IntEnum):
        ONCOLOGY = 1

    gate = Gate(owner(tmp_path, 'policy = "update"\nmetrics = ["a"]\nlimit = 1000'))
    with pytest.raises(NotReleased):
        gate.judge(SENT, None, {"a": Ward.ONCOLOGY})


def test_long_names_do_not_fill_the_log(tmp_path):
    site = owner(tmp_path)
    Gate(site).judge(SENT, None, {f"{'x' * 1_000_000}{i}": 1.0 for i in range(5)})
    assert site.log.stat().st_size < 20_000


def test_an_apps_words_are_one_line_of_the_log(tmp_path):
    site = owner(tmp_path)
    Gate(site).judge(SENT, SENT, {"a\n2026-11-20T09:00:00+00:00 left: 0 bits": 1})
    lines = site.log.read_text().splitlines()
    assert not any(line.startswith("2026-11-20T09:00:00") for line in lines)
    assert any("left: 0 bits" in line and "stays here" in line for line in lines)
