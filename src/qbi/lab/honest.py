"""Networks as honest clients have them: as they are initialised, and as published federations train them."""

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from qbi.lab.networks import FedAvgNet, Quickstart
from qbi.lab.training import optimiser_for, plain_step, train
from qbi.randomness import derive_seed, generator

NETWORKS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "quickstart": (Quickstart, "fc1"),
    "FedAvg's CNN": (FedAvgNet, "fc1"),
}
"""A network, and the layer that is read."""

Train = Callable[[nn.Module, Tensor, Tensor, int], None]
"""Changes a model's weights: on images, with labels, by a seed."""


def in_one_place(epochs: int, rate: float) -> Train:
    """SGD with momentum 0.9 in batches of 32."""

    def run(model: nn.Module, x: Tensor, y: Tensor, seed: int) -> None:
        draws = torch.Generator().manual_seed(derive_seed(seed, "training") % 2**31)
        step = plain_step(model, optimiser_for(model, "sgd", rate), x, y)
        for _ in train(step, torch.arange(len(x), device=x.device), 32, epochs, draws):
            pass

    return run


def federated(clients: int, rate: float, rounds: int = 3) -> Train:
    """Each client has its part of the images and trains an epoch in every round; the server takes the mean."""
    locally = in_one_place(1, rate)

    def run(model: nn.Module, x: Tensor, y: Tensor, seed: int) -> None:
        order = torch.randperm(len(x), generator=generator(seed, "clients")).to(x.device)
        for number in range(rounds):
            states = []
            for client, own in enumerate(order.tensor_split(clients)):
                local = copy.deepcopy(model)
                locally(local, x[own], y[own], derive_seed(seed, "round", number, client))
                states.append(local.state_dict())
            model.load_state_dict({n: torch.stack([s[n] for s in states]).mean(0) for n in states[0]})

    return run


TRAININGS: dict[str, Train] = {
    "as initialised": lambda *_: None,
    "rate 0.001": federated(clients=3, rate=0.001),
    "rate 0.01": federated(clients=10, rate=0.01),
    "rate 0.1": federated(clients=10, rate=0.1),
    "two epochs": in_one_place(2, rate=0.01),
}
"""How a network came to its weights. Flower's example (`examples/quickstart-pytorch`) had three clients and a rate of 0.001 until it got
run configurations, and has ten and 0.1 since; three rounds of one epoch, batches of 32 and momentum 0.9 in both. What lies between is ours."""
