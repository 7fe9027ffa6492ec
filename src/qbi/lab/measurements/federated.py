"""Federations in Flower's simulation, each in a process of its own."""

from dataclasses import replace
from typing import Any

from qbi.lab.federations import Federation, simulate
from qbi.lab.workers import alone

COSTS = {
    "small CNN": Federation("small CNN", rounds=10),
    "two layers": Federation("two layers", rounds=10),
    "100 clients": Federation("two layers", clients=100, rounds=1, images=4000),
}
PRICED = Federation("two layers", clients=4, rounds=20, images=3000, held_out=1000, batch=50, attack_round=5)
RATES = {False: 0.05, True: 1.0}
"""Of plain and of private training: clipping fixes a gradient's length. The better ones of 0.02, 0.05 and 0.1, and of 0.5 and 1, over three other
draws in one process."""
SEEDS = 5
SMALL = Federation("two layers", rounds=1, data="noise", guard=True)
"""One batch of noise for each client: what counts is the guard and the engine."""
MANY = ((200, 0), (200, 50), (1000, 50))
"""Clients, and messages under way at once (0: all)."""


def costs(_data: str) -> dict[str, Any]:
    """Rounds and clients, without the guard and with it."""
    return {
        name: [alone(simulate, replace(setting, guard=guard)) for guard in (False, True)]
        for name, setting in COSTS.items()
    }


def prices(data: str) -> dict[str, Any]:
    """Accuracy over seeds, with an attack on the way."""
    runs = [
        alone(simulate, replace(PRICED, data=data, guard=guard, rate=RATES[guard], seed=seed))
        for seed in range(SEEDS)
        for guard in (False, True)
    ]
    return {"runs": runs}


def thousand(_data: str) -> dict[str, Any]:
    """Up to a thousand simulated clients in one round, guarded: what each worker's process held at most, and what the engine took."""
    runs = []
    for clients, wave in MANY:
        setting = replace(SMALL, clients=clients, images=clients * SMALL.batch, wave=wave)
        run = alone(simulate, setting)
        paid = len(run.pop("bits by client"))
        runs.append({"clients": clients, "wave": wave, "in the ledger": paid, **run})
    return {"runs": runs}
