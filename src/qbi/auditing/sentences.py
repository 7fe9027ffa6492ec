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
        feed = _feed(samples, campaign.device)
        read = read_sentences(
            campaign.model,
            campaign.updates.whole(0).gradients,
            vocabulary=table.num_embeddings,
            length=positions,
            batch_size=client.batch_size,
            feed=feed,
            seed=campaign.seed,
            rounding=ROUNDINGS[client.precision] or ROUNDING,
        )
    except CannotRead as problem:
        return undecided(str(problem))
    return _judged(campaign, read, ids[chosen])


def _judged(campaign: Campaign, read: ReadSentences, truth: Tensor) -> FoundSentences:
    found = score(read.sequences, truth.tolist())
    present = set(truth.unique().tolist())
    source, order = campaign.others()
    others = source.inputs[0][order]
    guess = others.mode(0).values.tolist() if len(others) else []
    guessed = score([guess] * len(truth), truth.tolist()).rouge_1 if guess else 0.0
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
        marked=_marked(campaign.samples, read, found, truth),
    )


def _marked(
    samples: Samples, read: ReadSentences, found: SentenceScores, truth: Tensor
) -> tuple[tuple[tuple[str, bool], ...], ...]:
    """The true sentences, each word with whether it was read in its place."""
    named = samples.vocabulary
    out = []
    for row, taken in list(zip(truth.tolist(), found.taken, strict=True))[:MOST_SHOWN]:
        own = () if taken < 0 else read.sequences[taken]
        right = [place < len(own) and own[place] == token for place, token in enumerate(row)]
        names = [named[token] if token < len(named) else str(token) for token in row]
        out.append(tuple(zip(names, right, strict=True)))
    return tuple(out)


def undecided(reason: str) -> FoundSentences:
    """Nothing is known, for this reason."""
    return FoundSentences(False, reason, (), 0, 0, 0.0, 0.0, 0.0, 0.0, 0.0, 0, 0.0, 0.0)


def _feed(samples: Samples, device: str) -> Feed:
    """From ids to all inputs: others must be the same for every sample, or be targets, which change nothing before a loss."""
    rest = [part[:1].to(device) for part in samples.inputs[1:]]
    for number, part in enumerate(samples.inputs[1:], 1):
        is_target = part.shape == samples.targets.shape and torch.equal(part, samples.targets)
        if not is_target and not bool((part == part[:1]).all()):
            raise CannotRead(
                f"input {number} differs between samples (a mask of lengths, say), and the server would have to guess it too."
            )

    def feed(ids: Tensor) -> tuple[Tensor, ...]:
        return (ids, *(_cut(part, ids) for part in rest))

    return feed


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
