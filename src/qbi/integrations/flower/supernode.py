"""`flower-supernode` with the owner's gate in it: every reply passes through it on its way to the SuperLink.

    python -m qbi.integrations.flower.supernode --qbi-site /etc/qbi/qbi-site.toml --superlink … (flower-supernode's own options)

An app runs in a process of its own, so that what it does to mods, to qbi or to Flower in that process does not matter: the gate is in this
one. With the policy `update`, nothing an app says is believed. An app that runs under the same user can still attack this process by other
means (its memory, its keys, the network): give it a user or a container of its own (`--isolation process`).
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import Any

from flwr.app import Error, Message
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_children_ids_from_object_content,
    get_object_tree,
    iterate_object_tree,
)
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

from qbi.errors import QbiError
from qbi.integrations.flower.answers import gated
from qbi.integrations.flower.guard import CODE
from qbi.private.allowed import NotReleased
from qbi.private.boundary import REFUSED
from qbi.private.gate import Gate
from qbi.private.owner import VARIABLE, OwnersSite

loop: Any = import_module("flwr.supernode.start_client_internal")

PAUSE = 0.3
MOST_PARTS = 100_000
"""Of one reply: a part for each array, and a few for the records around them."""
PLACES = ("http_request_response", "_push_messages", "_pull_and_store_message", "start_client_internal")
"""What of Flower's loop the gate stands in; a version without them is not started."""

Connection = tuple[Any, ...]


class AnotherFlower(QbiError):
    """A version of Flower whose loop is not the one that the gate stands in."""


@dataclass
class FleetGate:
    """Stands between a SuperNode's loop and its connection: the loop itself cannot send anything."""

    gate: Gate
    connection: Connection
    pulled: dict[str, bytes] = field(default_factory=dict)
    expected: dict[str, Any] = field(default_factory=dict)
    asked: dict[str, Message] = field(default_factory=dict)

    def guarded(self) -> Connection:
        """The connection as the loop gets it."""
        node, _receive, _send, get_run, get_fab, _pull, _push, _confirm = self.connection
        return node, self._receive, _not_from_here, get_run, get_fab, self._pull, _not_from_here, self._confirm

    def _receive(self) -> Any:
        found = self.connection[1]()
        if found is not None:
            message, tree = found
            self.expected[message.metadata.message_id] = tree
        return found

    def _pull(self, run: int, name: str) -> bytes:
        self.pulled[name] = content = self.connection[5](run, name)
        return bytes(content)

    def _confirm(self, run: int, name: str) -> None:
        """All of a message is here: it is remembered, before the app sees it."""
        tree = self.expected.pop(name, None)
        if tree is not None:
            names = [part.object_id for part in iterate_object_tree(tree)]
            contents = {n: self.pulled[n] if n in self.pulled else self._pull(run, n) for n in names}
            message = inflate_object_from_contents(name, contents)
            assert isinstance(message, Message)
            message.metadata.__dict__["_message_id"] = name
            self.asked[name] = message
        self.pulled.clear()
        self.connection[7](run, name)

    def push(self, state: Any, object_store: Any, **_theirs: Any) -> None:
        """In the place of the loop's own: waits until all that was asked is answered, by what the gate lets out or by one fixed sentence.

        The loop calls this after a message has come, and not before the next one. So replies to what nobody asks any more, late ones and
        stray ones, must not end the waiting.
        """
        deadline = time.monotonic() + self.gate.site.wait
        while self.asked:
            for reply in state.get_messages_legacy(is_reply=True):
                mine, theirs = reply.metadata.message_id, reply.metadata.reply_to_message_id
                try:
                    self._answer(theirs, partial(self._judged, reply=reply, store=object_store, deadline=deadline))
                finally:
                    state.delete_messages(message_ids=[mine, theirs])
                    object_store.delete(mine)
            if time.monotonic() > deadline:
                for name in list(self.asked):
                    state.delete_messages(message_ids=[name])
                    self._answer(name, lambda _: _late())
            elif self.asked:
                time.sleep(PAUSE)

    def _judged(self, asked: Message, reply: Message, store: Any, deadline: float) -> Message:
        # Each part once, by what the parts themselves name: a tree that names a part twice at every level is 2ⁿ parts long.
        contents: dict[str, bytes] = {}
        left = [reply.metadata.message_id]
        while left:
            name = left.pop()
            while (content := store.get(name)) in (b"", None):
                if time.monotonic() > deadline:
                    raise NotReleased("the app named parts of a reply that it never gave.")
                time.sleep(PAUSE)
            contents[name] = content
            left += {*get_object_children_ids_from_object_content(content)} - {*contents, *left}
            if len(contents) > MOST_PARTS:
                raise NotReleased(f"the app's reply has more than {MOST_PARTS:,} parts.")
        whole = inflate_object_from_contents(reply.metadata.message_id, contents)
        if not isinstance(whole, Message):
            raise NotReleased("the app's reply is no message.")
        return gated(self.gate, asked, whole)

    def _answer(self, name: str, make: Callable[[Message], Message]) -> None:
        asked = self.asked.pop(name, None)
        if asked is None:
            self.gate.refuse(NotReleased("an app replied to what nobody asked, or twice."))
            return
        try:
            answer = make(asked)
        except (Exception, SystemExit) as problem:
            self.gate.refuse(problem)
            answer = Message(Error(CODE, REFUSED), reply_to=asked)
        try:
            self._send(answer)
        except Exception as problem:  # the SuperLink is gone, or the run is over: the node goes on
            self.gate.refuse(problem)

    def _send(self, answer: Message) -> None:
        send, push = self.connection[2], self.connection[6]
        answer.metadata.__dict__["_message_id"] = answer.object_id
        objects = get_all_nested_objects(answer)
        # How long the app took would be told too; it could say something by it, and nobody needs it.
        wanted, session = send(answer, get_object_tree(answer), 0.0)
        for name, part in objects.items():
            if name in wanted:
                push(answer.metadata.run_id, session, name, part.deflate())


def _not_from_here(*_arguments: Any) -> Any:
    raise NotReleased("supernode: something was about to be sent past the gate.")


def _late() -> Message:
    raise NotReleased("the app did not reply in time.")


def install(gate: Gate) -> None:
    """Put the gate into Flower's loop, in this process, before it starts."""
    missing = [name for name in PLACES if not hasattr(loop, name)]
    if missing:
        raise AnotherFlower(f"supernode: this Flower has no {missing[0]}; install the version that qbi[flower] names.")
    connect = loop.http_request_response
    here: list[FleetGate] = []

    @contextmanager
    def guarded(*arguments: Any, **named: Any) -> Iterator[Connection]:
        with connect(*arguments, **named) as connection:
            if len(connection) != 8:
                raise AnotherFlower(
                    "supernode: this Flower's connection has other parts; install the version that qbi[flower] names."
                )
            here[:] = [FleetGate(gate, connection)]
            yield here[0].guarded()

    loop.http_request_response = guarded
    loop._push_messages = lambda **given: here[0].push(**given)


def main() -> None:
    """The command."""
    from flwr.supernode.cli.flower_supernode import flower_supernode

    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--qbi-site")
    own, rest = parser.parse_known_args()
    try:
        gate = Gate(OwnersSite.read(own.qbi_site))
        install(gate)
    except QbiError as problem:
        sys.stderr.write(f"qbi: {problem}\n")
        raise SystemExit(2) from None
    if gate.site.settings.policy == "private":
        # The app's process writes receipts for what its private steps released.
        os.environ[VARIABLE] = str(gate.site.path)
    gate.site.note(f"a SuperNode starts behind the gate: policy {gate.site.settings.policy}")
    sys.argv = ["flower-supernode", *rest]
    flower_supernode()


if __name__ == "__main__":
    main()
