"""Sums of clipped gradients of one batch, in float64, part by part in sizes that do not depend on the data."""

import contextlib
import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from qbi.errors import BadValue, first_line
from qbi.private.graphs import Graphed
from qbi.private.incoming import filled, mode_of
from qbi.private.keystream import Keys, system_key
from qbi.private.planning import find_plan, refuse_carrying
from qbi.private.refusals import refuse_mixing
from qbi.private.reporting import totals
from qbi.private.samples import Evaluator, Plan

log = logging.getLogger("qbi.private")


class Sums:
    """The sum that a step will release, and what its owner may know of it.

    Args:
        evaluator: the model and the loss of one sample.
        clip: the longest that a sample's gradient may be.
        at_once: samples that are evaluated at once.
        graphs: on a GPU, record a part's work as a CUDA graph.
    """

    def __init__(self, evaluator: Evaluator, clip: float, at_once: int, *, graphs: bool) -> None:
        self.evaluator, self.clip, self.at_once, self.graphs = evaluator, clip, at_once, graphs
        shapes = evaluator.shapes
        self.device = next(iter(evaluator.parameters.values())).device
        self.total = torch.zeros(sum(s.numel() for s in shapes.values()), dtype=torch.float64, device=self.device)
        parts = self.total.split([s.numel() for s in shapes.values()])
        self._by_name = {n: part.view(s) for (n, s), part in zip(shapes.items(), parts, strict=True)}
        self.seen = torch.zeros(5, dtype=torch.float64, device=self.device)
        self.seeds: Keys = system_key
        self.parts = 0
        """How many times samples were added since the last release."""
        self.failed = ""
        """What ended the training: a sample on which the model failed."""
        self.evaluating = False
        """Whether a model is being run: nothing else of a training happens inside."""
        self._graphed = Graphed(evaluator.model)
        self._plan: Plan | None = None
        self._mode: Any = None

    def refuse_inside(self) -> None:
        """A model that trains itself while it is run would count its samples in a sum that nobody expects."""
        if self.failed:
            raise BadValue(
                f"private: the model failed on data ({self.failed}). Going on without that batch would tell of a sample, and without noise; this "
                "training is over. Mend the model, and create Private anew."
            )
        if self.evaluating:
            raise BadValue("private: add, step and batches are not called by a model or a loss while they are run.")

    def clear(self) -> None:
        """Begin anew."""
        self.total.zero_()
        self.seen.zero_()
        self.parts = 0

    def add(self, inputs: Any, targets: Any, count: int, batch_size: int) -> None:
        """Add so many samples; all of them or, where something fails, none of the whole batch."""
        self.parts += 1  # before anything is evaluated: what asks meanwhile must know of them
        self.evaluating = True
        try:
            inputs, targets = tree_map(lambda v: v.to(self.device), (inputs, targets))
            plan = self._planned(inputs, targets, batch_size)
            with torch.random.fork_rng(devices=[]), self._ended_by_failures():
                self._seed()
                for start in range(0, count, plan.at_once):
                    self._add_part(inputs, targets, start, count, plan)
        except BaseException:
            # Part of a batch must not be released, nor come twice.
            self.clear()
            raise
        finally:
            self.evaluating = False

    @contextlib.contextmanager
    def _ended_by_failures(self) -> Iterator[None]:
        """On data, whether something fails is told by a sample: nothing comes after it. Where samples go one by one, it counts for nothing instead."""
        try:
            yield
        except Exception as problem:
            self.failed = first_line(problem)
            raise

    def _planned(self, inputs: Any, targets: Any, batch_size: int) -> Plan:
        """How the model is run; found out anew where its switches changed."""
        mode = mode_of(self.evaluator.model, self.device)
        if self._plan is None or self._mode != mode:
            refuse_mixing(self.evaluator.model)
            self._mode = mode
            plan = find_plan(self.evaluator, inputs, targets, min(self.at_once, batch_size))
            refuse_carrying(self.evaluator, inputs, targets, plan)
            self._plan = plan
            if not self._plan.mapped:
                log.warning("samples go one by one, which is slow: %s", self._plan.reason)
        return self._plan

    def _seed(self) -> None:
        """Dropout and samplers draw from a secret seed: what one sample draws tells nothing of how much others drew."""
        secret = int.from_bytes(self.seeds()[:8], "little") >> 1
        torch.default_generator.manual_seed(secret)
        if self.device.type == "cuda":
            torch.cuda.manual_seed(secret)

    def _add_part(self, inputs: Any, targets: Any, start: int, count: int, plan: Plan) -> None:
        size = plan.at_once
        x, y = tree_map(lambda v: filled(v[start : start + size], size), (inputs, targets))
        used = torch.arange(size, device=self.device) < count - start
        if self.graphs and self.device.type == "cuda" and plan.mapped:
            self._graphed(self._add, x, y, used)
        else:
            self._add(x, y, used)

    def _add(self, inputs: Any, targets: Any, used: Tensor) -> None:
        assert self._plan is not None
        seen, losses = self.evaluator.add(self._by_name, inputs, targets, used, self.clip, self._plan)
        self.seen += totals(seen, losses, used, self.clip)


def one_at_a_time(drawn: Iterator[Any], lock: AbstractContextManager[Any], sums: Sums) -> Iterator[Any]:
    """Batches, each drawn while nothing is evaluated or released."""
    while True:
        with lock:
            sums.refuse_inside()
            batch = next(drawn, None)
        if batch is None:
            return
        yield batch
