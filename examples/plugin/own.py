"""One of everything that can be added from outside: `qbi --plugin examples/plugin/own.py audit --attack mine --format words`.

Each is an object and one line.
"""

from typing import Any

import torch

from qbi.attacks import QBI
from qbi.attacks.registry import ATTACKS
from qbi.data.open import SOURCES, ImageSource
from qbi.data.photos import synthetic_photos
from qbi.defences.registry import DEFENCES
from qbi.defences.rules import Noise
from qbi.detection.detectors import DETECTORS, Detector
from qbi.report.formats import FORMATS, Format
from qbi.uses import operation
from qbi.uses.kinds import Pairs


class Mine(QBI):
    """An attack: rows of one's own, or those of another with a new name."""

    key, name, action = "mine", "Mine", "has written rows of its own"


ATTACKS[Mine.key] = Mine
DEFENCES["loud"] = Noise(10.0)
DETECTORS["large rows"] = Detector("large rows", 0.0, lambda w, _bias: w.abs().mean(1), lambda s: s * 0 + 1)
FORMATS["words"] = Format("words", "verdict.txt", lambda found: found.document["verdict"]["text"] + "\n")
SOURCES["noise"] = ImageSource(
    "noise",
    lambda source: source == "my-noise",
    lambda asked: synthetic_photos(asked.count, asked.size, seed=asked.seed + 1),
)


@operation(torch.inner)
def inner(capture: Any, input: torch.Tensor, other: torch.Tensor) -> Any:
    """A layer rule: torch.inner is a linear map of the weight that it is called with."""
    return capture.use(Pairs(tuple(other.shape)), input, torch.inner(input, other), other, None)
