"""What an audit found, as records: for people, for JSON, for notebooks."""

import html
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qbi.auditing.bounds import BoundPoint
from qbi.auditing.client import Client
from qbi.auditing.decode import DecodedPictures
from qbi.auditing.finding import Finding, Untested
from qbi.auditing.match import MatchedBatch
from qbi.auditing.negative import why_not_tested
from qbi.auditing.outcomes import AttackOutcome, Curve, DefenceOutcome, Gallery, LayerOutcome, SideReading, Status
from qbi.auditing.patches import FoundPatches
from qbi.auditing.sentences import FoundSentences
from qbi.metrics import Threshold


@dataclass(frozen=True)
class AuditResult:
    """The whole audit.

    >>> import qbi, torch
    >>> x, y = torch.randn(24, 30, generator=torch.Generator().manual_seed(0)), torch.arange(24) % 3
    >>> model = torch.nn.Sequential(torch.nn.Linear(30, 40), torch.nn.ReLU(), torch.nn.Linear(40, 3))
    >>> result = qbi.audit(model, (x, y), attacks=["qbi"], client=qbi.Client(batch_size=4), defences=False)
    >>> result.accounts["0.weight"], result.recall > 0.3
    ('leaks', True)
    """

    model: str
    parameters: int
    traced_by: str
    trace_note: str
    data: str
    kind: str
    samples: int
    shape: tuple[tuple[int, ...], ...]
    client: Client
    loss: str
    batches: int
    layers: tuple[Finding, ...]
    path: tuple[str, ...]
    attacks: tuple[AttackOutcome, ...]
    untested: tuple[Untested, ...]
    side_information: tuple[SideReading, ...]
    defences: tuple[DefenceOutcome, ...]
    curve: Curve | None
    budgets: tuple[BoundPoint, ...]
    advice: tuple[str, ...]
    doubts: tuple[str, ...]
    gallery: Gallery
    decoded: DecodedPictures | None
    """Pictures that were made of features, where that was tried."""
    matched: MatchedBatch | None
    """What gradient matching made of a batch, or why it was not tried; none where it was not wanted."""
    patches: FoundPatches | None
    """Images put together of patches, where the model cuts them."""
    sentences: FoundSentences | None
    """Sentences of token ids, where the model takes those."""
    trained: tuple[str, ...]
    """Names of all trained parameters."""
    elsewhere: frozenset[str]
    """Trained parameters that are used in other ways than in a linear map too."""
    origins: Mapping[str, tuple[str, ...]]
    """For weights that were put together from others (a weight norm's): the parameters that are trained in their place."""
    threshold: Threshold
    """How well a sample must be read for a gate to count it."""
    seed: int
    versions: Mapping[str, str]
    seconds: float

    @property
    def worst(self) -> AttackOutcome | None:
        """The attack that reads most; of equals one that reads whole samples, and of those one that changes nothing."""
        return max(self.attacks, key=lambda a: a.badness(self.threshold), default=None)

    @property
    def recall(self) -> float:
        """R of the strongest attack, exact."""
        return max((a.recall for a in self.attacks), default=0.0)

    @property
    def share(self) -> float:
        """What the strongest attack reads at the audit's threshold, or what else leaves a layer: what a gate goes by."""
        told = [self.sentences.words] if self.sentences is not None and self.sentences.says_more else []
        told += [found.share_at(self.threshold) for found in (self.matched, self.patches) if found is not None]
        return max([o.share for o in self.outcomes] + [s.share for s in self.tokens] + told, default=0.0)

    @property
    def tokens(self) -> tuple[SideReading, ...]:
        """Tables whose tokens are read without an attack, trained ones or frozen."""
        return tuple(s for s in self.side_information if s.what == "tokens" and s.share > 0)

    @property
    def outcomes(self) -> tuple[LayerOutcome, ...]:
        """Every layer: it leaks, or it was not tested by whatever was not tried."""
        names = list(dict.fromkeys([f.name for f in self.layers] + [u.layer for u in self.untested if u.parameters]))
        return tuple(self._outcome(name) for name in names)

    def _outcome(self, layer: str) -> LayerOutcome:
        tried = [a for a in self.attacks if a.layer == layer]
        missing = [u for u in self.untested if u.layer == layer]
        finding = next((f for f in self.layers if f.name == layer), None)
        parameters = tuple(n for u in missing for n in u.parameters) if finding is None else finding.parameters
        names = tuple(a.attack for a in tried)
        told = [s for s in self.tokens if s.layer == layer]
        share = max([a.share_at(self.threshold) for a in tried] + [s.share for s in told], default=0.0)
        if any(a.reads for a in tried):
            return LayerOutcome(layer, "leaks", share, names, "", parameters)
        if told:
            return LayerOutcome(layer, "leaks", share, (told[0].what,), told[0].note, parameters)
        return LayerOutcome(layer, "not tested", 0.0, names, why_not_tested(self, tried, missing, finding), parameters)

    @property
    def accounts(self) -> Mapping[str, Status]:
        """Every trained parameter in exactly one state: the worst that is known of a layer it is part of; else not tested."""
        out: dict[str, Status] = dict.fromkeys(self.trained, "not tested")
        leaking = (name for outcome in self.outcomes if outcome.status == "leaks" for name in outcome.parameters)
        out |= dict.fromkeys(leaking, "leaks")
        return {own: state for name, state in out.items() for own in self.origins.get(name, (name,))}

    @property
    def untested_parameters(self) -> list[str]:
        """Trained parameters of which nothing is known."""
        return [name for name, state in self.accounts.items() if state == "not tested"]

    @property
    def status(self) -> Status:
        """Of the model: it leaks if a layer does. Else it was not tested: an attack that reads nothing shows that this attack reads nothing."""
        beside = [found.says_more for found in (self.sentences, self.matched, self.patches) if found is not None]
        leaks = "leaks" in self.accounts.values() or self.tokens or any(beside)
        return "leaks" if leaks else "not tested"

    @property
    def verdict(self) -> str:
        """One or two sentences in plain words."""
        from qbi.auditing.verdict import verdict

        return verdict(self)

    def document(self) -> dict[str, Any]:
        """The result as plain data, for JSON; the samples themselves stay out. See `docs/report.schema.json`."""
        from qbi.auditing.document import to_document

        return to_document(self)

    def to_dict(self) -> dict[str, Any]:
        """The same as `document`, under the name that tools for tracking experiments look for."""
        return self.document()

    def to_dataframe(self) -> Any:
        """A `pandas.DataFrame` with one row for each attack on each layer; needs the extra `frames`."""
        from qbi.auditing.frame import to_frame

        return to_frame(self)

    def __str__(self) -> str:
        return self.verdict

    def _repr_html_(self) -> str:
        """For notebooks."""
        rows = "".join(
            f"<tr><td>{html.escape(a.attack)}</td><td>{html.escape(a.layer)}</td><td>{100 * a.recall:.1f} %</td></tr>"
            for a in self.attacks
        )
        doubts = "".join(f"<li>{html.escape(d)}</li>" for d in self.doubts)
        return (
            f"<p><b>{html.escape(self.verdict)}</b></p><table><tr><th>attack</th><th>layer</th><th>R</th></tr>{rows}</table>"
            f"<ul>{doubts}</ul>"
        )
