"""Measurements behind the tables of the pages: each gives a document that `qbi measure` writes and `make docs` puts into the pages."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from qbi.errors import DataError

CLONE = Path(__file__).parents[4]
"""Where pages, examples and tests stand, if this is a clone of the repository."""


@dataclass(frozen=True)
class Measurement:
    """One of them: what it asks, where its function stands, and the file it writes, relative to a clone."""

    name: str
    question: str
    function: str
    file: str = ""

    @property
    def measure(self) -> Callable[..., Any]:
        """From the name of a data source, and which entries (`only`) where it keeps them, to the document."""
        module, name = self.function.rsplit(".", 1)
        found: Callable[..., Any] = getattr(import_module(f"qbi.lab.measurements.{module}"), name)
        return found

    @property
    def place(self) -> str:
        """The file that it writes."""
        return self.file or f"docs/data/{self.name}.json"


MEASUREMENTS = {
    m.name: m
    for m in (
        Measurement("pictures", "What is seen of batches of honest clients.", "pictures.pictures"),
        Measurement("unmixing", "What honest layers give away of large batches.", "unmixing.unmixing"),
        Measurement("matching", "What gradient matching sees of small batches.", "matching.matching"),
        Measurement("patches", "What the patches of a vision transformer give away.", "patches.patches"),
        Measurement("sentences", "What is read of sentences from honest transformers.", "text.sentences"),
        Measurement("fedavg", "What is read of several local steps.", "averaging.fedavg"),
        Measurement("best-case", "What the best-case server reads under noise.", "reading.best_case"),
        Measurement("learned", "What a learned code and a list of candidates read.", "reading.learned"),
        Measurement("saturation", "What the scale of rows costs.", "reading.saturation"),
        Measurement("detection", "Held-out benign models, and servers that know the detectors.", "detectors.detection"),
        Measurement("calibration", "The models the detectors' bounds were set on.", "detectors.calibration"),
        Measurement("longer", "The longest benign trainings.", "detectors.longer"),
        Measurement("audit", "Time and memory of audits.", "running.audits"),
        Measurement("audit-times", "Times of audits that users wait for.", "running.audit_times"),
        Measurement("filters", "Filters that frameworks ship, against servers that read.", "stock.filters"),
        Measurement(
            "learned-filters", "The same filters against a server that learned to read.", "stock.learned_filters"
        ),
        Measurement("federations", "What the guard costs in Flower's simulation.", "federated.costs"),
        Measurement("flower", "Accuracy with and without the guard, and an attack on the way.", "federated.prices"),
        Measurement("clients", "A thousand simulated clients.", "federated.thousand"),
        Measurement("nvflare", "Accuracy of NVFlare's example with and without the guard.", "sites.nvflare"),
        Measurement("coverage", "What the tests run through, room by room.", "testing.coverage"),
        Measurement("levels", "What is read of photos at each level of the private step, shown.", "shown.levels"),
        Measurement("zoo", "Audits of published architectures.", "running.zoo"),
        Measurement(
            "training",
            "The paper's training figure in full.",
            "running.training",
            "src/qbi/lab/reproduce/published/training_full.json",
        ),
    )
}
"""By name; one line adds one."""


def in_clone(path: str) -> Path:
    """A file that only a clone of the repository has."""
    if not (CLONE / path).exists():
        raise DataError(
            f"{path}: not here; this measurement needs a clone of the repository (`pip install -e .` in it)."
        )
    return CLONE / path
