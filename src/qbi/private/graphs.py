"""A part of a private step as a CUDA graph."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from qbi.cuda_graphs import recorded
from qbi.errors import first_line

log = logging.getLogger("qbi.private")

Work = Callable[[Any, Any, Tensor], None]
"""Adds a part of a batch (inputs, targets, which of them count) to sums that stay where they are."""


@dataclass
class _Captured:
    graph: torch.cuda.CUDAGraph
    batch: Any
    key: Any


class Graphed:
    """Runs work as a captured graph; where it cannot be captured, as it is."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._captured: _Captured | None = None
        self._failed = False

    def __call__(self, work: Work, inputs: Any, targets: Any, used: Tensor) -> None:
        """Do the work on one part of a batch, all parts of one shape."""
        batch = (inputs, targets, used)
        if self._failed:
            work(*batch)
            return
        key = self._key(batch)
        if self._captured is None or self._captured.key != key:
            self._capture(work, batch, key)
            if self._failed:
                work(*batch)
                return
        assert self._captured is not None
        for own, value in zip(tree_leaves(self._captured.batch), tree_leaves(batch), strict=True):
            own.copy_(value)
        self._captured.graph.replay()

    def _capture(self, work: Work, batch: Any, key: Any) -> None:
        """Record the work on copies of a batch; in the trial runs before, no sample counts, so that nothing is added."""
        own = tree_map(torch.clone, batch)
        own[2].zero_()
        try:
            graph = recorded(lambda: work(*own))
        except Exception as problem:
            log.info("the step runs without a CUDA graph: %s", first_line(problem))
            self._failed, self._captured = True, None
            torch.cuda.synchronize()
            return
        self._captured = _Captured(graph, own, key)

    def _key(self, batch: Any) -> Any:
        """What a recording depends on beside the values: shapes, places of the weights, modes."""
        shapes = tuple((v.shape, v.dtype) for v in tree_leaves(batch))
        places = tuple(p.data_ptr() for p in self.model.parameters())
        modes = tuple(m.training for m in self.model.modules())
        return shapes, places, modes, torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
