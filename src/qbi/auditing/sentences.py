"""Sentences of a client that trains on token ids: what a server that changes nothing reads of its words."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from qbi.auditing.campaign import Campaign
from qbi.auditing.samples import Samples
from qbi.auditing.trial import ROUNDINGS
from qbi.calling import as_client, hooked
from qbi.errors import CannotRead
from qbi.sentences import ReadSentences, SentenceScores, read_sentences, score
from qbi.sentences.arrivals import Feed
from qbi.sentences.span import ROUNDING

MOST_VALUES = 1_000_000_000
"""Values of all tokens at all positions up to which every one is tested: a minute on a core."""

MOST_POSITIONS = 2048
"""Positions of a batch up to which sentences are put together."""

MOST_SHOWN = 24


@dataclass(frozen=True)
class FoundSentences:
    """What was read of one batch of sentences, or why nothing was told by the gradient."""

    decided: bool
    """Whether the gradients' spans tell tokens apart; else nothing is known."""
    reason: str
    layers: tuple[str, ...]
    rank: int
    width: int
    exact: float
    """Share of sequences that were read whole."""
    rouge_1: float
    rouge_2: float
    words: float
    """Share of tokens that were read in their place."""
    tokens: float
    """Share of the batch's different tokens that were read, in whatever place."""
    proven: int
    """Sequences that lie in the spans at every position; told without the truth."""
    guessed: float
    """ROUGE-1 of a guess that reads nothing: the commonest token of other samples at each position."""
    seconds: float
    marked: tuple[tuple[tuple[str, bool], ...], ...] = field(default=(), repr=False)
    """The first batch in words, and which of them were read."""

    @property
    def says_more(self) -> bool:
        """Whether words are read that a guess would not give."""
        return self.decided and self.proven > 0 and self.rouge_1 > self.guessed


def found_sentences(campaign: Campaign, say: Callable[[str], None]) -> FoundSentences | None:
    """Read the first batch; None where inputs are no token ids, or where it would take long."""
    samples, client = campaign.samples, campaign.client
    ids = samples.inputs[0]
    if client.local_steps or ids.is_floating_point() or ids.dim() != 2 or ids.shape[1] < 2:
        return None
    chosen, inputs, _ = campaign.updates.batch(0)
    table = _table(campaign.model, inputs)
    if table is None:
        return None
    positions = ids.shape[1]
    if table.weight.numel() * positions > MOST_VALUES or positions * client.batch_size > MOST_POSITIONS:
        return undecided("it was not tried: every token at every position takes more than a minute here.")
    say("reading sentences")
    try:
        feed, padding = _feed(samples, campaign.device)
        read = read_sentences(
            campaign.model,
            campaign.updates.whole(0).gradients,
            vocabulary=table.num_embeddings,
            length=positions,
            batch_size=client.batch_size,
            feed=feed,
            padding=padding,
            seed=campaign.seed,
            rounding=ROUNDINGS[client.precision] or ROUNDING,
        )
    except CannotRead as problem:
        return undecided(str(problem))
    return _judged(campaign, read, ids[chosen].tolist(), padding)


def _judged(campaign: Campaign, read: ReadSentences, rows: list[list[int]], padding: int | None) -> FoundSentences:
    truth, sequences = ([[t for t in row if t != padding] for row in own] for own in (rows, read.sequences))
    seen = truth
    if read.causal and max(map(len, sequences), default=0) == max(map(len, truth)) - 1:
        seen = [
            row[:-1] for row in truth
        ]  # the last token of a text that is foretold is a target only: no layer sees it
    found = score(sequences, seen)
    present = {token for row in seen for token in row}
    source, order = campaign.others()
    others = source.inputs[0][order]
    guess = others.mode(0).values.tolist() if len(others) else []
    guessed = score([guess] * len(seen), seen).rouge_1 if guess else 0.0
    return FoundSentences(
        decided=True,
        reason="",
        layers=read.layers,
        rank=read.rank,
        width=read.width,
        exact=found.exact,
        rouge_1=found.rouge_1,
        rouge_2=found.rouge_2,
        words=found.words,
        tokens=len(present & set(read.tokens)) / len(present),
        proven=sum(read.proven),
        guessed=guessed,
        seconds=read.seconds,
        marked=_marked(campaign.samples, sequences, found, truth),
    )


def _marked(
    samples: Samples, sequences: list[list[int]], found: SentenceScores, truth: list[list[int]]
) -> tuple[tuple[tuple[str, bool], ...], ...]:
    """The true sentences, each word with whether it was read in its place."""
    named = samples.vocabulary
    out = []
    for row, taken in list(zip(truth, found.taken, strict=True))[:MOST_SHOWN]:
        own = [] if taken < 0 else sequences[taken]
        right = [place < len(own) and own[place] == token for place, token in enumerate(row)]
        names = [named[token] if token < len(named) else str(token) for token in row]
        out.append(tuple(zip(names, right, strict=True)))
    return tuple(out)


def undecided(reason: str) -> FoundSentences:
    """Nothing is known, for this reason."""
    return FoundSentences(False, reason, (), 0, 0, 0.0, 0.0, 0.0, 0.0, 0.0, 0, 0.0, 0.0)


def _feed(samples: Samples, device: str) -> tuple[Feed, int | None]:
    """From ids to all inputs, and the token that a mask hides, if one does.

    Others must be the same for every sample, or be targets, which change nothing before a loss.
    """
    ids, *others = samples.inputs
    hidden = [_hidden_by(part, ids) for part in others]
    rest = [part[:1].to(device) for part in others]
    for number, (part, token) in enumerate(zip(others, hidden, strict=True), 1):
        is_target = part.shape == samples.targets.shape and torch.equal(part, samples.targets)
        if token is None and not is_target and not bool((part == part[:1]).all()):
            raise CannotRead(
                f"input {number} differs between samples, and the server would have to guess it too. "
                "A mask of lengths is no hindrance where it hides one token, and hides it everywhere."
            )

    def feed(ids: Tensor) -> tuple[Tensor, ...]:
        made = (
            _cut(part, ids) if token is None else (ids != token).to(part)
            for part, token in zip(rest, hidden, strict=True)
        )
        return (ids, *made)

    return feed, next((token for token in hidden if token is not None), None)


def _hidden_by(part: Tensor, ids: Tensor) -> int | None:
    """The one token whose positions, behind the end of sequences, a mask has as zeros; none where it is no such mask."""
    if part.shape != ids.shape or not bool(((part == 0) | (part == 1)).all()) or bool((part == part[:1]).all()):
        return None
    tokens = ids[part == 0].unique()
    if len(tokens) != 1 or not torch.equal(part == 0, ids == tokens):
        return None
    behind = bool((part[:, :-1] >= part[:, 1:]).all())
    return int(tokens) if behind else None


def _cut(part: Tensor, ids: Tensor) -> Tensor:
    """One row for each sequence, as long as the ids where it has an entry for each position."""
    own = part[:, : ids.shape[1]] if part.dim() == 2 else part
    return own.expand(len(ids), *own.shape[1:])


def _table(model: nn.Module, inputs: tuple[Tensor, ...]) -> nn.Embedding | None:
    """The table that the ids are looked up in."""
    found: list[nn.Embedding] = []

    def look(module: nn.Module, given: tuple[Tensor, ...]) -> None:
        same = given and given[0].shape == inputs[0].shape and torch.equal(given[0], inputs[0])
        if same and isinstance(module, nn.Embedding):
            found.append(module)

    tables = [m for m in model.modules() if isinstance(m, nn.Embedding)]
    with hooked(before=dict.fromkeys(tables, look)), as_client(model), torch.no_grad():
        model(*inputs)
    return found[0] if found else None
