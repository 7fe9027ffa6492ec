"""A reply to a Flower message, made anew from what a site's gate lets out: nothing of the app's own message is passed on.

Names of records, their order and the kind of message follow from what the server asked, never from what the app answered.
"""

from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from qbi.integrations.flower.records import arrays_of, records_in, sent_in, state_of
from qbi.private.allowed import NotReleased
from qbi.private.gate import Gate, Leaving

OLDER = {"fitins.parameters": "fitres", "evaluateins.parameters": "evaluateres"}
"""Records of the older clients (`NumPyClient`), and what their server waits for."""


def gated(gate: Gate, asked: Message, reply: Message) -> Message:
    """The answer that may leave; raises where none may."""
    if reply.has_error():
        raise NotReleased("the app answered with an error.")
    records = records_in(reply.content, ArrayRecord)
    if len(records) > 1:
        raise NotReleased("flower: the reply holds several records of arrays; one model may leave.")
    arrays = state_of(next(iter(records.values()))) if records else None
    numbers: dict[str, Any] = {}
    for metrics in records_in(reply.content, MetricRecord).values():
        numbers |= dict(metrics)
    for config in records_in(reply.content, ConfigRecord).values():
        numbers |= dict(config)
    left = gate.judge(sent_in(asked), arrays, numbers)
    older = next((answer for name, answer in OLDER.items() if name in asked.content), None)
    content = _older(left, older) if older else _newer(left)
    return Message(content, reply_to=asked)


def _newer(left: Leaving) -> RecordDict:
    out = RecordDict()
    if left.arrays is not None:
        out["arrays"] = arrays_of(dict(left.arrays))
    words = {n: v for n, v in left.numbers.items() if not _is_number(v)}
    out["metrics"] = MetricRecord({n: v for n, v in left.numbers.items() if _is_number(v)})
    if words:
        out["config"] = ConfigRecord(words)
    return out


def _older(left: Leaving, answer: str) -> RecordDict:
    """What `NumPyClient`s send: the number of examples is one, the status is fine, metrics are those that the owner named."""
    own = ("num-examples", "num_examples", "loss")
    metrics = {n: v for n, v in left.numbers.items() if n not in own}
    count = int(left.numbers.get("num_examples", left.numbers.get("num-examples", 1)))
    out = RecordDict({f"{answer}.num_examples": MetricRecord({"num_examples": count})})
    if answer == "evaluateres":
        if "loss" not in left.numbers:
            raise NotReleased(
                'flower: an older client\'s evaluation needs a loss; name one, as metrics = ["loss:8:10"], or "loss=0".'
            )
        out["evaluateres.loss"] = MetricRecord({"loss": float(left.numbers["loss"])})
    elif left.arrays is None:
        raise NotReleased("flower: an older client's training answered without arrays.")
    else:
        out["fitres.parameters"] = arrays_of(dict(left.arrays))
    out[f"{answer}.metrics"] = ConfigRecord(metrics)
    out[f"{answer}.status"] = ConfigRecord({"code": 0, "message": ""})
    return out


def _is_number(value: Any) -> bool:
    """What a record of metrics holds: numbers, and lists of them."""
    if isinstance(value, list):
        return bool(value) and all(isinstance(v, int | float) for v in value)
    return isinstance(value, int | float) and not isinstance(value, bool)
