"""What the guard costs, what it does to accuracy, and how many virtual clients fit: figures of `docs/federation.md`.

python measure.py accuracy --seeds 5 --rounds 20 --data cifar-10-python.tar.gz
python measure.py overhead --rounds 10 --model cnn
python measure.py scale --clients 1000
"""

import argparse
import json
import os
import resource
import statistics
import sys
import time
from pathlib import Path

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
sys.path.insert(0, str(Path(__file__).parent))

from flower_guarded.task import accuracy, load_data, make_model, train
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

from qbi.integrations.flower import guarded_by

BACKEND = {"client_resources": {"num_cpus": 1, "num_gpus": 0}, "init_args": {"num_cpus": 2}}


def timed(msg: Message, context: Context, call_next) -> Message:
    """The outermost mod: seconds from message to reply."""
    started = time.perf_counter()
    reply = call_next(msg, context)
    if reply.has_content() and reply.content.metric_records:
        next(iter(reply.content.metric_records.values()))["seconds"] = time.perf_counter() - started
    return reply


def client_app(data: str, images: int, held_out: int, *, guard: bool, seed: int, policy: str, kind: str) -> ClientApp:
    """The example's client, its settings fixed; the first `held_out` images of the data are nobody's."""
    app = ClientApp(mods=[timed, *([guarded_by(policy=policy, inspect="refuse")] if guard else [])])

    @app.train()
    def train_here(msg: Message, context: Context) -> Message:
        model = make_model(kind=kind)
        model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
        part, parts = int(context.node_config["partition-id"]), int(context.node_config["num-partitions"])
        x, y = load_data(data, images, part, parts)
        x, y = x[held_out // parts :], y[held_out // parts :]
        loss = train(
            model,
            x,
            y,
            rate=0.05,
            batch_size=20,
            steps=0,
            seed=seed * 1000 + int(msg.content["config"]["server-round"]),
        )
        metrics = MetricRecord({"loss": loss, "num-examples": len(x)})
        return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=msg)

    return app


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
) -> dict:
    """One simulation: accuracy on what nobody trained on, seconds of each round, seconds of each client."""
    found: dict = {"rounds": [], "clients": []}
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:  # noqa: ARG001
        class Timed(FedAvg):
            def configure_train(self, *arguments):
                self.started = time.perf_counter()
                return super().configure_train(*arguments)

            def aggregate_train(self, server_round, replies):
                kept = list(replies)
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
        client_app(data, images, held_out, guard=guard, seed=seed, policy=policy, kind=kind),
        clients,
        backend_config=BACKEND,
    )
    return found


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
    parser.add_argument("--policy", default="auto")
    parser.add_argument("--images", type=int, default=0, help="built-in images; default 40 a client")
    chosen = parser.parse_args()
    data = chosen.data if chosen.data == "photos" else str(Path(chosen.data).resolve())
    images = chosen.images or 40 * chosen.clients
    rounds = 1 if chosen.what == "scale" else chosen.rounds
    held_out = 1000 if chosen.what == "accuracy" and data != "photos" else 0
    out = []
    for seed in range(chosen.seeds):
        for guard in chosen.only or (False, True):
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
            )
            usage = resource.getrusage(resource.RUSAGE_CHILDREN)
            out.append(
                {
                    "guard": guard,
                    "seed": seed,
                    "accuracy": found.get("accuracy"),
                    "answered": found["answered"],
                    "seconds a round": statistics.median(found["rounds"]),
                    "seconds a client": statistics.median(found["clients"]),
                    "largest process, MiB": round(usage.ru_maxrss / 1024),
                }
            )
            sys.stderr.write(f"{out[-1]}\n")
    print(json.dumps(out, indent=1))


if __name__ == "__main__":
    main()
