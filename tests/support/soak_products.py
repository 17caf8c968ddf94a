"""The families of the soak that are products of matrices: whole, by groups, with scales, with packed weights."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from library import ROUGH
from soak import LARGEST, ROUNDED, Case, Draw, both, gradients_of, text

from jtile import ops
from jtile.ops import quantized
from jtile.ops.gated_mlp import gated_mlp_reference
from jtile.ops.grouped_matmul import grouped_matmul_reference
from jtile.ops.matmul import matmul_reference
from jtile.ops.quantized_tensor import QuantizedTensor
from jtile.ops.scaled_matmul import scaled_matmul_reference

CODES = {"bfloat16": 1e-2, "float16": 1.5e-3}  # quantised weights are rounded to the dtype of many rows
ACTIVATIONS = (None, "relu", "silu", "gelu", "gelu_tanh")
FULL = ((512, 2048, 8192), (2048, 2048, 2048), (4096, 4096, 4096), (256, 1024, 16384), (8192, 8192, 8192))
PRODUCTS = ("matmul", "matmul_parts")


def operands(draw: Draw, m: int, n: int, k: int, dtype: str, ta: bool, tb: bool, batch: tuple[int, ...] = ()):
    """[m, k] and [k, n], transposed where asked for."""
    shapes = (k, m) if ta else (m, k), (n, k) if tb else (k, n)
    return [draw.numbers(*batch, *s, dtype=dtype) for s in shapes]


def products(draw: Draw) -> Case:
    """16-bit floats in every order of the operands, with what follows; some sums in parts; odd sizes."""
    dtype, ta, tb = draw.of("bfloat16", "float16"), draw.of(False, True), draw.of(False, True)
    if draw.chance(0.15):
        (m, n, k), batch = draw.of(*FULL), ()
    else:
        batch = draw.of((), (), (), (), (3,))
        step = draw.of(8, 8, 8, 8, 8, 1)
        m, n, k = (
            draw.size(65, 3000, 8 if ta and step == 8 else 1),
            draw.size(64, 3000, step),
            draw.size(72, 4096, step),
        )
    activation, bias, wide = draw.of(*ACTIVATIONS), draw.chance(0.5), draw.chance(0.2)
    options = dict(transpose_a=ta, transpose_b=tb, activation=activation, out_dtype="float32" if wide else dtype)
    run, reference = (lambda a, b, *c, f=f: f(a, b, bias=c[0] if c else None, **options)
                      for f in (ops.matmul, matmul_reference))  # fmt: skip
    of = lambda: (*operands(draw, m, n, k, dtype, ta, tb, batch), *([draw.numbers(n, dtype=dtype)] if bias else []))
    whole = n % 8 == 0 and k % 8 == 0 and (not ta or m % 8 == 0)
    level = "block" if whole else None  # what tensor maps do not take is padded, or stays at tile level
    what = text("matmul", m=m, n=n, k=k, dtype=dtype, batch=batch, bias=bias, **options)
    return Case(run, reference, of, what, ROUNDED[options["out_dtype"]], PRODUCTS, level)


def long_sums(draw: Draw) -> Case:
    """Few tiles and many terms: sums in parts, where that is predicted to be quicker."""
    dtype, ta, tb = draw.of("bfloat16", "float16"), draw.of(False, True), draw.of(False, True)
    m, n, k = draw.size(72, 400, 8), draw.size(64, 400, 8), draw.size(8192, 40000, 8, small=16384)
    activation, bias = draw.of(*ACTIVATIONS), draw.chance(0.5)
    options = dict(transpose_a=ta, transpose_b=tb, activation=activation)
    run, reference = (lambda a, b, *c, f=f: f(a, b, bias=c[0] if c else None, **options)
                      for f in (ops.matmul, matmul_reference))  # fmt: skip
    of = lambda: (*operands(draw, m, n, k, dtype, ta, tb), *([draw.numbers(n, dtype=dtype)] if bias else []))
    what = text("matmul", m=m, n=n, k=k, dtype=dtype, bias=bias, **options)
    return Case(run, reference, of, what, ROUNDED[dtype], PRODUCTS)


def products_of_bytes(draw: Draw) -> Case:
    """int8 and 8-bit floats: at the block level where both operands lie along k."""
    dtype = draw.of("float8_e4m3fn", "int8", "float8_e5m2")
    ta, tb = draw.chance(0.08), not draw.chance(0.12)
    step = draw.of(16, 16, 16, 16, 1)
    m, n, k = draw.size(65, 3000, 16 if ta else 1), draw.size(64, 3000, step), draw.size(144, 6000, step)
    if draw.chance(0.08):
        m, n, k = draw.of(*FULL[1:3])
    out = "int32" if dtype == "int8" else draw.of("bfloat16", "float32")
    activation = None if dtype == "int8" else draw.of(*ACTIVATIONS)
    options = dict(transpose_a=ta, transpose_b=tb, activation=activation, out_dtype=out)
    run, reference = both(ops.matmul, matmul_reference, **options)
    if dtype == "int8":
        reference = functools.partial(_whole_products, ta=ta, tb=tb)
    level = "tile" if ta or not tb else "block" if n % 16 == 0 and k % 16 == 0 else None
    return Case(
        run, reference, lambda: tuple(operands(draw, m, n, k, dtype, ta, tb)),
        text("matmul", m=m, n=n, k=k, dtype=dtype, **options), max(ROUNDED[out], ROUGH * (out == "float32")), PRODUCTS,
        level,
    )  # fmt: skip


def _whole_products(a, b, *, ta: bool, tb: bool):
    """Exact sums of int8: XLA's int32 product of a GPU takes no transposes and few sizes, sums of float32 of up to 512
    terms are exact."""
    a, b = (x.T if t else x for x, t in ((a, ta), (b, tb)))
    pad = -a.shape[1] % 512
    A = jnp.pad(a, ((0, 0), (0, pad))).astype(jnp.float32).reshape(a.shape[0], -1, 512)
    B = jnp.pad(b, ((0, pad), (0, 0))).astype(jnp.float32).reshape(-1, 512, b.shape[1])
    return sum(jnp.matmul(A[:, p], B[p], precision="highest").astype(jnp.int32) for p in range(A.shape[1]))


def scaled_products(draw: Draw) -> Case:
    """Narrow operands with one scale, or with scales of blocks."""
    dtype = draw.of("float8_e4m3fn", "float8_e4m3fn", "float8_e5m2", "bfloat16")
    blocks, tb, fast = not draw.chance(0.3), not draw.chance(0.1), draw.chance(0.25)
    m, n, k = draw.size(65, 3000), draw.size(64, 3000, 16), draw.size(144, 5000, 16)
    if draw.chance(0.08):
        m, n, k = 4096, 4096, 4096
    out = draw.of("bfloat16", "float32")
    options = dict(transpose_b=tb, out_dtype=out)
    run = functools.partial(ops.scaled_matmul, precision="fast" if fast else None, **options)

    def of():
        parts, columns = -(-k // 128), -(-n // 128)
        sides = (columns, parts) if tb else (parts, columns)
        shapes = ((m, parts), sides) if blocks else ((), ())
        return *operands(draw, m, n, k, dtype, False, tb), *(jnp.exp(draw.numbers(*s)) for s in shapes)

    narrow = fast and dtype != "bfloat16"
    return Case(
        run, functools.partial(scaled_matmul_reference, **options), of,
        text("scaled_matmul", m=m, n=n, k=k, dtype=dtype, blocks=blocks, fast=fast, **options),
        max(ROUNDED[out], 3e-3 if narrow else ROUGH), ("scaled_products", "products_times"),
        "block" if tb or dtype == "bfloat16" else "tile",
    )  # fmt: skip


def few_rows(draw: Draw) -> Case:
    """Products that read a matrix for 1 to 64 rows: one or two at the block level, and 64."""
    dtype = draw.of("bfloat16", "float16")
    m, tb = draw.of(1, 2, 1, 2, 16, 64, draw.size(3, 63)), not draw.chance(0.2)
    n, k = draw.size(64, 6000, 8), draw.size(136, 8192, 8)
    activation, bias = draw.of(*ACTIVATIONS), draw.chance(0.3)
    options = dict(transpose_b=tb, activation=activation)
    run, reference = (lambda a, b, *c, f=f: f(a, b, bias=c[0] if c else None, **options)
                      for f in (ops.matmul, matmul_reference))  # fmt: skip
    of = lambda: (*operands(draw, m, n, k, dtype, False, tb), *([draw.numbers(n, dtype=dtype)] if bias else []))
    what = text("matmul", m=m, n=n, k=k, dtype=dtype, bias=bias, **options)
    streamed = tb and m <= 2
    kernels, level = (("hopper_gemv",), "block") if streamed else (PRODUCTS, None)
    return Case(run, reference, of, what, ROUNDED[dtype], kernels, level)


def gated(draw: Draw) -> Case:
    dtype, tb, activation = draw.of("bfloat16", "float16"), draw.chance(0.5), draw.of(*ACTIVATIONS[1:])
    m, n, k = draw.size(65, 2500), draw.size(64, 3000, 8), draw.size(72, 3000, 8)
    options = dict(transpose=tb, activation=activation)

    def of():
        x, gate = operands(draw, m, n, k, dtype, False, tb)
        x = x * jnp.asarray(k**-0.5, x.dtype)  # products of two sums stay in float16
        return x, gate, draw.numbers(*gate.shape, dtype=dtype)

    what = text("gated_mlp", m=m, n=n, k=k, dtype=dtype, **options)
    return Case(*both(ops.gated_mlp, gated_mlp_reference, **options), of, what, ROUNDED[dtype], ("gated_mlp",))


# -- groups -----------------------------------------------------------------------------------------------------------


def _groups(draw: Draw) -> tuple[dict[str, Any], Callable[[], tuple[Any, ...]]]:
    """Uneven groups, some of them empty, and rows behind them."""
    dtype, tw = draw.of("bfloat16", "float16"), draw.of(False, True)
    groups = draw.of(3, 1, 5, 8, 16, 33, 64)
    n, k = draw.size(64, 1500, 8), draw.size(72, 1500, 8)
    rows = draw.size(100, min(4000, LARGEST // (groups * max(n, k))))
    shares = draw.rng.exponential(size=groups) ** 2 * (draw.rng.random(groups) > 0.2)
    total = rows - draw.of(7, 0, rows // 5)
    sizes = np.floor(shares / max(shares.sum(), 1e-9) * total).astype(np.int32)

    def of():
        x = draw.numbers(rows, k, dtype=dtype)
        w = draw.numbers(groups, *((n, k) if tw else (k, n)), dtype=dtype)
        return x, w, jnp.asarray(sizes)

    return dict(rows=rows, n=n, k=k, dtype=dtype, transpose_w=tw, sizes=sizes.tolist()), of


def grouped(draw: Draw) -> Case:
    about, of = _groups(draw)
    fns = both(ops.grouped_matmul, grouped_matmul_reference, transpose_w=about["transpose_w"])
    return Case(*fns, of, text("grouped_matmul", **about), ROUNDED[about["dtype"]], ("grouped_rows",))


def grouped_gradients(draw: Draw) -> Case:
    about, of = _groups(draw)
    fns = both(ops.grouped_matmul, grouped_matmul_reference, transpose_w=about["transpose_w"])
    with_ct = lambda: (draw.numbers(about["rows"], about["n"], dtype=about["dtype"]), *of())
    run, reference = (gradients_of(f, 2) for f in fns)
    kernels = "grouped_rows", "grouped_outer"
    return Case(run, reference, with_ct, text("gradients of groups", **about), ROUNDED[about["dtype"]], kernels)


# -- quantised weights ------------------------------------------------------------------------------------------------


def _weights(draw: Draw, kind: str, out: int, inner: int) -> QuantizedTensor:
    """Packed weights of any codes; scales near those of normal weights."""
    four = kind in ("q4_0", "q4_1")
    codes = draw.numbers(out, inner // (8 if four else 4), dtype="uint32")
    blocks, dtype = (1, "float32") if kind == "int8" else (inner // 32, "float16")
    positive = lambda: jnp.abs(draw.numbers(out, blocks, dtype=dtype)) * jnp.asarray(1 / (8 if four else 128), dtype)
    return QuantizedTensor(codes, positive(), -8 * positive() if kind == "q4_1" else None, kind)


def _packed(draw: Draw, rows: int, kernels: tuple[str, ...]) -> Case:
    kind, gate = draw.of("q4_0", "int8", "q8_0", "q4_1"), draw.chance(0.25)
    dtype = draw.of("bfloat16", "float16", *["float32"] * (rows <= 2))
    out, inner = draw.size(64, 4000), draw.size(256, 8192, 32 if kind == "int8" else 256)
    activation, bias = draw.of(*ACTIVATIONS[gate:]), draw.chance(0.3) and not gate
    residual = draw.chance(0.3) and not gate

    def of():
        weights = [_weights(draw, kind, out, inner) for _ in range(1 + gate)]
        more = [draw.numbers(out)] * bias + [draw.numbers(rows, out)] * residual
        return draw.numbers(rows, inner, dtype=dtype), *weights, *more

    def fn(product, gated):
        def run(x, *rest):
            if gate:
                return gated(x, *rest, activation=activation).astype(jnp.float32)
            weight, *more = rest
            named = dict(bias=more[0] if bias else None, residual=more[-1] if residual else None)
            return product(x, weight, activation=activation, **named)

        return run

    tolerance = ROUNDED["float32"] if rows == 1 or dtype == "float32" else CODES[dtype]
    wide = lambda x, *rest, **options: gated_mlp_reference(x.astype(jnp.float32), *rest, **options)
    about = dict(rows=rows, out=out, inner=inner, kind=kind, dtype=dtype, gated=gate, bias=bias, residual=residual)
    return Case(
        fn(ops.quantized_matmul, ops.gated_mlp), fn(quantized.quantized_matmul_reference, wide), of,
        text("quantised", activation=activation, **about), tolerance, kernels,
    )  # fmt: skip


def quantized_rows(draw: Draw) -> Case:
    """One or two rows of x."""
    return _packed(draw, draw.of(1, 2), ("hopper_gemv", "hopper_quantized_product"))


def quantized_products(draw: Draw) -> Case:
    """Many rows of x."""
    kernels = ("hopper_quantized_product", "hopper_quantized_shares")
    return _packed(draw, draw.of(16, 64, 256, draw.size(3, 600)), kernels)
