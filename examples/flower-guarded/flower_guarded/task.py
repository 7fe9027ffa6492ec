"""The model, the data of one client, and plain training, to compare with."""

import itertools
from pathlib import Path

import torch
from flwr.app import Context
from torch import Tensor, nn
from torch.nn import functional as F

from qbi.data.images import normalised
from qbi.data.open import open_images
from qbi.data.photos import synthetic_photos

SHAPE = (3, 32, 32)
CLASSES = 10


def make_model(seed: int = 0, kind: str = "mlp") -> nn.Module:
    """A hidden layer on the flattened image, behind convolutions where `kind` is "cnn": what these attacks like best."""
    torch.manual_seed(seed)
    head = [nn.Flatten(), nn.Linear(3072, 200), nn.ReLU(), nn.Linear(200, CLASSES)]
    if kind == "mlp":
        return nn.Sequential(*head)
    widths = (3, 64, 64, 3)
    body = [nn.Conv2d(i, o, 3, padding=1) for i, o in itertools.pairwise(widths)]
    return nn.Sequential(*body, *head)


def load_data(source: str, images: int, part: int, parts: int) -> tuple[Tensor, Tensor]:
    """The share of one client: photos of its own, or every `parts`-th image of a data set."""
    if source == "photos":
        data = synthetic_photos(max(2, images // parts), SHAPE[1], seed=part)
        return normalised(data, slice(None)), data.labels % CLASSES
    data = open_images(str(Path(source)), size=SHAPE[1], count=images, seed=0)
    chosen = torch.arange(part, len(data), parts)
    return normalised(data, chosen), data.labels[chosen] % CLASSES


def train(model: nn.Module, x: Tensor, y: Tensor, *, rate: float, batch_size: int, steps: int, seed: int) -> float:
    """SGD over the client's images, or over the first `steps` batches of them; the last loss."""
    optimiser = torch.optim.SGD(model.parameters(), lr=rate)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    batches = list(order.split(batch_size))[: steps or None]
    loss = torch.zeros(())
    model.train()
    for chosen in batches:
        optimiser.zero_grad()
        loss = F.cross_entropy(model(x[chosen]), y[chosen])
        loss.backward()
        optimiser.step()
    return float(loss.detach())


def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """The share of images put in the right class."""
    model.eval()
    with torch.no_grad():
        return float((model(x).argmax(1) == y).double().mean())


def settings_of(context: Context) -> dict[str, object]:
    """Which part of the data this client holds."""
    return {
        "part": int(context.node_config.get("partition-id", 0)),
        "parts": int(context.node_config.get("num-partitions", 1)),
        "source": str(context.run_config.get("data", "photos")),
        "images": int(context.run_config.get("images", 400)),
    }
