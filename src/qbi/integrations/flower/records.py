"""Between Flower's records and named tensors, integer buffers included."""

from pathlib import Path
from typing import TypeVar

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from safetensors.torch import save
from torch import Tensor

from qbi.files import write_atomically

Kind = TypeVar("Kind", ArrayRecord, ConfigRecord, MetricRecord)


def records_in(content: RecordDict, kind: type[Kind]) -> dict[str, Kind]:
    """A message's records of one kind. Flower's own views (`array_records`, …) tie a message to itself: its arrays then outlive it."""
    return {name: record for name, record in content.items() if isinstance(record, kind)}


def state_of(arrays: ArrayRecord) -> dict[str, Tensor]:
    """The arrays by name, whatever their type; scalars and whole numbers stay what they are."""
    return {name: torch.from_numpy(array.numpy().copy()) for name, array in arrays.items()}


def sent_in(message: Message) -> dict[str, Tensor]:
    """Every array of a message, whatever number of records it came in."""
    records = records_in(message.content, ArrayRecord)
    return {name: value for record in records.values() for name, value in state_of(record).items()}


def arrays_of(state: dict[str, Tensor]) -> ArrayRecord:
    """Named tensors as a record to send."""
    return ArrayRecord({name: value.detach().cpu().contiguous() for name, value in state.items()})


def save_record(arrays: ArrayRecord, path: Path) -> None:
    """A record as safetensors, which `qbi replay` and `qbi inspect` read."""
    write_atomically(path, save({n: v.contiguous() for n, v in state_of(arrays).items()}))
