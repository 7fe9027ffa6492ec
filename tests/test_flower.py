"""The guard and the recording server in Flower: message by message, on Ray, and over real processes."""

import gc
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import weakref
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="the extra flower is not installed")

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from safetensors.torch import load_file
from torch import nn

from qbi.attacks import QBI, mount
from qbi.integrations.flower import guarded_by, leak_guard, load_record, read_reply, save_record, state_of
from qbi.integrations.flower.deployment import LocalFederation
from qbi.integrations.flower.guard import REFUSED
from qbi.metrics import FAITHFUL, match
from qbi.randomness import generator

EXAMPLE = Path(__file__).parents[1] / "examples/flower-guarded"


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 60), nn.BatchNorm1d(60), nn.ReLU(), nn.Linear(60, 4))


def plain():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 60), nn.ReLU(), nn.Linear(60, 4))


X = torch.randn(12, 40, generator=torch.Generator().manual_seed(1))
Y = torch.arange(12) % 4


@pytest.fixture(autouse=True)
def in_a_run(monkeypatch):
    """A message belongs to a run; outside of one, its makers must be told which."""
    from flwr.supercore.task_identity import TaskIdentity

    for name, value in (("_task_id", 1), ("_run_id", 1), ("_node_id", 7)):
        monkeypatch.setattr(TaskIdentity, name, value)


def asked(state, kind="train"):
    return Message(RecordDict({"arrays": ArrayRecord(state)}), dst_node_id=1, message_type=kind)


def context(**config):
    return Context(run_id=1, node_id=7, node_config=config.pop("node", {}), state=RecordDict(), run_config=config)


def trainer(model, steps=1, another=False):
    """Training code as clients write it."""

    def train(msg, ctxt):
        model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
        optimiser = torch.optim.SGD(model.parameters(), lr=1.0)
        for _ in range(steps):
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(X), Y).backward()
            optimiser.step()
        state = dict(model.state_dict())
        if another:
            state["0.weight"] = state["0.weight"][:3]
        return Message(
            RecordDict({"arrays": ArrayRecord(state), "metrics": MetricRecord({"num-examples": 12})}), reply_to=msg
        )

    return train


def crafted():
    return mount(plain(), QBI(12), X[:2], generator(0, "flower"))


def crafted_arrays():
    return ArrayRecord(crafted().model.state_dict())


def recall(sent, reply):
    difference = {n: v - state_of(reply.content["arrays"])[n] for n, v in state_of(sent).items()}
    found = read_reply(crafted(), difference, {})
    return match(found.samples, X, data_range=4.0)[FAITHFUL].recall


@pytest.mark.parametrize("policy", ["report", "auto", "noise", "aggp", "drop", "skip"])
def test_the_mod_protects_a_round(policy):
    sent = crafted_arrays()
    reply = guarded_by(policy=policy, inspect="warn")(asked(state_of(sent)), context(), trainer(plain()))
    assert not reply.has_error()
    assert (recall(sent, reply) > 0.5) == (policy == "report")


def test_a_benign_model_passes_and_keeps_its_buffers():
    model = make()
    reply = leak_guard(asked(model.state_dict()), context(node={"qbi-policy": "noise"}), trainer(make()))
    assert not reply.has_error()
    state = state_of(reply.content["arrays"])
    assert state["1.num_batches_tracked"].dtype == torch.int64
    assert int(state["1.num_batches_tracked"]) == 1
    assert state.keys() == model.state_dict().keys()


REFUSALS = {
    "a crafted model": (lambda: state_of(crafted_arrays()), lambda: trainer(plain()), {}, "looks crafted"),
    "NaN": (lambda: {n: p * torch.nan for n, p in plain().state_dict().items()}, lambda: trainer(plain()), {}, "NaN"),
    "wrong shapes": (
        lambda: nn.Sequential(nn.Linear(3, 60), nn.ReLU(), nn.Linear(60, 4)).state_dict(),
        lambda: trainer(plain()),
        {},
        "training failed",
    ),
    "a layer without bias": (
        lambda: {n: p for n, p in plain().state_dict().items() if n != "0.bias"},
        lambda: trainer(plain()),
        {},
        "training failed",
    ),
    "training that raises": (
        lambda: plain().state_dict(),
        lambda: _raising,
        {},
        "training failed (RuntimeError: sorry)",
    ),
    "training that is not seen": (
        lambda: plain().state_dict(),
        lambda: trainer(plain(), steps=0),
        {},
        "no backward pass",
    ),
    "another model in the reply": (
        lambda: plain().state_dict(),
        lambda: trainer(plain(), another=True),
        {},
        "would leave as",
    ),
    "a leaking step": (
        lambda: state_of(crafted_arrays()),
        lambda: trainer(plain()),
        {"node": {"qbi-policy": "refuse", "qbi-inspect": "off"}},
        "stand alone",
    ),
    "an unknown policy": (lambda: plain().state_dict(), lambda: trainer(plain()), {"qbi-policy": "hope"}, "qbi-policy"),
    "an unknown inspection": (
        lambda: plain().state_dict(),
        lambda: trainer(plain()),
        {"qbi-inspect": "no"},
        "qbi-inspect",
    ),
}


def _raising(msg, ctxt):
    raise RuntimeError("sorry")


@pytest.mark.parametrize(("state", "train", "config", "why"), REFUSALS.values(), ids=REFUSALS.keys())
def test_the_mod_fails_closed_and_says_why(state, train, config, why):
    reply = leak_guard(asked(state()), context(**config), train())
    assert reply.has_error()
    assert reply.error.code == REFUSED
    assert why in reply.error.reason
    assert not reply.has_content()


def test_a_run_may_only_tighten(caplog):
    """Whoever starts a run writes its config, and that is the server: what is milder than the owner's is not done."""
    sent = state_of(crafted_arrays())
    lax = {
        "qbi-policy": "report",
        "qbi-inspect": "off",
        "qbi-bits": 1e9,
        "qbi-metrics": "keep",
        "qbi-ledger": "elsewhere",
    }
    assert leak_guard(asked(sent), context(**lax), trainer(plain())).has_error()
    owners = {"qbi-inspect": "off"}
    reply = leak_guard(asked(sent), context(**lax, node=owners), trainer(plain()))
    assert recall(ArrayRecord(sent), reply) == 0
    assert caplog.text.count("only the node's owner may set that") == 2 * 4 + 1
    assert leak_guard(
        asked(sent), context(**{"qbi-policy": "refuse"}, node={**owners, "qbi-policy": "report"}), trainer(plain())
    ).has_error()


def test_other_messages_pass():
    said = []
    reply = leak_guard(asked(plain().state_dict(), "evaluate"), context(), lambda m, c: said.append(m) or m)
    assert said == [reply]


def test_arrays_are_kept_and_read_again(tmp_path):
    arrays = ArrayRecord(make().state_dict())
    save_record(arrays, tmp_path / "sent.safetensors")
    again = load_record(tmp_path / "sent.safetensors")
    assert all(torch.equal(v, state_of(arrays)[n]) for n, v in state_of(again).items())


def test_without_the_extra_the_import_says_which(tmp_path):
    code = "import sys; sys.modules['flwr'] = None\nimport qbi.integrations.flower"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "pip install 'qbi[flower]'" in done.stderr


SIMULATION = """
import json, sys
from pathlib import Path
import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.simulation import run_simulation
from torch import nn
from qbi.attacks import QBI
from qbi.exposure import count_leaks
from qbi.federation.exposed import exposed_step
from qbi.integrations.flower import audit_server_app, guarded_by

out = Path(sys.argv[1])

def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(192, 100), nn.ReLU(), nn.Linear(100, 4))

def data(part):
    return torch.randn(10, 192, generator=torch.Generator().manual_seed(part)), torch.arange(10) % 4

def client(mods):
    app = ClientApp(mods=mods)

    @app.train()
    def train(msg, ctxt):
        model = make()
        model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
        part = int(ctxt.node_config["partition-id"])
        x, y = data(part)
        if not mods:  # it takes gradients by autograd.grad, which a guarded client may not
            leak = count_leaks(exposed_step(model, x, y, layers=["0"]).exposures[0])
            (out / f"count-{part}.json").write_text(json.dumps(leak.samples.nonzero()[:, 0].tolist()))
        optimiser = torch.optim.SGD(model.parameters(), lr=10.0)
        nn.functional.cross_entropy(model(x), y).backward()
        optimiser.step()
        content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": 10})})
        return Message(content, reply_to=msg)

    return app

resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0}, "init_args": {"num_cpus": 2}}
for name, mods in (("open", []), ("guarded", [guarded_by(policy="noise", inspect="warn")])):
    server = audit_server_app(make, out / name, attack=QBI(10), sample=torch.randn(2, 192), timeout=60)
    run_simulation(server, client(mods), num_supernodes=10, backend_config=resources)
"""


@pytest.mark.serial
def test_ten_simulated_clients_leak_what_they_count_and_nothing_when_guarded(tmp_path):
    script = tmp_path / "simulation.py"
    script.write_text(textwrap.dedent(SIMULATION))
    done = subprocess.run(
        [sys.executable, script, tmp_path], capture_output=True, text=True, timeout=200, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr[-2000:]
    truth = [torch.randn(10, 192, generator=torch.Generator().manual_seed(part)) for part in range(10)]
    counted = {(p, i) for p in range(10) for i in json.loads((tmp_path / f"count-{p}.json").read_text())}
    for name, expected in (("open", counted), ("guarded", set())):
        replies = [load_file(path)["samples"] for path in (tmp_path / name).glob("*.safetensors")]
        assert len(replies) == 10
        read = set()
        for samples in replies:
            for part in range(10):
                found = match(samples, truth[part], data_range=4.0)[FAITHFUL].recovered
                read |= {(part, i) for i in found.nonzero()[:, 0].tolist()}
        assert read == expected
    assert len(counted) > 50


@pytest.fixture(scope="module")
def federation():
    with LocalFederation(3) as running:
        yield running
    processes = [running.link, *running.nodes]
    assert all(process.poll() is not None for process in processes)


def run(federation, out, **config):
    settings = {"rounds": 1, "attack": "qbi", "local-steps": 1, "learning-rate": 1.0, "images": 120, "evaluate": False}
    status = federation.run(EXAMPLE, settings | config | {"out": str(out)}, within=150.0)
    return status, json.loads((out / "federation.json").read_text())


@pytest.mark.serial
@pytest.mark.timeout(400)
def test_three_clients_as_processes(federation, tmp_path):
    status, found = run(federation, tmp_path / "open", guard=False)
    assert status == "finished:completed"
    assert len(found["readings"]) == 3
    assert all(reading["sure"] >= 3 for reading in found["readings"])
    status, found = run(federation, tmp_path / "guarded", guard=True)
    assert found["readings"] == []
    assert len(found["errors"]) == 3
    assert all("looks crafted" in error["reason"] for error in found["errors"])


@pytest.mark.serial
@pytest.mark.timeout(400)
def test_a_client_killed_in_mid_round_does_not_stop_the_others(federation, tmp_path):
    """Killed as soon as it has its message: its reply never comes, and the round goes on without it."""

    def asked():
        return federation.log("supernode-2").count("Receiving: train message")

    before, killed = asked(), threading.Event()

    def kill_when_asked():
        while asked() == before and not killed.wait(0.2):
            pass
        federation.kill(2)
        killed.set()

    killer = threading.Thread(target=kill_when_asked, daemon=True)
    killer.start()
    status, found = run(federation, tmp_path / "killed", guard=False, timeout=22.0, pause=3.0)
    assert killed.is_set()
    assert status == "finished:completed"
    assert len(found["readings"]) == 2
    assert federation.nodes[2].poll() is not None


ENDING = """
import subprocess, sys, time
from qbi.integrations.flower.deployment import LocalFederation

class Sleeping(LocalFederation):
    def _start(self, name, program, *arguments):
        return subprocess.Popen(["sleep", "300"], start_new_session=True)
    def _wait_for(self, port):
        pass

with Sleeping(2) as federation:
    print(federation.link.pid, *(n.pid for n in federation.nodes), flush=True)
    time.sleep(300)
"""


def test_a_federation_that_is_told_to_end_leaves_no_process_behind():
    process = subprocess.Popen([sys.executable, "-c", ENDING], stdout=subprocess.PIPE, text=True)
    children = [int(word) for word in process.stdout.readline().split()]
    assert len(children) == 3
    process.terminate()
    assert process.wait(timeout=60) == 143
    for child in children:
        with pytest.raises(ProcessLookupError):
            os.kill(child, 0)


@pytest.mark.parametrize("policy", ["auto", "budget"])
def test_messages_go_when_they_are_done(policy):
    """A worker of a simulation guards hundreds of clients: nothing of a round stays until the next collection."""
    model = plain()
    gc.collect()
    gc.disable()
    try:
        message = asked(model.state_dict())
        sent = weakref.ref(message.content["arrays"])
        reply = guarded_by(policy=policy, inspect="warn")(message, context(), trainer(model))
        answer = weakref.ref(reply.content["arrays"])
        del message, reply
        assert sent() is None
        assert answer() is None
    finally:
        gc.enable()


INTERRUPTED = """
import runpy, subprocess, sys, time
from qbi.integrations.flower.deployment import LocalFederation

LocalFederation._start = lambda *_: subprocess.Popen(["sleep", "300"], start_new_session=True)
LocalFederation._wait_for = lambda *_: None

def run(federation, *_, **__):
    print(federation.link.pid, *(n.pid for n in federation.nodes), flush=True)
    time.sleep(300)

LocalFederation.run = run
sys.argv = ["run.py", "deployment"]
runpy.run_path(EXAMPLE, run_name="__main__")
"""


def test_ctrl_c_in_the_examples_script_ends_every_process():
    code = INTERRUPTED.replace("EXAMPLE", repr(str(EXAMPLE / "run.py")))
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell may have it ignored
    )
    children = [int(word) for word in process.stdout.readline().split()]
    assert len(children) == 4
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert said == "stopped; every process of the federation was ended.\n"
    assert process.returncode == 1
    for child in children:
        with pytest.raises(ProcessLookupError):
            os.kill(child, 0)


def replying(model, *, extra=None, **metrics):
    """A client that also sends numbers, and arrays of its own."""

    def train(msg, ctxt):
        trainer(model)(msg, ctxt)
        state = {**dict(model.state_dict()), **({} if extra is None else extra(model))}
        records = {"arrays": ArrayRecord(state), "metrics": MetricRecord({"num-examples": 12, **metrics})}
        return Message(RecordDict(records), reply_to=msg)

    return train


def test_numbers_that_no_noise_covers_stay_at_home():
    sent = plain().state_dict()
    reply = guarded_by(inspect="off")(asked(sent), context(), replying(plain(), loss=0.5))
    assert dict(reply.content["metrics"]) == {"num-examples": 12}
    kept = guarded_by(inspect="off", metrics="keep")(asked(sent), context(), replying(plain(), loss=0.5))
    assert kept.content["metrics"]["loss"] == 0.5

    def evaluate(msg, ctxt):
        return Message(RecordDict({"metrics": MetricRecord({"num-examples": 12, "accuracy": 0.7})}), reply_to=msg)

    seen = leak_guard(asked(sent, "evaluate"), context(), evaluate)
    assert dict(seen.content["metrics"]) == {"num-examples": 12}


def test_nothing_but_protected_weights_leaves_under_the_budget():
    """Gradients kept aside, or statistics of the batch, are arrays that changed without the guard: refused."""
    sent = plain().state_dict()
    raw = torch.randn(60, 40)
    reply = guarded_by(inspect="off")(asked(sent), context(), replying(plain(), extra=lambda _m: {"gradient": raw}))
    assert reply.has_error()
    assert "no weight that the guard saw move" in reply.error.reason
    fine = guarded_by(inspect="off")(
        asked(sent), context(), replying(plain(), extra=lambda m: {"copy": m[0].weight.detach()})
    )
    assert not fine.has_error()


def test_the_ledger_of_a_node_stops_it(tmp_path):
    guard = guarded_by(inspect="off", ledger=str(tmp_path / "ledger"), samples=12, data="clinic", limit=150)
    sent = plain().state_dict()
    assert [guard(asked(sent), context(), trainer(plain())).has_error() for _ in range(3)] == [False, False, True]
    refused = guard(asked(sent), context(), trainer(plain()))
    assert "144 of 150 bits" in refused.error.reason


def test_a_recording_server_survives_layers_of_another_width(tmp_path):
    """The best layer's samples need not have the shape of a picture; they are written down without one."""
    from flwr.serverapp.strategy import FedAvg

    from qbi.integrations.flower import Recording

    recording = Recording(FedAvg(), tmp_path, shape=(3, 5, 7))
    recording.sent = ArrayRecord(plain().state_dict())
    reply = trainer(plain())(asked(plain().state_dict()), context())
    recording.aggregate_train(1, [reply])
    assert recording.readings
    assert recording.readings[0].samples.shape[1:] != (3 * 5 * 7,)
    assert json.loads((tmp_path / "federation.json").read_text())["errors"] == []
    assert not list(tmp_path.glob("*.png"))


def test_an_audit_server_without_a_sample_says_what_to_give(tmp_path):
    from qbi.errors import BadValue
    from qbi.integrations.flower import audit_server_app

    with pytest.raises(BadValue, match="give sample="):
        audit_server_app(plain, tmp_path, attack=QBI(12))
