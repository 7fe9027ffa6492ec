"""What is read of several local steps."""

from tables.reading import FAITHFUL, RECOGNISABLE, load, table

SHOWN = (FAITHFUL, "psnr>30", RECOGNISABLE)


def fedavg() -> str:
    """By local steps, rate and optimiser."""
    rows = []
    for r in load("fedavg")["rows"]:
        extra = f", weight decay {r['weight_decay']:g}" if r["weight_decay"] else ""
        passes = f", {r['epochs']} passes" if r["epochs"] > 1 else ""
        network = "" if r["network"] == "two layers" else f"{r['network']}: "
        how = f"{network}{r['steps']} × {r['batch_size']}{passes}, {r['optimiser']} {r['rate']:g}{extra}"
        read = [
            "–" if found is None else ", ".join(f"{100 * found[key]:.0f}" for key in SHOWN if key in found)
            for found in (r["read"][server] for server in ("passive", "cascade", "qbi"))
        ]
        rows.append([how, *read])
    return table(["batches × images, optimiser and rate", "passive", "cascade", "QBI"], rows)
