"""A client as one writes it for Flower; the guard is one line."""

import time

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from flower_guarded.task import accuracy, load_data, make_model, settings_of, train
from qbi.integrations.flower import leak_guard


def maybe_guarded(msg: Message, context: Context, call_next) -> Message:
    """The guard, unless the run asks for a federation without it to compare with."""
    return leak_guard(msg, context, call_next) if context.run_config.get("guard", True) else call_next(msg, context)


app = ClientApp(mods=[maybe_guarded])


@app.train()
def train_here(msg: Message, context: Context) -> Message:
    """Train on this client's images and answer with the weights."""
    model = make_model(kind=str(context.run_config.get("model", "cnn")))
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    x, y = load_data(**settings_of(context))
    time.sleep(float(context.run_config.get("pause", 0.0)))
    loss = train(
        model,
        x,
        y,
        rate=float(context.run_config.get("learning-rate", 0.05)),
        batch_size=int(context.run_config.get("batch-size", 20)),
        steps=int(context.run_config.get("local-steps", 0)),
        seed=int(msg.content["config"]["server-round"]),
    )
    metrics = MetricRecord({"loss": loss, "num-examples": len(x)})
    return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=msg)


@app.evaluate()
def evaluate_here(msg: Message, context: Context) -> Message:
    """Accuracy on this client's images."""
    model = make_model(kind=str(context.run_config.get("model", "cnn")))
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    x, y = load_data(**settings_of(context))
    metrics = MetricRecord({"accuracy": accuracy(model, x, y), "num-examples": len(x)})
    return Message(RecordDict({"metrics": metrics}), reply_to=msg)
