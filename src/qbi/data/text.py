"""Texts from folders, archives and CSV files, and their way into token ids of one length."""

import csv
import io
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch

from qbi.data.tree import files, is_archive
from qbi.errors import DataError, require_positive
from qbi.records import TextData

PAD, UNKNOWN = "[PAD]", "[UNK]"

_WORD = re.compile(r"\w+|[^\w\s]")


@dataclass(frozen=True)
class Corpus:
    """Texts with labels, before any tokeniser."""

    name: str
    texts: tuple[str, ...]
    labels: tuple[int, ...]
    classes: tuple[str, ...]


def load_imdb(root: Path, *, part: str = "train") -> Corpus:
    """The labelled IMDB reviews of `aclImdb/{train,test}/{neg,pos}/*.txt`, folder or archive."""

    def wanted(name: str) -> bool:
        return name.endswith(".txt") and f"{part}/" in name and name.split("/")[-2] in ("neg", "pos")

    found = sorted((name, _text(content, f"{root}: {name}")) for name, content in files(root, wanted))
    if not found:
        raise DataError(f"{root}: no reviews here; the published layout is aclImdb/{part}/pos/*.txt and …/neg/*.txt.")
    labels = tuple(int(name.split("/")[-2] == "pos") for name, _ in found)
    return Corpus("IMDB", tuple(text for _, text in found), labels, ("neg", "pos"))


def load_text_folder(root: Path) -> Corpus:
    """Every .txt file below a folder or in an archive; the sub-folder is the class."""
    found = sorted((n, _text(c, f"{root}: {n}")) for n, c in files(root, lambda n: n.lower().endswith(".txt")))
    if not found:
        raise DataError(f"{root}: no .txt files here.")
    folders = [name.split("/")[-2] if "/" in name else "" for name, _ in found]
    classes = tuple(sorted(set(folders)))
    return Corpus(root.name, tuple(t for _, t in found), tuple(classes.index(f) for f in folders), classes)


def load_text_csv(path: Path) -> Corpus:
    """A CSV file with a column `text` and, if there is one, a column `label`."""
    try:
        content = path.read_bytes()
    except OSError as problem:
        raise DataError(f"{path}: it cannot be read ({problem.strerror}).") from problem
    try:
        rows = list(csv.DictReader(io.StringIO(_text(content, str(path)))))
    except csv.Error as problem:
        raise DataError(
            f"{path}: not a readable CSV file ({problem}); texts above 131,072 characters must be cut."
        ) from problem
    if not rows or "text" not in rows[0]:
        raise DataError(f"{path}: no column 'text'; name the column of texts so in the first line.")
    bare = next((i for i, row in enumerate(rows) if not row["text"]), None)
    if bare is not None:
        raise DataError(f"{path}: row {bare + 2} has no text; remove it or fill it in.")
    names = [row.get("label") or "" for row in rows]
    classes = tuple(sorted(set(names)))
    return Corpus(path.stem, tuple(r["text"] for r in rows), tuple(classes.index(n) for n in names), classes)


def load_text(path: Path) -> Corpus:
    """A folder, an archive or a CSV file of texts, whichever the path is."""
    if path.is_dir() or is_archive(path):
        return load_text_folder(path)
    return load_text_csv(path)


def word_tokens(corpus: Corpus, *, length: int = 250, vocabulary: int = 10_000) -> TextData:
    """Words and signs as tokens, the most frequent ones kept: no extra needed, same ids for the same texts."""
    require_positive("tokeniser", length=length, vocabulary=vocabulary)
    words = [_WORD.findall(text.lower())[:length] for text in corpus.texts]
    counts = Counter(word for text in words for word in text)
    kept = sorted(counts, key=lambda word: (-counts[word], word))[: vocabulary - 2]
    entries = (PAD, UNKNOWN, *sorted(kept))
    ids = {word: i for i, word in enumerate(entries)}
    return pack(corpus, [[ids.get(word, 1) for word in text] for text in words], entries, length)


def pack(corpus: Corpus, ids: list[list[int]], vocabulary: tuple[str, ...], length: int) -> TextData:
    """Cut or pad every text to one length; entry 0 of the vocabulary is the padding."""
    tokens = torch.zeros(len(ids), length, dtype=torch.long)
    for row, text in enumerate(ids):
        cut = torch.tensor(text[:length], dtype=torch.long)
        tokens[row, : len(cut)] = cut
    return TextData(corpus.name, tokens, torch.tensor(corpus.labels), corpus.classes, vocabulary)


def _text(content: bytes, place: str) -> str:
    try:
        return content.decode("utf-8-sig")  # spreadsheets put a mark before the first letter
    except UnicodeDecodeError as problem:
        raise DataError(f"{place}: not UTF-8 text (byte {problem.start}); convert it to UTF-8.") from problem
