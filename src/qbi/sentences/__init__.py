"""From the gradient of an honest transformer to sentences: what its layers' gradients span, tested token by token."""

from qbi.sentences.batch import ReadSentences
from qbi.sentences.reading import read_sentences
from qbi.sentences.scores import SentenceScores, rouge, score

__all__ = ["ReadSentences", "SentenceScores", "read_sentences", "rouge", "score"]
