"""Decoding on the accelerator that holds the update, where matrices are large enough to keep it busy.

Most of a decoding is many small steps, at which a processor is faster. A cascade over a thousand rows is not: there each step multiplies
matrices of that size. Certificates are given on the processor in any case, by the model as it runs.
"""

from dataclasses import fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from qbi.attacks.by_label import ByLabel
from qbi.attacks.explaining import ByNumber
from qbi.extraction.decoding import cascade
from qbi.extraction.recovered import Recovered
from qbi.extraction.system import System

Record = TypeVar("Record", System, Recovered, ByLabel)

LARGE = 2**15
"""Entries of the space of backprops from which on an accelerator is faster."""


def cascaded(system: System, tail: ByLabel | ByNumber, outputs: int, device: torch.device) -> Recovered:
    """The cascade, where it is fastest; what it finds stands on the processor."""
    if device.type == "cpu" or system.basis.numel() < LARGE or not isinstance(tail, ByLabel) or not tail.goes_anywhere:
        return cascade(system, tail, outputs)
    return _moved(cascade(_moved(system, device), _moved(tail, device), outputs), system.bias.device)


def _moved(record: Record, device: torch.device) -> Record:
    """The same with its tensors elsewhere."""
    values = {field.name: getattr(record, field.name) for field in fields(record)}
    moved: dict[str, Any] = {name: value.to(device) for name, value in values.items() if isinstance(value, Tensor)}
    return replace(record, **moved)
