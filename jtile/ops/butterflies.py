"""Small Fourier transforms as arithmetic, and the roots of unity of longer ones (Cooley and Tukey 1965).

Complex numbers are pairs (real, imaginary) of tiles here, so that multiplications by 1, i and (1 + i) / sqrt(2) cost
no more than they have to.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax.numpy as jnp
import numpy as np

Pair = tuple[Any, Any]
PRIMES = (3, 5, 7, 11, 13)


def add(a: Pair, b: Pair) -> Pair:
    return a[0] + b[0], a[1] + b[1]


def subtract(a: Pair, b: Pair) -> Pair:
    return a[0] - b[0], a[1] - b[1]


def multiply(a: Pair, b: Pair) -> Pair:
    return a[0] * b[0] - a[1] * b[1], a[0] * b[1] + a[1] * b[0]


def turned(a: Pair, k: int, n: int) -> Pair:
    """a e^(2 pi i k / n)."""
    (re, im), k = a, k % n
    if 4 * k % n == 0:
        return ((re, im), (-im, re), (-re, -im), (im, -re))[4 * k // n]
    if 8 * k % n == 0:
        half, both, apart = math.sqrt(0.5), re + im, re - im
        found = {1: (apart, both), 3: (-both, apart), 5: (-apart, -both), 7: (both, -apart)}[8 * k // n]
        return found[0] * half, found[1] * half
    return multiply(a, (math.cos(2 * math.pi * k / n), math.sin(2 * math.pi * k / n)))


def butterfly(x: list[Pair], sign: int) -> list[Pair]:
    """X_k = sum_j x_j e^(sign 2 pi i j k / r) of r = len(x) numbers, a power of two or an odd prime."""
    r = len(x)
    if r == 1:
        return x
    if r % 2 == 0:
        even, odd = butterfly(x[0::2], sign), butterfly(x[1::2], sign)
        odd = [turned(v, sign * k, r) for k, v in enumerate(odd)]
        return [add(a, b) for a, b in zip(even, odd)] + [subtract(a, b) for a, b in zip(even, odd)]
    sums = [add(x[j], x[r - j]) for j in range(1, r // 2 + 1)]
    rests = [subtract(x[j], x[r - j]) for j in range(1, r // 2 + 1)]
    out = [functools.reduce(add, sums, x[0])] * r
    for k in range(1, r // 2 + 1):
        turns = [2 * math.pi * j * k / r for j in range(1, r // 2 + 1)]
        level = functools.reduce(add, [(s[0] * math.cos(t), s[1] * math.cos(t)) for s, t in zip(sums, turns)], x[0])
        tilt = functools.reduce(add, [(d[0] * math.sin(t), d[1] * math.sin(t)) for d, t in zip(rests, turns)])
        tilt = (-sign * tilt[1], sign * tilt[0])
        out[k], out[r - k] = add(level, tilt), subtract(level, tilt)
    return out


def radices(n: int, most: int) -> tuple[int, ...] | None:
    """Factors of n, powers of two up to `most` first; None where a prime factor is larger than 13."""
    found, rest = [], n
    while rest % 2 == 0:
        bits = (rest & -rest).bit_length() - 1
        per = most.bit_length() - 1
        steps = -(-bits // per)
        step = -(-bits // steps)
        found.append(1 << step)
        rest >>= step
    for p in PRIMES:
        while rest % p == 0:
            found.append(p)
            rest //= p
    return tuple(found) if rest == 1 else None


@functools.lru_cache(256)
def roots(factors: tuple[int, ...], sign: int) -> np.ndarray:
    """complex64: for every factor r but the last, and k from 1 to r - 1: e^(sign 2 pi i p k / (r m)) for p < m, where m
    is the product of the factors behind it."""
    parts = [np.ones(1)]
    for s, r in enumerate(factors[:-1]):
        m = math.prod(factors[s + 1 :])
        parts += [np.exp(sign * 2j * np.pi * (np.arange(m) * k % (r * m)) / (r * m)) for k in range(1, r)]
    return np.concatenate(parts).astype(np.complex64)


def first_root(factors: tuple[int, ...], s: int) -> int:
    """The place in `roots` where the numbers of factor s begin."""
    return 1 + sum((r - 1) * math.prod(factors[k + 1 :]) for k, r in enumerate(factors[:s]))


def divisor(n: int, most: int) -> int:
    """The largest divisor of n up to `most`."""
    return next(d for d in range(min(n, most), 0, -1) if n % d == 0)


def pair(z: Any) -> Pair:
    return jnp.real(z), jnp.imag(z)
