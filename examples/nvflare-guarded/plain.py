"""The same without a private step, for comparison: a guarded site does not answer it."""

import argparse

import nvflare.client as flare
import torch
from task import Net, load_data
from torch.nn import functional as F


def main() -> None:
    """Train in every round until the server says that it is over."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="cnn")
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--rate", type=float, default=0.05)
    parser.add_argument("--batch", type=int, default=20)
    parser.add_argument("--images", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    flare.init()
    x, y = load_data(int(flare.get_site_name().split("-")[-1]), chosen.images, chosen.seed)
    while flare.is_running():
        got = flare.receive()
        model = Net(chosen.model)
        model.load_state_dict(got.params)
        optimiser = torch.optim.SGD(model.parameters(), lr=chosen.rate)
        batches = list(zip(x.split(chosen.batch), y.split(chosen.batch), strict=True))
        for some, targets in batches[: chosen.steps or None]:
            optimiser.zero_grad()
            loss = F.cross_entropy(model(some), targets)
            loss.backward()
            optimiser.step()
        flare.send(flare.FLModel(params=model.state_dict(), metrics={"loss": float(loss)}))


if __name__ == "__main__":
    main()
