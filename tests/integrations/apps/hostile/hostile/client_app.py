"""One way out after another, as the server names it; the secret is a tensor that no release could give."""

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import nn

import qbi
from qbi.integrations.flower import leak_guard

SECRET = 4711.25

app = ClientApp()


def model():
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def data():
    return torch.randn(16, 6, generator=torch.Generator().manual_seed(0)), torch.arange(16) % 3


def stolen(msg):
    state = msg.content["arrays"].to_torch_state_dict()
    return {n: torch.full_like(v, SECRET) for n, v in state.items()}


def reply(msg, state, **numbers):
    content = RecordDict({"arrays": ArrayRecord(state), "metrics": MetricRecord({"num-examples": 4711, **numbers})})
    return Message(content, reply_to=msg)


def honest(msg, context):
    def train(msg, context):
        net = model()
        net.load_state_dict(msg.content["arrays"].to_torch_state_dict())
        private = qbi.Private(net, bits=18)
        for x, y in private.batches(data(), batch_size=16):
            private.step(torch.optim.SGD(net.parameters(), lr=0.1), x, y)
        return reply(msg, private.state_dict(), accuracy=0.5)

    return leak_guard(msg, context, train)


def patched(msg, context):
    """Everything of qbi in this process that could be changed is changed; then a private training that is none."""
    from qbi.integrations.flower import guard
    from qbi.private import boundary, gate, site

    boundary.Boundary.check_arrays = lambda self, state: dict(state)
    vars(guard)["guarded_round"] = site.guarded_round = lambda s, sent, work, **_: site.Passed(work(), 0.0, ())
    gate.Gate.judge = lambda self, sent, arrays, numbers: gate.Leaving(arrays, numbers, 0.0)
    vars(guard)["write_receipts"] = lambda *_: None
    return guard.leak_guard(msg, context, lambda m, c: reply(m, stolen(m)))


def other_type(msg, context):
    out = Message(RecordDict({"arrays": ArrayRecord(stolen(msg))}), reply_to=msg)
    out.metadata.__dict__["_message_type"] = "query.secret4711"
    out.metadata.__dict__["_group_id"] = "4711"
    return out


def forged(msg, context):
    """Reads the key of the receipts, which this process may, and signs what it likes."""
    from qbi.private.owner import OwnersSite
    from qbi.private.receipts import Receipts

    sent = msg.content["arrays"].to_torch_state_dict()
    Receipts.of(OwnersSite.read()).write(sent, stolen(msg))
    return reply(msg, stolen(msg))


WAYS = {
    "honest": honest,
    "no guard": lambda msg, context: reply(msg, stolen(msg)),
    "patched": patched,
    "other type": other_type,
    "integers": lambda msg, context: reply(msg, msg.content["arrays"].to_torch_state_dict(), secret=4711),
    "texts": lambda msg, context: Message(
        RecordDict({"4711": ConfigRecord({"secret": "4711.25", "bytes": b"4711.25"})}), reply_to=msg
    ),
    "raises": lambda msg, context: 1 / 0 if msg else None,
    "several": lambda msg, context: Message(
        RecordDict({"a": ArrayRecord(stolen(msg)), "b": ArrayRecord(stolen(msg))}), reply_to=msg
    ),
    "not numbers": lambda msg, context: reply(msg, {n: v * float("nan") for n, v in stolen(msg).items()}),
    "shapes": lambda msg, context: reply(msg, {n: torch.full((4711,), SECRET) for n in stolen(msg)}),
    "forged": forged,
}


@app.train()
def train(msg, context):
    return WAYS[msg.content["config"]["way"]](msg, context)
