"""Rounded Gaussian noise on whole numbers, under a ChaCha20 keystream (RFC 8439), in one launch.

A lane has one block of the stream: 16 words of 32 bits, four pairs of values. The law is that of `qbi.private.noise`: two words of 64 bits
for a pair, Box and Muller's transform in float64, rounded; where a radius word is small, 64 bits more from a stream with another nonce.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

LANES = 128


@triton.jit
def _turn(x, bits: tl.constexpr):
    return (x << bits) | (x >> (32 - bits))


@triton.jit
def _quarter(a, b, c, d):
    a = a + b
    d = _turn(d ^ a, 16)
    c = c + d
    b = _turn(b ^ c, 12)
    a = a + b
    d = _turn(d ^ a, 8)
    c = c + d
    b = _turn(b ^ c, 7)
    return a, b, c, d


@triton.jit
def _chacha(key, counter, n0, n1, n2):
    """The 16 words of each block, 20 rounds."""
    zero = counter & 0
    s0, s1, s2, s3 = zero + 0x61707865, zero + 0x3320646E, zero + 0x79622D32, zero + 0x6B206574
    k0, k1, k2, k3 = zero + tl.load(key), zero + tl.load(key + 1), zero + tl.load(key + 2), zero + tl.load(key + 3)
    k4, k5, k6, k7 = zero + tl.load(key + 4), zero + tl.load(key + 5), zero + tl.load(key + 6), zero + tl.load(key + 7)
    m0, m1, m2 = zero + n0, zero + n1, zero + n2
    a0, a1, a2, a3 = s0, s1, s2, s3
    b0, b1, b2, b3 = k0, k1, k2, k3
    c0, c1, c2, c3 = k4, k5, k6, k7
    d0, d1, d2, d3 = counter, m0, m1, m2
    for _ in range(10):
        a0, b0, c0, d0 = _quarter(a0, b0, c0, d0)
        a1, b1, c1, d1 = _quarter(a1, b1, c1, d1)
        a2, b2, c2, d2 = _quarter(a2, b2, c2, d2)
        a3, b3, c3, d3 = _quarter(a3, b3, c3, d3)
        a0, b1, c2, d3 = _quarter(a0, b1, c2, d3)
        a1, b2, c3, d0 = _quarter(a1, b2, c3, d0)
        a2, b3, c0, d1 = _quarter(a2, b3, c0, d1)
        a3, b0, c1, d2 = _quarter(a3, b0, c1, d2)
    return (
        a0 + s0, a1 + s1, a2 + s2, a3 + s3, b0 + k0, b1 + k1, b2 + k2, b3 + k3,
        c0 + k4, c1 + k5, c2 + k6, c3 + k7, d0 + counter, d1 + m0, d2 + m1, d3 + m2,
    )  # fmt: skip


@triton.jit
def _positive(low, high):
    """63 bits of two words as float64."""
    word = (low.to(tl.uint64) | (high.to(tl.uint64) << 32)) >> 1
    return word.to(tl.int64).to(tl.float64)


@triton.jit
def _add_pair(total, key, counter, number: tl.constexpr, w0, w1, w2, w3, half, values, inverse, spread):
    """Round two sums to the grid and add the pair of whole numbers that four words give."""
    place = counter.to(tl.int64) * 4 + number
    uniform = _positive(w0, w1)
    small = (uniform < 140737488355328.0) & (place < half)  # 2⁴⁷
    if tl.max(small.to(tl.int32)) > 0:
        e0, e1, e2, e3, e4, e5, e6, e7, _8, _9, _10, _11, _12, _13, _14, _15 = _chacha(key, counter, 1, 0, 0)
        if number == 0:
            extra = _positive(e0, e1)
        elif number == 1:
            extra = _positive(e2, e3)
        elif number == 2:
            extra = _positive(e4, e5)
        else:
            extra = _positive(e6, e7)
        uniform = tl.where(small, uniform + extra * 1.0842021724855044e-19, uniform)  # 2⁻⁶³
    uniform = (uniform + 5.421010862427522e-20) * 1.0842021724855044e-19
    radius = libdevice.sqrt(-2.0 * libdevice.log(uniform)) * spread
    angle = (w2.to(tl.uint64) | (w3.to(tl.uint64) << 32)).to(tl.int64).to(tl.float64) * 3.4061215800865545e-19  # π·2⁻⁶³
    first, second = libdevice.rint(radius * libdevice.cos(angle)), libdevice.rint(radius * libdevice.sin(angle))
    inside = place < half
    tl.store(
        total + place, libdevice.rint(tl.load(total + place, mask=inside, other=0.0) * inverse) + first, mask=inside
    )
    other, within = place + half, inside & (place + half < values)
    tl.store(
        total + other, libdevice.rint(tl.load(total + other, mask=within, other=0.0) * inverse) + second, mask=within
    )


@triton.jit
def _release(total, key, half, values, inverse: tl.float64, spread: tl.float64, lanes: tl.constexpr):
    counter = (tl.program_id(0) * lanes + tl.arange(0, lanes)).to(tl.uint32)
    w0, w1, w2, w3, w4, w5, w6, w7, w8, w9, w10, w11, w12, w13, w14, w15 = _chacha(key, counter, 0, 0, 0)
    _add_pair(total, key, counter, 0, w0, w1, w2, w3, half, values, inverse, spread)
    _add_pair(total, key, counter, 1, w4, w5, w6, w7, half, values, inverse, spread)
    _add_pair(total, key, counter, 2, w8, w9, w10, w11, half, values, inverse, spread)
    _add_pair(total, key, counter, 3, w12, w13, w14, w15, half, values, inverse, spread)


@triton.jit
def _words(out, key, first, n0, n1, n2, count, lanes: tl.constexpr):
    lane = tl.arange(0, lanes)
    w0, w1, w2, w3, w4, w5, w6, w7, w8, w9, w10, w11, w12, w13, w14, w15 = _chacha(
        key, (first + lane).to(tl.uint32), n0, n1, n2
    )
    at, some = out + 16 * lane, lane < count
    tl.store(at + 0, w0, mask=some)
    tl.store(at + 1, w1, mask=some)
    tl.store(at + 2, w2, mask=some)
    tl.store(at + 3, w3, mask=some)
    tl.store(at + 4, w4, mask=some)
    tl.store(at + 5, w5, mask=some)
    tl.store(at + 6, w6, mask=some)
    tl.store(at + 7, w7, mask=some)
    tl.store(at + 8, w8, mask=some)
    tl.store(at + 9, w9, mask=some)
    tl.store(at + 10, w10, mask=some)
    tl.store(at + 11, w11, mask=some)
    tl.store(at + 12, w12, mask=some)
    tl.store(at + 13, w13, mask=some)
    tl.store(at + 14, w14, mask=some)
    tl.store(at + 15, w15, mask=some)


def key_words(key: bytes, device: torch.device) -> Tensor:
    """A key of 32 bytes as 8 words on the device."""
    return torch.frombuffer(bytearray(key), dtype=torch.int32).to(device).view(torch.uint32)


def add_grid_noise(total: Tensor, step: float, spread: float, key: Tensor) -> None:
    """Round a flat float64 sum to whole numbers of grid steps and add noise of that spread, in place."""
    values = total.numel()
    half = (values + 1) // 2
    programs = triton.cdiv(triton.cdiv(half, 4), LANES)
    if programs * LANES >= 2**32:
        raise ValueError(f"{values} values are more than one keystream holds.")
    _release[(programs,)](total, key, half, values, 1 / step, spread, lanes=LANES)


def _keystream_words(key: bytes, first: int, nonce: tuple[int, int, int], count: int, device: torch.device) -> Tensor:
    """Words of some blocks, to be compared with published ones."""
    lanes = triton.next_power_of_2(max(16, count))
    out = torch.zeros(16 * lanes, dtype=torch.int32, device=device).view(torch.uint32)
    _words[(1,)](out, key_words(key, device), first, *nonce, count, lanes=lanes)
    return out[: 16 * count]
