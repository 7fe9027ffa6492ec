"""What a ledger says, in numbers, in words and as a picture."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from qbi.private.ledger import Entry
from qbi.report.plotting import new_figure, picture_of
from qbi.theory import guarantees


@dataclass(frozen=True)
class Spending:
    """What has left about the samples of one data set."""

    data: str
    participations: float
    bits: float
    limit: float
    epsilon: float
    delta: float
    families: dict[str, float]
    first: str
    last: str

    def document(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "data": self.data,
            "participations": self.participations,
            "bits": _finite(self.bits),
            "limit": self.limit,
            "epsilon": _finite(self.epsilon),
            "delta": self.delta,
            "families": {name: _finite(bits) for name, bits in self.families.items()},
            "first": self.first,
            "last": self.last,
        }

    def __str__(self) -> str:
        where = ", ".join(f"{name} {bits:.4g}" for name, bits in self.families.items())
        return (
            f"{self.data}: at most {self.bits:.4g} of {self.limit:.4g} bits about each sample in {self.participations:g} participations "
            f"(ε = {self.epsilon:.4g} at δ = {self.delta:g}, no help from sampling assumed). By model family: {where}. "
            f"From {self.first} to {self.last}."
        )


def _finite(value: float) -> float | None:
    return value if value < float("inf") else None


def summarise(entries: Sequence[Entry], limit: float, delta: float) -> list[Spending]:
    """One summary for each data set."""
    out = []
    for data in sorted({e.data for e in entries}):
        own = [e for e in entries if e.data == data]
        families: dict[str, float] = {}
        for entry in own:
            families[entry.family] = families.get(entry.family, 0.0) + entry.bits
        bits = sum(families.values())
        # Gaussian sums compose by their squared shifts: so many participations at noise 1.
        spent = guarantees.epsilon(delta, guarantees.noise_for_bits(bits)) if bits else 0.0
        times = sum(e.participations for e in own)
        out.append(Spending(data, times, bits, limit, spent, delta, families, own[0].at, own[-1].at))
    return out


def draw(entries: Sequence[Entry], limit: float, kind: str) -> bytes:
    """Bits over participations, one line for each data set, and the limit."""
    figure = new_figure(6, 3.2)
    axis = figure.subplots()
    for data in sorted({e.data for e in entries}):
        times, bits = [0.0], [0.0]
        for entry in (e for e in entries if e.data == data):
            times.append(times[-1] + entry.participations)
            bits.append(bits[-1] + entry.bits)
        axis.step(times, bits, where="post", label=data)
    axis.axhline(limit, color="#c05621", linestyle="--", label="limit")
    axis.set(xlabel="participations", ylabel="bits about one sample, at most", ylim=(0, None))
    axis.legend()
    return picture_of(figure, kind)
