"""One command for the simulation, one for real processes: `python run.py simulation`, `python run.py deployment`."""

import argparse
import os
import sys
from pathlib import Path

from qbi.integrations.flower.deployment import LocalFederation

HERE = Path(__file__).parent
OWNERS = 'policy = "private"\nmetrics = ["accuracy:7", "loss:8:10"]\n'
"""What stands in each client's `qbi-site.toml`, beside its ledger."""


def main() -> None:
    """Run the example once and say where the results are."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("how", choices=["simulation", "deployment"])
    parser.add_argument("--clients", type=int, help="default: 10 simulated, 3 as processes")
    parser.add_argument("--attack", choices=["", "qbi"], default="")
    parser.add_argument("--no-guard", action="store_true", help="clients without the mod and with plain training")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--data", default="photos")
    parser.add_argument("--out", type=Path, default=Path("out/federation"))
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    config = {
        "rounds": 1 if chosen.attack else chosen.rounds,
        "attack": chosen.attack,
        "local-steps": 1 if chosen.attack else 0,
        "learning-rate": 1.0 if chosen.attack else 0.05,
        "data": chosen.data if chosen.data == "photos" else str(Path(chosen.data).resolve()),
        "out": str(chosen.out.resolve()),
        "seed": chosen.seed,
    }
    if chosen.no_guard:
        # The owner's choice, in the environment of the clients' processes: no setting of a run can make it.
        os.environ["QBI_EXAMPLE_UNGUARDED"] = "1"
    simulated = chosen.how == "simulation"
    # Each SuperNode stands behind its owner's gate; virtual clients of a simulation have the mod alone.
    owners = None if simulated or chosen.no_guard else OWNERS
    clients = chosen.clients or (10 if simulated else 3)
    with LocalFederation(clients, simulated=simulated, owners=owners) as federation:
        status = federation.run(HERE, config, within=600.0)
    print(f"{status}; results in {chosen.out}")
    sys.exit(0 if status == "finished:completed" else 1)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("stopped; every process of the federation was ended.")
