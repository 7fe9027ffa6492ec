"""WordPiece, retrained on the texts at hand as the paper does (erratum 15), with ids that never change."""

import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from itertools import pairwise
from typing import Any

from qbi.data.text import PAD, UNKNOWN, Corpus, pack
from qbi.errors import MissingExtra, require_positive
from qbi.records import TextData

SPECIAL = (PAD, UNKNOWN, "[CLS]", "[SEP]", "[MASK]")
CONTINUED = "##"

_WORD = re.compile(r"[^\W_]+|[^\w\s]|_")


def wordpiece_tokens(corpus: Corpus, *, length: int = 250, vocabulary: int = 10_000) -> TextData:
    """Train on the corpus and encode it: [CLS] pieces [SEP], cut and padded to one length."""
    require_positive("tokeniser", length=length, vocabulary=vocabulary)
    entries = train_wordpiece(corpus.texts, vocabulary)
    encoded = encode(corpus.texts, entries, length)
    return pack(corpus, encoded, entries, length)


def train_wordpiece(texts: Sequence[str], size: int = 10_000) -> tuple[str, ...]:
    """The vocabulary: special entries first, the rest sorted, the same for the same texts.

    Pairs of neighbouring pieces are joined, the most frequent first, until the vocabulary is full. The `tokenizers`
    library trains faster but breaks ties by the order of a randomised hash, so that two runs may differ.
    """
    counts = Counter(word for text in texts for word in _WORD.findall(_plain(text)))
    words = sorted(counts)
    pieces = [[word[0], *(CONTINUED + letter for letter in word[1:])] for word in words]
    vocabulary = {piece for word in pieces for piece in word}
    pairs: Counter[tuple[str, str]] = Counter()
    places: defaultdict[tuple[str, str], set[int]] = defaultdict(set)
    for index, word in enumerate(pieces):
        for pair in pairwise(word):
            pairs[pair] += counts[words[index]]
            places[pair].add(index)
    queue = [(-count, pair) for pair, count in pairs.items()]
    heapify(queue)
    while queue and len(vocabulary) + len(SPECIAL) < size:
        count, pair = heappop(queue)
        if pairs[pair] != -count:
            continue  # an older count of this pair; the current one is queued too
        vocabulary.add(_joined(pair))
        changed = _join(pair, pieces, pairs, places, counts, words)
        for neighbour in changed:
            if pairs[neighbour] > 0:
                heappush(queue, (-pairs[neighbour], neighbour))
    return (*SPECIAL, *sorted(vocabulary)[: size - len(SPECIAL)])


def _join(
    pair: tuple[str, str],
    pieces: list[list[str]],
    pairs: Counter[tuple[str, str]],
    places: dict[tuple[str, str], set[int]],
    counts: Counter[str],
    words: list[str],
) -> set[tuple[str, str]]:
    """Join one pair wherever it stands, keep the counts right, and say which pairs changed."""
    changed: set[tuple[str, str]] = set()
    joined = _joined(pair)
    for index in places.pop(pair):
        old, count = pieces[index], counts[words[index]]
        new: list[str] = []
        for piece in old:
            if new and (new[-1], piece) == pair:
                new[-1] = joined
            else:
                new.append(piece)
        for before in pairwise(old):
            pairs[before] -= count
            changed.add(before)
        for after in pairwise(new):
            pairs[after] += count
            places[after].add(index)
            changed.add(after)
        pieces[index] = new
    return changed - {pair}


def _joined(pair: tuple[str, str]) -> str:
    return pair[0] + pair[1].removeprefix(CONTINUED)


def _plain(text: str) -> str:
    """Lower case without accents, as the tokeniser will see it."""
    decomposed = unicodedata.normalize("NFD", text.lower())
    return "".join(c for c in decomposed if unicodedata.category(c) != "Mn") if not text.isascii() else decomposed


def encode(texts: Sequence[str], entries: tuple[str, ...], length: int) -> list[list[int]]:
    """Token ids of each text, at most `length` of them."""
    tokenizers = _library()
    ids = {entry: i for i, entry in enumerate(entries)}
    tokenizer = tokenizers.BertWordPieceTokenizer(vocab=ids, lowercase=True)
    tokenizer.enable_truncation(length)
    return [encoding.ids for encoding in tokenizer.encode_batch(list(texts))]


def _library() -> Any:
    try:
        import tokenizers
    except ImportError as problem:
        raise MissingExtra("tokenizers", "text") from problem
    return tokenizers
