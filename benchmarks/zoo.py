"""Kernels of the library that stand alone, against what people write in jnp: on CPUs here, on GPUs in gpu/zoo.py."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import sparse

from benchmarks.backward import cross_entropy, pulled
from benchmarks.data import TOLERANCE, normal, size
from benchmarks.harness import Case
from jtile import ops
from jtile.ops import bodies, filters, histograms, images, native_sparse, sampling
from jtile.ops.optimizers import adamw_reference, newton_schulz_reference


def cases() -> Iterator[Case]:
    yield from _linear_cross_entropy()
    yield from _segments()
    yield from _optimizers()
    yield from _filters()
    yield from _convolutions()
    for make, of in array_cases(False):
        yield Case(**of, args=make(0))


def _linear_cross_entropy() -> Iterator[Case]:
    rows, k, vocab = 512, 512, 32000
    for dtype, unit in (("float32", "f32"), ("bfloat16", "bf16")):
        x, w, labels = linear_cross_entropy_operands(0, rows, k, vocab, dtype)
        fixed = {
            "config": f"{rows}x{k}x{vocab}", "dtype": dtype, "unit": unit, "bytes": size(x, w),
            "tolerance": TOLERANCE[dtype],
        }  # fmt: skip
        yield Case(
            "linear_cross_entropy", ours=ops.linear_cross_entropy, peers={"xla": linear_cross_entropy},
            args=(x, w, labels), flops=2 * rows * k * vocab, **fixed,
        )  # fmt: skip
        yield Case(
            "linear_cross_entropy_gradient", ours=pulled(ops.linear_cross_entropy, 2),
            peers={"xla": pulled(linear_cross_entropy, 2)}, args=(normal(3, rows), x, w, labels),
            flops=6 * rows * k * vocab, **fixed,
        )  # fmt: skip


def linear_cross_entropy(x, w, labels):
    """The loss of logits that are in memory."""
    return cross_entropy(x @ w.T, labels)


def linear_cross_entropy_operands(seed, rows: int, k: int, vocab: int, dtype: str):
    labels = jax.random.randint(jax.random.key(2 * seed + 1), (rows,), 0, vocab)
    x = normal(2 * seed, rows, k, dtype=dtype)
    return x, normal(2 * seed + 1, vocab, k, dtype=dtype, scale=k**-0.5), labels


def _segments() -> Iterator[Case]:
    n, segments = 131072, 4096
    for f in (1, 64):
        for in_order in (False, True):
            args = segment_operands(0, n, f, segments, in_order)
            given: dict[str, Any] = {"config": f"{n}x{f} of {segments}" + ", sorted" * in_order, "dtype": "float32"}
            ours, xla = summed(segments, in_order)
            yield Case("segment_sum", ours=ours, peers={"xla": xla}, args=args, bytes=size(*args), **given)


def segment_operands(seed, n: int, f: int, segments: int, in_order: bool):
    ids = jax.random.randint(jax.random.key(2 * seed + 1), (n,), 0, segments)
    return normal(2 * seed, n, f), jnp.sort(ids) if in_order else ids


def summed(segments: int, in_order: bool):
    """(`segment_sum` of jtile, that of JAX)."""
    ours = lambda data, ids: ops.segment_sum(data, ids, segments, sorted=in_order)
    return ours, lambda data, ids: jax.ops.segment_sum(data, ids, segments, indices_are_sorted=in_order)


def _optimizers() -> Iterator[Case]:
    n = 2048
    args = tuple(normal(s, n, n) for s in range(4))
    ours, xla = adam_step(ops.adamw), adam_step(adamw_reference)
    yield Case(
        "adamw",
        f"{n}x{n}, 8 steps",
        "float32",
        ours=ours,
        peers={"xla": xla},
        args=args,
        bytes=7 * STEPS * size(args[0]),
    )
    n = 768
    yield Case(
        "newton_schulz", f"{n}x{n}", "float32", ours=ops.newton_schulz, peers={"xla": newton_schulz_reference},
        args=(normal(0, n, n),), bytes=2 * size(args[0]), flops=5 * 4 * n**3, tolerance=1e-4,
    )  # fmt: skip


STEPS = 8


def adam_step(step):
    """Several steps of parameters with gradients and both means, in place: arguments are copied once."""

    def run(p, g, m, v):
        state = ops.AdamState(jnp.full((), 2, jnp.int32), m, v * v)
        one = lambda _, now: step(now[0], g, now[1], learning_rate=1e-3)
        params, state = jax.lax.fori_loop(0, STEPS, one, (p, state))
        return params, state.m, state.v

    return run


def _filters() -> Iterator[Case]:
    for name, config, ours, peer, args in filter_cases(2048, 96):
        yield Case(name, config, "float32", ours=ours, peers={"xla": peer}, args=args, bytes=2 * size(args[0]))


def filter_cases(n: int, cube: int, seed: int = 0) -> Iterator[tuple[str, str, Any, Any, tuple]]:
    """Yields (name, config, ours, the jnp form, arguments) for chains of stencils and filters."""
    plane, steps = normal(2 * seed, n, n), 4
    once = ops.stencil, filters.stencil_reference
    yield "stencil", f"{n}x{n}, 3x3", *once, (plane, normal(2 * seed + 1, 3, 3))
    ours, form = (functools.partial(f, steps=steps) for f in (ops.stencil, filters.stencil_reference))
    yield "stencil", f"{n}x{n}, 3x3, {steps} steps", ours, form, (plane, normal(2 * seed + 1, 3, 3))
    yield (
        "stencil", f"{cube}^3, 3x3x3", *once,
        (normal(2 * seed, cube, cube, cube), normal(2 * seed + 1, 3, 3, 3)),
    )  # fmt: skip
    windows = (normal(2 * seed + 1, 9), normal(2 * seed + 2, 9))
    one_by_one = lambda x, w: filters.stencil_reference(
        filters.stencil_reference(x, w[1][None], boundary="edge"), w[0][:, None], boundary="edge"
    )
    yield "separable_filter", f"{n}x{n}, 9x9", ops.separable_filter, one_by_one, (plane, windows)
    size = {"size": (7, 7)}
    yield (
        "dilate", f"{n}x{n}, 7x7", functools.partial(ops.dilate, **size),
        functools.partial(filters.dilate_reference, **size), (plane,),
    )  # fmt: skip


CONVOLUTIONS: dict[str, tuple[tuple, tuple, dict]] = {  # shapes of x and of the window, and options; a batch of 1
    "7x7 of 3 channels": ((224, 224, 3), (7, 7, 3, 64), {"stride": 2}),
    "3x3 of 64 channels": ((56, 56, 64), (3, 3, 64, 64), {}),
    "1x1 of 256 channels": ((28, 28, 256), (1, 1, 256, 512), {}),
    "depthwise 7x7 of 128 channels": ((56, 56, 128), (7, 7, 1, 128), {"groups": 128}),
    "3x3x3 of 32 channels": ((16, 28, 28, 32), (3, 3, 3, 32, 32), {}),
    "5 of 256 channels": ((2048, 256), (5, 256, 256), {}),
    "transposed 4x4 of 128 channels": ((28, 28, 128), (4, 4, 64, 128), {"stride": 2, "transposed": True}),
}


def _convolutions() -> Iterator[Case]:
    for name in CONVOLUTIONS:
        ours, xla, args, flops = convolution_case(*CONVOLUTIONS[name], 2, "float32")
        given = {"config": f"2 x {name}", "dtype": "float32", "bytes": size(*args)}
        yield Case("convolution", ours=ours, peers={"xla": xla}, args=args, flops=flops, **given)


def convolution_case(shape: tuple, window: tuple, options: dict, batch: int, dtype: str, seed=0):
    """(our convolution, XLA's, the arguments, the operations that are needed). `options`: those of ours, alike for all
    axes, and whether it is `transposed`."""
    transposed, options = options.get("transposed", False), {k: v for k, v in options.items() if k != "transposed"}
    stride, rank, pad = options.get("stride", 1), len(shape) - 1, options.get("padding", "SAME")
    x, w = normal(2 * seed, batch, *shape, dtype=dtype), normal(2 * seed + 1, *window, dtype=dtype)
    ours = functools.partial(ops.convolution_transpose if transposed else ops.convolution, **options)
    axes = "DHW"[3 - rank :]
    dimensions = f"N{axes}C", f"{axes}IO", f"N{axes}C"

    def xla(x, w):
        if transposed:
            given = {"dimension_numbers": dimensions, "transpose_kernel": True}
            return jax.lax.conv_transpose(x, w, (stride,) * rank, "SAME", **given)
        return jax.lax.conv_general_dilated(
            x, w, (stride,) * rank, pad if isinstance(pad, str) else ((pad, pad),) * rank,
            rhs_dilation=(options.get("dilation", 1),) * rank, feature_group_count=options.get("groups", 1),
            dimension_numbers=dimensions,
        )  # fmt: skip

    points = math.prod(shape[:-1]) // (1 if transposed else stride**rank)
    return ours, xla, (x, w), 2 * batch * points * math.prod(window)


# -- transforms, sparse matrices, pairs, draws -------------------------------------------------------------------------


def array_cases(large: bool, tiny: bool = False) -> Iterator[tuple[Any, Any]]:
    """Yields (a function from a seed to the arguments, the other fields of a case) for kernels that are no layers of
    models."""
    side = (lambda n, big: 16 if tiny else big if large else n)  # fmt: skip
    for n, rows in ((1024, side(1024, 16384)), (4096, side(256, 4096))):
        n = 32 if tiny else n
        make = lambda seed, n=n, rows=rows: (jax.lax.complex(normal(2 * seed, rows, n), normal(2 * seed + 1, rows, n)),)
        flops = 5 * rows * n * int(math.log2(n))
        given = {"config": f"{rows}x{n}", "dtype": "complex64", "tolerance": 1e-6}
        yield make, {"workload": "fft", "ours": ops.fft, "peers": {"xla": jnp.fft.fft}, "bytes": 16 * rows * n, **given}
        real = lambda seed, n=n, rows=rows: (normal(seed, rows, n),)
        given |= {"dtype": "float32", "bytes": 8 * rows * n, "flops": flops // 2}
        yield real, {"workload": "rfft", "ours": ops.rfft, "peers": {"xla": jnp.fft.rfft}, **given}
    m, n, per = side(4096, 65536), side(64, 128), side(40, 32)
    make = functools.partial(sparse_operands, m=m, n=n, entries=m * per, block=None)
    yield make, {
        "workload": "csr_matmul", "config": f"{m}x{m}, {per} a row, times {n}", "dtype": "float32",
        "ours": ops.csr_matmul, "peers": {"xla": segmented, "xla bcsr": by_bcsr},
        "bytes": 8 * m * (per + n), "flops": 2 * m * per * n,
    }  # fmt: skip
    m, n, block = side(32, 128), side(256, 4096), 16 if tiny else 64
    make = functools.partial(sparse_operands, m=m, n=n, entries=m * m // 8, block=block)
    yield make, {
        "workload": "bsr_matmul", "config": f"{m * block}^2, an eighth of blocks of {block}, times {n}",
        "dtype": "float32", "ours": ops.bsr_matmul, "peers": {"xla": segmented},
        "tolerance": 1e-2 if large else 1e-5, "bytes": 4 * m * block * (m * block // 8 + 2 * n),
        "flops": m * m // 4 * block * block * n,
    }  # fmt: skip
    yield from _two_of_four(large, side)
    n = side(2048, 16384)
    yield (lambda seed: (normal(2 * seed, n, 3), abs(normal(2 * seed + 1, n)))), {
        "workload": "n_body", "config": f"{n}", "dtype": "float32", "tolerance": 1e-5,
        "ours": functools.partial(ops.n_body, softening=0.1), "bytes": 28 * n, "flops": 20 * n * n,
        "peers": {"xla": functools.partial(bodies.n_body_reference, softening=0.1)},
    }  # fmt: skip
    rows, n = side(16, 128), side(32000, 128256)
    key = jax.random.key(0)
    yield (lambda seed: (3 * normal(seed, rows, n),)), {
        "workload": "sample_top_p", "config": f"{rows}x{n}", "dtype": "float32",
        "ours": lambda x: ops.sample_top_p(x, key, p=0.9),
        "peers": {"xla": lambda x: sampling.sample_top_p_reference(x, key, p=0.9)}, "bytes": 4 * rows * n,
    }  # fmt: skip
    n, counted = side(1 << 20, 1 << 26), {"bins": 256, "range": (-4.0, 4.0)}
    yield (lambda seed, n=n: (normal(seed, n),)), {
        "workload": "histogram", "config": f"{n} in 256 bins", "dtype": "float32", "bytes": 4 * n,
        "ours": functools.partial(ops.histogram, **counted),
        "peers": {"xla": functools.partial(histograms.histogram_reference, **counted)},
    }  # fmt: skip
    n = side(1024, 4096)
    filtered = {"space": 2.0, "level": 1.0}
    yield (lambda seed: (normal(seed, n, n),)), {
        "workload": "bilateral_filter", "config": f"{n}x{n}, 9x9", "dtype": "float32", "bytes": 8 * n * n,
        "ours": functools.partial(ops.bilateral_filter, **filtered), "flops": 81 * 12 * n * n, "tolerance": 1e-5,
        "peers": {"xla": functools.partial(images.bilateral_filter_reference, **filtered)},
    }  # fmt: skip
    for method, to in (("linear", 2 * n), ("lanczos3", n // 2)):
        shape = (to, to, 3)
        yield (lambda seed: (normal(seed, n, n, 3),)), {
            "workload": "resize", "config": f"{n}x{n}x3 to {to}, {method}", "dtype": "float32", "tolerance": 1e-5,
            "ours": functools.partial(ops.resize, shape=shape, method=method), "bytes": 12 * (n * n + to * to),
            "peers": {"xla": functools.partial(jax.image.resize, shape=shape, method=method)},
        }  # fmt: skip
    t, heads, d = side(1024, 4096), side(8, 32), side(64, 128)
    dtype = "bfloat16" if large else "float32"
    shapes = [(1, t, heads, d), *[(1, t, max(1, heads // 16), d)] * 2, (1, t, heads, 3)]
    elements, nsa = t * heads * d, native_sparse.native_sparse_attention_reference
    yield (lambda seed: tuple(normal(4 * seed + j, *s, dtype=dtype) for j, s in enumerate(shapes))), {
        "workload": "native_sparse_attention", "config": f"{t}, {heads} heads of {d}", "dtype": dtype,
        "ours": ops.native_sparse_attention, "peers": {"xla": nsa}, "bytes": (4 if large else 8) * elements,
        "flops": 4 * elements * min(t, 512 + 16 * 64), "tolerance": 2e-2,
    }  # fmt: skip


def _two_of_four(large: bool, side: Any) -> Iterator[tuple[Any, Any]]:
    """Weights of which two in four numbers are kept; the peer has the same matrix as a dense one."""
    dtype, unit = ("bfloat16", "bf16") if large else ("float32", "f32")
    n = k = side(4096, 8192)
    for m in (1, 16, side(256, 4096)):

        def make(seed, m=m):
            # pairs are what the GPUs' sparse tensor cores read, and only 16-bit floats can be
            order = "pairs" if dtype == "bfloat16" else "halves"
            weight = ops.sparse24(normal(2 * seed + 1, n, k, dtype=dtype), order=order)
            return normal(2 * seed, m, k, dtype=dtype), weight, weight.dense()

        yield make, {
            # sparse tensor cores leave out the products with zeros, which others compute
            "workload": "sparse24_matmul", "config": f"{m}x{n}x{k}", "dtype": dtype, "unit": unit,
            "bytes": k * n * (4 * jnp.dtype(dtype).itemsize + 1) // 8, "flops": (1 if large else 2) * m * n * k,
            "ours": lambda x, weight, _: ops.sparse24_matmul(x, weight), "tolerance": 1e-2 if large else 1e-5,
            "peers": {"xla": lambda x, _, dense: x @ dense.T},
        }  # fmt: skip


def sparse_operands(seed, m: int, n: int, entries: int, block: int | None):
    """data, columns, starts and b of a random matrix of m rows of numbers or of blocks."""
    keys = jax.random.split(jax.random.key(seed), 2)
    rows = jnp.sort(jax.random.randint(keys[0], (entries,), 0, m))
    columns = jax.random.randint(keys[1], (entries,), 0, m)
    starts = jnp.searchsorted(rows, jnp.arange(m + 1)).astype(jnp.int32)
    data = normal(2 * seed, entries, *((block, block) if block else ()))
    return data, columns, starts, normal(2 * seed + 1, m * (block or 1), n)


def segmented(data, columns, starts, b):
    """A sparse product as people write it: a gather, and sums of segments."""
    entries, m = data.shape[0], starts.shape[0] - 1
    rows = jnp.searchsorted(starts, jnp.arange(entries), side="right") - 1
    if data.ndim == 1:
        return jax.ops.segment_sum(data[:, None] * b[columns], rows, m, indices_are_sorted=True)
    r, c = data.shape[1:]
    parts = jnp.einsum("erc,ecn->ern", data, b.reshape(-1, c, b.shape[1])[columns])
    return jax.ops.segment_sum(parts, rows, m, indices_are_sorted=True).reshape(m * r, -1)


def by_bcsr(data, columns, starts, b):
    """A sparse product by `jax.experimental.sparse`."""
    return sparse.BCSR((data, columns, starts), shape=(starts.shape[0] - 1, b.shape[0])) @ b
