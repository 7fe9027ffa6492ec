"""Every defence by its key, with the settings at which it is compared."""

from qbi.defences.aggp import AGGP
from qbi.defences.base import Defence, StepDefence, chain
from qbi.defences.private import DPSGD
from qbi.defences.rules import DropClose, DropDominated, DropSparse, HideReadable, Noise, NoisyRows, Sparsify
from qbi.errors import BadValue
from qbi.private.defence import PrivateStep
from qbi.private.goal import Budget

NO_DEFENCE = "none"

DEFENCES: dict[str, Defence | StepDefence] = {
    NO_DEFENCE: chain(),
    "aggp": AGGP(),
    "aggp-no-bias": AGGP(bias="drop"),
    "drop-sparse": DropSparse(15),
    "drop-dominated": DropDominated(0.2),
    "drop-close": DropClose(16),
    "auto": HideReadable(3.0),
    "row-noise-1": NoisyRows(1.0),
    "row-noise-3": NoisyRows(3.0),
    "aggp-row-noise": chain(AGGP(), NoisyRows(1.0)),
    "top-10": Sparsify(0.1),
    "noise-0.1": Noise(0.1),
    "noise-1": Noise(1.0),
    "private": PrivateStep(Budget.for_goal()),
    "private-8": PrivateStep(Budget.for_goal(bits=8)),
    "dp-sgd": DPSGD(clip=1.0, noise=1.0),
}
"""All of them. One of one's own is added with `DEFENCES[key] = my_defence`."""


def select(keys: list[str], place: str) -> list[str]:
    """Keys as they are; `all` stands for every defence."""
    if "all" in keys:
        return list(DEFENCES)
    unknown = [key for key in keys if key not in DEFENCES]
    if unknown:
        raise BadValue(f"{place}: no defence is called {unknown[0]!r}; there are {', '.join(DEFENCES)}.")
    return keys
