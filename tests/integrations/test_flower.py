"""The mod and the recording server in Flower: message by message, on Ray, and over real processes."""

import gc
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="the extra flower is not installed")

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.serverapp.exception import InconsistentMessageReplies
from flwr.serverapp.strategy import FedAvg
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

from qbi import Private
from qbi.attacks import QBI, mount
from qbi.data.checkpoint import load_parameters
from qbi.errors import BadValue
from qbi.integrations.flower import guarded_by, leak_guard, read_reply, save_record, state_of
from qbi.integrations.flower.deployment import LocalFederation
from qbi.integrations.flower.guard import CODE, SPENT
from qbi.metrics import FAITHFUL, match
from qbi.private.boundary import REFUSED, THREE_LINES
from qbi.private.ledger import Ledger
from qbi.randomness import generator

EXAMPLE = Path(__file__).parents[2] / "examples/flower-guarded"


def plain():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 60), nn.ReLU(), nn.Linear(60, 4))


def with_buffers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 60), nn.BatchNorm1d(60), nn.ReLU(), nn.Linear(60, 4)).eval()


X = torch.randn(12, 40, generator=torch.Generator().manual_seed(1))
Y = torch.arange(12) % 4
SENT = plain().state_dict()


@pytest.fixture(autouse=True)
def in_a_run(monkeypatch):
    """A message belongs to a run; outside of one, its makers must be told which."""
    from flwr.supercore.task_identity import TaskIdentity

    for name, value in (("_task_id", 1), ("_run_id", 1), ("_node_id", 7)):
        monkeypatch.setattr(TaskIdentity, name, value)


def asked(state, kind="train"):
    return Message(RecordDict({"arrays": ArrayRecord(state)}), dst_node_id=1, message_type=kind)


def context(node=None, **run):
    return Context(run_id=1, node_id=7, node_config=node or {}, state=RecordDict(), run_config=run)


def answering(state=None, config=None, **metrics):
    """A client's code that answers with what it is given."""

    def answer(msg, ctxt):
        records = {"metrics": MetricRecord({"num-examples": 12, **metrics})}
        if state is not None:
            records["arrays"] = ArrayRecord(dict(state))
        if config is not None:
            records["config"] = ConfigRecord(config)
        return Message(RecordDict(records), reply_to=msg)

    return answer


def plainly(model=None, **metrics):
    """Training code as clients write it, without anything private."""

    def train(msg, ctxt):
        own = model or plain()
        own.load_state_dict(msg.content["arrays"].to_torch_state_dict())
        optimiser = torch.optim.SGD(own.parameters(), lr=1.0)
        F.cross_entropy(own(X), Y).backward()
        optimiser.step()
        return answering(own.state_dict(), **metrics)(msg, ctxt)

    return train


def released(private):
    return private.state_dict()


def privately(answer=released, model=None, before=None, **metrics):
    """Training code that uses `qbi.Private`; what it answers is said by a function of the trained Private."""

    def train(msg, ctxt):
        own = model or plain()
        own.load_state_dict(msg.content["arrays"].to_torch_state_dict())
        if before is not None:
            before(own)
        optimiser = torch.optim.SGD((p for p in own.parameters() if p.requires_grad), lr=1.0)
        private = Private(own, F.cross_entropy, bits=72, average=0.9)
        for x, y in private.batches((X, Y), 6):
            private.step(optimiser, x, y)
        return answering(answer(private), **metrics)(msg, ctxt)

    return train


def crafted():
    return mount(plain(), QBI(12), X[:2], generator(0, "flower"))


def recall(reply):
    """The share of the client's samples that a reply to the crafted model gives away."""
    sent = crafted()
    difference = {n: v - state_of(reply.content["arrays"])[n] for n, v in sent.model.state_dict().items()}
    return match(read_reply(sent, difference, {}).samples, X, data_range=4.0)[FAITHFUL].recall


def is_refusal(reply):
    """An error with the fixed sentence, and nothing besides."""
    return reply.has_error() and not reply.has_content() and (reply.error.code, reply.error.reason) == (CODE, REFUSED)


# What may leave


def minus_sent(private):
    return {n: v - SENT[n] for n, v in private.state_dict().items()}


def sent_minus(private):
    return {n: SENT[n] - v for n, v in private.state_dict().items()}


RELEASED = {
    "the state": released,
    "the model's own state": lambda private: private.model.state_dict(),
    "the average": lambda private: private.state_dict(averaged=True),
    "the last gradient": lambda private: {n: p.grad for n, p in private.model.named_parameters()},
    "a weight difference": minus_sent,
    "a difference the other way round": sent_minus,
}


@pytest.mark.parametrize("answer", RELEASED.values(), ids=RELEASED.keys())
def test_what_was_released_leaves_bit_for_bit(answer):
    said = {}

    def remembered(private):
        said.update({n: v.detach().clone() for n, v in answer(private).items()})
        return said

    reply = leak_guard(asked(SENT), context(), privately(remembered))
    left = state_of(reply.content["arrays"])
    assert all(torch.equal(left[n], v) for n, v in said.items())
    assert left.keys() == said.keys()
    assert not any(torch.equal(left[n], SENT[n]) for n in ("0.bias", "2.weight"))


def test_half_of_a_release_does_not_leave():
    """Which half would be the code's choice."""

    def half(private):
        return {**private.state_dict(), "0.weight": SENT["0.weight"]}

    assert is_refusal(leak_guard(asked(SENT), context(), privately(half)))


def test_what_was_sent_may_leave_again():
    reply = leak_guard(asked(SENT), context(), answering(SENT))
    assert all(torch.equal(v, SENT[n]) for n, v in state_of(reply.content["arrays"]).items())


@pytest.mark.parametrize("kind", ["train", "evaluate", "query", "train.mine"])
def test_every_kind_of_reply_is_looked_at(kind):
    ask = asked(SENT, kind)
    raw = {**SENT, "0.weight": X.repeat(5, 1)}
    assert is_refusal(leak_guard(ask, context(), answering(raw)))
    assert is_refusal(leak_guard(ask, context(), plainly()))
    assert not leak_guard(ask, context(), privately()).has_error()


@pytest.mark.parametrize("policy", ["private", "update"])
@pytest.mark.parametrize("kind", ["evaluate", "query"])
def test_only_training_releases_an_update(kind, policy):
    assert is_refusal(guarded_by(policy=policy)(asked(SENT, kind), context(), plainly()))


def test_buffers_leave_as_they_were_sent():
    sent = with_buffers().state_dict()
    reply = leak_guard(asked(sent), context(), privately(model=with_buffers()))
    state = state_of(reply.content["arrays"])
    assert state["1.num_batches_tracked"].dtype == torch.int64
    assert all(torch.equal(state[n], sent[n]) for n in ("1.running_mean", "1.running_var", "1.num_batches_tracked"))
    assert not torch.equal(state["0.weight"], sent["0.weight"])


def by_number(state):
    return {str(i): v for i, v in enumerate(state.values())}


def test_arrays_without_names_leave_if_they_were_released():
    """As older clients answer: "0", "1", … in the order of the state."""
    reply = leak_guard(asked(SENT), context(), privately(lambda private: by_number(private.state_dict())))
    assert [*state_of(reply.content["arrays"])] == ["0", "1", "2", "3"]
    swapped = leak_guard(
        asked(SENT), context(), privately(lambda private: by_number(dict(reversed(private.state_dict().items()))))
    )
    assert is_refusal(swapped)
    assert is_refusal(leak_guard(asked(SENT), context(), lambda m, c: answering(by_number(trained(m)))(m, c)))


def trained(msg):
    return state_of(plainly()(msg, None).content["arrays"])


# What may not


def begun_elsewhere(model):
    with torch.no_grad():
        model[2].bias += 1e-3


def raising(msg, ctxt):
    raise RuntimeError(f"row 3: {PATIENT}")


def failing(msg, ctxt):
    return Message(Error(1, f"row 3: {PATIENT}"), reply_to=msg)


PATIENT = "Ada Lovelace, born 1815"

REFUSALS = {
    "plain training": (SENT, plainly(), "neither as it was sent nor released"),
    "a private state, one array of it raw": (
        SENT,
        privately(lambda private: {**private.state_dict(), "0.bias": X[:, 0].repeat(5)}),
        "“0.bias” is neither as it was sent nor released",
    ),
    "a private state, rounded": (
        SENT,
        privately(lambda private: {n: v.half().float() for n, v in private.state_dict().items()}),
        "nor released",
    ),
    "half state, half difference": (
        SENT,
        privately(lambda private: {**private.state_dict(), "0.weight": minus_sent(private)["0.weight"]}),
        None,
    ),
    "an array more": (SENT, privately(lambda private: {**private.state_dict(), "x": X}), "just these names"),
    "an array less": (
        SENT,
        privately(lambda private: {"0.weight": private.state_dict()["0.weight"]}),
        "just these names",
    ),
    "arrays of another width": (SENT, answering({**SENT, "0.weight": X}), "“0.weight” has another shape"),
    "NaN in the reply": (SENT, answering({**SENT, "2.bias": torch.tensor([1.0, torch.nan, 0, 0])}), "NaN"),
    "a private training that begins elsewhere": (
        SENT,
        privately(before=begun_elsewhere),
        "that is not what the server sent",
    ),
    "samples given twice": (SENT, lambda m, c: twice(m, c), "each drawn batch is for one step"),
    "a crafted model": (crafted().model.state_dict(), privately(), "looks crafted"),
    "NaN in what was sent": ({n: v * torch.nan for n, v in SENT.items()}, privately(), "NaN"),
    "weights of another shape": ({**SENT, "0.weight": torch.randn(60, 3)}, privately(), "size mismatch"),
    "a layer without bias": ({n: v for n, v in SENT.items() if n != "0.bias"}, privately(), "0.bias"),
    "training that raises": (SENT, raising, f"RuntimeError: row 3: {PATIENT}"),
    "training that answers with an error": (SENT, failing, "answered with an error"),
    "training that answers with nothing": (SENT, lambda m, c: None, "NoneType"),
}


def twice(msg, ctxt):
    model = plain()
    private = Private(model, F.cross_entropy)
    for x, y in private.batches((X, Y), 6):
        private.step(torch.optim.SGD(model.parameters(), lr=1.0), torch.cat([x, x]), torch.cat([y, y]))
    return answering(private.state_dict())(msg, ctxt)


@pytest.mark.parametrize(("state", "train", "why"), REFUSALS.values(), ids=REFUSALS.keys())
def test_the_server_hears_one_sentence_and_the_owner_why(state, train, why, caplog):
    reply = leak_guard(asked(state), context(), train)
    assert is_refusal(reply)
    assert "not answered" in caplog.text
    assert why is None or why in caplog.text


def test_the_owner_is_told_what_to_write(caplog):
    assert is_refusal(leak_guard(asked(SENT), context(), plainly()))
    assert THREE_LINES in caplog.text
    assert "policy `update`" in caplog.text


@pytest.mark.parametrize("kind", ["train", "evaluate", "query"])
@pytest.mark.parametrize("code", [raising, failing], ids=["raised", "answered"])
def test_the_words_of_an_exception_stay_here(code, kind):
    ask = asked(SENT, kind)
    reply = leak_guard(ask, context(), code)
    assert is_refusal(reply)
    assert PATIENT not in str(vars(reply)) + str(reply.error.reason)
    with pytest.raises(RuntimeError, match=PATIENT):
        raising(ask, None)
    assert PATIENT in failing(ask, None).error.reason


PASSES = {
    "gradients formed after the last step": lambda: privately(raw_gradients),
    "frozen weights that were trained before": lambda: privately(before=trained_then_frozen),
    "buffers that have seen data": lambda: privately(model=with_buffers(), before=with_statistics),
}


def raw_gradients(private):
    private.model.zero_grad()
    F.cross_entropy(private.model(X), Y).backward()
    return {n: p.grad for n, p in private.model.named_parameters()}


def trained_then_frozen(model):
    F.cross_entropy(model(X), Y).backward()
    torch.optim.SGD(model[0].parameters(), lr=1.0).step()
    model[0].requires_grad_(False)


def with_statistics(model):
    model.train()(X)
    model.eval()


@pytest.mark.parametrize("train", PASSES.values(), ids=PASSES.keys())
def test_what_the_private_step_did_not_make_stays_here(train):
    sent = (with_buffers() if train is PASSES["buffers that have seen data"] else plain()).state_dict()
    assert is_refusal(leak_guard(asked(sent), context(), train()))


# Numbers, texts, bytes

NUMBERS = {"correct": 7, "accuracy": 0.7, "loss": 23.0, "losses": [0.5, 0.25], "counts": [1, 2, 3]}
WORDS = {"note": PATIENT, "blob": b"abc", "flag": True, "names": [PATIENT], "rate": 0.1}


@pytest.mark.parametrize("kind", ["train", "evaluate", "query"])
def test_numbers_that_nobody_named_stay_here(kind):
    ctxt = context()
    reply = leak_guard(asked(SENT, kind), ctxt, answering(config=WORDS, **NUMBERS))
    assert dict(reply.content["metrics"]) == {"num-examples": 1}  # alike for every client
    assert dict(reply.content["config"]) == {}
    assert ctxt.state[SPENT]["bits"] == 0


@pytest.mark.parametrize("kind", ["train", "evaluate", "query"])
def test_named_numbers_leave_rounded_and_are_charged(kind):
    ctxt = context({"qbi-metrics": "num-examples=5 correct accuracy:7 loss:8:10 losses note blob names flag=1"})
    reply = leak_guard(asked(SENT, kind), ctxt, answering(config=WORDS, **NUMBERS))
    assert dict(reply.content["metrics"]) == {
        "num-examples": 5,
        "correct": 7,
        "accuracy": round(0.7 * 127) / 127,
        "loss": 10.0,
        "losses": [0.5, 0.25],
    }
    assert dict(reply.content["config"]) == {"note": PATIENT, "blob": b"abc", "names": [PATIENT], "flag": 1}
    assert isinstance(reply.content["config"], ConfigRecord)
    values = 64 + 7 + 8 + 8 * (8 + 2 * 9) + 8 * (8 + len(PATIENT)) + 8 * (8 + 3) + 8 * (8 + 1 + 8 + len(PATIENT))
    kinds, presence = 5 * 8, 2 * 7  # of values as they are; of seven names in two records
    assert ctxt.state[SPENT]["bits"] == values + kinds + presence


@pytest.mark.parametrize(("metrics", "values"), [("note:7", {"config": WORDS}), ("losses:7", NUMBERS)])
def test_what_is_no_number_has_no_so_many_bits(metrics, values, caplog):
    assert is_refusal(guarded_by(metrics=metrics)(asked(SENT, "query"), context(), answering(**values)))
    assert "name it without bits" in caplog.text


def test_a_records_name_says_nothing():
    def query(msg, ctxt):
        return Message(RecordDict({PATIENT: MetricRecord({"num-examples": 12}), "x": ConfigRecord({})}), reply_to=msg)

    reply = leak_guard(asked(SENT, "query"), context(), query)
    assert {name: type(record) for name, record in reply.content.items()} == {
        "metrics": MetricRecord,
        "config": ConfigRecord,
    }


def test_named_numbers_run_out():
    guard, ctxt = guarded_by(metrics="correct", total=150), context()
    refused = [is_refusal(guard(asked(SENT, "evaluate"), ctxt, answering(correct=7))) for _ in range(4)]
    assert refused == [False, False, True, True]


# Whose settings


def test_what_the_server_sets_changes_nothing(tmp_path):
    """Whoever starts a run writes its config, and that is the server."""
    lax = {
        "qbi-policy": "update",
        "qbi-inspect": "off",
        "qbi-metrics": "correct loss",
        "qbi-total": 1e9,
        "qbi-bits": 1e9,
        "qbi-ledger": str(tmp_path / "elsewhere"),
        "qbi-hope": "?",
    }
    assert is_refusal(leak_guard(asked(crafted().model.state_dict()), context(**lax), privately()))
    assert is_refusal(leak_guard(asked(SENT), context(**lax), plainly()))
    ctxt = context({"qbi-total": "100"}, **lax)
    ask = asked(SENT)
    ask.content["config"] = ConfigRecord(lax)
    reply = leak_guard(ask, ctxt, privately(correct=7, loss=0.5))
    assert dict(reply.content["metrics"]) == {"num-examples": 1}
    assert is_refusal(leak_guard(ask, ctxt, privately()))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("policy", ["budget", "report", "auto", "noise", "aggp", "drop", "skip", "refuse"])
def test_a_policy_that_is_gone_says_what_there_is(policy, caplog):
    with pytest.raises(BadValue, match=r"is gone; there are private .*qbi\.Private.* and update"):
        guarded_by(policy=policy)
    assert is_refusal(leak_guard(asked(SENT), context({"qbi-policy": policy}), privately()))
    assert f"'{policy}' is gone" in caplog.text


WRONG = {
    "policy": ({"policy": "hope"}, "private, update"),
    "inspect": ({"inspect": "no"}, "refuse, warn, off"),
    "a name": ({"fewest": 3}, "no .*setting"),
    "a number": ({"total": "much"}, "no number"),
    "metrics": ({"metrics": "loss:seven"}, "name:bits"),
}


@pytest.mark.parametrize(("settings", "why"), WRONG.values(), ids=WRONG.keys())
def test_a_wrong_setting_is_said_at_once_and_lets_nothing_out(settings, why):
    with pytest.raises(BadValue, match=why):
        guarded_by(**settings)
    node = {f"qbi-{name}": value for name, value in settings.items()}
    assert is_refusal(leak_guard(asked(SENT), context(node), answering(SENT)))
    assert not leak_guard(asked(SENT), context({"partition-id": 3}), answering(SENT)).has_error()


# What is promised, and counted


def test_a_crafted_model_reads_nothing_from_guarded_clients():
    ask = asked(crafted().model.state_dict())
    assert recall(plainly()(ask, None)) > 0.5
    assert recall(guarded_by(policy="update", inspect="off")(ask, context(), plainly())) == 0
    assert recall(guarded_by(inspect="off")(ask, context(), privately())) == 0


def test_update_keeps_training_code_and_moves_every_weight():
    sent = with_buffers().state_dict()
    ctxt = context({"qbi-policy": "update"})
    reply = leak_guard(asked(sent), ctxt, plainly(with_buffers().train(), loss=0.5))
    state = state_of(reply.content["arrays"])
    assert all(not torch.equal(state[n], v) for n, v in sent.items() if v.is_floating_point())
    assert int(state["1.num_batches_tracked"]) == 0
    assert dict(reply.content["metrics"]) == {"num-examples": 1}
    assert ctxt.state[SPENT]["bits"] == pytest.approx(72)


def test_update_follows_the_training():
    """With next to no noise, and a clip that nothing reaches, what leaves is what was trained."""
    ask = asked(SENT)
    reply = guarded_by(policy="update", bits=1e14, clip=100, total=1e15)(ask, context(), plainly())
    far = trained(ask)
    assert all(torch.allclose(v, far[n], atol=1e-4) for n, v in state_of(reply.content["arrays"]).items())
    assert not any(torch.allclose(far[n], SENT[n], atol=1e-3) for n in far)
    short = guarded_by(policy="update", bits=1e14, clip=0.01, total=1e15)(ask, context(), plainly())
    moved = {n: v - SENT[n] for n, v in state_of(short.content["arrays"]).items()}
    assert float(torch.cat([v.flatten() for v in moved.values()]).norm()) == pytest.approx(0.01, rel=1e-3)


def test_the_total_of_a_run_stops_it(caplog):
    guard, ctxt = guarded_by(total=150), context()
    assert [is_refusal(guard(asked(SENT), ctxt, privately())) for _ in range(4)] == [False, False, True, True]
    assert ctxt.state[SPENT]["bits"] == pytest.approx(144)
    assert "the budget of this run is used up" in caplog.text
    own = guarded_by(policy="update", total=150)
    ctxt = context()
    assert [is_refusal(own(asked(SENT), ctxt, plainly())) for _ in range(3)] == [False, False, True]


def test_without_a_word_a_run_has_a_total():
    ctxt = context()
    ctxt.state[SPENT] = ConfigRecord({"bits": 1440.0})
    assert is_refusal(leak_guard(asked(SENT), ctxt, privately()))
    assert not leak_guard(asked(SENT), context(), privately()).has_error()


def test_a_ledger_counts_over_runs(tmp_path, caplog):
    guard = guarded_by(ledger=str(tmp_path / "ledger"), data="clinic", total=152, metrics="accuracy:6")
    rounds = [guard(asked(SENT), context(), train) for train in (privately(), privately(accuracy=0.5), privately())]
    assert [is_refusal(reply) for reply in rounds] == [False, False, True]
    assert "the budget of “clinic” is used up: 152 of 152 bits" in caplog.text
    assert [e.bits for e in Ledger(tmp_path / "ledger").entries("clinic")] == pytest.approx([72, 1, 72, 1, 6])


# With Flower's own strategies and older clients


def mixed(metrics):
    """Replies of a guarded and of an unguarded client."""
    node = {"qbi-metrics": metrics} if metrics else {}
    train = privately(loss=0.5)
    guarded = leak_guard(asked(SENT), context(node), train)
    return [guarded, plainly(loss=0.5)(asked(SENT), context())]


def test_guarded_and_unguarded_clients_are_averaged_together():
    replies = mixed("num-examples=1 loss=0")
    arrays, metrics = FedAvg().aggregate_train(1, replies)
    one, other = (state_of(r.content["arrays"]) for r in replies)
    assert all(torch.allclose(v, (one[n] + 12 * other[n]) / 13, atol=1e-6) for n, v in state_of(arrays).items())
    assert metrics["loss"] == pytest.approx(0.5 * 12 / 13)
    with pytest.raises(InconsistentMessageReplies):
        FedAvg().aggregate_train(1, mixed(""))


def test_texts_beside_the_numbers_do_not_stop_an_average():
    """A record of texts stays one when they are taken out: strategies expect one record of numbers."""
    replies = [leak_guard(asked(SENT), context(), answering(SENT, config=WORDS, loss=0.5)) for _ in range(2)]
    arrays, metrics = FedAvg().aggregate_train(1, replies)
    assert arrays is not None
    assert dict(metrics) == {}
    seen = [leak_guard(asked(SENT, "evaluate"), context(), answering(accuracy=0.5)) for _ in range(2)]
    assert dict(FedAvg().aggregate_evaluate(1, seen)) == {}


def older(private):
    """A client of Flower's first years: arrays in a list, whose names the server never heard."""
    from flwr.client import NumPyClient

    class Old(NumPyClient):
        def fit(self, parameters, config):
            model = plain()
            state = dict(zip(model.state_dict(), map(torch.tensor, parameters), strict=True))
            model.load_state_dict(state)
            if private:
                ask = asked(state)
                moved = state_of(privately()(ask, None).content["arrays"])
            else:
                moved = trained(asked(state))
            return [v.numpy() for v in moved.values()], 12, {"loss": 0.5}

    return lambda context: Old().to_client()


@pytest.mark.parametrize(
    "policy",
    [
        "update",
        "private",
    ],
)
def test_older_clients_are_guarded_too(policy):
    from flwr.clientapp import ClientApp
    from flwr.common import FitIns, ndarrays_to_parameters
    from flwr.compat.common.recorddict_compat import fitins_to_recorddict, recorddict_to_fitres

    guard = guarded_by(policy=policy, metrics="num_examples=1 code=0 message")
    app = ClientApp(client_fn=older(policy == "private"), mods=[guard])
    ins = FitIns(ndarrays_to_parameters([v.numpy() for v in SENT.values()]), {})
    ask = Message(fitins_to_recorddict(ins, keep_input=True), dst_node_id=1, message_type="train")
    reply = app(ask, context())
    assert not reply.has_error()
    result = recorddict_to_fitres(reply.content, keep_input=True)
    assert len(result.parameters.tensors) == 4
    assert (result.num_examples, result.metrics) == (1, {})


@pytest.mark.parametrize(("policy", "train"), [("private", privately), ("update", plainly)], ids=["private", "update"])
@pytest.mark.parametrize("fine", [True, False], ids=["answered", "refused"])
def test_messages_go_when_they_are_done(policy, train, fine):
    """A worker of a simulation guards hundreds of clients: nothing of a round stays until the next collection."""
    gc.collect()
    gc.disable()
    try:
        message = asked(SENT)
        sent = weakref.ref(message.content["arrays"])
        reply = guarded_by(policy=policy, total=100 if fine else 10)(message, context(), train(model=plain()))
        assert reply.has_error() != fine
        answer = weakref.ref(reply.content["arrays"]) if fine else None
        del message, reply
        assert sent() is None
        assert answer is None or answer() is None
    finally:
        gc.enable()


def test_a_private_training_goes_when_it_is_done():
    kept = []

    def remember(private):
        kept.append(weakref.ref(private))
        return private.state_dict()

    gc.collect()
    gc.disable()
    try:
        leak_guard(asked(SENT), context(), privately(remember))
        assert kept[0]() is None
    finally:
        gc.enable()


# Records, and a server that reads


def test_arrays_are_kept_and_read_again(tmp_path):
    arrays = ArrayRecord(with_buffers().state_dict())
    save_record(arrays, tmp_path / "sent.safetensors")
    again = load_parameters(tmp_path / "sent.safetensors")
    assert again.keys() == state_of(arrays).keys()
    assert all(torch.equal(v, state_of(arrays)[n]) for n, v in again.items())


def test_without_the_extra_the_import_says_which():
    code = "import sys; sys.modules['flwr'] = None\nimport qbi.integrations.flower"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "pip install 'qbi[flower]'" in done.stderr


def test_a_recording_server_survives_layers_of_another_width(tmp_path):
    """The best layer's samples need not have the shape of a picture; they are written down without one."""
    from qbi.integrations.flower import Recording

    def small():
        return nn.Sequential(nn.Linear(40, 6), nn.ReLU(), nn.Linear(6, 4))

    sent = small().state_dict()
    recording = Recording(FedAvg(), tmp_path, shape=(3, 5, 7))
    recording.sent = ArrayRecord(sent)
    recording.aggregate_train(1, [plainly(small())(asked(sent), context())])
    assert recording.readings
    assert recording.readings[0].samples.shape[1:] != (3 * 5 * 7,)
    assert json.loads((tmp_path / "federation.json").read_text())["errors"] == []
    assert not list(tmp_path.glob("*.png"))


def test_an_audit_server_without_a_sample_says_what_to_give(tmp_path):
    from qbi.integrations.flower import audit_server_app

    with pytest.raises(BadValue, match="give sample="):
        audit_server_app(plain, tmp_path, attack=QBI(12))


# A simulation

SIMULATION = """
import json, sys
from pathlib import Path
import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.simulation import run_simulation
from torch import nn
import qbi
from qbi.exposure import count_leaks
from qbi.federation.exposed import exposed_step
from qbi.integrations.flower import audit_server_app, guarded_by

out = Path(sys.argv[1])
GUARDS = {"private": guarded_by(inspect="warn"), "update": guarded_by(policy="update", inspect="warn")}

def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(192, 100), nn.ReLU(), nn.Linear(100, 4))

def data(part):
    return torch.randn(10, 192, generator=torch.Generator().manual_seed(part)), torch.arange(10) % 4

def how(ctxt):
    return ("open", "open", "private", "update")[int(ctxt.node_config["partition-id"]) % 4]

def own(msg, ctxt, call_next):
    return GUARDS[how(ctxt)](msg, ctxt, call_next) if how(ctxt) in GUARDS else call_next(msg, ctxt)

app = ClientApp(mods=[own])

@app.train()
def train(msg, ctxt):
    model = make()
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    part = int(ctxt.node_config["partition-id"])
    x, y = data(part)
    optimiser = torch.optim.SGD(model.parameters(), lr=10.0)
    if how(ctxt) == "private":
        private = qbi.Private(model)
        for some, targets in private.batches((x, y), batch_size=10):
            private.step(optimiser, some, targets)
    else:
        leak = count_leaks(exposed_step(model, x, y, layers=["0"]).exposures[0])
        (out / f"{how(ctxt)}-{part}.json").write_text(json.dumps(leak.samples.nonzero()[:, 0].tolist()))
        nn.functional.cross_entropy(model(x), y).backward()
        optimiser.step()
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": 10})})
    return Message(content, reply_to=msg)

resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0}, "init_args": {"num_cpus": 2}}
server = audit_server_app(make, out, attack=qbi.QBI(10), sample=torch.randn(2, 192), timeout=600)
run_simulation(server, app, num_supernodes=12, backend_config=resources)
"""


@pytest.mark.serial
@pytest.mark.timeout(900)
@pytest.mark.long
def test_simulated_clients_leak_what_they_count_and_nothing_when_guarded(tmp_path):
    """Twelve clients: six without a guard, three with a private step, three whose whole update is released."""
    script = tmp_path / "simulation.py"
    script.write_text(textwrap.dedent(SIMULATION))
    done = subprocess.run(
        [sys.executable, script, tmp_path], capture_output=True, text=True, timeout=800, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr[-2000:]
    truth = [torch.randn(10, 192, generator=torch.Generator().manual_seed(part)) for part in range(12)]
    open_ones = [0, 1, 4, 5, 8, 9]
    counted = {(p, i) for p in open_ones for i in json.loads((tmp_path / f"open-{p}.json").read_text())}
    replies = [load_file(path)["samples"] for path in tmp_path.glob("*.safetensors")]
    assert len(replies) == 12
    read = set()
    for samples in replies:
        for part in range(12):
            found = match(samples, truth[part], data_range=4.0)[FAITHFUL].recovered
            read |= {(part, i) for i in found.nonzero()[:, 0].tolist()}
    assert read == counted
    assert len(counted) > 30
    assert sum(len(json.loads((tmp_path / f"update-{p}.json").read_text())) for p in (3, 7, 11)) > 15


# The example, and real processes


def test_no_setting_of_a_run_turns_the_examples_guard_off(monkeypatch):
    monkeypatch.delenv("QBI_EXAMPLE_UNGUARDED", raising=False)
    monkeypatch.syspath_prepend(str(EXAMPLE))
    from flower_guarded import client_app, task

    run = {"model": "mlp", "images": 40, "guard": False, "QBI_EXAMPLE_UNGUARDED": "1", "qbi-policy": "update"}
    model = task.make_model(kind="mlp")
    ctxt = context({"partition-id": 0, "num-partitions": 1}, **run, **{"local-steps": 1, "batch-size": 10})
    ask = asked(model.state_dict())
    ask.content["config"] = ConfigRecord({"server-round": 1})
    reply = client_app.app(ask, ctxt)
    assert dict(reply.content["metrics"]) == {"num-examples": 1}
    assert ctxt.state[SPENT]["bits"] == pytest.approx(72)
    moved = state_of(reply.content["arrays"])["1.weight"] - model[1].weight.detach()
    # The rate times noise on every weight, of a tenth of the clip over the batch: one step of private training.
    assert float(moved.std()) == pytest.approx(0.2 * 0.1 / 10, rel=0.1)
    seen = client_app.app(asked(model.state_dict(), "evaluate"), ctxt)
    assert dict(seen.content["metrics"]) == {"num-examples": 1}


@pytest.fixture(scope="module")
def unguarded():
    """Three clients whose owners want no guard."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QBI_EXAMPLE_UNGUARDED", "1")
        federation = LocalFederation(3)
    with federation:
        yield federation
    assert all(process.poll() is not None for process in [federation.link, *federation.nodes])


def run(federation, out, **config):
    settings = {"rounds": 1, "attack": "qbi", "local-steps": 1, "learning-rate": 1.0, "images": 120, "evaluate": False}
    started = time.monotonic()
    status = federation.run(EXAMPLE, settings | config | {"out": str(out)}, within=150.0)
    federation.took = time.monotonic() - started
    return status, json.loads((out / "federation.json").read_text())


@pytest.mark.long
@pytest.mark.serial
@pytest.mark.timeout(400)
def test_three_unguarded_clients_as_processes(unguarded, tmp_path):
    status, found = run(unguarded, tmp_path)
    assert status == "finished:completed"
    assert len(found["readings"]) == 3
    assert all(reading["agree"] >= 3 for reading in found["readings"])


@pytest.mark.serial
@pytest.mark.timeout(400)
def test_guarded_clients_as_processes(tmp_path):
    """A crafted model in the first round, which is not answered; an honest one in the second, which is."""
    with LocalFederation(2, node_config={"qbi-metrics": "num-examples=3"}) as federation:
        status, found = run(federation, tmp_path, rounds=2)
        said = [federation.log(f"supernode-{number}") for number in range(2)]
    assert status == "finished:completed"
    assert [(error["round"], error["reason"]) for error in found["errors"]] == [(1, REFUSED)] * 2
    assert [(reading["round"], reading["agree"]) for reading in found["readings"]] == [(2, 0)] * 2
    assert all("looks crafted" in words and "qbi guard: 72 bits" in words for words in said)


@pytest.mark.long
@pytest.mark.serial
@pytest.mark.timeout(400)
def test_a_client_killed_in_mid_round_does_not_stop_the_others(unguarded, tmp_path):
    """Killed as soon as it has its message: its reply never comes, and the round goes on without it."""

    def asked():
        return unguarded.log("supernode-2").count("Receiving: train message")

    before, killed = asked(), threading.Event()

    def kill_when_asked():
        while asked() == before and not killed.wait(0.2):
            pass
        unguarded.kill(2)
        killed.set()

    killer = threading.Thread(target=kill_when_asked, daemon=True)
    killer.start()
    # The server waits for the lost one: as long as a whole run took on this machine as it is now.
    status, found = run(unguarded, tmp_path, timeout=getattr(unguarded, "took", 45.0), pause=3.0)
    assert killed.is_set()
    assert status == "finished:completed"
    assert len(found["readings"]) == 2
    assert unguarded.nodes[2].poll() is not None


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


@pytest.mark.long
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


OWNERS = """
import runpy, sys
from qbi.integrations.flower.deployment import LocalFederation

LocalFederation.__enter__ = lambda self: self

def run(federation, app, config, **_):
    print(federation.environment.get("QBI_EXAMPLE_UNGUARDED"), *(k for k in config if "guard" in k or "qbi" in k))
    return "finished:completed"

LocalFederation.run = run
script = sys.argv[1]
for words in (["simulation"], ["simulation", "--no-guard"]):
    sys.argv = [script, *words]
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        assert end.code == 0
"""


@pytest.mark.long
def test_the_examples_script_leaves_the_guard_to_the_owner():
    """It stands in the environment of the clients' processes, and in nothing that a server sends."""
    environment = {n: v for n, v in os.environ.items() if n != "QBI_EXAMPLE_UNGUARDED"}
    command = [sys.executable, "-c", OWNERS, EXAMPLE / "run.py"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[::2] == ["None", "1"]
