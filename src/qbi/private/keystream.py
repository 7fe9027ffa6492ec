"""Random bits that protect: a stream cipher under a key that the operating system gives for one step, never stored, never seeded.

On a CPU the stream is AES-128 in counter mode, from OpenSSL; on a GPU it is ChaCha20 (`gpu.py`). Both are tested against published
vectors. A stream of either kind cannot be told from random bits by anybody without the key, however much of it is known.
"""

import hashlib
import itertools
import os
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

KEY_BYTES = 32
Keys = Callable[[], bytes]


def system_key() -> bytes:
    """A fresh key from the operating system."""
    return os.urandom(KEY_BYTES)


class AesStream:
    """AES-128 in counter mode: the first half of a key is the cipher's, the second starts the counter.

    Vectors: NIST SP 800-38A, F.5.
    """

    def __init__(self, key: bytes) -> None:
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

        self._cipher = Cipher(algorithms.AES(key[:16]), modes.CTR(key[16:])).encryptor()

    def words(self, count: int) -> Tensor:
        """The next so many 64-bit words."""
        if not count:
            return torch.zeros(0, dtype=torch.int64)
        out = bytearray(8 * count + 16)
        self._cipher.update_into(_zeros(8 * count), out)
        return torch.frombuffer(out, dtype=torch.int64, count=count)

    def uniform(self, count: int) -> Tensor:
        """Whole numbers from 0 to 2⁶³ − 1."""
        return self.words(count) & (2**63 - 1)


@lru_cache(maxsize=4)
def _zeros(count: int) -> bytes:
    return bytes(count)


def permutation(count: int) -> Tensor:
    """A fresh order of so many things; two equal words, of 2⁶³, are the only flaw."""
    return AesStream(system_key()).uniform(count).argsort()


def repeated_keys(seed: int) -> Keys:
    """Keys that follow from a seed: for experiments whose results are to be repeated. Nothing that protects uses them."""
    count = itertools.count()
    return lambda: hashlib.sha256(f"{seed} {next(count)}".encode()).digest()
