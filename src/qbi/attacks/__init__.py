"""The server's side: each attack in a file of its own, the registry of all, and the way to mount one on a model."""

from qbi.attacks.base import Attack, Carried, Knowledge, Mounted, Reading, SampleSource
from qbi.attacks.cascade import Cascade
from qbi.attacks.copies import Copies
from qbi.attacks.gram_space import InGramSpace
from qbi.attacks.imprint import Imprint
from qbi.attacks.input_range import InputRange
from qbi.attacks.mirrored import Mirrored
from qbi.attacks.mounting import carry, mount
from qbi.attacks.pairs import PAIRS
from qbi.attacks.passive import Passive
from qbi.attacks.qbi import QBI
from qbi.attacks.registry import ATTACKS
from qbi.attacks.scaled import Scaled
from qbi.attacks.trap_weights import TrapWeights

__all__ = [
    "ATTACKS",
    "PAIRS",
    "QBI",
    "Attack",
    "Carried",
    "Cascade",
    "Copies",
    "Imprint",
    "InGramSpace",
    "InputRange",
    "Knowledge",
    "Mirrored",
    "Mounted",
    "Passive",
    "Reading",
    "SampleSource",
    "Scaled",
    "TrapWeights",
    "carry",
    "mount",
]
