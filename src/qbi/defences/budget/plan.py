"""Which call tells which parameter's gradient apart by sample, and a check that nothing is missing."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from qbi.defences.budget.per_sample import combined, sample_gradients, squared_norms, weighted_sum
from qbi.defences.budget.products import squares
from qbi.defences.calls import Call, LeakRefused
from qbi.defences.layout import leaves
from qbi.defences.seeing import Seeing
from qbi.finite import is_finite

TOLERANCE = 1e-3
"""Of that comparison, relative to the gradient's norm."""

FLOOR = 1e-6
"""Of that comparison, relative to the norm of all gradients: some are rounding alone, such as a bias before a normalisation."""


Explained = tuple[Call, list[str], list[int]]
"""A call, with the names in its module of the parameters that it explains, and their keys."""


@dataclass
class Plan:
    """Which call tells which parameter's gradient."""

    seeing: Seeing
    calls: list[Call]
    parameters: dict[int, Tensor]
    above: dict[int, str]
    """Parameters that the module they stand in does not explain, and the name of the one around it that does."""
    checks: dict[int, int] = field(default_factory=dict)
    """How often each parameter's gradient was compared with torch's own."""
    shared: list[int] = field(default_factory=list)
    """Parameters that several calls use, once norms were taken."""
    formed: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    """Samples' own gradients of small layers, kept from the norms for the sums."""

    def kept(self) -> "Plan":
        """Without what belongs to one pass."""
        return Plan(self.seeing, [], {}, self.above, self.checks)

    def explained(self) -> list[Explained]:
        """Calls with the names, in their module, of the parameters that each one explains, and the parameters' keys."""
        out = []
        for call in self.calls:
            found: dict[str, int] = {}
            for name, parameter in call.module.named_parameters(remove_duplicate=False):
                key = id(parameter)
                if key not in self.parameters or key in found.values():
                    continue
                own = "." not in name
                if self.above.get(key) == call.key[0] if key in self.above else own and self._tells(call):
                    found[name] = key
            if found:
                out.append((call, list(found), list(found.values())))
        return out

    def _tells(self, call: Call) -> bool:
        """Whether what comes back to a call comes from samples; a table of positions, or a weight made of others, is the same for all."""
        places = self.seeing.places(call)
        first = len(leaves(call.given))
        return all(places[first + number] is not None for number in call.gradients)

    def norms(self, samples: int) -> Tensor:
        """Each sample's norm over all parameters. Gradients of small layers that were formed for it are kept for the sums."""
        self.formed = {}
        explained = self.explained()
        times: dict[int, int] = {}
        for _, _, keys in explained:
            for key in keys:
                times[key] = times.get(key, 0) + 1
        self.shared = [key for key, count in times.items() if count > 1]
        total = torch.zeros(samples, device=next(iter(self.parameters.values())).device)
        for call, names, keys in explained:
            single = [n for n, key in zip(names, keys, strict=True) if times[key] == 1]
            if single:
                squared, formed = squared_norms(call, self.seeing.places(call), single, samples)
                total += squared
                if formed is not None and len(single) == len(names):
                    self.formed[id(call)] = formed
        for key in self.shared:
            total += torch.cat([squares({"": part}) for part in self._joint(explained, key, samples)])
        return total.sqrt()

    def _joint(self, explained: Sequence[Explained], key: int, samples: int) -> list[Tensor]:
        """A parameter that several calls use: each sample's gradients of it add up before the norm is taken."""
        each = [
            [
                part[names[keys.index(key)]]
                for part in sample_gradients(call, self.seeing.places(call), [names[keys.index(key)]], samples)
            ]
            for call, names, keys in explained
            if key in keys
        ]
        return [sum(parts[1:], start=parts[0]) for parts in zip(*each, strict=True)]

    def sums(self, weights: Tensor) -> dict[int, Tensor]:
        """Σ wᵢ·gᵢ of every parameter that is explained."""
        out: dict[int, Tensor] = {}
        explained = self.explained()
        for key in self.shared:
            parts = self._joint(explained, key, len(weights))
            shares = weights.split([len(part) for part in parts])
            out[key] = torch.stack([combined({"": p}, w)[""] for p, w in zip(parts, shares, strict=True)]).sum(0)
        for call, all_names, all_keys in explained:
            left = [(n, key) for n, key in zip(all_names, all_keys, strict=True) if key not in self.shared]
            if not left:
                continue
            names, keys = [n for n, _ in left], [key for _, key in left]
            if id(call) in self.formed:
                found = combined(self.formed[id(call)], weights)
            else:
                found = weighted_sum(call, self.seeing.places(call), names, weights)
            for name, key in zip(names, keys, strict=True):
                if name in found:
                    out[key] = out[key] + found[name] if key in out else found[name]
        return out

    def _torchs_own(self, before: dict[int, Tensor]) -> tuple[dict[int, Tensor], dict[int, float], float]:
        """What torch left as gradients, the size of those that are finite, and the size below which one is rounding."""
        raw = {key: _raw(p.grad, before.get(key)) for key, p in self.parameters.items() if p.grad is not None}
        sizes = {key: float(g.double().norm()) for key, g in raw.items() if is_finite(g)}
        return raw, sizes, FLOOR * sum(size**2 for size in sizes.values()) ** 0.5

    def told_by(self, keys: Sequence[int], before: dict[int, Tensor]) -> bool:
        """Whether this pass says anything about one of these parameters."""
        _, sizes, floor = self._torchs_own(before)
        return any(sizes.get(key, 0.0) > floor for key in keys)

    def settled_norms(self, samples: int, before: dict[int, Tensor]) -> Tensor:
        """Norms, once sums of the samples' shares are torch's own gradients; where they are not, look from further out, or refuse."""
        tried: dict[int, set[str]] = {}
        raw, sizes, floor = self._torchs_own(before)
        while True:
            norms = self.norms(samples)
            sums = self.sums(torch.ones(samples, device=norms.device))
            wrong = [
                key for key, p in self.parameters.items() if not _agrees(sums.get(key), raw.get(key), p.dtype, floor)
            ]
            if not wrong:
                break
            for key in wrong:
                self._step_out(key, tried.setdefault(key, set()))
        for key, size in sizes.items():
            # A gradient that is nothing, or rounding, agrees with anything.
            self.checks[key] = self.checks.get(key, 0) + (size > floor)
        return norms

    def _step_out(self, key: int, tried: set[str]) -> None:
        """Look at a parameter from the next module around it."""
        holders = [c for c in self.calls if any(id(p) == key for p in c.module.parameters())]
        tried |= {c.key[0] for c in holders if "." not in self._name(c, key)}
        left = [c.key[0] for c in holders if c.key[0] not in tried and self._tells(c)]
        if not left:
            name = self._name(holders[0], key) if holders else "a weight"
            raise LeakRefused(
                f"guard: not every use of “{name}” was seen: the samples' shares do not add up to its gradient. Weights used "
                "outside their module, dropout inside a module that holds weights, or a second backward pass do this."
            )
        self.above[key] = max(left, key=lambda name: name.count(".") + bool(name))
        tried.add(self.above[key])

    def _name(self, call: Call, key: int) -> str:
        return next(n for n, p in call.module.named_parameters(remove_duplicate=False) if id(p) == key)


def _raw(gradient: Tensor, before: Tensor | None) -> Tensor:
    gradient = (gradient.to_dense() if gradient.is_sparse else gradient).float()
    return gradient if before is None else gradient - before.float()


def _agrees(found: Tensor | None, raw: Tensor | None, dtype: torch.dtype, floor: float) -> bool:
    if raw is None:
        return found is None or not bool(found.any())
    if not is_finite(raw):
        return True
    apart = raw if found is None else raw - found.float()
    tolerance = TOLERANCE if dtype in (torch.float32, torch.float64) else 30 * TOLERANCE
    return bool(apart.norm() <= tolerance * raw.norm() + floor)
