"""A client as one writes it for Flower: a private step in the training loop, and a mod that lets nothing else out."""

import os
import time

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch.nn import functional as F

from flower_guarded.task import accuracy, load_data, make_model, settings_of, train
from qbi import Private
from qbi.integrations.flower import leak_guard

UNGUARDED = os.environ.get("QBI_EXAMPLE_UNGUARDED") == "1"
"""For comparison. This is the environment of the client's owner; nothing that a server sends can set it."""

app = ClientApp(mods=[] if UNGUARDED else [leak_guard])


@app.train()
def train_here(msg: Message, context: Context) -> Message:
    """Train on this client's images and answer with the weights."""
    config = context.run_config
    model = make_model(kind=str(config.get("model", "cnn")))
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    data = load_data(**settings_of(context))
    time.sleep(float(config.get("pause", 0.0)))
    batch_size, steps = int(config.get("batch-size", 20)), int(config.get("local-steps", 0))
    if UNGUARDED:
        rate = float(config.get("learning-rate", 0.05))
        seed = int(msg.content["config"]["server-round"])
        loss = train(model, *data, rate=rate, batch_size=batch_size, steps=steps, seed=seed)
        state = model.state_dict()
    else:
        optimiser = torch.optim.SGD(model.parameters(), lr=float(config.get("private-learning-rate", 0.2)))
        private = Private(model, F.cross_entropy, bits=72)
        for x, y in private.batches(data, batch_size):
            loss = private.step(optimiser, x, y).loss
            if private.steps == steps:
                break
        state = private.state_dict()
    # Of the numbers, the mod lets out those that the owner named; a server cannot count on the loss.
    metrics = MetricRecord({"loss": loss, "num-examples": len(data[0])})
    return Message(RecordDict({"arrays": ArrayRecord(state), "metrics": metrics}), reply_to=msg)


@app.evaluate()
def evaluate_here(msg: Message, context: Context) -> Message:
    """Accuracy on this client's images; it leaves only where the owner named it."""
    model = make_model(kind=str(context.run_config.get("model", "cnn")))
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    x, y = load_data(**settings_of(context))
    metrics = MetricRecord({"accuracy": accuracy(model, x, y), "num-examples": len(x)})
    return Message(RecordDict({"metrics": metrics}), reply_to=msg)
