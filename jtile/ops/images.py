"""Bilateral filters, and images of other sizes."""

from __future__ import annotations

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np

import jtile as jt
from jtile.errors import KernelTypeError, KernelValueError
from jtile.ops._shapes import check_float, fit, machine, sums_in, wide

# -- bilateral filters -------------------------------------------------------------------------------------------------


def _grid(x, *_, bm: int, bn: int, radius: int, **__):
    return x.shape[0], jt.cdiv(x.shape[1] - 2 * radius, bm), jt.cdiv(x.shape[2] - 2 * radius, bn)


def _inner(x, *_, radius: int, **__):
    return jt.like(x, shape=(x.shape[0], *(n - 2 * radius for n in x.shape[1:])))


def _weight(apart, a, b, space: float, level: float):
    far = jnp.asarray(a * a + b * b).astype(apart.dtype)
    return jnp.exp(apart * apart * (-0.5 / level**2) - far * (0.5 / space**2))


def _inside(i, j, bm: int, bn: int, a, b, m: int, n: int):
    """Which of the places (a, b) from the points of a tile are in the image."""
    rows, columns = i * bm + a + jt.arange(bm)[:, None], j * bn + b + jt.arange(bn)[None, :]
    return (rows >= 0) & (rows < m) & (columns >= 0) & (columns < n)


@jt.kernel(out_type=_inner, grid=_grid)
def bilateral_tiles(x, y, *, bm: int, bn: int, radius: int, space: float, level: float):
    """x [batch, m, n] with `radius` points around it that are so far away that they have no weight, y [batch, m, n]."""
    # y_i = sum_j w_ij x_j / sum_j w_ij     w_ij = exp(-|i - j|^2 / 2 space^2 - (x_j - x_i)^2 / 2 level^2)
    p, i, j = jt.program_id(0), jt.program_id(1), jt.program_id(2)
    at = lambda a, b: wide(x[p, jt.ds(i * bm + a, bm), jt.ds(j * bn + b, bn)])
    middle = at(radius, radius)
    total, sums = jnp.zeros_like(middle), jnp.zeros_like(middle)
    for a in jt.range(2 * radius + 1):
        for b in jt.range(2 * radius + 1):
            apart = at(a, b) - middle
            w = _weight(apart, a - radius, b - radius, space, level)
            total, sums = total + w, sums + w * apart
    y.tiles(None, bm, bn)[p, i, j] = (middle + sums / total).astype(y.dtype)


@jt.kernel(out_type=lambda x, y, u, **meta: _inner(x, **meta), grid=_grid)
def bilateral_gradient(x, y, u, g, *, bm: int, bn: int, radius: int, space: float, level: float):
    """x, y, u with `radius` points around them: the image, the result, and its cotangent over the sum of weights, which
    is 0 around the image; g: the cotangent of x."""
    # g_k = sum_j w_kj ((x_j - y_k) (x_j - x_k) / level^2 u_k + (1 - (x_k - y_j) (x_k - x_j) / level^2) u_j)
    p, i, j = jt.program_id(0), jt.program_id(1), jt.program_id(2)
    at = lambda ref, a, b: wide(ref[p, jt.ds(i * bm + a, bm), jt.ds(j * bn + b, bn)])
    x_k, y_k, u_k = (at(ref, radius, radius) for ref in (x, y, u))
    total = jnp.zeros_like(x_k)
    for a in jt.range(2 * radius + 1):
        for b in jt.range(2 * radius + 1):
            x_j, y_j, u_j = (at(ref, a, b) for ref in (x, y, u))
            apart = x_j - x_k
            seen = _inside(i, j, bm, bn, a - radius, b - radius, *g.shape[1:])
            w = jnp.where(seen, _weight(apart, a - radius, b - radius, space, level), 0.0)
            slope = apart * (1 / level**2)
            total = total + w * ((x_j - y_k) * slope * u_k + (1 + (x_k - y_j) * slope) * u_j)
    g.tiles(None, bm, bn)[p, i, j] = total.astype(g.dtype)


@jt.kernel(out_type=lambda x, **meta: jt.like(_inner(x, **meta), dtype=sums_in(x)), grid=_grid)
def bilateral_sums(x, y, *, bm: int, bn: int, radius: int, space: float, level: float):
    """The sums of weights of `bilateral_tiles`, y [batch, m, n]; x as there."""
    p, i, j = jt.program_id(0), jt.program_id(1), jt.program_id(2)
    at = lambda a, b: wide(x[p, jt.ds(i * bm + a, bm), jt.ds(j * bn + b, bn)])
    middle = at(radius, radius)
    total = jnp.zeros_like(middle)
    for a in jt.range(2 * radius + 1):
        for b in jt.range(2 * radius + 1):
            total = total + _weight(at(a, b) - middle, a - radius, b - radius, space, level)
    y.tiles(None, bm, bn)[p, i, j] = total


def _around(x, radius: int, value: float = 0.0):
    return jnp.pad(x, ((0, 0), (radius, radius), (radius, radius)), constant_values=value)


def _bilateral_forward(x, **meta):
    y = bilateral_tiles(x, **meta)
    return y, (x, y)


def _bilateral_backward(residuals, g, **meta):
    (x, y), radius = residuals, meta["radius"]
    u, inner = wide(g) / bilateral_sums(x, **meta), x[:, radius:-radius, radius:-radius]
    return (_around(bilateral_gradient(*(_around(v, radius) for v in (inner, y, u)), **meta), radius),)


bilateral_tiles.defvjp(_bilateral_forward, _bilateral_backward)


@functools.partial(jax.jit, static_argnames=("space", "level", "radius"), inline=True)
def bilateral_filter(x: jax.Array, *, space: float, level: float, radius: int | None = None) -> jax.Array:
    """A mean of the points around each, of which those of a similar level count most (Tomasi and Manduchi 1998).

    `y_i = sum_j w_ij x_j / sum_j w_ij`, `w_ij = exp(-|i - j|^2 / (2 space^2) - (x_j - x_i)^2 / (2 level^2))`, over the
    points j of the image in a square around i, computed in float32 (float64 for float64). Differentiable in x.

    Args:
      x: float array [..., m, n].
      space: standard deviation of distances, in points. level: standard deviation of differences of x.
      radius: the square has 2 radius + 1 points a side; 1 to 16, default ceil(2 space), at most 16.
    Returns:
      An array like `x`.
    Raises:
      KernelTypeError: no floats, no numbers. KernelValueError: shapes or numbers that do not fit.
    """
    op = "bilateral_filter"
    check_float(op, x=x)
    if x.ndim < 2:
        raise KernelValueError(f"{op}: x is [..., m, n], got shape {tuple(x.shape)}")
    for name, value in (("space", space), ("level", level)):
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise KernelTypeError(f"{op}: {name} is a number, got {value!r}")
        if not 0 < value < math.inf:
            raise KernelValueError(f"{op}: {name} is above 0, got {value}")
    radius = min(16, math.ceil(2 * space)) if radius is None else radius
    if isinstance(radius, bool) or not isinstance(radius, int) or not 1 <= radius <= 16:
        raise KernelValueError(f"{op}: radius is an int of 1 to 16, got {radius!r}")
    if x.size == 0:
        return x
    m, n = x.shape[-2:]
    bm, bn = (1, fit(n, 256)) if machine().whole else (fit(m, 8), fit(n, 128))
    # The square of a difference to what stands around the image is infinite, and its weight 0. Small floats have no
    # such numbers.
    far = 2 * float(jnp.finfo(sums_in(x)).max) ** 0.5
    stored = x if float(jnp.finfo(x.dtype).max) > far else wide(x)
    around = _around(stored.reshape(-1, m, n), radius, far)
    y = bilateral_tiles(around, bm=bm, bn=bn, radius=radius, space=float(space), level=float(level))
    return y.reshape(x.shape).astype(x.dtype)


def bilateral_filter_reference(x, *, space, level, radius=None):
    """`bilateral_filter` in jnp."""
    radius = min(16, math.ceil(2 * space)) if radius is None else radius
    m, n = x.shape[-2:]
    middle, none = wide(x), [(0, 0)] * (x.ndim - 2)
    around = jnp.pad(middle, [*none, (radius, radius), (radius, radius)])
    there = jnp.pad(jnp.ones((m, n), bool), radius)
    total, sums = jnp.zeros_like(middle), jnp.zeros_like(middle)
    for a, b in itertools.product(range(-radius, radius + 1), repeat=2):
        here = slice(radius + a, radius + a + m), slice(radius + b, radius + b + n)
        apart = around[..., *here] - middle
        w = jnp.where(there[here], _weight(apart, a, b, space, level), 0.0)
        total, sums = total + w, sums + w * apart
    return (middle + sums / total).astype(x.dtype)


# -- other sizes -------------------------------------------------------------------------------------------------------


def _cubic(x):
    """Keys (1981), with a = -1/2."""
    near, far = ((1.5 * x - 2.5) * x * x + 1, ((-0.5 * x + 2.5) * x - 4) * x + 2)
    return np.where(x < 1, near, np.where(x < 2, far, 0.0))


def _lanczos(x, radius: int):
    return np.where(x < radius, np.sinc(x) * np.sinc(x / radius), 0.0)


_METHODS = {  # name -> (how far a kernel reaches, the kernel)
    "linear": (1, lambda x: np.maximum(0.0, 1 - x)),
    "cubic": (2, _cubic),
    "lanczos3": (3, functools.partial(_lanczos, radius=3)),
    "lanczos5": (5, functools.partial(_lanczos, radius=5)),
}


@functools.lru_cache(256)
def _band(n: int, m: int, method: str, antialias: bool) -> tuple[np.ndarray, np.ndarray]:
    """(first [m], weights [m, taps]): point i of m is the sum of weights_ia times the point first_i + a of n."""
    place = (np.arange(m) + 0.5) * n / m - 0.5
    if method == "nearest":
        return np.floor(place + 0.5).clip(0, n - 1).astype(np.int32), np.ones((m, 1), np.float32)
    reach, kernel = _METHODS[method]
    spread = max(n / m, 1.0) if antialias else 1.0
    taps = 2 * math.ceil(reach * spread) + 1
    first = np.floor(place).astype(int) - taps // 2
    at = first[:, None] + np.arange(taps)[None, :]
    w = np.where((at >= 0) & (at < n), kernel(np.abs(place[:, None] - at) / spread), 0.0)
    w = w / w.sum(1, keepdims=True)
    return _narrow(first, w, n)


def _narrow(first, w, n: int) -> tuple[np.ndarray, np.ndarray]:
    """A band of as few taps as there are numbers other than 0, inside of n points."""
    used = np.abs(w) > 0
    skip = np.where(used.any(1), used.argmax(1), 0)
    taps = max(1, int((w.shape[1] - used[:, ::-1].argmax(1) - skip)[used.any(1)].max(initial=1)))
    moved = np.minimum(first + skip, n - min(taps, n)).clip(0)
    out = np.zeros((len(first), taps))
    for a in range(taps):  # the tap of the old band that stands at the same point
        old = moved + a - first
        fits = (old >= 0) & (old < w.shape[1])
        out[:, a] = np.where(fits, np.take_along_axis(w, old.clip(0, w.shape[1] - 1)[:, None], 1)[:, 0], 0.0)
    return moved.astype(np.int32), out.astype(np.float32)


@functools.lru_cache(256)
def _turned_band(n: int, m: int, method: str, antialias: bool) -> tuple[np.ndarray, np.ndarray]:
    """The band of the transposed matrix."""
    first, w = _band(n, m, method, antialias)
    i, a = np.nonzero(w)
    j = first[i] + a
    begin, end = np.full(n, m), np.zeros(n, int)
    np.minimum.at(begin, j, i)
    np.maximum.at(end, j, i + 1)
    begin = np.where(end > 0, begin, 0)
    out = np.zeros((n, max(1, int((end - begin).max()))))
    np.add.at(out, (j, i - begin[j]), w[i, a])
    return _narrow(begin, out, m)


@jt.kernel(
    out_type=lambda x, first, *_, **__: jt.like(x, shape=(x.shape[0], first.shape[0], x.shape[2])),
    grid=lambda x, first, *_, bc, **__: (x.shape[0], first.shape[0], jt.cdiv(x.shape[2], bc)),
)
def resize_rows(x, first, w, back_first, back_w, y, *, bc: int):
    """Resizes the middle axis of x [outer, n, inner]; first [m], w [m, taps]: see `_band`. The band of the transposed
    matrix is what reverse mode takes."""
    # y_i = sum_a w_ia x_(first_i + a)
    del back_first, back_w
    o, i, c = jt.program_id(0), jt.program_id(1), jt.program_id(2)
    X, total = x.tiles(None, None, bc), jt.zeros((bc,), sums_in(x))
    for a in jt.range(w.shape[1]):
        total = total + w[i, a].astype(total.dtype) * wide(X[o, jnp.minimum(first[i] + a, x.shape[1] - 1), c])
    y.tiles(None, None, bc)[o, i, c] = total.astype(y.dtype)


@jt.kernel(
    out_type=lambda x, first, *_, **__: jt.like(x, shape=(x.shape[0], first.shape[0])),
    grid=lambda x, first, *_, br, bc, **__: (jt.cdiv(x.shape[0], br), jt.cdiv(first.shape[0], bc)),
)
def resize_columns(x, first, w, back_first, back_w, y, *, br: int, bc: int):
    """Resizes the last axis of x [outer, n]; the other arguments are those of `resize_rows`."""
    del back_first, back_w
    o, c = jt.program_id(0), jt.program_id(1)
    begin, total = first.tiles(bc)[c], jt.zeros((br, bc), sums_in(x))
    rows = o * br + jt.arange(br)
    for a in jt.range(w.shape[1]):
        weight = w.tiles(bc, None)[c, a].astype(total.dtype)
        total = total + weight[None, :] * wide(x[rows[:, None], jnp.minimum(begin + a, x.shape[1] - 1)[None, :]])
    y.tiles(br, bc)[o, c] = total.astype(y.dtype)


def _resize_backward(bands, g):
    first, w, back_first, back_w = bands
    return _resized(g, back_first, back_w, first, w), None, None, None, None


def _resized(x, *bands):
    """x with the middle axis of [outer, n, inner], or the last one of [outer, n], resized."""
    if x.ndim == 3:
        return resize_rows(x, *bands, bc=fit(x.shape[2], machine().tile // 8 if machine().whole else 256))
    m = bands[0].shape[0]
    bc = fit(m, 256)
    return resize_columns(x, *bands, br=fit(x.shape[0], max(1, machine().tile // 4 // bc)), bc=bc)


for _kernel in (resize_rows, resize_columns):
    _kernel.defvjp(
        lambda x, *bands, kernel=_kernel, **meta: (kernel(x, *bands, **meta), bands),
        lambda bands, g, **_: _resize_backward(bands, g),
    )


@functools.partial(jax.jit, static_argnames=("shape", "method", "antialias"), inline=True)
def resize(x: jax.Array, shape: tuple[int, ...], *, method: str = "linear", antialias: bool = True) -> jax.Array:
    """`x` with other sides, an axis after the other, as `jax.image.resize`; sums are in float32 (float64 for float64).

    Differentiable in x, without atomic additions: the transposed matrix of each axis is a band, too.

    Args:
      x: float array.
      shape: that of the result, of x's rank; axes whose side stays are left alone.
      method: "nearest", "linear", "cubic", "lanczos3" or "lanczos5".
      antialias: where a side shrinks, kernels are as wide as a point of the result.
    Returns:
      An array of x's dtype.
    Raises:
      KernelTypeError: no floats, no ints. KernelValueError: a shape or method that does not fit.
    """
    check_float("resize", x=x)
    if method not in (*_METHODS, "nearest"):
        raise KernelValueError(f"resize: method is one of nearest, {', '.join(_METHODS)}, got {method!r}")
    if any(isinstance(n, bool) or not isinstance(n, int) for n in shape):
        raise KernelTypeError(f"resize: shape is a tuple of ints, got {shape!r}")
    if (
        len(shape) != x.ndim
        or any(n < 0 for n in shape)
        or any(n and not o for n, o in zip(shape, x.shape, strict=True))
    ):
        raise KernelValueError(f"resize: shape {tuple(shape)} for an array of shape {tuple(x.shape)}")
    if 0 in shape:
        return jnp.zeros(shape, x.dtype)
    dtype, x = x.dtype, wide(x)  # the array between two axes' steps stays wide, and is rounded once
    for axis, (n, m) in enumerate(zip(x.shape, shape, strict=True)):
        if n == m:
            continue
        bands = (*_band(n, m, method, antialias), *_turned_band(n, m, method, antialias))
        outer, inner = math.prod(x.shape[:axis]), math.prod(x.shape[axis + 1 :])
        flat = x.reshape(outer, n) if inner == 1 else x.reshape(outer, n, inner)
        x = _resized(flat, *bands).reshape(*x.shape[:axis], m, *x.shape[axis + 1 :])
    return x.astype(dtype)


def resize_reference(x, shape, *, method="linear", antialias=True):
    """`resize` in jnp, by whole matrices."""
    dtype, x = x.dtype, wide(x)
    for axis, (n, m) in enumerate(zip(x.shape, shape, strict=True)):
        if n != m:
            first, w = _band(n, m, method, antialias)
            matrix = np.zeros((m, n), np.float32)
            np.add.at(matrix, (np.arange(m)[:, None], (first[:, None] + np.arange(w.shape[1])).clip(0, n - 1)), w)
            moved = jnp.matmul(jnp.moveaxis(x, axis, -1), matrix.T.astype(x.dtype), precision="highest")
            x = jnp.moveaxis(moved, -1, axis)
    return x.astype(dtype)
