"""As many threads as work is worth."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

SMALL = 1e9
"""Operations of a step below which threads wait for each other longer than they compute, many times over on a busy machine."""


@contextmanager
def fitting_threads(operations: float) -> Iterator[None]:
    """One thread for small steps, as many as there were for others."""
    before = torch.get_num_threads()
    try:
        if operations < SMALL:
            torch.set_num_threads(1)
        yield
    finally:
        torch.set_num_threads(before)
