"""Work on a GPU, recorded once and replayed: launching hundreds of small kernels costs more than running them."""

import logging
from collections.abc import Callable

import torch

from qbi.errors import first_line

log = logging.getLogger("qbi.cuda_graphs")

TRIALS = 2
"""Runs before a recording, in which libraries choose their kernels and take their memory."""


def recorded(work: Callable[[], None], trials: int = TRIALS) -> torch.cuda.CUDAGraph:
    """The work as a CUDA graph, after trial runs; whatever it reads and writes stays where it is. Raises what the work raises."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(trials):
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def replaying(work: Callable[[], None]) -> Callable[[], None]:
    """The work to do from now on, recorded; as it is where it cannot be. It has been done some times already."""
    try:
        return recorded(work).replay
    except Exception as problem:
        log.info("runs without a CUDA graph: %s", first_line(problem))
        torch.cuda.synchronize()
        return work
