"""The arithmetic inside a private step: full float32, plain operations."""

import contextlib
import warnings
from collections.abc import Iterator

import torch
from torch import Tensor


def dense(gradient: Tensor) -> Tensor:
    """A gradient with all its zeros."""
    return gradient.to_dense() if gradient.is_sparse else gradient


@contextlib.contextmanager
def exact_arithmetic(device: torch.device) -> Iterator[None]:
    """Full float32 products: no TF32, no bfloat16 inside, no autocast, no graph."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Plain operations only: attention's fast path would hide its parameters; slow batching rules are no news to the user."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="There is a performance drop")
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
