"""The client's side: a mod that lets out what was released, in every kind of reply, and nothing else.

    app = ClientApp(mods=[leak_guard])                       # training code uses qbi.Private
    app = ClientApp(mods=[guarded_by(policy="update")])      # training code stays as it is

Settings are the node owner's: from the owner's file where the environment names one (`QBI_SITE`), from the node's own config (`qbi-policy`, `qbi-total`, `qbi-ledger`, `qbi-metrics` …, see `SiteSettings`), or
fixed in the client's code with `guarded_by`. A run's config, which the server writes, is never asked. What is wrong goes to the
owner's log; the server gets one fixed sentence.
"""

import logging
import os
from collections.abc import Callable, Mapping

from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, MessageType, MetricRecord, RecordDict

from qbi.errors import BadValue, QbiError
from qbi.integrations.flower.records import arrays_of, records_in, sent_in, state_of
from qbi.private.boundary import REFUSED
from qbi.private.owner import VARIABLE, OwnersSite
from qbi.private.receipts import Receipts
from qbi.private.site import MOST_RECORDS, PREFIX, Reply, SiteSettings, guarded_round, reason
from qbi.private.trainer import write_receipts

log = logging.getLogger("flwr")

CODE = 4711
"""Of the error reply."""

SPENT = "qbi-spent"
"""Where a node's own state keeps the bits that have left in a run."""

NAMES = {"arrays", "metrics", "config"} | {
    f"{kind}res.{part}"
    for kind in ("fit", "evaluate", "getparameters", "getproperties")
    for part in ("parameters", "num_examples", "loss", "metrics", "properties", "status")
}
"""Of records that may leave under their own names: those of Flower's messages, and of its older clients (`NumPyClient`)."""

Next = Callable[[Message, Context], Message]
Mod = Callable[[Message, Context, Next], Message]


def guarded_by(**settings: str | int | float) -> Mod:
    """The same mod with settings that no config changes: policy, inspect, bits, clip, total, ledger, data, metrics."""
    fixed = {f"{PREFIX}{name}": value for name, value in settings.items()}
    unknown = [name for name in fixed if name not in SiteSettings.names()]
    if unknown:
        raise BadValue(f"guard: there is no setting {unknown[0]!r}; there are {', '.join(SiteSettings.names())}.")
    SiteSettings.of(fixed)

    def guard(msg: Message, ctxt: Context, call_next: Next) -> Message:
        return _mod(msg, ctxt, call_next, fixed)

    return guard


def leak_guard(msg: Message, ctxt: Context, call_next: Next) -> Message:
    """Guard every reply; what goes wrong becomes an error reply with a fixed sentence."""
    return _mod(msg, ctxt, call_next, {})


def _mod(msg: Message, ctxt: Context, call_next: Next, fixed: Mapping[str, str | int | float]) -> Message:
    charged: list[float] = []
    before = 0.0
    try:
        before = _spent(ctxt)
        own = {k: v for k, v in ctxt.node_config.items() if k.startswith(PREFIX)}
        settings = SiteSettings.of({**own, **fixed})
        site = OwnersSite.read() if VARIABLE in os.environ else None
        settings = settings if site is None else site.settings
        # Names that the server sent may come back, unless it sent so many that choosing among them says much.
        known = NAMES | ({*msg.content} if len(msg.content) <= MOST_RECORDS else set())
        kinds: dict[str, type] = {}

        def work() -> Reply | None:
            reply = call_next(msg, ctxt)
            if reply.has_error():
                return None
            kinds.update({name: type(record) for name, record in reply.content.items()})
            return _reply(reply)

        kind = msg.metadata.message_type.split(".")[0]
        passed = guarded_round(
            settings, sent_in(msg), work, trains=kind == MessageType.TRAIN, spent=before, told=charged.append
        )
        content = _content(passed.reply, kinds, known)
        if site is not None and settings.policy == "private":
            # For the gate in the SuperNode's process, which saw nothing of the training.
            for state in passed.reply.arrays.values():
                write_receipts(Receipts.of(site), sent_in(msg), state)
        if not settings.ledger:
            ctxt.state[SPENT] = ConfigRecord({"bits": before + sum(charged)})
    except (Exception, SystemExit) as problem:  # whatever it is, it must not leave, nor its words
        # Whatever the client's code did to it; what was charged may leave with a later reply.
        ctxt.state[SPENT] = ConfigRecord({"bits": before + sum(charged)})
        theirs = None if isinstance(problem, QbiError) else problem
        log.warning("qbi guard, not answered: %s", reason(problem), exc_info=theirs)
        return Message(Error(CODE, REFUSED), reply_to=msg)
    log.info("qbi guard: %.4g bits; %d signs in the model; policy %s", passed.bits, len(passed.signs), settings.policy)
    return Message(content, reply_to=msg)


def _spent(ctxt: Context) -> float:
    """Bits that have left in this run, by the node's own state."""
    record = ctxt.state.get(SPENT)
    return float(record["bits"]) if isinstance(record, ConfigRecord) else 0.0  # type: ignore[arg-type]


def _reply(reply: Message) -> Reply:
    metrics = {name: dict(record) for name, record in records_in(reply.content, MetricRecord).items()}
    config = {name: dict(record) for name, record in records_in(reply.content, ConfigRecord).items()}
    arrays = {name: state_of(record) for name, record in records_in(reply.content, ArrayRecord).items()}
    return Reply(arrays, {**metrics, **config})


def _content(reply: Reply, kinds: Mapping[str, type], known: set[str]) -> RecordDict:
    """Records made anew, of the kinds that strategies look for, under names that say nothing."""
    out = RecordDict()
    for name, state in sorted(reply.arrays.items()):
        out[_named(name, "arrays", known, out)] = arrays_of(dict(state))
    for name, values in sorted(reply.numbers.items()):
        if kinds[name] is ConfigRecord:
            out[_named(name, "config", known, out)] = ConfigRecord(dict(values))
        else:
            out[_named(name, "metrics", known, out)] = MetricRecord(dict(values))
    return out


def _named(name: str, kind: str, known: set[str], out: RecordDict) -> str:
    if name in known and name not in out:
        return name
    return next(n for n in (kind, *(f"{kind}-{i}" for i in range(2, 100))) if n not in out)
