"""Ops with a combining region (reduce, scan), and dots."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from .parse import Stmt
from .table import Types, arity, arrow, demand, op
from .types import Type, width


def _region(stmt: Stmt, args: list[Type]) -> None:
    """The region takes two scalars of each operand's type."""
    demand(stmt, len(stmt.regions) == 1, "one region")
    demand(stmt, args and all(a.shape == args[0].shape for a in args), "operands of one shape")
    scalars = [Type((), a.elem) for a in args]
    got = [t for _, t in stmt.regions[0].params]
    demand(stmt, got == scalars * 2, f"the region takes {', '.join(map(str, got))} for {', '.join(map(str, args))}")
    demand(stmt, 0 <= stmt.attrs["axis"] < len(args[0].shape), f"axis {stmt.attrs['axis']} of {args[0]}")


def _reduce_rule(stmt: Stmt, args: list[Type]) -> Types:
    _region(stmt, args)
    axis = stmt.attrs["axis"]
    return [a.shaped((*a.shape[:axis], *a.shape[axis + 1 :])) for a in args]


@op("tt.reduce", rule=_reduce_rule, form=arrow)
def _reduce(m, s: Stmt, *xs):
    """By halves that lie far apart: neither the order nor the neighbourhood of lanes is kept on a GPU."""
    axis = s.attrs["axis"]
    xs = [np.moveaxis(x, axis, 0) for x in xs]
    while len(xs[0]) > 1:
        half = len(xs[0]) // 2
        xs = m.lifted(s.regions[0], [*(x[:half] for x in xs), *(x[half:] for x in xs)])
    return tuple(x[0] for x in xs)


def _scan_rule(stmt: Stmt, args: list[Type]) -> Types:
    _region(stmt, args)
    return args


@op("tt.scan", rule=_scan_rule, form=arrow)
def _scan(m, s: Stmt, *xs):
    axis, back = s.attrs["axis"], s.attrs.get("reverse", False)
    xs = [np.moveaxis(x, axis, 0)[:: -1 if back else 1] for x in xs]
    d, n = 1, len(xs[0])
    while d < n:
        new = m.lifted(s.regions[0], [*(x[:-d] for x in xs), *(x[d:] for x in xs)])
        xs = [np.concatenate([x[:d], y]) for x, y in zip(xs, new, strict=True)]
        d *= 2
    return tuple(np.moveaxis(x[:: -1 if back else 1], 0, axis) for x in xs)


def _each_rule(stmt: Stmt, args: list[Type]) -> Types:
    demand(stmt, len(stmt.regions) == 1, "one region")
    got = [t for _, t in stmt.regions[0].params]
    demand(stmt, got == [Type((), a.elem) for a in args], f"the region takes {', '.join(map(str, got))}")
    return [Type(args[0].shape, t.elem) for t in stmt.regions[0].body[-1].arg_types]


@op("tt.map_elementwise", rule=_each_rule, form=arrow)
def _each(m, s: Stmt, *xs):
    return tuple(m.lifted(s.regions[0], xs))


# -- dots --------------------------------------------------------------------------------------------------------------

_PAIRS = {"f32": ("f16", "bf16", "f32", "f8E4M3FN", "f8E5M2"), "f16": ("f16", "f8E4M3FN", "f8E5M2"),
          "i32": ("i8", "i32"), "f64": ("f64",)}  # fmt: skip


def _product(stmt: Stmt, a: Type, b: Type, c: Type, k_of=(1, 1)) -> None:
    """(.., m, k) by (.., k, n) into (.., m, n); `k_of`: elements that a lane holds."""
    demand(stmt, len(a.shape) == len(b.shape) == len(c.shape) in (2, 3), f"ranks of {a}, {b}, {c}")
    batch = a.shape[:-2] == b.shape[:-2] == c.shape[:-2]
    inner = a.shape[-1] * k_of[0] == b.shape[-2] * k_of[1]
    demand(stmt, batch and inner and (a.shape[-2], b.shape[-1]) == c.shape[-2:], f"a product {a} * {b} -> {c}")


def _dot_rule(stmt: Stmt, args: list[Type]) -> Types:
    arity(stmt, args, 3)
    a, b, c = args
    _product(stmt, a, b, c)
    pair = _PAIRS.get(c.elem, ())
    demand(stmt, a.elem in pair and b.elem in pair, f"a product {a} * {b} -> {c}")
    demand(stmt, a.elem == b.elem or width(a.elem) == width(b.elem) == 8, f"a product {a} * {b}")
    return [c]


def _tf32(x: np.ndarray) -> np.ndarray:
    """f32 rounded to 10 bits of fraction."""
    bits = x.view(np.int32)
    return np.where(np.isfinite(x), ((bits + 0x1000) & ~0x1FFF).view(np.float32), x)


def _dot_form(args: Types, results: Types) -> tuple[Types, Types]:
    return args[:-1], results


@op("tt.dot", rule=_dot_rule, form=_dot_form)
def _dot(m, s: Stmt, a, b, c):
    if c.dtype == np.int32:
        return (np.matmul(a.astype(np.int64), b.astype(np.int64)) + c).astype(np.int32)
    precision = s.attrs.get("inputPrecision", "ieee")
    if a.dtype == np.float32:
        demand(s, precision in ("tf32", "ieee", "tf32x3", "bf16x3", "bf16x6"), f"precision {precision}")
        a, b = (_tf32(a), _tf32(b)) if precision == "tf32" else (a, b)
    return (np.matmul(a.astype(np.float64), b.astype(np.float64)) + c.astype(np.float64)).astype(c.dtype)


_FORMATS = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2, "bf16": ml_dtypes.bfloat16,
            "fp16": np.float16, "e2m1": None}  # fmt: skip
_HELD = {"e2m1": ("i8",), "bf16": ("bf16",), "fp16": ("f16",), "e4m3": ("f8E4M3FN", "i8"), "e5m2": ("f8E5M2", "i8")}


def _scaled_parts(stmt: Stmt) -> tuple[bool, bool, int, int]:
    """Which operands have scales, and how many elements a lane holds along k."""
    text = stmt.head
    first, second = (p.strip() for p in text.split(",")[:2])
    packs = [
        2 if stmt.attrs[side] == "e2m1" and stmt.attrs.get(f"{side}_k_pack", True) else 1 for side in ("lhs", "rhs")
    ]
    return " scale " in first, " scale " in second, *packs


def _scaled_rule(stmt: Stmt, args: list[Type]) -> Types:
    left, right, *packs = _scaled_parts(stmt)
    arity(stmt, args, 3 + left + right)
    a, b, c = args[0], args[1 + left], args[-1]
    demand(stmt, c.elem == "f32", f"a scaled product into {c}")
    _product(stmt, a, b, c, packs)
    k = a.shape[-1] * packs[0]
    for has, scale, n, x, side in ((left, args[1], a.shape[-2], a, "lhs"), (right, args[-2], b.shape[-1], b, "rhs")):
        form = stmt.attrs[side]
        demand(stmt, form in _FORMATS, f"format {form}")
        want = {
            "e2m1": ("i8",),
            "bf16": ("bf16",),
            "fp16": ("f16",),
            "e4m3": ("f8E4M3FN", "i8"),
            "e5m2": ("f8E5M2", "i8"),
        }
        demand(stmt, x.elem in want[form], f"{form} as {x}")
        good = not has or (scale.elem == "i8" and scale.shape in ((n, k // 32), (n, k // 16)))
        demand(stmt, good, f"scales {scale} of {x}")
    return [c]


def _decoded(x: np.ndarray, form: str, axis: int) -> np.ndarray:
    if form != "e2m1":
        dtype = np.dtype(_FORMATS[form])
        return (x if x.dtype == dtype else x.view(dtype)).astype(np.float64)
    if axis == -2:
        return _decoded(x.swapaxes(-1, -2), form, -1).swapaxes(-1, -2)
    codes = np.stack([x & 15, (x >> 4) & 15], -1).reshape(*x.shape[:-1], -1)
    return np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])[codes & 7] * np.where(codes & 8, -1.0, 1.0)


def _scales(x: np.ndarray, k: int) -> np.ndarray:
    """Powers of two from their codes, one for each element along k."""
    codes = x.view(np.uint8).astype(np.int64)
    values = np.where(codes == 255, np.nan, np.exp2(codes - 127.0))
    return np.repeat(values, k // x.shape[-1], -1)


@op("tt.dot_scaled", rule=_scaled_rule, form=_dot_form)
def _dot_scaled(m, s: Stmt, *args):
    left, right, *_ = _scaled_parts(s)
    a, b = _decoded(args[0], s.attrs["lhs"], -1), _decoded(args[1 + left], s.attrs["rhs"], -2)
    k = a.shape[-1]
    a = a * _scales(args[1], k) if left else a
    b = b * _scales(args[-2], k).swapaxes(-1, -2) if right else b
    return (np.matmul(a, b) + args[-1].astype(np.float64)).astype(np.float32)
