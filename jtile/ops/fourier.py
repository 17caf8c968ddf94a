"""Fourier transforms along an axis: of any length, of complex and of real numbers."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

import jtile as jt
from jtile.errors import KernelTypeError, KernelValueError
from jtile.ops._shapes import check_axis, check_float, fit, machine, tuned
from jtile.ops.butterflies import add, butterfly, divisor, first_root, multiply, pair, radices, roots, subtract
from jtile.ops.dispatch import Implementation, Op, first_unmet

_LONGEST = (
    4096,
    1 << 15,
)  # numbers of a row that a program takes at once: on a GPU in registers, on a CPU in its cache


def _pair(x):
    """Real and imaginary parts of a tile, complex or with a last axis of both."""
    return pair(x) if jnp.issubdtype(x.dtype, jnp.complexfloating) else (x[..., 0], x[..., 1])


def _spectrum(x, *_, **__):
    return jax.ShapeDtypeStruct(x.shape[:2], jnp.complex64)


@jt.kernel(out_type=_spectrum, grid=lambda x, table, *, br, **_: jt.cdiv(x.shape[0], br))
def fft_tiles(x, table, y, *, br: int, factors: tuple[int, ...], sign: int, scale: float):
    """x, y complex64 [rows, n], or x float32 [rows, n, 2] of the same bytes, `br` rows in registers; table: `roots`."""
    # Stockham's order: with n = l r m, a step takes z[j m + p, q] to z'[p r + k, q], p < m, q < l, j, k < r:
    # z'[p, k, q] = e^(sign 2 pi i p k / (r m)) sum_j e^(sign 2 pi i j k / r) z[j, p, q]
    i, n = jt.program_id(0), x.shape[1]
    z, l = _pair(x.tiles(br, *x.shape[1:])[(i, *[0] * (len(x.shape) - 1))]), 1
    for s, r in enumerate(factors):
        m, first = n // (r * l), first_root(factors, s)
        parts = tuple(v.reshape(br, r, m, l) for v in z)
        out = butterfly([(parts[0][:, j], parts[1][:, j]) for j in range(r)], sign)
        for k in range(1, r if m > 1 else 1):
            re, im = pair(table[jt.ds(first + (k - 1) * m, m)])
            out[k] = multiply(out[k], (re[None, :, None], im[None, :, None]))
        z = tuple(jnp.stack([o[part] for o in out], 2).reshape(br, n) for part in (0, 1))
        l *= r
    z = z if scale == 1 else (z[0] * scale, z[1] * scale)
    y.tiles(br, n)[i, 0] = jax.lax.complex(*z)


def _between(x, table, *_, factors: tuple[int, ...], **__):
    """Memory for the numbers between two steps: behind the first step a row for each p with all k, real parts first;
    behind the others the real and the imaginary parts, and room for one more."""
    n, r = x.shape[1], factors[0]
    return [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((n // r, 2 * r), *[(n + 1,)] * 4)]


@jt.function
def _by_steps(x, table, i, memory, put, factors: tuple[int, ...], sign: int):
    """The transform of row i in `memory`, as `_between` has it: vectors run along q, in the first step along p. The
    results go to `put(place, pair)`; for None into memory, whose two Refs are the result of this function."""
    # s: step, of radix r; l: product of the radices before; m = n / (l r); p < m, q < l; z: r numbers; c: block of q
    n, l, more = x.shape[1], 1, [slice(None)] * (len(x.shape) - 2)
    begun, now, then = memory[0], memory[1:3], memory[3:5]
    for s, r in enumerate(factors):
        m, first, last = n // (r * l), first_root(factors, s), s + 1 == len(factors)
        b = divisor(m if s == 0 else l, 16)  # numbers that are taken at once: a vector or two, which stay in registers
        for p in jt.range(1 if s == 0 else m):
            for c in jt.range((m if s == 0 else l) // b):
                q = c * b
                if s == 0:
                    z = [_pair(x[(i, jt.ds(j * m + q, b), *more)]) for j in range(r)]
                elif s == 1:
                    z = [(begun[j * m + p, jt.ds(q, b)], begun[j * m + p, jt.ds(l + q, b)]) for j in range(r)]
                else:
                    here = [jt.ds((j * m + p) * l + q, b) for j in range(r)]
                    z = [(now[0][at], now[1][at]) for at in here]
                out = butterfly(z, sign)
                for k in range(1, 1 if last else r):
                    root = first + (k - 1) * m + (q if s == 0 else p)
                    out[k] = multiply(out[k], pair(table[jt.ds(root, b) if s == 0 else root]))
                if s == 0 and not last:
                    begun[jt.ds(q, b), :] = jnp.stack([v[part] for part in (0, 1) for v in out], -1)
                    continue
                for k, v in enumerate(out):
                    at = jt.ds((p * r + k) * l + q, b)
                    if last and put is not None:
                        put(at, v)
                    else:
                        then[0][at], then[1][at] = v
        now, then, l = (then, now, l * r) if s or last else (now, then, r)
    return now


@jt.kernel(out_type=_spectrum, grid=lambda x, table, **_: x.shape[0], scratch=_between)
def fft_rows(
    x, table, y, begun, real, imaginary, other_real, other_imaginary, *,
    factors: tuple[int, ...], sign: int, scale: float,
):  # fmt: skip
    """The transform of `fft_tiles` a row at a time, in memory of the program."""
    i = jt.program_id(0)

    def put(at, v):
        y[i, at] = jax.lax.complex(*(v if scale == 1 else (v[0] * scale, v[1] * scale)))

    _by_steps(x, table, i, (begun, real, imaginary, other_real, other_imaginary), put, factors, sign)


@jt.kernel(
    out_type=lambda x, *_, **__: jax.ShapeDtypeStruct((x.shape[0], x.shape[1] + 1), jnp.complex64),
    grid=lambda x, *_, **__: x.shape[0], scratch=_between,
)  # fmt: skip
def rfft_rows(
    x, table, turns, y, begun, real, imaginary, other_real, other_imaginary, *, factors: tuple[int, ...]
):  # fmt: skip
    """`_real` a row at a time: z is complete before the first X_k, and stays in memory of the program."""
    i, n = jt.program_id(0), x.shape[1]
    re, im = _by_steps(x, table, i, (begun, real, imaginary, other_real, other_imaginary), None, factors, -1)
    re[n], im[n] = re[0], im[0]
    b = divisor(n, 16)
    for c in jt.range(n // b):
        q = c * b
        here, there = jt.ds(q, b), jt.ds(n - b + 1 - q, b)
        z, back = (re[here], im[here]), (jnp.flip(re[there]), -jnp.flip(im[there]))
        odd = multiply(subtract(z, back), pair(turns[here]))
        y[i, here] = jax.lax.complex(*(0.5 * v + w for v, w in zip(add(z, back), odd)))
    y[i, n] = jax.lax.complex(re[0] - im[0], jnp.float32(0))


def _forward(kernel, x, table, **meta):
    return kernel(x, table, **meta), (table, jnp.zeros((0,) * x.ndim))  # a rank as a number would be mapped by vmap


def _backward(kernel, residuals, g, **meta):
    table, like = residuals
    x = kernel(g, table, **meta)  # the matrix of a transform is symmetric
    return x if like.ndim == 2 else jnp.stack([jnp.real(x), -jnp.imag(x)], -1), None


for _kernel in (fft_tiles, fft_rows):
    _kernel.defvjp(functools.partial(_forward, _kernel), functools.partial(_backward, _kernel))


def _of_real_rows(residuals, g, **_):
    (turns,) = residuals
    like = jnp.zeros((g.shape[0], g.shape[1] - 1, 2), jnp.float32)
    return jax.vjp(lambda x: _halves_joined(x, turns), like)[1](g)[0], None, None


rfft_rows.defvjp(lambda x, table, turns, **meta: (rfft_rows(x, table, turns, **meta), (turns,)), _of_real_rows)


def _real(x):
    """The first n + 1 numbers of the transforms of 2 n real ones, for x [rows, n, 2], of neighbours."""
    # z = even + i odd     X_k = even_k + w^k odd_k     even_k = (Z_k + conj Z_-k) / 2, odd_k = (Z_k - conj Z_-k) / 2i
    n = x.shape[1]
    turns = (-0.5j * np.exp(-1j * np.pi * np.arange(n + 1) / n)).astype(np.complex64)
    return _joined(x, turns)


def _joined_in_rows(x, turns):
    factors = radices(x.shape[1], 8)
    assert factors is not None
    return rfft_rows(x, roots(factors, -1), turns, factors=factors)


def _not_in_rows(x, *_, **__) -> str | None:
    """Why a program does not transform a row of x [rows, n, ...] in memory of its own."""
    n = x.shape[1]
    return _no_butterflies(x) or first_unmet(
        (n > 1, "a number is its own transform"),
        (machine().whole, "programs have no memory of their own that is as quick as registers"),
        (n <= _LONGEST[True], f"rows of {n} are too long for a cache"),
    )


def _no_butterflies(x, *_, **__) -> str | None:
    return None if radices(x.shape[1], 8) is not None else f"{x.shape[1]} has a prime factor of more than 13"


def _halves_joined(x, turns):
    """`_real` by the transform of x as complex numbers, whose results are arrays."""
    z = _rows(x, sign=-1, scale=1.0) if x.shape[1] > 1 else _as_complex(x)
    z = jnp.concatenate([z, z[:, :1]], 1)
    back = jnp.conj(jnp.flip(z, 1))
    return (z + back) * np.complex64(0.5) + (z - back) * turns[None]


_joined = Op(
    "halves of the transform of real numbers",
    Implementation("joined in the kernel of the transform", _joined_in_rows, _not_in_rows),
    Implementation("joined as arrays", _halves_joined),
)


def _as_complex(x):
    """complex64 [rows, n] of x [rows, n], or of float32 [rows, n, 2]."""
    return jax.lax.complex(x[..., 0], x[..., 1]) if x.ndim == 3 else x


def _in_memory(x, *, sign: int, scale: float):
    factors = radices(x.shape[1], 8)
    assert factors is not None
    return fft_rows(x, roots(factors, sign), factors=factors, sign=sign, scale=scale)


def _in_tiles(x, *, sign: int, scale: float):
    (rows, n), factors = x.shape[:2], radices(x.shape[1], 8)
    assert factors is not None
    br = fit(rows, max(1, 2048 // n))
    kernel = tuned(fft_tiles, num_warps=8 if br * n > 2048 else 4)
    return kernel(x, roots(factors, sign), br=br, factors=factors, sign=sign, scale=scale)


def _not_in_tiles(x, **_) -> str | None:
    n = x.shape[1]
    return _no_butterflies(x) or first_unmet(
        (not machine().whole, "memory of a program is as quick as registers"),
        (n <= _LONGEST[False], f"rows of {n} are too long for registers"),
    )


def _halves(factors: tuple[int, ...]) -> int:
    """The product of some of the factors that is near the root of the product of all."""
    return functools.reduce(lambda a, r: a * r if (a * r) ** 2 <= 2 * math.prod(factors) else a, factors, 1)


def _in_two(x, *, sign: int, scale: float):
    """The transform of n = left right numbers, by those of the columns and then the rows of a matrix (Bailey 1990)."""
    # y[k1 + left k2] = sum_j2 w_right^(j2 k2) w_n^(j2 k1) sum_j1 w_left^(j1 k1) x[j1 right + j2]
    x, factors = _as_complex(x), radices(x.shape[1], 8)
    assert factors is not None
    (rows, n), left = x.shape, _halves(factors)
    right = n // left
    columns = x.reshape(rows, left, right).swapaxes(1, 2).reshape(-1, left)
    inner = _rows(columns, sign=sign, scale=1.0).reshape(rows, right, left)
    turns = np.outer(np.arange(right), np.arange(left)) % n
    turns = np.exp(sign * 2j * np.pi * turns / n).astype(np.complex64)
    outer = _rows((inner * turns[None]).swapaxes(1, 2).reshape(-1, right), sign=sign, scale=scale)
    return outer.reshape(rows, left, right).swapaxes(1, 2).reshape(rows, n)


def _by_chirps(x, *, sign: int, scale: float):
    """The transform as a convolution of the length of a power of two (Bluestein 1970), since
    j k = (j^2 + k^2 - (k - j)^2) / 2."""
    x, n = _as_complex(x), x.shape[1]
    m = jt.next_power_of_2(2 * n - 1)
    chirp = np.exp(sign * 1j * np.pi * (np.arange(n) ** 2 % (2 * n)) / n)
    against = np.zeros(m, np.complex128)
    against[:n] = chirp.conj()
    against[m - n + 1 :] = chirp.conj()[1:][::-1]
    spectrum = (np.fft.fft(against) / m).astype(np.complex64)
    chirp = chirp.astype(np.complex64)
    z = _rows(jnp.pad(x * chirp[None], ((0, 0), (0, m - n))), sign=-1, scale=1.0) * spectrum[None]
    return _rows(z, sign=1, scale=1.0)[:, :n] * (chirp * np.float32(scale))[None]


# The transforms of the rows of x [rows, n], complex64, or of x float32 [rows, n, 2], both parts side by side.
_rows = Op(
    "transforms of rows",
    Implementation("rows in memory of a program", _in_memory, _not_in_rows),
    Implementation("rows in tiles", _in_tiles, _not_in_tiles),
    Implementation("two passes", _in_two, _no_butterflies),
    Implementation("a convolution", _by_chirps),
)


_MANY = 1 << 20  # numbers, from which on XLA's transforms were measured on a GPU


def _not_left_to_xla(x, **_) -> str | None:
    """Why XLA's transforms are not quicker. On NVIDIA's GPUs they are: 16384 rows of 1024 numbers took 69 us on an H200
    (167 in kernels here), and 39 of real ones (160)."""
    many = isinstance(x.size, int) and x.size >= _MANY
    return None if many else f"{x.size} numbers are fewer than {_MANY}"


def _by_xla(x, *, axis: int, inverse: bool):
    return (jnp.fft.ifft if inverse else jnp.fft.fft)(x, axis=axis)


def _by_rows(x, *, axis: int, inverse: bool):
    last, n = jnp.moveaxis(x, axis, -1), x.shape[axis]
    found = _rows(last.reshape(-1, n), sign=1 if inverse else -1, scale=1.0 / n if inverse else 1.0)
    return jnp.moveaxis(found.reshape(last.shape), -1, axis)


_MEASURED = ("measured warps",)  # the feature of the GPUs that kernels were timed on
_transform = Op(
    "Fourier transform",
    Implementation("XLA's", _by_xla, _not_left_to_xla, _MEASURED),
    Implementation("transforms of rows", _by_rows),
)


def _reals_by_xla(x, *, axis: int):
    return jnp.fft.rfft(x.astype(jnp.float32), axis=axis)


def _reals_as_complex(x, *, axis: int):
    return jax.lax.slice_in_dim(fft(x, axis), 0, x.shape[axis] // 2 + 1, axis=axis)


def _reals_in_pairs(x, *, axis: int):
    x, n = jnp.moveaxis(x, axis, -1), x.shape[axis]
    y = _real(x.astype(jnp.float32).reshape(-1, n // 2, 2)).reshape(*x.shape[:-1], n // 2 + 1)
    return jnp.moveaxis(y, -1, axis)


def _no_pairs(x, *, axis: int) -> str | None:
    return f"{x.shape[axis]} numbers are no pairs" if x.shape[axis] % 2 else None


_transform_of_reals = Op(
    "Fourier transform of real numbers",
    Implementation("XLA's", _reals_by_xla, _not_left_to_xla, _MEASURED),
    Implementation("one of pairs", _reals_in_pairs, _no_pairs),
    Implementation("one of complex numbers", _reals_as_complex),
)


def _along(op: str, x, axis: int, inverse: bool):
    axis = check_axis(axis, x.ndim, op)
    n = x.shape[axis]
    if n == 0:
        raise KernelValueError(f"{op}: axis {axis} of x has no elements")
    if x.size == 0 or n == 1:
        return x
    return _transform(x, axis=axis, inverse=inverse)


def _complex(op: str, x):
    if not hasattr(x, "dtype"):
        raise KernelTypeError(f"{op}: x is an array, got {type(x).__name__}; convert it: jnp.asarray(...)")
    if x.dtype in (jnp.complex64, jnp.float32, jnp.bfloat16, jnp.float16):
        return x.astype(jnp.complex64)
    raise KernelTypeError(f"{op}: x is complex64, or of floats of at most 32 bits, got {x.dtype.name}; convert it")


@functools.partial(jax.jit, static_argnames=("axis",), inline=True)
def fft(x: jax.Array, axis: int = -1) -> jax.Array:
    """`X_k = sum_j x_j e^(-2 pi i j k / n)` along an axis, as `jnp.fft.fft`, computed in float32.

    Lengths whose prime factors are at most 13 go through butterflies of radix 2 to 13, which a program computes
    in registers or in a cache; longer ones than it holds in two passes, and lengths with larger primes as a
    convolution. NVIDIA's GPUs take XLA's transforms of a million numbers or more. Differentiable.

    Args:
      x: complex64 array [..., n, ...], or one of floats of at most 32 bits.
      axis: the axis to transform along.
    Returns:
      complex64, of x's shape.
    Raises:
      KernelTypeError: another dtype. KernelValueError: no such axis, or one of no elements.
    """
    return _along("fft", _complex("fft", x), axis, False)


@functools.partial(jax.jit, static_argnames=("axis",), inline=True)
def ifft(x: jax.Array, axis: int = -1) -> jax.Array:
    """`x_j = 1/n sum_k X_k e^(2 pi i j k / n)` along an axis, the inverse of `fft`. Differentiable.

    Args:
      x: complex64 array [..., n, ...], or one of floats of at most 32 bits.
      axis: the axis to transform along.
    Returns:
      complex64, of x's shape.
    Raises:
      KernelTypeError: another dtype. KernelValueError: no such axis, or one of no elements.
    """
    return _along("ifft", _complex("ifft", x), axis, True)


@functools.partial(jax.jit, static_argnames=("axis",), inline=True)
def rfft(x: jax.Array, axis: int = -1) -> jax.Array:
    """The first n // 2 + 1 numbers of `fft` of real x, as `jnp.fft.rfft`; an even n takes a transform of n / 2.

    Args:
      x: array of floats of at most 32 bits, [..., n, ...].
      axis: the axis to transform along.
    Returns:
      complex64 [..., n // 2 + 1, ...].
    Raises:
      As `fft`.
    """
    check_float("rfft", x=x)
    axis = check_axis(axis, x.ndim, "rfft")
    if x.size == 0 and x.shape[axis] % 2 == 0:
        return jnp.zeros((*x.shape[:axis], x.shape[axis] // 2 + 1, *x.shape[axis + 1 :]), jnp.complex64)
    return _transform_of_reals(x, axis=axis)


@functools.partial(jax.jit, static_argnames=("n", "axis"), inline=True)
def irfft(x: jax.Array, n: int | None = None, axis: int = -1) -> jax.Array:
    """The real numbers whose `rfft` is x, as `jnp.fft.irfft`.

    Args:
      x: complex64 array [..., m, ...]; of the first number, and of the last one for an even n, the real part counts.
      n: how many numbers the result has, 2 m - 2 (default) or 2 m - 1.
      axis: the axis to transform along.
    Returns:
      float32 [..., n, ...].
    Raises:
      As `fft`; KernelValueError: another n.
    """
    x = _complex("irfft", x)
    axis = check_axis(axis, x.ndim, "irfft")
    m = x.shape[axis]
    n = 2 * m - 2 if n is None else n
    if n < 1 or n // 2 + 1 != m:
        raise KernelValueError(f"irfft: n is {2 * m - 2} or {2 * m - 1}, 1 or more, for {m} numbers, got {n}")
    x = jnp.moveaxis(x, axis, -1)
    x = jnp.concatenate([jnp.real(x[..., :1]).astype(x.dtype), x[..., 1:]], -1)
    if n % 2:
        whole = jnp.concatenate([x, jnp.conj(jnp.flip(x[..., 1:], -1))], -1)
        return jnp.moveaxis(jnp.real(ifft(whole)), -1, axis)
    x = jnp.concatenate([x[..., :-1], jnp.real(x[..., -1:]).astype(x.dtype)], -1)
    back = jnp.conj(jnp.flip(x, -1))
    w = np.exp(2j * np.pi * np.arange(m) / n).astype(np.complex64).reshape((1,) * (x.ndim - 1) + (-1,))
    z = ifft(((x + back) * np.complex64(0.5) + (x - back) * (w * np.complex64(0.5j)))[..., :-1])
    both = jnp.stack([jnp.real(z), jnp.imag(z)], -1)
    return jnp.moveaxis(both.reshape(*x.shape[:-1], n), -1, axis)


def fft_reference(x, axis: int = -1):
    """`fft` in jnp, by the matrix of the transform."""
    return jnp.moveaxis(_dft(jnp.moveaxis(x, axis, -1), -1), -1, axis)


def ifft_reference(x, axis: int = -1):
    """`ifft` in jnp."""
    return jnp.moveaxis(_dft(jnp.moveaxis(x, axis, -1), 1) / np.complex64(x.shape[axis]), -1, axis)


def rfft_reference(x, axis: int = -1):
    """`rfft` in jnp."""
    return jax.lax.slice_in_dim(fft_reference(x, axis), 0, x.shape[axis] // 2 + 1, axis=axis % x.ndim)


def irfft_reference(x, n=None, axis: int = -1):
    """`irfft` in jnp."""
    return jnp.fft.irfft(x, n, axis)


def _dft(x, sign: int):
    n = x.shape[-1]
    turns = np.outer(np.arange(n), np.arange(n)) % n
    matrix = np.exp(sign * 2j * np.pi * turns / n).astype(np.complex64)
    return jnp.matmul(x.astype(jnp.complex64), matrix, precision="highest")
