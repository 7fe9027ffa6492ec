"""Which samples make a batch: drawn with the operating system's randomness, so that participations are counted, not promised."""

import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, default_collate

from qbi.errors import BadValue
from qbi.private.keystream import AesStream, permutation, system_key

Sampling = Literal["passes", "poisson"]
"""Passes without putting back: each sample once in each. Poisson: each sample in each batch by a chance of its own."""


class Tensors:
    """A data set of tensors that are indexed together."""

    def __init__(self, parts: Sequence[Any]) -> None:
        self.parts = tuple(parts)

    def __len__(self) -> int:
        return len(_first(self.parts))

    def take(self, chosen: Tensor) -> Any:
        """The samples of these numbers."""
        return tree_map(lambda v: v[chosen.to(v.device)], self.parts)


def _first(value: Any) -> Tensor:
    if isinstance(value, dict):
        return _first(next(iter(value.values())))
    return _first(value[0]) if isinstance(value, tuple | list) else value


def draws(count: int, batch_size: int, sampling: Sampling) -> list[Tensor]:
    """The numbers of the samples in each batch of one pass."""
    if sampling == "passes":
        return list(permutation(count).split(batch_size))
    if sampling != "poisson":
        raise BadValue(f"private: sampling is {sampling!r}; there are passes and poisson.")
    rate, steps = batch_size / count, math.ceil(count / batch_size)
    if rate >= 1:
        return [torch.arange(count)] * steps
    below = int(rate * 2**63)
    return [(AesStream(system_key()).uniform(count) < below).nonzero()[:, 0] for _ in range(steps)]


def participations(count: int, batch_size: int, sampling: Sampling) -> float:
    """How often a sample takes part in one pass: once; by Poisson sampling, on average."""
    return 1.0 if sampling == "passes" else math.ceil(count / batch_size) * batch_size / count


def check(count: int, batch_size: int) -> None:
    """Refuse what cannot be drawn."""
    if count < 1:
        raise BadValue("private: the data set is empty.")
    if not 1 <= batch_size <= count:
        raise BadValue(f"private: batches of {batch_size} from {count} samples; choose a batch size from 1 to {count}.")


def load(dataset: Any, chosen: Sequence[Tensor], workers: int) -> Iterator[Any]:
    """The batches with these numbers, as tensors; an empty one has tensors without a sample."""
    if isinstance(dataset, Tensors):
        yield from (dataset.take(numbers) for numbers in chosen)
        return
    full = [numbers.tolist() for numbers in chosen if len(numbers)]
    loader = iter(DataLoader(dataset, batch_sampler=full, num_workers=workers))
    for numbers in chosen:
        if len(numbers):
            yield next(loader)
        else:
            yield tree_map(lambda v: v[:0], default_collate([dataset[0]]))


def as_dataset(dataset: Any) -> Any:
    """Tuples of tensors and `TensorDataset` are indexed at once; other data sets sample by sample."""
    if isinstance(dataset, torch.utils.data.TensorDataset):
        return Tensors(dataset.tensors)
    if isinstance(dataset, tuple) and all(isinstance(p, Tensor | dict | tuple) for p in dataset):
        return Tensors(dataset)
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise BadValue(
            f"private: a {type(dataset).__name__} cannot be drawn from; give a data set with a length and samples by number, or a "
            "tuple of tensors. Participations are counted by drawing."
        )
    return dataset
