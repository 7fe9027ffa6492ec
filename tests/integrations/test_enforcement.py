"""Flower: an app's reply passes the owner's gate in the SuperNode's process, or one fixed sentence does."""

import hashlib
import itertools
import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("flwr")

from flwr.app import ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree, iterate_object_tree

from qbi.integrations.flower.answers import gated
from qbi.integrations.flower.deployment import LocalFederation
from qbi.integrations.flower.records import arrays_of, records_in, state_of
from qbi.integrations.flower.supernode import AnotherFlower, FleetGate, install
from qbi.integrations.processes import end
from qbi.private import NotReleased
from qbi.private.boundary import REFUSED
from qbi.private.gate import Gate
from qbi.private.owner import OwnersSite
from qbi.private.receipts import Receipts

APP = Path(__file__).parent / "apps" / "hostile"
SENT = {"0.weight": torch.randn(8, 6, generator=torch.Generator().manual_seed(0)), "0.bias": torch.zeros(8)}
STOLEN = {n: torch.full_like(v, 4711.25) for n, v in SENT.items()}


@pytest.fixture(autouse=True)
def in_a_run(monkeypatch):
    from flwr.supercore.task_identity import TaskIdentity

    for name, value in (("_task_id", 1), ("_run_id", 1), ("_node_id", 7)):
        monkeypatch.setattr(TaskIdentity, name, value)


def gate(folder, text='policy = "private"\nwait = 1'):
    place = folder / "qbi-site.toml"
    place.write_text(f'ledger = "client.ledger"\n{text}')
    return Gate(OwnersSite.read(place))


def asked(kind="train", **records):
    content = RecordDict({"arrays": arrays_of(SENT), "config": ConfigRecord({"round": 1}), **records})
    message = Message(content, dst_node_id=7, message_type=kind, group_id="1")
    message.metadata.__dict__["_message_id"] = message.object_id
    return message


def replied(ask, **records):
    return Message(RecordDict(records), reply_to=ask)


def said(message):
    """Everything that a message says, as one text."""
    out = [message.metadata.message_type, message.metadata.group_id, *message.content]
    for record in message.content.values():
        numbers = (
            {n: a.numpy().tolist() for n, a in record.items()} if isinstance(record, ArrayRecord) else dict(record)
        )
        out.append(repr(numbers))
    return " ".join(map(str, out))


def test_released_arrays_leave_under_names_that_say_nothing(tmp_path):
    here, ask = gate(tmp_path), asked()
    Receipts.of(here.site).write(SENT, STOLEN)
    reply = replied(ask, **{"4711": arrays_of(STOLEN), "m4711": MetricRecord({"num-examples": 4711, "secret": 4711})})
    answer = gated(here, ask, reply)
    assert list(answer.content) == ["arrays", "metrics"]
    assert dict(answer.content["metrics"]) == {"num-examples": 1}
    assert all(torch.equal(v, STOLEN[n]) for n, v in state_of(answer.content["arrays"]).items())


@pytest.mark.parametrize(
    "records",
    [
        {"arrays": arrays_of(STOLEN)},
        {"arrays": arrays_of(SENT), "more": arrays_of(STOLEN)},
        {"arrays": arrays_of({"0.weight": STOLEN["0.weight"]})},
        {"arrays": arrays_of({n: v * float("nan") for n, v in STOLEN.items()})},
    ],
    ids=["another", "two", "part", "NaN"],
)
def test_unreleased_arrays_do_not(tmp_path, records):
    ask = asked()
    with pytest.raises(NotReleased):
        gated(gate(tmp_path), ask, replied(ask, **records))


@pytest.mark.parametrize("kind", ["train", "evaluate", "query", "query.other"])
def test_numbers_texts_and_another_type_say_nothing(tmp_path, kind):
    ask = asked(kind)
    reply = replied(
        ask,
        arrays=arrays_of(SENT),
        a4711=MetricRecord({"secret": 4711, "list": [4711, 4711]}),
        b4711=ConfigRecord({"secret": "4711.25", "bytes": b"4711", "flag": True}),
    )
    reply.metadata.__dict__["_message_type"] = "query.4711"
    reply.metadata.__dict__["_group_id"] = "4711"
    answer = gated(gate(tmp_path), ask, reply)
    assert "4711" not in said(answer).replace(repr(state_of(arrays_of(SENT))), "")
    assert answer.metadata.message_type == kind
    assert answer.metadata.group_id == "1"


def test_an_errors_words_stay(tmp_path):
    ask = asked()
    with pytest.raises(NotReleased):
        gated(gate(tmp_path), ask, Message(Error(4, "sample 4711.25"), reply_to=ask))


def test_older_clients_are_answered_in_their_own_records(tmp_path):
    from flwr.compat.common.recorddict_compat import recorddict_to_evaluateres, recorddict_to_fitres

    here = gate(tmp_path, 'policy = "update"\nmetrics = ["loss=0"]')
    fit = Message(RecordDict({"fitins.parameters": arrays_of(SENT)}), dst_node_id=7, message_type="train")
    reply = replied(fit, **{"fitres.parameters": arrays_of(STOLEN), "fitres.metrics": ConfigRecord({"secret": "4711"})})
    result = recorddict_to_fitres(gated(here, fit, reply).content, keep_input=True)
    assert (result.num_examples, result.metrics, result.status.message) == (1, {}, "")
    ask = Message(RecordDict({"evaluateins.parameters": arrays_of(SENT)}), dst_node_id=7, message_type="evaluate")
    found = recorddict_to_evaluateres(gated(here, ask, replied(ask, m=MetricRecord({"loss": 4711.25}))).content)
    assert (found.loss, found.num_examples) == (0, 1)


# The loop of a SuperNode, its connection and its stores played by hand


class Played:
    """A connection that remembers what was sent, and the stores of a SuperNode."""

    def __init__(self, message):
        self.message, self.tree = message, get_object_tree(message)
        self.objects = {n: o.deflate() for n, o in get_all_nested_objects(message).items()}
        self.sent, self.pushed, self.replies, self.stored = [], {}, [], {}

    def connection(self):
        return (7, lambda: (self.message, self.tree), self._send, None, None, self._pull, self._push, lambda *_: None)

    def _pull(self, _run, name):
        return self.objects[name]

    def _send(self, message, tree, seconds):
        self.sent.append((message, seconds))
        return {part.object_id for part in iterate_object_tree(tree)}, "session"

    def _push(self, _run, _session, name, content):
        self.pushed[name] = content

    def reply(self, message, *, parts=True):
        message.metadata.__dict__["_message_id"] = message.object_id
        self.stored |= {n: o.deflate() if parts else b"" for n, o in get_all_nested_objects(message).items()}
        self.replies.append(message)

    # NodeState and ObjectStore

    def get_messages_legacy(self, **_):
        found, self.replies = self.replies, []
        return found

    def delete_messages(self, **_):
        pass

    def get(self, name):
        return self.stored.get(name)

    def delete(self, name):
        pass


def looped(folder, text='policy = "private"\nwait = 1'):
    ask = asked()
    played = Played(ask)
    fleet = FleetGate(gate(folder, text), played.connection())
    guarded = fleet.guarded()
    guarded[1]()
    for part in iterate_object_tree(played.tree):
        guarded[5](1, part.object_id)
    guarded[7](1, ask.object_id)
    return ask, played, fleet, guarded


def test_the_loop_itself_cannot_send(tmp_path):
    _, played, _, guarded = looped(tmp_path)
    for call in (lambda: guarded[2](asked(), None, 1.0), lambda: guarded[6](1, "s", "n", b"4711")):
        with pytest.raises(NotReleased):
            call()
    assert not played.sent
    assert not played.pushed


def test_a_reply_passes_the_gate(tmp_path):
    ask, played, fleet, _ = looped(tmp_path)
    Receipts.of(fleet.gate.site).write(SENT, STOLEN)
    played.reply(replied(ask, arrays=arrays_of(STOLEN), metrics=MetricRecord({"secret": 4711})))
    fleet.push(played, played)
    ((answer, seconds),) = played.sent
    assert seconds == 0.0
    assert not answer.has_error()
    assert len(records_in(answer.content, ArrayRecord)) == 1
    assert answer.metadata.reply_to_message_id == ask.object_id
    assert set(played.pushed) == {part.object_id for part in iterate_object_tree(get_object_tree(answer))}


@pytest.mark.parametrize("how", ["stolen", "never", "parts", "twice", "another", "nothing"])
def test_what_does_not_pass_becomes_one_sentence_in_time(tmp_path, how):
    ask, played, fleet, _ = looped(tmp_path)
    reply = replied(ask, arrays=arrays_of(SENT if how in ("twice", "parts") else STOLEN))
    if how == "another":
        reply.metadata.__dict__["_reply_to_message_id"] = "4711"
    if how not in ("never", "nothing"):
        played.reply(reply, parts=how != "parts")
    if how == "twice":
        played.reply(reply)
    if how == "nothing":
        played.reply(Message(RecordDict(), reply_to=ask), parts=False)
    started = time.monotonic()
    fleet.push(played, played)
    assert time.monotonic() - started < 20
    assert len(played.sent) == 1
    answer = played.sent[0][0]
    if how == "twice":
        assert not answer.has_error()
    else:
        assert (answer.error.reason, answer.error.code) == (REFUSED, 4711)
    assert b"4711.25" not in b"".join(played.pushed.values())


def test_a_late_reply_does_not_leave_the_node_one_behind(tmp_path):
    """The loop asks for replies after a message has come: one that comes too late must not stand for the next one."""
    ask, played, fleet, _ = looped(tmp_path)
    fleet.push(played, played)
    assert played.sent[0][0].has_error()
    played.reply(replied(ask, arrays=arrays_of(SENT)))
    later = asked(more=ConfigRecord({"round": 2}))
    fleet.asked[later.object_id] = later
    answer = replied(later, arrays=arrays_of(SENT))
    threading.Timer(0.5, lambda: played.reply(answer)).start()
    fleet.push(played, played)
    assert [m.metadata.reply_to_message_id for m, _ in played.sent] == [ask.object_id, later.object_id]
    assert not played.sent[1][0].has_error()


def test_parts_that_name_each_other_twice_are_not_unfolded(tmp_path):
    """A few kilobytes that would be 2⁶⁰ parts."""
    from flwr.proto.message_pb2 import ObjectTree
    from flwr.supercore.object_store.object_store_factory import ObjectStoreFactory
    from flwr.supernode.nodestate import NodeStateFactory

    ask, played, fleet, _ = looped(tmp_path)
    state = NodeStateFactory(objectstore_factory=ObjectStoreFactory()).state()
    names = [hashlib.sha256(str(i).encode()).hexdigest() for i in range(60)]
    tree = ObjectTree(object_id=names[0])
    for below, name in itertools.pairwise(names):
        above = ObjectTree(object_id=name)
        above.children.add().CopyFrom(tree)
        above.children.add(object_id=below)
        tree = above
    reply = replied(ask)
    reply.metadata.__dict__["_message_id"] = tree.object_id
    state.store_message_and_object_tree(reply, tree, state.start_session(1))
    fleet.push(state, state.object_store)
    assert played.sent[0][0].has_error()


def test_another_version_of_flower_is_not_started(tmp_path, monkeypatch):
    import flwr.supernode.start_client_internal as loop

    monkeypatch.delattr(loop, "_push_messages")
    with pytest.raises(AnotherFlower, match="_push_messages"):
        install(gate(tmp_path))


# Real processes

STARTER = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], start_new_session=True)
print(child.pid, flush=True)
time.sleep(300)
"""


def running(number):
    try:
        return ") Z " not in Path(f"/proc/{number}/stat").read_text()
    except OSError:
        return False


def test_what_a_process_started_in_a_session_of_its_own_is_ended_too():
    process = subprocess.Popen([sys.executable, "-c", STARTER], stdout=subprocess.PIPE, start_new_session=True)
    child = int(process.stdout.readline())
    end(process)
    deadline = time.monotonic() + 10
    while running(child) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not running(child)


WAYS = "no guard,patched,other type,integers,texts,raises,several,not numbers,shapes"


def ways(federation, out, which):
    status = federation.run(APP, {"out": str(out), "ways": which}, within=400.0)
    assert status == "finished:completed"
    return json.loads(out.read_text())


@pytest.mark.serial
@pytest.mark.serial
@pytest.mark.long
@pytest.mark.timeout(600)
def test_no_way_past_the_gate_of_a_private_site(tmp_path):
    """And the one that there is: code that may read the receipts' key. The documents say so."""
    with LocalFederation(1, owners='policy = "private"\nmetrics = ["accuracy:7"]\n') as federation:
        found = ways(federation, tmp_path / "found.json", f"honest,{WAYS},forged")
    honest, forged = found.pop("honest"), found.pop("forged")
    assert honest["metrics"] == {"accuracy": "0.5039370078740157", "num-examples": "1"}
    assert honest["arrays"] != honest["sent"]
    assert forged["arrays"]["0.bias"] == [4711.25] * 8
    for way, reply in found.items():
        if way in ("integers", "texts"):
            assert reply.get("arrays", reply["sent"]) == reply["sent"]
            assert reply["metrics"] == {"num-examples": "1"}
        else:
            assert (reply["error"], reply["code"]) == (REFUSED, 4711)


@pytest.mark.serial
@pytest.mark.serial
@pytest.mark.long
@pytest.mark.timeout(600)
def test_no_way_past_the_gate_that_releases_updates_itself(tmp_path):
    with LocalFederation(1, owners='policy = "update"\nbits = 18\n') as federation:
        found = ways(federation, tmp_path / "found.json", "no guard,patched,other type,integers,texts,forged")
    assert found["forged"]["error"] == REFUSED  # there is nothing to forge
    for way, reply in found.items():
        if "arrays" in reply:
            moved = torch.cat([torch.tensor(reply["arrays"][n]) - torch.tensor(v) for n, v in reply["sent"].items()])
            assert float(moved.norm()) < 5  # a clip of 1, and noise of 0.2 on 83 values
            assert float(moved.std()) == pytest.approx(0.2, rel=0.4)
        assert reply.get("metrics", {"num-examples": "1"}) == {"num-examples": "1"}, way


@pytest.mark.serial
@pytest.mark.serial
@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_gate_stands_before_a_superlink_with_tls(tmp_path):
    with LocalFederation(1, owners='policy = "update"\nbits = 18\n', tls=True) as federation:
        found = ways(federation, tmp_path / "found.json", "no guard,raises")
    assert found["raises"]["error"] == REFUSED
    assert max(abs(v) for values in found["no guard"]["arrays"].values() for v in values) < 5
