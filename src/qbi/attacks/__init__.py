"""The server's crafted parameters: QBI, PAIRS, trap weights, and the way to mount them on a model."""

from qbi.attacks.base import Attack
from qbi.attacks.imprint import Imprint
from qbi.attacks.mirrored import Mirrored
from qbi.attacks.mount import Mounted, mount
from qbi.attacks.pairs import PAIRS, SampleSource
from qbi.attacks.qbi import QBI
from qbi.attacks.trap_weights import TrapWeights

__all__ = ["PAIRS", "QBI", "Attack", "Imprint", "Mirrored", "Mounted", "SampleSource", "TrapWeights", "mount"]
