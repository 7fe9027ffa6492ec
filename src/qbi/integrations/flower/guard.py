"""The client's side: a mod that looks before, during and after training, and answers with an error when it must.

    app = ClientApp(mods=[leak_guard])

Settings: `qbi-policy` (report, auto, noise, aggp, drop, skip, refuse), `qbi-inspect` (refuse, warn, off), `qbi-fewest`. They
are taken from the node's own config first and from the run's config after it, since whoever starts a run also writes
the run's config; `guarded_by` fixes them in the client's code. Any PyTorch training code works as it is.
"""

import logging
from collections.abc import Callable, Iterator, Mapping

from flwr.app import ArrayRecord, Context, Error, Message, MessageType
from torch import Tensor

from qbi.defences.round import RoundSettings, guarded_round
from qbi.errors import BadValue, QbiError, first_line
from qbi.integrations.flower.records import state_of

log = logging.getLogger("flwr")

REFUSED = 4711
"""Code of the error reply."""

Next = Callable[[Message, Context], Message]
Mod = Callable[[Message, Context, Next], Message]


def guarded_by(**settings: str | int) -> Mod:
    """The same mod with settings that no config changes: policy, inspect, fewest."""
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


def _mod(msg: Message, ctxt: Context, call_next: Next, fixed: Mapping[str, str | int]) -> Message:
    if msg.metadata.message_type.split(".")[0] != MessageType.TRAIN:
        return call_next(msg, ctxt)
    try:
        settings = RoundSettings.of({**ctxt.run_config, **ctxt.node_config, **fixed})
        reply, report = guarded_round(
            state_of(_arrays(msg)),
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
    return reply


def _refusal(msg: Message, why: str) -> Message:
    log.warning("qbi guard, round refused: %s", why)
    return Message(Error(REFUSED, f"qbi guard: {why}"), reply_to=msg)


def _arrays(msg: Message) -> ArrayRecord:
    records = list(msg.content.array_records.values())
    if len(records) != 1:
        raise BadValue(f"the message holds {len(records)} records of arrays; one model is expected.")
    return records[0]


def _states(reply: Message) -> Iterator[dict[str, Tensor]]:
    return (state_of(record) for record in reply.content.array_records.values())
