"""Batches for a framework's training loop that `qbi.Private` draws, one pass for each epoch."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import IterableDataset, TensorDataset, default_collate

from qbi.errors import BadValue
from qbi.private import Private
from qbi.private.drawing import Sampling, as_dataset

Collate = Callable[[Sequence[Any]], Any]


class DrawnBatches:
    """What a framework takes for a loader: each time it is gone through, `private.batches` draws a pass and counts it.

    Args:
        private: asked for when a pass begins, so that it may be made after the loader.
        dataset: with a length and samples by number, or a tuple of tensors.
        batch_size: samples in a batch.
    """

    def __init__(
        self,
        private: Callable[[], Private],
        dataset: Any,
        batch_size: int,
        *,
        sampling: Sampling = "passes",
        workers: int = 0,
    ) -> None:
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
            raise BadValue(
                f"private: a {type(dataset).__name__} has no length; participations are counted by drawing from a data set that has one."
            )
        tensors = isinstance(dataset, tuple) and all(isinstance(part, Tensor) for part in dataset)
        self.dataset: Any = TensorDataset(*dataset) if tensors else dataset
        self.batch_size, self.collate_fn = batch_size, default_collate
        self._private, self._sampling, self._workers = private, sampling, workers

    def __len__(self) -> int:
        return math.ceil(len(as_dataset(self.dataset)) / self.batch_size)

    def __iter__(self) -> Iterator[Any]:
        return self._private().batches(self.dataset, self.batch_size, sampling=self._sampling, workers=self._workers)


class Collated:
    """A data set whose samples are put into tensors one by one: no collator sees two of them, and all have one shape."""

    def __init__(self, dataset: Any, collate: Collate) -> None:
        self.dataset, self.collate = dataset, collate
        self._shapes: list[tuple[int, ...]] | None = None

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, number: int) -> Any:
        one = self.collate([self.dataset[int(number)]])
        one = dict(one) if hasattr(one, "keys") else one
        leaves = tree_leaves(one)
        if not all(isinstance(v, Tensor) and v.dim() and len(v) == 1 for v in leaves):
            raise BadValue(
                "private: the collator makes more of a sample than tensors with one row; leave such columns out."
            )
        shapes = [tuple(v.shape[1:]) for v in leaves]
        if self._shapes is None:
            self._shapes = shapes
        if shapes != self._shapes:
            raise BadValue(
                f"private: samples have shapes {self._shapes[0]} and {shapes[0]}, which would tell of the data; pad or cut all of them to one "
                "length (padding='max_length', truncation=True)."
            )
        return tree_map(lambda v: v[0], one)
