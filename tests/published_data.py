"""What the entries of the zoo share: their form and the data they are trained on."""

from typing import Any, NamedTuple

import torch

DRAWS = torch.Generator().manual_seed(0)
COUNT, CLASSES = 48, 4
IMAGES = torch.randn(COUNT, 3, 32, 32, generator=DRAWS)
SLICES = torch.randn(COUNT, 1, 16, 16, generator=DRAWS)
SOUND = torch.randn(COUNT, 800, generator=DRAWS)
TOKENS = torch.randint(5, 60, (COUNT, 8), generator=DRAWS)
KINDS = torch.randint(2, (COUNT, 8), generator=DRAWS)
NODES = torch.randn(COUNT, 6, 10, generator=DRAWS)
LINKS = (torch.rand(COUNT, 6, 6, generator=DRAWS) < 0.5).float()
LABELS = torch.arange(COUNT) % CLASSES
WORDS = {"input_ids": TOKENS, "labels": LABELS}
PICTURES = (IMAGES, LABELS)


class Entry(NamedTuple):
    """A model of a package, how it is made, and the data it is trained on."""

    package: str
    make: Any
    data: Any
    more: dict[str, Any] = {}  # noqa: RUF012
