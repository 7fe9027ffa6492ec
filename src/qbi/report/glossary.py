"""What each word and each number means: the one place, for `docs/glossary.md` and for every report.

The glossary's page is rendered from `TERMS`; a report has each meaning where the number stands.
"""

from dataclasses import dataclass

from qbi.metrics import CLEAR, EXACT, FAITHFUL, RECOGNISABLE
from qbi.report.wording import level_words, threshold_words


@dataclass(frozen=True)
class Term:
    """A word, and what is meant by it, in plain text."""

    key: str
    word: str
    meaning: str
    shown: bool = False
    """Whether a report's list of words has it."""


TERMS = (
    Term(
        "server",
        "server",
        "whoever sends the model and receives updates. Malicious: it writes weights of its own choice. Honest-but-curious: it leaves the model as it is",
    ),
    Term("client", "client", "whoever trains on private samples and sends an update"),
    Term(
        "update",
        "update",
        "what a client sends: the gradient of one step (FedSGD), or the change of its weights after local training (FedAvg)",
        shown=True,
    ),
    Term("batch", "batch, B", "the samples behind one step"),
    Term("batches", "batches tried", "how many batches were attacked; ± is a 95 % interval over them"),
    Term(
        "layer",
        "layer, N, M",
        "a linear map of M inputs to N neurons. Rows are neurons: a row of the weight's gradient and its entry of the bias's gradient belong together",
    ),
    Term("neurons", "neurons, N", "rows of a layer that a server can read, or write"),
    Term(
        "values",
        "values",
        "numbers of a sample that arrive at the layer; times positions, where it has tokens or patches",
    ),
    Term(
        "use",
        "use",
        "one operation that a parameter takes part in; its gradient is the sum over uses of input ⊗ backprop",
    ),
    Term("features", "input of the layer, features", "what the layers in front make of a sample"),
    Term(
        "backprops",
        "backprops, δ",
        "per-sample gradients of the loss with respect to a layer's outputs: how much each sample adds to each row",
    ),
    Term(
        "per-sample",
        "per-sample gradient",
        "the gradient that a sample would have alone; the private step clips its norm",
    ),
    Term(
        "recover", "to recover, to reconstruct, to read", "to get a sample back from an update, to a stated precision"
    ),
    Term(
        "recall",
        "recall, R",
        "the share of a batch that is recovered. By activations: samples that stand alone in some row. From gradients: samples matched one to one",
        shown=True,
    ),
    Term(
        "share",
        "share read",
        "the part of a batch that the strongest attack recovers at the level of --fail-at, where that is more than a guess",
        shown=True,
    ),
    Term(
        "levels",
        "recall at 60, 30, 19 dB",
        "the same, where a reconstruction counts from that PSNR on: no visible difference, a good picture, a recognisable one",
    ),
    Term(
        EXACT.key,
        "exact",
        "mean squared error below 1e-10, as in the paper; in pixels for images, in each feature's spread for all else",
        shown=True,
    ),
    Term("active", "A", "the share of neurons that fire for some sample", shown=True),
    Term("precision", "P", "the share of neurons that fire for exactly one sample", shown=True),
    Term(
        "alone", "R by activations", "the share of samples that stand alone in some row: what single rows can give away"
    ),
    Term(
        "predicted",
        "predicted",
        "R by the law of the Gram matrix of this very batch, without a training step",
        shown=True,
    ),
    Term("limit", "limit", "R that random rows reach on normal data", shown=True),
    Term(
        "guess",
        "a guess",
        "the share that somebody who read nothing would hit, with the mean of other samples or the nearest of them",
        shown=True,
    ),
    Term("crafted", "crafted rows", "weights and biases that a malicious server writes into a layer"),
    Term(
        "carrier", "carrier", "how a sample stands in the input of an attacked layer, and what of it is lost on the way"
    ),
    Term(
        "cascade",
        "cascade",
        "rows at many quantiles; what is found is subtracted everywhere (successive cancellation), which frees more",
    ),
    Term("unmixing", "unmixing", "joint decoding of an honest layer's update by the zeros that a rectifier leaves"),
    Term("joint", "joint decoding", "reading all rows of an update together, instead of row by row"),
    Term("certified", "certified", "the reader proved, without knowing the truth, that a reconstruction is right"),
    Term("side", "side information", "labels and tokens that an update tells without any reconstruction", shown=True),
    Term("rank", "rank", "dimensions that the gradient of a layer spans, of as many as the layer is wide"),
    Term(
        "rouge", "ROUGE-1, ROUGE-2", "overlap of single words, and of pairs, between a sentence and what was read of it"
    ),
    Term("kind", "heuristic, formal", "measured against the servers named; proven for every one", shown=True),
    Term(
        "private",
        "private step",
        "clip each per-sample gradient, sum, round to a grid, add noise from the operating system, release",
        shown=True,
    ),
    Term(
        "bits",
        "bits",
        "an upper bound on what an update can tell about one sample: 1/(2σ² ln 2) for one participation at noise σ times the clip",
        shown=True,
    ),
    Term("noise", "noise, σ", "standard deviation of the private step's noise, in units of the clip", shown=True),
    Term("psnr", "PSNR, dB", "peak signal to noise ratio of a picture: larger is closer to the sample", shown=True),
    Term(
        "gaussian",
        "Gaussian data",
        "the best PSNR that any server could reach, if the data were normal with this covariance",
    ),
    Term(
        "chance",
        "chance of a guess",
        "the most that a guess of 1 % beforehand can become by one participation, for any server",
    ),
    Term(
        "epsilon",
        "ε, δ",
        "differential privacy of one participation: likelihoods with and without a sample differ by a factor of e^ε at most, but for a chance δ",
    ),
    Term(
        "accuracy",
        "accuracy elsewhere",
        "what small networks reached on CIFAR-10 under as much noise; not this model's",
    ),
    Term("ledger", "ledger", "the owner's record of what was released about a data set"),
    Term(
        "untested",
        "not tested",
        "no claim is made. Only “recovered” and “nothing recovered by the attacks named” are findings",
        shown=True,
    ),
)
"""All of them; no key stands twice."""


def meanings(kind: str) -> dict[str, str]:
    """By key, as whole sentences, for data of one kind: dB are for pictures, spreads for all else."""
    found = {t.key: _sentence(t.meaning) for t in TERMS}
    _, levels = level_words(kind)
    for threshold in (FAITHFUL, CLEAR, RECOGNISABLE):
        said = threshold_words(threshold, kind)
        found[threshold.key] = f"The share of a batch that is recovered from gradients, {said}. {levels}"
    return found


def shown_terms(kind: str) -> list[tuple[str, str]]:
    """The words that a report lists at its end."""
    listed = [(t.word, _sentence(t.meaning)) for t in TERMS if t.shown and (t.key != "psnr" or kind == "images")]
    return [*listed, level_words(kind)]


def _sentence(meaning: str) -> str:
    """
    >>> _sentence("no claim is made")
    'No claim is made.'
    """
    return f"{meaning[0].upper()}{meaning[1:]}."
