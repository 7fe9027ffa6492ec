"""The keystream and the noise: published vectors, the law in the middle and in the tails, and what rounding leaves of a pair."""

import math
import os

import mpmath
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from scipy import stats

from qbi.private import keystream, noise
from qbi.private.keystream import AesStream, permutation, repeated_keys, system_key
from qbi.private.noise import SPREAD, add_noise, noise_slack, pairs_of
from qbi.private.release import Grid, release

KEY = bytes.fromhex("2b7e151628aed2a6abf7158809cf4f3c")
COUNTER = bytes.fromhex("f0f1f2f3f4f5f6f7f8f9fafbfcfdfeff")


def test_the_keystream_is_aes_in_counter_mode_by_nist():
    """SP 800-38A, F.5.1: plaintext and ciphertext of four blocks; the stream is their difference."""
    plain = bytes.fromhex(
        "6bc1bee22e409f96e93d7e117393172aae2d8a571e03ac9c9eb76fac45af8e51"
        "30c81c46a35ce411e5fbc1191a0a52eff69f2445df4f9b17ad2b417be66c3710"
    )
    cipher = bytes.fromhex(
        "874d6191b620e3261bef6864990db6ce9806f66b7970fdff8617187bb9fffdff"
        "5ae4df3edbd5d35e5b4f09020db03eab1e031dda2fbe03d1792170a0f3009cee"
    )
    stream = AesStream(KEY + COUNTER)
    first, rest = stream.words(3), stream.words(5)
    drawn = torch.cat([first, rest]).numpy().tobytes()
    assert bytes(a ^ b for a, b in zip(plain, cipher, strict=True)) == drawn


def test_keys_come_from_the_system_and_are_never_the_same(monkeypatch):
    assert len({system_key() for _ in range(100)}) == 100
    asked = []
    monkeypatch.setattr(os, "urandom", lambda n: asked.append(n) or bytes(n))
    release(torch.zeros(10, dtype=torch.float64), Grid.of(1.0, 0.1, 10))
    assert asked == [keystream.KEY_BYTES]


def test_repeated_keys_are_for_experiments_and_repeat():
    a, b = repeated_keys(3), repeated_keys(3)
    assert [a(), a()] == [b(), b()]
    assert repeated_keys(4)() != repeated_keys(3)()


def drawn(count, spread, key=bytes(32)):
    out = torch.zeros(count, dtype=torch.float64)
    add_noise(out, spread, key)
    return out


@pytest.mark.parametrize("spread", [3.0, SPREAD])
def test_the_law_is_that_of_a_rounded_gaussian(spread):
    """A million fixed values against Φ((k+½)/τ) − Φ((k−½)/τ), in 60 cells of equal chance: χ² with the stated law."""
    values = drawn(1_000_000, spread, bytes(range(32)))
    assert torch.equal(values, values.round())
    edges = (
        torch.tensor([round(spread * stats.norm.ppf(i / 60)) for i in range(1, 60)], dtype=torch.float64).unique() + 0.5
    )
    counted = torch.bincount(torch.bucketize(values, edges), minlength=len(edges) + 1).double().numpy()
    chances = stats.norm.cdf(edges.numpy() / spread)
    expected = 1e6 * (torch.tensor([*chances, 1.0]) - torch.tensor([0.0, *chances])).numpy()
    assert stats.chisquare(counted, expected).pvalue > 1e-4
    # A wrong spread is told apart by the same test.
    wrong = (
        1e6
        * (
            torch.tensor([*stats.norm.cdf(edges.numpy() / (1.01 * spread)), 1.0])
            - torch.tensor([0.0, *stats.norm.cdf(edges.numpy() / (1.01 * spread))])
        ).numpy()
    )
    assert stats.chisquare(counted, wrong).pvalue < 1e-4


def test_the_two_of_a_pair_are_independent():
    """Radius shared, angle shared: the joint law is a product all the same, on a 12 × 12 table."""
    a, b = pairs_of(AesStream(bytes(range(32))), 500_000, SPREAD)
    edges = torch.tensor(stats.norm.ppf([i / 12 for i in range(1, 12)])) * SPREAD
    table = torch.zeros(144).index_add_(
        0, torch.bucketize(a, edges) * 12 + torch.bucketize(b, edges), torch.ones(500_000)
    )
    assert stats.chi2_contingency(table.reshape(12, 12).numpy()).pvalue > 1e-4


class Words(AesStream):
    """A stream of chosen words."""

    def __init__(self, *words):
        self.queue = [torch.tensor(w, dtype=torch.int64) for w in words]

    def words(self, count):
        out = self.queue.pop(0)
        assert len(out) == count
        return out

    def uniform(self, count):
        return self.words(count) & (2**63 - 1)


def test_the_tail_goes_on_where_the_first_word_ends():
    """Radius words from one to 2⁴⁷ − 1, with 63 bits more: the radius is that of the exact uniform to one part in 10¹⁴."""
    radii = [0, 1, 2, 1000, 2**47 - 1, 2**47, 2**62, 2**63 - 1]
    extra = [5, 2**62, 7, 2**63 - 1, 1]
    a, b = pairs_of(Words(radii, [0] * 8, extra), 8, 2.0**40)
    for number, (radius, found) in enumerate(zip(radii, a.tolist(), strict=True)):
        more = extra[number] if radius < 2**47 else 0
        exact = mpmath.mpf(radius) + mpmath.mpf(more) / 2**63 + mpmath.mpf(2) ** -64
        expected = mpmath.sqrt(-2 * mpmath.log(min(mpmath.mpf(1), exact / 2**63))) * 2**40
        assert abs(found - expected) <= 1 + float(expected) * 1e-14
    assert bool((b == 0).all())
    assert a[0] / 2.0**40 > 12.9  # a tail that 63 bits alone would end at 9.4


def test_tail_chances_are_right():
    """How often |z| > 4.5 τ in twenty million: 136 expected; 60 to 220 is five standard deviations and more."""
    beyond = sum(int((drawn(2_000_000, SPREAD, bytes([i] * 32)).abs() > 4.5 * SPREAD).sum()) for i in range(10))
    expected = 2e7 * 2 * stats.norm.sf(4.5)
    assert abs(beyond - expected) < 5 * math.sqrt(expected)


def test_float64_functions_keep_the_error_that_is_allowed_for():
    """log, square root, cosine and sine of torch, on a thousand arguments of the sampler, against 60 digits: below 4 units each."""
    with mpmath.workdps(60):
        u = (torch.rand(1000, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) ** 8).clamp_min(2.0**-60)
        angle = (torch.rand(1000, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) - 0.5) * 2 * math.pi
        for function, exact, values in (
            (torch.log, mpmath.log, u),
            (torch.sqrt, mpmath.sqrt, u),
            (torch.cos, mpmath.cos, angle),
            (torch.sin, mpmath.sin, angle),
        ):
            for value, found in zip(values.tolist(), function(values).tolist(), strict=True):
                true = exact(mpmath.mpf(value))
                # Relative to the function's own size, or to 1 for cosine and sine, whose error moves a point by so much of the radius.
                size = max(abs(true), mpmath.mpf(1)) if function in (torch.cos, torch.sin) else abs(true)
                assert abs(mpmath.mpf(found) - true) <= 4 * size * 2.0**-53


def test_the_slack_is_what_its_formula_says():
    assert noise_slack(11_200_000) == pytest.approx(0.2024, rel=1e-3)
    assert noise.DISPLACED < 2.0**-28


def test_draws_are_orders_and_nothing_else():
    assert sorted(permutation(500).tolist()) == list(range(500))
    assert not torch.equal(permutation(500), permutation(500))


def chacha_block(key, counter, nonce):
    """RFC 8439 by OpenSSL: the 16 words of one block."""
    state = counter.to_bytes(4, "little") + b"".join(n.to_bytes(4, "little") for n in nonce)
    return Cipher(algorithms.ChaCha20(key, state), mode=None).encryptor().update(bytes(64))


def test_openssl_gives_the_rfc_block_that_the_gpu_test_compares_with():
    """RFC 8439, 2.3.2."""
    block = chacha_block(bytes(range(32)), 1, (0x09000000, 0x4A000000, 0))
    assert block[:16].hex() == "10f1e7e4d13b5915500fdd1fa32071c4"


def test_there_is_one_zero():
    """A sum just below nothing, and noise just below nothing, round to zeros whose sign would tell the sum's."""
    grid = Grid.of(1.0, 0.1, 4)
    for keys in (repeated_keys(3), system_key):
        total = torch.full((2_000_000,), -0.3 * grid.step, dtype=torch.float64)
        out = release(total, grid, keys=keys)
        assert int((out == 0).sum()) > 0
        assert not bool(((out == 0) & out.signbit()).any())
    still = release(torch.full((8,), -0.3 * grid.step, dtype=torch.float64), Grid.of(1.0, 0.0, 4))
    assert not bool(still.signbit().any())
