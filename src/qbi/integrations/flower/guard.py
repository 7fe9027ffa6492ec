"""The client's side: a mod that looks before, during and after training, and answers with an error when it must.

    app = ClientApp(mods=[leak_guard])

Settings: `qbi-policy` (budget; report, auto, noise, aggp, drop, skip and refuse are heuristic), `qbi-bits`, `qbi-limit`, `qbi-ledger`,
`qbi-samples`, `qbi-data`, `qbi-clip`, `qbi-metrics` (drop, keep), `qbi-inspect` (refuse, warn, off), `qbi-fewest`. They are the node owner's: taken
from the node's own config, or fixed in the client's code with `guarded_by`. A run's config, which the server writes, may only tighten
them. Any PyTorch training code works as it is.
"""

import logging
from collections.abc import Callable, Iterator, Mapping

from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, MessageType, MetricRecord
from torch import Tensor

from qbi.defences.round import RoundSettings, guarded_round
from qbi.errors import BadValue, QbiError, first_line
from qbi.integrations.flower.records import records_in, state_of

log = logging.getLogger("flwr")

REFUSED = 4711
"""Code of the error reply."""

Next = Callable[[Message, Context], Message]
Mod = Callable[[Message, Context, Next], Message]


def guarded_by(**settings: str | int | float) -> Mod:
    """The same mod with settings that no config changes: policy, bits, limit, ledger, samples, data, clip, metrics, inspect, fewest."""
    fixed = {f"qbi-{name}": value for name, value in settings.items()}
    unknown = [name for name in fixed if name not in RoundSettings.names()]
    if unknown:
        raise BadValue(f"guard: there is no setting {unknown[0]!r}; there are {', '.join(RoundSettings.names())}.")

    def guard(msg: Message, ctxt: Context, call_next: Next) -> Message:
        return _mod(msg, ctxt, call_next, fixed)

    return guard


def leak_guard(msg: Message, ctxt: Context, call_next: Next) -> Message:
    """Guard one training round; other messages pass. What goes wrong becomes an error reply that says why."""
    return _mod(msg, ctxt, call_next, {})


def _mod(msg: Message, ctxt: Context, call_next: Next, fixed: Mapping[str, str | int | float]) -> Message:
    kind = msg.metadata.message_type.split(".")[0]
    try:
        settings = RoundSettings.of({**ctxt.node_config, **fixed}).tightened(
            {k: v for k, v in ctxt.run_config.items() if k not in fixed}
        )
    except QbiError as problem:
        return _refusal(msg, str(problem))
    if kind != MessageType.TRAIN:
        return _without_numbers(call_next(msg, ctxt), settings)
    try:
        reply, report = guarded_round(
            _sent(msg),
            settings,
            lambda: call_next(msg, ctxt),
            _states,
            lambda reply: not reply.has_error(),
        )
    except QbiError as problem:
        return _refusal(msg, str(problem))
    except Exception as problem:
        # Whatever the training code raises must not leave as a half-made reply.
        return _refusal(msg, f"training failed ({type(problem).__name__}: {first_line(problem)})")
    log.info("qbi guard: %s", report)
    return _without_numbers(reply, settings)


def _without_numbers(reply: Message, settings: RoundSettings) -> Message:
    """A loss or an accuracy on a model of the server's making says something about samples that no noise covers."""
    if settings.policy != "budget" or settings.metrics == "keep" or reply.has_error():
        return reply
    found: dict[str, MetricRecord | ConfigRecord] = {}
    found.update(records_in(reply.content, MetricRecord))
    found.update(records_in(reply.content, ConfigRecord))
    for name, record in found.items():
        taken = [key for key, value in record.items() if _is_fractional(value)]
        for key in taken:
            del record[key]
        if taken:
            log.info(
                "qbi guard: %s left out of %s: the budget does not cover numbers (qbi-metrics).", ", ".join(taken), name
            )
    return reply


def _is_fractional(value: object) -> bool:
    return isinstance(value, float) or (isinstance(value, list) and any(isinstance(v, float) for v in value))


def _refusal(msg: Message, why: str) -> Message:
    log.warning("qbi guard, round refused: %s", why)
    return Message(Error(REFUSED, f"qbi guard: {why}"), reply_to=msg)


def _sent(msg: Message) -> dict[str, Tensor]:
    """Everything that came, whatever number of records it came in."""
    records = records_in(msg.content, ArrayRecord)
    if not records:
        raise BadValue("the message holds no arrays; a model is expected.")
    return {name: value for record in records.values() for name, value in state_of(record).items()}


def _states(reply: Message) -> Iterator[dict[str, Tensor]]:
    return (state_of(record) for record in records_in(reply.content, ArrayRecord).values())
