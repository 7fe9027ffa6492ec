"""What the guard costs, what it does to accuracy, and how many virtual clients fit: figures of `docs/federation.md`.

python measure.py accuracy --seeds 5 --rounds 20 --attack-round 5 --data cifar-10-python.tar.gz
python measure.py overhead --rounds 10 --model cnn
python measure.py scale --clients 1000
"""

import argparse
import json
import os
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
sys.path.insert(0, str(Path(__file__).parent))

import torch
from flower_guarded.task import accuracy, load_data, make_model, train
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch import nn
from torch.nn import functional as F

from qbi import Ledger, Private
from qbi.attacks import Cascade, Knowledge, Mounted, mount
from qbi.integrations.flower import guarded_by
from qbi.integrations.flower.records import arrays_of, state_of
from qbi.metrics import CLEAR, match
from qbi.randomness import generator
from qbi.records import Update

BACKEND = {"client_resources": {"num_cpus": 1, "num_gpus": 0}, "init_args": {"num_cpus": 2}}


def timed(msg: Message, context: Context, call_next) -> Message:
    """The outermost mod: seconds from message to reply."""
    started = time.perf_counter()
    reply = call_next(msg, context)
    if reply.has_content():
        for record in reply.content.values():
            if isinstance(record, MetricRecord):
                record["seconds"] = time.perf_counter() - started
    return reply


def own_guard(policy: str, ledger: str):
    """Each client's own guard: its data set has a name and a budget of its own in the ledger."""

    def guard(msg: Message, context: Context, call_next) -> Message:
        name = f"client {context.node_config['partition-id']}"
        return guarded_by(policy=policy, inspect="warn", ledger=ledger, data=name)(msg, context, call_next)

    return guard


def train_privately(
    model: nn.Module, x: torch.Tensor, y: torch.Tensor, *, rate: float, batch_size: int, steps: int
) -> float:
    """One pass over the images, or its first `steps` batches; the last loss. The mod keeps the ledger."""
    optimiser = torch.optim.SGD(model.parameters(), lr=rate)
    private = Private(model, F.cross_entropy, bits=72)
    for some, targets in private.batches((x, y), batch_size):
        report = private.step(optimiser, some, targets)
        if private.steps == steps:
            break
    return report.loss


def client_app(
    data: str,
    images: int,
    held_out: int,
    *,
    guard: bool,
    seed: int,
    policy: str,
    kind: str,
    ledger: str,
    batch: int,
    rate: float,
) -> ClientApp:
    """The example's client, its settings fixed; the first `held_out` images of the data are nobody's."""
    app = ClientApp(mods=[timed, *([own_guard(policy, ledger)] if guard else [])])

    @app.train()
    def train_here(msg: Message, context: Context) -> Message:
        model = make_model(kind=kind)
        model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
        part, parts = int(context.node_config["partition-id"]), int(context.node_config["num-partitions"])
        x, y = load_data(data, images, part, parts)
        x, y = x[held_out // parts :], y[held_out // parts :]
        steps = int(msg.content["config"].get("local-steps", 0))
        if guard and policy == "private":
            loss = train_privately(model, x, y, rate=rate, batch_size=batch, steps=steps)
        else:
            number = seed * 1000 + int(msg.content["config"]["server-round"])
            loss = train(model, x, y, rate=rate, batch_size=batch, steps=steps, seed=number)
        metrics = MetricRecord({"loss": loss, "num-examples": len(x)})
        return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=msg)

    return app


def crafted(images_of: list, seed: int, kind: str, batch: int) -> Mounted:
    """A cascade on the example's model, tuned on what nobody trains on."""
    auxiliary = torch.cat([x[:20] for x, _ in images_of])
    model = make_model(seed, kind)
    layer = next(n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear))
    neurons = model.get_submodule(layer).out_features
    attack = Cascade.prepare(Knowledge(batch, neurons, auxiliary[0].numel(), auxiliary.flatten(1), seed=seed))
    return mount(model, attack, auxiliary[:2], generator(seed, "measure"), layer=layer)


def read_from(mounted: Mounted, reply: Message, rate: float, truth: torch.Tensor) -> int:
    """How many images of the client a reply gives away at 30 dB."""
    sent, back = mounted.model.state_dict(), state_of(reply.content["arrays"])
    update = Update({n: (sent[n] - back[n]) / rate for n in sent}, {}, 0, float("nan"))
    found = mounted.read(update).samples
    if not len(found):
        return 0
    return int(match(found, truth, data_range=4.0)[CLEAR].recovered.sum())


def simulate(
    clients: int,
    rounds: int,
    data: str,
    images: int,
    *,
    guard: bool,
    seed: int,
    held_out: int = 0,
    policy: str,
    kind: str,
    ledger: str = "",
    batch: int = 20,
    rate: float = 0.05,
    attack_round: int = 0,
) -> dict:
    """One simulation: accuracy on what nobody trained on, seconds of each round, seconds of each client.

    In the round of the attack the server sends a cascade, asks for one step, and reads every reply; then it goes on as if nothing had been.
    """
    found: dict = {"rounds": [], "clients": []}
    app = ServerApp()
    images_of = [load_data(data, images, part, clients) for part in range(clients)] if attack_round else []
    mounted = crafted(images_of, seed, kind, batch) if attack_round else None

    @app.main()
    def main(grid: Grid, context: Context) -> None:  # noqa: ARG001
        class Timed(FedAvg):
            def configure_train(self, server_round, arrays, config, grid):
                self.started = time.perf_counter()
                if server_round == attack_round:
                    self.honest, arrays = arrays, arrays_of(dict(mounted.model.state_dict()))
                    config = ConfigRecord({**config, "local-steps": 1})
                return super().configure_train(server_round, arrays, config, grid)

            def aggregate_train(self, server_round, replies):
                kept = list(replies)
                if server_round == attack_round:
                    truth = torch.cat([x[held_out // clients :].flatten(1) for x, _ in images_of])
                    found["read"] = [read_from(mounted, reply, rate, truth) for reply in kept if not reply.has_error()]
                    return self.honest, MetricRecord({"num-examples": 1})
                found["rounds"].append(time.perf_counter() - self.started)
                found["answered"] = sum(not r.has_error() for r in kept)
                found["clients"] += [r.content["metrics"]["seconds"] for r in kept if not r.has_error()]
                return super().aggregate_train(server_round, kept)

        strategy = Timed(
            fraction_train=1.0, fraction_evaluate=0.0, min_available_nodes=clients, min_train_nodes=clients
        )
        result = strategy.start(
            grid=grid, initial_arrays=ArrayRecord(make_model(seed, kind).state_dict()), num_rounds=rounds, timeout=1800
        )
        if held_out:
            model = make_model(kind=kind)
            model.load_state_dict(result.arrays.to_torch_state_dict())
            parts = [load_data(data, images, part, clients) for part in range(clients)]
            per = held_out // clients
            found["accuracy"] = statistics.fmean(accuracy(model, x[:per], y[:per]) for x, y in parts)

    run_simulation(
        app,
        client_app(
            data,
            images,
            held_out,
            guard=guard,
            seed=seed,
            policy=policy,
            kind=kind,
            ledger=ledger,
            batch=batch,
            rate=rate,
        ),
        clients,
        backend_config=BACKEND,
    )
    return found


def spent(ledger: str) -> dict[str, float] | None:
    """What the ledger says of each client."""
    if not Path(ledger).exists():
        return None
    out: dict[str, float] = {}
    for entry in Ledger(ledger).entries():
        out[entry.data] = round(out.get(entry.data, 0.0) + entry.bits, 1)
    return out


def main() -> None:
    """Measure and print one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["accuracy", "overhead", "scale"])
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--data", default="photos")
    parser.add_argument("--model", choices=["mlp", "cnn"], default="mlp")
    parser.add_argument("--guarded", dest="only", action="store_const", const=(True,), help="leave out the other half")
    parser.add_argument("--policy", choices=["private", "update"], default="private")
    parser.add_argument("--attack-round", type=int, default=0, help="in which the server sends a cascade")
    parser.add_argument("--batch", type=int, default=20)
    parser.add_argument("--rate", type=float, default=0.05, help="of plain training")
    parser.add_argument("--private-rate", type=float, default=0.2, help="of private training")
    parser.add_argument("--images", type=int, default=0, help="built-in images; default 40 a client")
    chosen = parser.parse_args()
    data = chosen.data if chosen.data == "photos" else str(Path(chosen.data).resolve())
    images = chosen.images or (40 * chosen.clients if data == "photos" else 6000)
    rounds = 1 if chosen.what == "scale" else chosen.rounds
    held_out = 1000 if chosen.what == "accuracy" and data != "photos" else 0
    out = []
    for seed in range(chosen.seeds):
        for guard in chosen.only or (False, True):
            ledger = str(Path(tempfile.mkdtemp()) / "ledger")
            found = simulate(
                chosen.clients,
                rounds,
                data,
                images,
                guard=guard,
                seed=seed,
                held_out=held_out,
                policy=chosen.policy,
                kind=chosen.model,
                ledger=ledger,
                batch=chosen.batch,
                rate=chosen.private_rate if guard and chosen.policy == "private" else chosen.rate,
                attack_round=chosen.attack_round,
            )
            usage = resource.getrusage(resource.RUSAGE_CHILDREN)
            out.append(
                {
                    "guard": guard,
                    "seed": seed,
                    "accuracy": found.get("accuracy"),
                    "answered": found["answered"],
                    "read in the attack": found.get("read"),
                    "in the batch": chosen.clients * chosen.batch,
                    "bits by client": spent(ledger),
                    "seconds per round": statistics.median(found["rounds"]),
                    "seconds per client": statistics.median(found["clients"]),
                    "largest process, MiB": round(usage.ru_maxrss / 1024),
                }
            )
            sys.stderr.write(f"{out[-1]}\n")
    print(json.dumps(out, indent=1))


if __name__ == "__main__":
    main()
