"""The client's side: a mod that looks before, during and after training, and answers with an error when it must.

    app = ClientApp(mods=[leak_guard])

Settings: `qbi-policy` (report, auto, noise, aggp, drop, skip, refuse), `qbi-inspect` (refuse, warn, off), `qbi-fewest`. They
are taken from the node's own config first and from the run's config after it, since whoever starts a run also writes
the run's config; `guarded_by` fixes them in the client's code. Any PyTorch training code works as it is.
"""

import logging
from collections.abc import Callable, Mapping
from typing import Any

from flwr.app import ArrayRecord, Context, Error, Message, MessageType
from torch import Tensor

from qbi.defences.ambient import AmbientGuard
from qbi.defences.guard import POLICIES, is_finite
from qbi.detection import inspect_parameters
from qbi.errors import BadValue, QbiError
from qbi.extraction import weight_difference
from qbi.integrations.flower.records import state_of

log = logging.getLogger("flwr")

REFUSED = 4711
"""Code of the error reply."""

INSPECTIONS = ("refuse", "warn", "off")
DEFAULTS: dict[str, Any] = {"qbi-policy": "auto", "qbi-inspect": "refuse", "qbi-fewest": 16}
Next = Callable[[Message, Context], Message]
Mod = Callable[[Message, Context, Next], Message]


def guarded_by(**settings: str | int) -> Mod:
    """The same mod with settings that no config changes: policy, inspect, fewest."""
    fixed = {f"qbi-{name}": value for name, value in settings.items()}
    unknown = [name for name in fixed if name not in DEFAULTS]
    if unknown:
        raise BadValue(f"guard: there is no setting {unknown[0]!r}; there are {', '.join(DEFAULTS)}.")

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
        return _guarded(msg, ctxt, call_next, fixed)
    except QbiError as problem:
        return _refusal(msg, str(problem))
    except Exception as problem:
        # Whatever the training code raises must not leave as a half-made reply.
        first = (str(problem).splitlines() or [""])[0]
        return _refusal(msg, f"training failed ({type(problem).__name__}: {first})")


def _refusal(msg: Message, why: str) -> Message:
    log.warning("qbi guard, round refused: %s", why)
    return Message(Error(REFUSED, f"qbi guard: {why}"), reply_to=msg)


def _guarded(msg: Message, ctxt: Context, call_next: Next, fixed: Mapping[str, str | int]) -> Message:
    policy, inspection, fewest = _settings(ctxt, fixed)
    sent = state_of(_arrays(msg))
    signs = _look_before(sent, inspection)
    guard = AmbientGuard(policy, fewest=fewest, seed=int(ctxt.node_id) % 2**31)
    with guard:
        reply = call_next(msg, ctxt)
    if reply.has_error():
        return reply
    if guard.tally.steps == 0:
        raise BadValue("no optimiser step was seen; a training that cannot be watched is not answered.")
    _look_after(sent, reply)
    log.info("qbi guard: %s; %d signs in the model; policy %s", guard.tally, signs, policy)
    return reply


def _settings(ctxt: Context, fixed: Mapping[str, str | int]) -> tuple[Any, str, int]:
    config = DEFAULTS | {k: v for k, v in {**ctxt.run_config, **ctxt.node_config, **fixed}.items() if k in DEFAULTS}
    policy, inspection = str(config["qbi-policy"]), str(config["qbi-inspect"])
    if policy not in POLICIES:
        raise BadValue(f"qbi-policy: {policy!r}; there are {', '.join(POLICIES)}.")
    if inspection not in INSPECTIONS:
        raise BadValue(f"qbi-inspect: {inspection!r}; there are {', '.join(INSPECTIONS)}.")
    return policy, inspection, int(config["qbi-fewest"])


def _arrays(msg: Message) -> ArrayRecord:
    records = list(msg.content.array_records.values())
    if len(records) != 1:
        raise BadValue(f"the message holds {len(records)} records of arrays; one model is expected.")
    return records[0]


def _look_before(state: dict[str, Tensor], inspection: str) -> int:
    """Detection that needs no data, on what the server sent."""
    for name, value in state.items():
        if value.is_floating_point() and not is_finite(value):
            raise BadValue(f"{name} came with NaN or infinite values.")
    if inspection == "off":
        return 0
    signs = inspect_parameters(state)
    if signs and inspection == "refuse":
        raise BadValue(
            f"the model looks crafted: {signs[0]}" + (f" (and {len(signs) - 1} more)" if len(signs) > 1 else "")
        )
    for sign in signs:
        log.warning("qbi guard: the model looks crafted: %s", sign)
    return len(signs)


def _look_after(sent: dict[str, Tensor], reply: Message) -> None:
    """The outgoing update: of the same model, and finite."""
    for record in reply.content.array_records.values():
        for name, value in weight_difference(sent, state_of(record)).items():
            if not is_finite(value):
                raise BadValue(f"{name} would leave with NaN or infinite values.")
