"""The arithmetic inside a private step: full float32, plain operations."""

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


def dense(gradient: Tensor) -> Tensor:
    """A gradient with all its zeros."""
    return gradient.to_dense() if gradient.is_sparse else gradient


@contextlib.contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Full float32 products: no TF32, no bfloat16 inside, no autocast."""
    try:
        products, convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    except RuntimeError:  # somebody chose precisions one by one, as newer versions of torch let them
        with _each_precise(), torch.autocast(device.type, enabled=False):
            yield
        return
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        torch.set_float32_matmul_precision(products)
        torch.backends.cudnn.allow_tf32 = convolutions


@contextlib.contextmanager
def _each_precise() -> Iterator[None]:
    backends: Any = torch.backends
    places = [backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn, backends.mkldnn.matmul, backends.mkldnn.conv, backends.mkldnn.rnn]  # fmt: skip
    before = [place.fp32_precision for place in places]
    for place in places:
        place.fp32_precision = "ieee"
    try:
        yield
    finally:
        for place, value in zip(places, before, strict=True):
            place.fp32_precision = value


@contextlib.contextmanager
def exact_arithmetic(device: torch.device) -> Iterator[None]:
    """Full float32 products, and no graph."""
    with torch.no_grad(), full_precision(device):
        yield


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
