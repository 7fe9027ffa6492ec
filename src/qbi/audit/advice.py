"""What would help on this model and data, with the number that says how much."""

from collections.abc import Sequence

from qbi.audit.result import AttackOutcome, Curve, DefenceOutcome
from qbi.audit.survey import Finding
from qbi.audit.trials import (
    Client,
)


def advise(
    outcomes: Sequence[AttackOutcome],
    defences: Sequence[DefenceOutcome],
    curve: Curve | None,
    client: Client,
    findings: Sequence[Finding],
) -> tuple[str, ...]:
    """What would help on this model and data, with the number that says how much."""
    worst = max(outcomes, key=lambda o: o.recall, default=None)
    if worst is None or worst.recall == 0:
        return ()
    out = []
    without = next((d for d in defences if d.name == "none"), None)
    tried = [d for d in defences if d is not without]
    if without is not None and tried and without.recall["psnr>19"] > 0:
        # In the order of what they withstand (docs/defences.md): the first that does the job here.
        good = [d for d in tried if d.recall["psnr>19"] <= 0.05]
        best = good[0] if good else min(tried, key=lambda d: d.recall["psnr>19"])
        out.append(
            f"Switch on “{best.name}” on the clients: R of the strongest prepared attack falls from "
            f"{100 * without.recall['mse<1e-10']:.0f} % to "
            f"{100 * best.recall['mse<1e-10']:.0f} % exact, {100 * best.recall['psnr>19']:.0f} % recognisable (measured here)."
        )
    if curve is not None and worst.attack == "QBI":
        neurons = next(f.target.neurons for f in findings if f.name == worst.layer)
        now = _at(curve, client.batch_size, neurons)
        larger = [b for b in curve.batch_sizes if b >= 4 * client.batch_size]
        if larger:
            out.append(
                f"Train with batches of {larger[0]} instead of {client.batch_size}: R falls from {100 * now:.0f} % to "
                f"{100 * _at(curve, larger[0], neurons):.0f} % (predicted for this data)."
            )
        narrower = [n for n in curve.neurons if n <= neurons / 4]
        if narrower:
            out.append(
                f"Make {worst.layer} narrower, {narrower[-1]} neurons instead of {neurons}: "
                f"{100 * _at(curve, client.batch_size, narrower[-1]):.0f} % (predicted for this data)."
            )
    exposed = [f for f in findings if f.reach == "exact" and f.target.rectified and f.target.has_bias]
    if exposed:
        names = ", ".join(f.name for f in exposed)
        out.append(
            f"Take the bias out of {names}, or put pooling in front of it: without a bias gradient there is nothing to "
            "divide by, and pooling leaves only what it keeps."
        )
    return tuple(out)


def _at(curve: Curve, batch_size: int, neurons: int) -> float:
    return curve.recall[curve.batch_sizes.index(batch_size)][curve.neurons.index(neurons)]
