"""A server that trains, records what every reply would give away, and on request sends a crafted model first."""

from pathlib import Path

import torch
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from flower_guarded.task import SHAPE, make_model
from qbi import QBI, mount
from qbi.integrations.flower import Recording
from qbi.randomness import generator

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Federated averaging over all clients that are there."""
    config = context.run_config
    model = make_model(int(config["seed"]), str(config["model"]))
    crafted = None
    if config["attack"] == "qbi":
        sample = torch.randn(2, *SHAPE, generator=torch.Generator().manual_seed(0))
        crafted = mount(model, QBI(int(config["batch-size"])), sample, generator(int(config["seed"]), "flower"))
    inner = FedAvg(fraction_train=1.0, fraction_evaluate=1.0 if config["evaluate"] else 0.0, min_available_nodes=2)
    strategy = Recording(inner, Path(str(config["out"])), crafted=crafted, shape=SHAPE)
    strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(model.state_dict()),
        num_rounds=int(config["rounds"]),
        timeout=float(config["timeout"]),
    )
