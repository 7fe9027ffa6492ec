"""The model and the data of one site: those of `examples/flower-guarded`."""

import itertools
import os

import torch
from torch import Tensor, nn

from qbi.data.images import normalised
from qbi.data.open import open_images
from qbi.data.photos import synthetic_photos

SHAPE = (3, 32, 32)
CLASSES = 10


class Net(nn.Sequential):
    """A hidden layer on the flattened image, behind convolutions where `kind` is "cnn": what these attacks like best."""

    def __init__(self, kind: str = "cnn", seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.kind, self.seed = kind, seed
        head = [nn.Flatten(), nn.Linear(3072, 200), nn.ReLU(), nn.Linear(200, CLASSES)]
        body = [nn.Conv2d(i, o, 3, padding=1) for i, o in itertools.pairwise((3, 64, 64, 3))] if kind == "cnn" else []
        super().__init__(*body, *head)


def load_data(part: int, images: int = 40, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A site's own images: built-in ones, or every fourth of the archive that the site's environment names, shuffled by the seed."""
    if source := os.environ.get("QBI_EXAMPLE_DATA"):
        data = open_images(source, size=SHAPE[1], count=6000, seed=0)
        order = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed))
        chosen = order[part::4][:images]
        return normalised(data, chosen), data.labels[chosen] % CLASSES
    data = synthetic_photos(images, SHAPE[1], seed=part)
    return normalised(data, slice(None)), data.labels % CLASSES
