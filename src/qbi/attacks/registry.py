"""Every attack by its key. `audit`, `compare`, `calibrate`, `--help` and the contract tests take theirs from here."""

from collections.abc import Iterable, Sequence

from qbi.attacks.base import Attack
from qbi.attacks.cascade import Cascade
from qbi.attacks.copies import Copies
from qbi.attacks.imprint import Imprint
from qbi.attacks.measured import Measured
from qbi.attacks.mirrored import Mirrored
from qbi.attacks.one_class import OneClass
from qbi.attacks.pairs import PAIRS
from qbi.attacks.passive import Passive
from qbi.attacks.qbi import QBI
from qbi.attacks.scaled import Scaled
from qbi.attacks.trap_weights import TrapWeights
from qbi.errors import BadValue

ATTACKS: dict[str, type[Attack]] = {
    a.key: a for a in (Passive, Cascade, QBI, Measured, PAIRS, TrapWeights, Imprint, Mirrored, Scaled, Copies, OneClass)
}
"""In the order in which they are run and shown. An attack of one's own is added with `ATTACKS[key] = MyAttack`."""

BY_DEFAULT: tuple[str, ...] = (Passive.key, Cascade.key, QBI.key, Measured.key, OneClass.key)
"""What an audit runs when nothing is asked for."""


def select(keys: Sequence[str], place: str) -> list[type[Attack]]:
    """Attacks by key; `all` stands for every one."""
    wanted: Iterable[str] = ATTACKS if "all" in keys else dict.fromkeys(keys)
    unknown = [key for key in wanted if key not in ATTACKS]
    if unknown:
        raise BadValue(f"{place}: no attack is called {unknown[0]!r}; there are {', '.join(ATTACKS)}.")
    return [ATTACKS[key] for key in wanted]
