"""A training script as one writes it for NVFlare, with a private step between `flare.receive` and `flare.send`."""

import argparse

import nvflare.client as flare
import torch
from task import Net, load_data
from torch.nn import functional as F

import qbi
from qbi.integrations.nvflare import received


def main() -> None:
    """Train in every round until the server says that it is over."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="cnn")
    parser.add_argument("--steps", type=int, default=0, help="0: one pass over the site's images")
    parser.add_argument("--rate", type=float, default=0.2)
    parser.add_argument("--batch", type=int, default=20)
    parser.add_argument("--images", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    flare.init()
    data = load_data(int(flare.get_site_name().split("-")[-1]), chosen.images, chosen.seed)
    while flare.is_running():
        with received(flare.receive()) as here:
            model = Net(chosen.model)
            model.load_state_dict(here.sent)
            optimiser = torch.optim.SGD(model.parameters(), lr=chosen.rate)
            private = qbi.Private(model, F.cross_entropy, bits=72)
            for x, y in private.batches(data, batch_size=chosen.batch):
                loss = private.step(optimiser, x, y).loss
                if private.steps == chosen.steps:
                    break
            # The loss does not arrive unless the owner names it: metrics = ["loss:8:10"] in qbi-site.toml.
            flare.send(here.answer(private, {"loss": loss}))


if __name__ == "__main__":
    main()
