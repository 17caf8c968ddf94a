"""Rotary position embedding (Su et al. 2021), from positions or from tables of cosines and sines."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

import jtile as jt
from jtile.errors import KernelValueError
from jtile.ops._shapes import check_float, check_int, check_rank, check_shape, fit, machine, sums_in, wide


def _pairs(ref, b, t, bt: int, d: int, interleaved: bool):
    """The two halves [bt, heads, d] of the rotated features of ref [batch, length, heads, dim, ...]."""
    here = (b, jt.ds(t * bt, bt), slice(None))
    if interleaved:  # ref is [..., dim / 2, 2]
        return (*here, slice(0, d), 0), (*here, slice(0, d), 1)
    return (*here, slice(0, d)), (*here, slice(d, 2 * d))


@jt.kernel(
    out_type=lambda x, c, s, **_: jt.like(x), grid=lambda x, c, s, *, bt, **_: (x.shape[0], jt.cdiv(x.shape[1], bt))
)
def rope_tables(x, c, s, y, *, bt: int, interleaved: bool):
    """x [batch, length, heads, dim], or [..., dim / 2, 2] if interleaved; c, s [batch or 1, length, d]."""
    # (y_1, y_2) = (x_1 cos - x_2 sin, x_2 cos + x_1 sin)
    b, t, d = jt.program_id(0), jt.program_id(1), c.shape[2]
    row = b if c.shape[0] != 1 else 0
    cos, sin = (wide(ref[row, jt.ds(t * bt, bt), :])[:, None, :] for ref in (c, s))
    _rotate(x, y, b, t, cos, sin, bt, d, interleaved)


@jt.kernel(
    out_type=lambda x, p, f, **_: jt.like(x), grid=lambda x, p, f, *, bt, **_: (x.shape[0], jt.cdiv(x.shape[1], bt))
)
def rope_positions(x, p, f, y, *, bt: int, interleaved: bool):
    """x as in `rope_tables`; p int [batch or 1, length]; f float32 [d], radians a pair turns per position."""
    # angle = position * frequency
    b, t, d = jt.program_id(0), jt.program_id(1), f.shape[0]
    row = b if p.shape[0] != 1 else 0
    angle = p[row, jt.ds(t * bt, bt)].astype(jnp.float32)[:, None] * f[...][None, :]
    _rotate(x, y, b, t, jnp.cos(angle)[:, None, :], jnp.sin(angle)[:, None, :], bt, d, interleaved)


def _rotate(x, y, b, t, cos, sin, bt: int, d: int, interleaved: bool) -> None:
    first, second = _pairs(x, b, t, bt, d, interleaved)
    x1, x2 = wide(x[first]), wide(x[second])
    cos, sin = cos.astype(x1.dtype), sin.astype(x1.dtype)
    y[first] = (x1 * cos - x2 * sin).astype(y.dtype)
    y[second] = (x2 * cos + x1 * sin).astype(y.dtype)
    rest = x.shape[3] - (d if interleaved else 2 * d)
    if rest:  # features that do not turn
        here = (b, jt.ds(t * bt, bt), slice(None), slice(x.shape[3] - rest, None))
        y[here] = x[here]


@jt.kernel(
    out_type=lambda x, g, *, d, **_: (jax.ShapeDtypeStruct((*x.shape[:2], d), sums_in(x)),) * 2,
    grid=lambda x, g, *, bt, **_: (x.shape[0], jt.cdiv(x.shape[1], bt)),
)
def rope_tables_backward(x, g, dc, ds, *, bt: int, d: int, interleaved: bool):
    """The cotangents dc, ds [batch, length, d] of the tables; x and the cotangents g of y as in `rope_tables`."""
    # dcos = sum_h x_1 g_1 + x_2 g_2     dsin = sum_h x_1 g_2 - x_2 g_1
    b, t = jt.program_id(0), jt.program_id(1)
    first, second = _pairs(x, b, t, bt, d, interleaved)
    x1, x2, g1, g2 = (wide(ref[at]) for ref in (x, g) for at in (first, second))
    dc[b, jt.ds(t * bt, bt), :] = (x1 * g1 + x2 * g2).sum(1)
    ds[b, jt.ds(t * bt, bt), :] = (x1 * g2 - x2 * g1).sum(1)


def _tables_forward(x, c, s, **meta):
    return rope_tables(x, c, s, **meta), (x, c, s)


def _tables_backward(residuals, g, **meta):
    x, c, s = residuals
    dc, ds = rope_tables_backward(x, g, d=c.shape[2], **meta)
    shared = lambda dt, t: (dt if t.shape[0] == dt.shape[0] else dt.sum(0, keepdims=True)).astype(t.dtype)
    return rope_tables(g, c, -s, **meta), shared(dc, c), shared(ds, s)  # the cotangent turns back by the same angle


def _positions_forward(x, p, f, **meta):
    return rope_positions(x, p, f, **meta), (x, p, f)


def _positions_backward(residuals, g, **meta):
    x, p, f = residuals
    dc, ds = rope_tables_backward(x, g, d=f.shape[0], **meta)
    place = p.astype(dc.dtype)[..., None]
    angle = place * f.astype(dc.dtype)[None, None, :]
    df = (place * (ds * jnp.cos(angle) - dc * jnp.sin(angle))).sum((0, 1)).astype(f.dtype)
    return rope_positions(g, p, -f, **meta), None, df


rope_tables.defvjp(_tables_forward, _tables_backward)
rope_positions.defvjp(_positions_forward, _positions_backward)


def frequencies(dim: int, theta: float = 10000.0) -> jax.Array:
    """float32 [dim / 2]: radians that pair i turns per position, `theta^(-2i / dim)`."""
    return jnp.asarray(theta, jnp.float32) ** (jnp.arange(0, dim, 2, dtype=jnp.float32) * (-1.0 / max(dim, 1)))


@functools.partial(jax.jit, static_argnames=("theta", "rotary_dim", "interleaved"), inline=True)
def rope(
    x: jax.Array,
    cos: jax.Array | None = None,
    sin: jax.Array | None = None,
    *,
    positions: jax.Array | None = None,
    theta: float = 10000.0,
    inverse_frequencies: jax.Array | None = None,
    rotary_dim: int | None = None,
    interleaved: bool = False,
) -> jax.Array:
    """Turns pair i of the features of every head by `position * frequency_i`.

    The angles come from `cos` and `sin` if given, else from `positions`, and the frequencies from `inverse_frequencies`
    if given, else from `theta`.

    Differentiable in x, cos, sin and inverse_frequencies, not in positions.

    Args:
      x: float array [batch, length, heads, head_dim].
      cos, sin: float [batch, length, d] or [length, d] with d pairs, 2d <= head_dim; features past 2d are not turned.
      positions: int [batch, length] or [length]; default 0, 1, ....
      theta: the base of the frequencies `theta^(-2i / rotary_dim)`.
      inverse_frequencies: float [d], radians per position.
      rotary_dim: the number of features that are turned, 2d; default head_dim.
      interleaved: whether pairs are (2i, 2i + 1) instead of (i, i + d).
    Returns:
      An array like `x`.
    Raises:
      KernelTypeError: a wrong dtype. KernelValueError: shapes that do not fit, cos without sin.
    """
    check_float("rope", x=x, cos=cos, sin=sin, inverse_frequencies=inverse_frequencies)
    check_int("rope", positions=positions)
    check_rank("rope", "x", x, 4, "[batch, length, heads, head_dim]")
    if (cos is None) != (sin is None):
        raise KernelValueError("rope: give cos and sin together")
    if cos is not None and positions is not None:
        raise KernelValueError("rope: cos and sin are those of each position; leave positions out, or index the tables")
    if cos is not None:
        tables = [_per_position("cos", cos, x, cos.shape[-1:]), _per_position("sin", sin, x, cos.shape[-1:])]
        kernel, d = rope_tables, cos.shape[-1]
    else:
        tables, d = _angles(x, positions, theta, inverse_frequencies, rotary_dim)
        kernel = rope_positions
    dim = x.shape[3]
    if 2 * d > dim or (interleaved and dim % 2):
        raise KernelValueError(f"rope: {d} pairs do not fit into heads of {dim} features")
    if x.size == 0 or d == 0:
        return x
    bt = fit(x.shape[1], max(1, machine().tile // (x.shape[2] * dim)))
    split = x.reshape(*x.shape[:3], dim // 2, 2) if interleaved else x
    return kernel(split, *tables, bt=bt, interleaved=bool(interleaved)).reshape(x.shape)


def _angles(x, positions, theta: float, inverse, rotary_dim: int | None):
    dim = x.shape[3] if rotary_dim is None else rotary_dim
    if inverse is None and dim % 2:
        raise KernelValueError(f"rope: an even number of features turns, got {dim}")
    inverse = frequencies(dim, theta) if inverse is None else inverse.astype(jnp.float32)
    check_rank("rope", "inverse_frequencies", inverse, 1, "[pairs]")
    positions = jnp.arange(x.shape[1], dtype=jnp.int32) if positions is None else positions
    return [_per_position("positions", positions, x, ()), inverse], inverse.shape[0]


def _per_position(name: str, table, x, tail: tuple[int, ...]):
    """`table` as [batch or 1, length, ...]."""
    table = table[None] if table.ndim == 1 + len(tail) else table
    check_shape("rope", name, table, (table.shape[0], x.shape[1], *tail))
    if table.shape[0] not in (1, x.shape[0]):
        raise KernelValueError(f"rope: {name} has batch {table.shape[0]}, but x has {x.shape[0]}")
    return table


def rope_reference(
    x,
    cos=None,
    sin=None,
    *,
    positions=None,
    theta=10000.0,
    inverse_frequencies=None,
    rotary_dim=None,
    interleaved=False,
):
    """`rope` in jnp."""
    if cos is None:
        positions = jnp.arange(x.shape[1], dtype=jnp.int32) if positions is None else positions
        inverse = frequencies(rotary_dim or x.shape[3], theta) if inverse_frequencies is None else inverse_frequencies
        lead = (1,) * positions.ndim
        angle = positions.astype(jnp.float32)[..., None] * inverse.astype(jnp.float32).reshape(*lead, -1)
        cos, sin = jnp.cos(angle), jnp.sin(angle)
    cos, sin = ((t if t.ndim == 3 else t[None])[:, :, None].astype(wide(x).dtype) for t in (cos, sin))
    d = cos.shape[-1]
    turned, rest = wide(x[..., : 2 * d]), x[..., 2 * d :]
    x1, x2 = (turned[..., ::2], turned[..., 1::2]) if interleaved else (turned[..., :d], turned[..., d:])
    y1, y2 = x1 * cos - x2 * sin, x2 * cos + x1 * sin
    y = jnp.stack([y1, y2], -1).reshape(turned.shape) if interleaved else jnp.concatenate([y1, y2], -1)
    return jnp.concatenate([y.astype(x.dtype), rest], -1)
