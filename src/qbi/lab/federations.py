"""Whole federations in Flower's simulation: what the guard costs, what it does to accuracy, and what a crafted round reads."""

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qbi.attacks import Cascade, Knowledge, Mounted, mount
from qbi.data.images import normalised
from qbi.data.open import open_images
from qbi.data.photos import synthetic_photos
from qbi.errors import MissingExtra
from qbi.lab.networks import two_layers, with_convolutions
from qbi.lab.training import accuracy, plain_step, train
from qbi.metrics import CLEAR, match
from qbi.private import Ledger, Private
from qbi.randomness import generator
from qbi.records import Update

try:
    from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    from qbi.integrations.flower import guarded_by
    from qbi.integrations.flower.records import arrays_of, state_of
    from qbi.lab.many_clients import Waves, held, timed
except ImportError as problem:
    raise MissingExtra("flwr", "flower") from problem

BACKEND: Any = {"client_resources": {"num_cpus": 1, "num_gpus": 0}, "init_args": {"num_cpus": 2}}
NETWORKS: dict[str, Callable[[], nn.Module]] = {"two layers": two_layers, "small CNN": with_convolutions}
BITS = 72.0


@dataclass(frozen=True)
class Federation:
    """One simulation. In the round of the attack the server sends a cascade and asks for one step; then it goes on as if nothing had been."""

    network: str = "two layers"
    clients: int = 10
    rounds: int = 10
    data: str = "photos"
    """Images as `qbi data` names them, or `noise`, which costs next to nothing to make."""
    images: int = 400
    held_out: int = 0
    """Images that nobody trains on."""
    guard: bool = False
    batch: int = 20
    rate: float = 0.05
    seed: int = 0
    attack_round: int = 0
    ledger: str = ""
    wave: int = 0
    """Messages under way at once; 0: all."""

    def model(self) -> nn.Module:
        """The network, its weights by the seed."""
        torch.manual_seed(self.seed)
        return NETWORKS[self.network]()

    def part(self, number: int) -> tuple[Tensor, Tensor]:
        """All images of one client's share, those that it does not train on first."""
        if self.data == "noise":
            draws = generator(self.seed, "noise", number)
            count = max(2, self.images // self.clients)
            return torch.randn(count, 3, 32, 32, generator=draws), torch.randint(10, (count,), generator=draws)
        if self.data == "photos":
            own = synthetic_photos(max(2, self.images // self.clients), 32, seed=number)
            return normalised(own, slice(None)), own.labels % 10
        images = open_images(self.data, size=32, count=self.images, seed=0)
        chosen = torch.arange(number, len(images), self.clients)
        return normalised(images, chosen), images.labels[chosen] % 10

    @property
    def spared(self) -> int:
        """How many images of a client it does not train on."""
        return self.held_out // self.clients


@dataclass
class _Watched:
    """What was seen of a simulation while it ran."""

    rounds: list[float] = field(default_factory=list)
    clients: list[float] = field(default_factory=list)
    replies: int = 0
    peaks: dict[int, list[float]] = field(default_factory=dict)
    """MiB that each worker had held at most by each of its replies."""
    read: list[int] | None = None
    accuracy: float | None = None


def _client(setting: Federation) -> ClientApp:
    def guard(msg: Message, context: Context, call_next: Any) -> Message:
        # Each data set has a name and a budget of its own in the ledger.
        name = f"client {context.node_config['partition-id']}"
        mod = guarded_by(policy="private", inspect="warn", ledger=setting.ledger, data=name)
        return mod(msg, context, call_next)

    app = ClientApp(mods=[timed, *([guard] if setting.guard else [])])

    @app.train()
    def train_here(msg: Message, context: Context) -> Message:
        model = setting.model()
        arrays: Any = msg.content["arrays"]
        model.load_state_dict(arrays.to_torch_state_dict())
        x, y = (part[setting.spared :] for part in setting.part(int(context.node_config["partition-id"])))
        config: Any = msg.content["config"]
        steps, number = int(config.get("local-steps", 0)), int(config["server-round"])
        _train(setting, model, x, y, steps, setting.seed * 1000 + number)
        metrics = MetricRecord({"num-examples": len(x)})
        return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=msg)

    return app


def _train(setting: Federation, model: nn.Module, x: Tensor, y: Tensor, steps: int, seed: int) -> None:
    """One pass over the images, or its first `steps` batches."""
    optimiser = torch.optim.SGD(model.parameters(), lr=setting.rate)
    if setting.guard:
        private = Private(model, F.cross_entropy, bits=BITS)
        for inputs, targets in private.batches((x, y), setting.batch):
            private.step(optimiser, inputs, targets)
            if private.steps == steps:
                return
        return
    order = torch.Generator().manual_seed(seed)
    done = train(plain_step(model, optimiser, x, y), torch.arange(len(x)), setting.batch, 1, order)
    for _, number in done:
        if number + 1 == steps:
            return


def _crafted(setting: Federation, parts: list[tuple[Tensor, Tensor]]) -> Mounted:
    """A cascade on the network, tuned on what nobody trains on."""
    auxiliary = torch.cat([x[:20] for x, _ in parts])
    model = setting.model()
    layer = next(n for n, m in model.named_modules() if isinstance(m, nn.Linear))
    target = model.get_submodule(layer)
    assert isinstance(target, nn.Linear)
    knowledge = Knowledge(
        setting.batch, target.out_features, auxiliary[0].numel(), auxiliary.flatten(1), seed=setting.seed
    )
    return mount(model, Cascade.prepare(knowledge), auxiliary[:2], setting.seed, layer=layer)


def _read_from(mounted: Mounted, reply: Message, rate: float, truth: Tensor) -> int:
    """How many images of the client a reply gives away at 30 dB."""
    arrays: Any = reply.content["arrays"]
    sent, back = mounted.model.state_dict(), state_of(arrays)
    found = mounted.read(Update({n: (sent[n] - back[n]) / rate for n in sent}, {}, 0, float("nan"))).samples
    return int(match(found, truth, data_range=4.0)[CLEAR].recovered.sum()) if len(found) else 0


def _server(setting: Federation, seen: _Watched) -> ServerApp:
    app = ServerApp()
    parts = [setting.part(n) for n in range(setting.clients)] if setting.attack_round or setting.held_out else []
    mounted = _crafted(setting, parts) if setting.attack_round else None

    class Timed(FedAvg):
        def configure_train(self, server_round: int, arrays: Any, config: Any, grid: Grid) -> Any:
            self.started = time.perf_counter()
            if server_round == setting.attack_round and mounted is not None:
                self.honest, arrays = arrays, arrays_of(dict(mounted.model.state_dict()))
                config = ConfigRecord({**config, "local-steps": 1})
            return super().configure_train(server_round, arrays, config, grid)

        def aggregate_train(self, server_round: int, replies: Any) -> Any:
            kept = [reply for reply in replies if not reply.has_error()]
            if server_round == setting.attack_round and mounted is not None:
                truth = torch.cat([x[setting.spared :].flatten(1) for x, _ in parts])
                seen.read = [_read_from(mounted, reply, setting.rate, truth) for reply in kept]
                return self.honest, MetricRecord({"num-examples": 1})
            seen.rounds.append(time.perf_counter() - self.started)
            seen.replies = len(kept)
            for reply in kept:
                metrics: Any = reply.content["metrics"]
                seen.clients.append(metrics["seconds"])
                seen.peaks.setdefault(metrics["worker"], []).append(metrics["peak"])
            return super().aggregate_train(server_round, kept)

    @app.main()
    def main(grid: Grid, context: Context) -> None:  # noqa: ARG001
        count = setting.clients
        strategy = Timed(fraction_train=1.0, fraction_evaluate=0.0, min_available_nodes=count, min_train_nodes=count)
        start = ArrayRecord(setting.model().state_dict())
        sending: Any = Waves(grid, setting.wave) if setting.wave else grid
        result = strategy.start(grid=sending, initial_arrays=start, num_rounds=setting.rounds, timeout=1800)
        if setting.held_out:
            model = setting.model()
            model.load_state_dict(result.arrays.to_torch_state_dict())
            own = [accuracy(model, x[: setting.spared], y[: setting.spared]) for x, y in parts]
            seen.accuracy = statistics.fmean(own)

    return app


def simulate(setting: Federation) -> dict[str, Any]:
    """One simulation, as plain data."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
    with tempfile.TemporaryDirectory() as folder:
        setting = replace(setting, ledger=str(Path(folder) / "ledger"))
        seen = _Watched()
        run_simulation(_server(setting, seen), _client(setting), setting.clients, backend_config=BACKEND)
        spent = _spent(Path(setting.ledger))
    return {
        "guard": setting.guard,
        "seed": setting.seed,
        "accuracy": seen.accuracy,
        "answered": seen.replies,
        "read in the attack": seen.read,
        "in the batch": setting.clients * setting.batch,
        "bits by client": spent,
        "seconds per round": statistics.median(seen.rounds),
        "seconds per client": statistics.median(seen.clients),
        "workers": held(seen.peaks),
        "seconds of the engine's CPU": time.process_time(),
    }


def _spent(ledger: Path) -> dict[str, float] | None:
    """What the ledger says of each client."""
    if not ledger.exists():
        return None
    out: dict[str, float] = {}
    for entry in Ledger(ledger).entries():
        out[entry.data] = round(out.get(entry.data, 0.0) + entry.bits, 1)
    return out
