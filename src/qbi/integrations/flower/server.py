"""The server's side, for test clients of one's own: send a crafted model, or only look on; read every reply apart."""

import logging
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg, Strategy
from safetensors.torch import save
from torch import Tensor, nn

from qbi.attacks import Attack, Mounted, Reading, mount
from qbi.auditing.replay import replay
from qbi.errors import BadValue, QbiError
from qbi.extraction import difference_rounding, weight_difference
from qbi.files import to_json, write_atomically
from qbi.integrations.flower.records import arrays_of, records_in, state_of
from qbi.randomness import generator
from qbi.records import Candidates, Update
from qbi.report.pictures import grid as picture_grid
from qbi.report.pictures import stretched

log = logging.getLogger("flwr")
MOST_SHOWN = 24


@dataclass
class ReplyReading:
    """What one reply gave away."""

    round: int
    node: int
    layer: str
    candidates: int
    agree: int
    samples: Tensor = field(repr=False)

    def document(self) -> dict[str, Any]:
        """As plain data, without the samples."""
        return {
            "round": self.round,
            "node": str(self.node),
            "layer": self.layer,
            "candidates": self.candidates,
            "agree": self.agree,
        }


class Recording(Strategy):
    """Any strategy, wrapped: replies are read one by one before it aggregates them.

    With `crafted`, what the clients get in the first round is the crafted model instead of the strategy's own. `agree` counts
    candidates that several rows agree on: the truth stays with the clients.
    """

    def __init__(
        self,
        inner: Strategy,
        out: Path,
        *,
        crafted: Mounted | None = None,
        shape: tuple[int, int, int] | None = None,
        keep_samples: bool = True,
    ) -> None:
        self.inner, self.out, self.crafted, self.shape, self.keep_samples = inner, out, crafted, shape, keep_samples
        self.sent: ArrayRecord | None = None
        self.readings: list[ReplyReading] = []
        self.errors: list[dict[str, Any]] = []

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """As the wrapped strategy does, with the crafted model in the first round if there is one."""
        attacked = self.crafted is not None and server_round == 1
        self.sent = arrays_of(dict(self.crafted.model.state_dict())) if attacked and self.crafted else arrays
        return self.inner.configure_train(server_round, self.sent, config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Read each reply, write down what was found, and let the wrapped strategy aggregate."""
        kept = list(replies)
        for reply in kept:
            self._read(server_round, reply)
        self._write()
        return self.inner.aggregate_train(server_round, kept)

    def _read(self, server_round: int, reply: Message) -> None:
        node = reply.metadata.src_node_id
        if reply.has_error():
            self.errors.append({"round": server_round, "node": str(node), "reason": reply.error.reason})
            return
        assert self.sent is not None
        for record in records_in(reply.content, ArrayRecord).values():
            try:
                self.readings += self._readings(server_round, node, record)
            except QbiError as problem:
                self.errors.append({"round": server_round, "node": str(node), "reason": str(problem)})

    def _readings(self, server_round: int, node: int, record: ArrayRecord) -> list[ReplyReading]:
        assert self.sent is not None
        sent, received = state_of(self.sent), state_of(record)
        difference = weight_difference(sent, received)
        if self.crafted is not None and server_round == 1:
            found = read_reply(self.crafted, difference, received)
            agree = int((found.support > 1).sum())
            return [ReplyReading(server_round, node, self.crafted.layer, len(found.rows), agree, found.samples)]
        layers = replay(difference, sent)
        return [
            ReplyReading(server_round, node, f.layer, len(f.support), f.agree, f.samples[: f.agree]) for f in layers[:1]
        ]

    def _write(self) -> None:
        document = {"readings": [r.document() for r in self.readings], "errors": self.errors}
        write_atomically(self.out / "federation.json", to_json(document))
        if not self.keep_samples:
            return
        for reading in self.readings:
            name = f"round-{reading.round}-node-{reading.node}"
            write_atomically(self.out / f"{name}.safetensors", save({"samples": reading.samples.contiguous()}))
            fits = self.shape is not None and reading.samples.shape[1:] == (math.prod(self.shape),)
            if fits and self.shape is not None and len(reading.samples):
                images = stretched(reading.samples[:MOST_SHOWN].reshape(-1, *self.shape))
                write_atomically(self.out / f"{name}.png", picture_grid(images, f"node {reading.node}, best first"))

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """As the wrapped strategy does."""
        return self.inner.configure_evaluate(server_round, arrays, config, grid)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """As the wrapped strategy does."""
        return self.inner.aggregate_evaluate(server_round, replies)

    def summary(self) -> None:
        """Say what is recorded, then the wrapped strategy's own words."""
        what = "a crafted model" if self.crafted is not None else "the model as it is"
        log.info("\t└──> qbi: sending %s to test clients, reading every reply; results in %s", what, self.out)
        self.inner.summary()


def read_reply(crafted: Mounted, difference: dict[str, Tensor], received: dict[str, Tensor]) -> Candidates:
    """The samples in one reply to a crafted model: weights sent minus weights received, and the buffers received."""
    weight = crafted.target.weight.detach()
    rounding = difference_rounding(weight, difference[f"{crafted.layer}.weight"])
    return crafted.read(Update(difference, received, 0, float("nan")), Reading(rounding=rounding))


def audit_server_app(
    make_model: Callable[[], nn.Module],
    out: Path,
    *,
    attack: Attack | None = None,
    sample: Tensor | None = None,
    rounds: int = 1,
    timeout: float = 120.0,
    strategy: Strategy | None = None,
    shape: tuple[int, int, int] | None = None,
    seed: int = 0,
) -> ServerApp:
    """A server for test clients of one's own: benign, or crafted with `attack`; every reply is read and written down."""
    if attack is not None and sample is None:
        raise BadValue("audit server: crafting needs a sample of the clients' shape; give sample=.")
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:  # noqa: ARG001
        torch.manual_seed(seed)
        model = make_model()
        crafted = None
        if attack is not None and sample is not None:
            crafted = mount(model, attack, sample, generator(seed, "flower"))
        inner = strategy or FedAvg(fraction_train=1.0, fraction_evaluate=0.0, min_available_nodes=2)
        recording = Recording(inner, out, crafted=crafted, shape=shape)
        started = time.monotonic()
        recording.start(
            grid=grid, initial_arrays=arrays_of(dict(model.state_dict())), num_rounds=rounds, timeout=timeout
        )
        log.info("qbi: %d replies read in %.1f s", len(recording.readings), time.monotonic() - started)

    return app
