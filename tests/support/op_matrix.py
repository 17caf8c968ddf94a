"""Small kernels for every op card over dtypes, odd shapes and directions: what each back end must agree on.

`CASES` maps names to functions that make a `Case`; `check(case, run)` compares a back end with the interpreter.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Sequence

import numpy as np
from draws import thorough

from jtile import ir
from jtile.interpret import interpret

FLOATS = ["float32", "float64", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"]
INTS = ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]
NIBBLES = ["int4", "uint4"]
DTYPES = [*FLOATS, *INTS, *NIBBLES, "bool"]
# These differ from others by numbers only, which the tests of casts check: no need to try every function on them.
ALIKE = ("float8_e4m3", "float8_e5m2fnuz", "float8_e4m3b11fnuz", "uint2")
TOLERANCE = {
    "float64": 1e-12,
    "float32": 2e-6,
    "float16": 2e-3,
    "bfloat16": 1.6e-2,
    "float8_e4m3fn": 0.13,
    "float8_e5m2": 0.26,
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A kernel, its inputs, how far floats may be off (None: a few steps of their dtype), and what its outputs are."""

    kernel: ir.Kernel
    inputs: Sequence[np.ndarray]
    tolerance: float | None = None
    names: Sequence[str] = ()


CASES: dict[str, Callable[[], Case]] = {}


def over(unless: Callable[..., bool] = lambda *_: False, **axes: Sequence):
    """Register a case for each combination of the values of its parameters, but those that `unless` says."""

    def add(fn):
        for values in itertools.product(*axes.values()):
            if not unless(*values):
                words = [re.sub(r"\W+", "_", str(v)).strip("_") or "none" for v in values]
                CASES["-".join([fn.__name__, *words])] = functools.partial(fn, **dict(zip(axes, values, strict=True)))
        return fn

    return add


def check(case: Case, run: Callable[[ir.Kernel, Sequence[np.ndarray]], Sequence[np.ndarray]]) -> None:
    """`run(kernel, inputs)` gives what the interpreter gives."""
    expected = interpret(case.kernel, list(case.inputs))
    for k, (got, want) in enumerate(zip(run(case.kernel, case.inputs), expected, strict=True)):
        try:
            close(got, want, case.tolerance)
        except AssertionError as e:
            e.add_note(f"output {k}{': ' + case.names[k] if case.names else ''}")
            raise


def close(got: np.ndarray, want: np.ndarray, tolerance: float | None = None) -> None:
    info = ir.DTYPES[want.dtype.name]
    if info.kind != "f":
        np.testing.assert_array_equal(got, want)
        return
    tol = TOLERANCE[want.dtype.name] if tolerance is None else tolerance
    np.testing.assert_allclose(got.astype(np.float64), want.astype(np.float64), rtol=tol, atol=tol)


def array(shape, dtype: str, seed: int = 0, low: float = -3.0, high: float = 3.0) -> np.ndarray:
    """Random data that spreads over the values of the dtype."""
    rng = np.random.default_rng(seed)
    info = ir.DTYPES[dtype]
    if info.kind == "b":
        return rng.integers(0, 2, shape).astype(bool)
    if info.kind == "f":
        return rng.uniform(low, high, shape).astype(np.float32).astype(info.numpy)
    lo, hi = (
        (-8, 8) if dtype == "int4" else (0, 16) if dtype == "uint4" else (-100, 100) if info.kind == "i" else (0, 200)
    )
    return rng.integers(lo, hi, shape).astype(info.numpy)


class Bench:
    """A kernel with whole-array inputs and outputs around a few ops."""

    def __init__(self, *inputs: np.ndarray):
        self.inputs = inputs
        self.b = ir.Builder()
        self.params = [ir.Value(ir.RefType(x.shape, x.dtype.name, "in"), f"x{k}") for k, x in enumerate(inputs)]
        self.outs: list[ir.Value] = []
        self.names: list[str] = []
        self.name = ""  # of the outputs that follow

    def whole(self, shape) -> tuple[ir.Dim, ...]:
        zero = self.b.index(0)
        return tuple(ir.Span(zero, n) for n in shape)

    def loads(self) -> list[ir.Value]:
        return [self.b.value(ir.Load(p, self.whole(p.shape))) for p in self.params]

    def output(self, shape, dtype: str) -> ir.Value:
        self.outs.append(ir.Value(ir.RefType(tuple(shape), dtype, "out"), f"o{len(self.outs)}"))
        self.names.append(self.name)
        return self.outs[-1]

    def store(self, v: ir.Value) -> None:
        self.b.add(ir.Store(self.output(v.shape, v.dtype), self.whole(v.shape), v))

    def value(self, op: ir.Op) -> None:
        """Store the result of an op."""
        self.store(self.b.value(op))

    def case(self, tolerance: float | None = None, grid=(), inits=None) -> Case:
        inits = inits or (None,) * len(self.outs)
        kernel = ir.Kernel("bench", (*self.params, *self.outs), grid, self.b.block, (), inits)
        return Case(kernel, self.inputs, tolerance, self.names)


# -- one element at a time ---------------------------------------------------------------------------------------------


@over(dtype=DTYPES)
def copy(dtype):
    b = Bench(array((3, 37), dtype))
    b.store(b.loads()[0])
    return b.case()


@over(dtype=DTYPES)
def elementwise(dtype):
    b = Bench(array((5, 19), dtype), array((5, 19), dtype, 1))
    args = b.loads()
    for fn in ("add", "mul", "max", "lt", "and", "neg", "exp"):
        f = ir.ELEMENTWISE[fn]
        if ir.DTYPES[dtype].kind in f.kinds:
            b.store(b.b.map(fn, *args[: f.arity]))
    return b.case(2 * TOLERANCE.get(dtype, 0))


@over(dtype=FLOATS)
def constants_are_rounded(dtype):
    b = Bench(array((3, 20), dtype))
    b.loads()
    b.store(b.b.full(0.3, (3, 20), dtype))
    b.store(b.b.cast(b.b.full(0.3, (3, 20), dtype), "float32"))
    return b.case(0.0)


@over(source=DTYPES)
def casts(source):
    """To every dtype; floats stay in the range of the integers."""
    b = Bench(array((3, 13), source, low=0, high=6))
    (x,) = b.loads()
    for dtype in DTYPES:
        b.store(b.b.cast(x, dtype))
    return b.case()


# -- shapes ------------------------------------------------------------------------------------------------------------

SHAPES = [
    ("transpose", (7, 18), lambda x: ir.Transpose(x, (1, 0))),
    ("transpose3", (3, 5, 20), lambda x: ir.Transpose(x, (2, 0, 1))),
    ("split", (6, 40), lambda x: ir.Reshape(x, (6, 5, 8))),
    ("merge", (6, 5, 8), lambda x: ir.Reshape(x, (30, 8))),
    ("merge_lanes", (6, 5, 8), lambda x: ir.Reshape(x, (6, 40))),
    ("regroup", (6, 10), lambda x: ir.Reshape(x, (4, 15))),
    ("slice", (9, 40), lambda x: ir.Slice(x, (1, 3), (8, 40), (2, 3))),
    ("reverse", (4, 33), lambda x: ir.Reverse(x, (0, 1))),
    ("broadcast", (5, 1), lambda x: ir.Broadcast(x, (2, 5, 17), (1, 2))),
    ("newaxis", (17,), lambda x: ir.Broadcast(x, (17, 6), (0,))),
]


@over(dtype=["float32", "bfloat16", "int8", "bool", "int4"])
def shapes(dtype):
    b = Bench(*[array(shape, dtype, seed) for seed, (_, shape, _) in enumerate(SHAPES)])
    for x, (_, _, make) in zip(b.loads(), SHAPES, strict=True):
        b.value(make(x))
    return b.case()


@over(dtype=DTYPES)
def concat_pad_update(dtype):
    b = Bench(array((3, 10), dtype), array((3, 21), dtype, 1))
    x, y = b.loads()
    b.value(ir.Concat((x, y, x), 1))
    b.value(ir.Pad(x, b.b.full(1, (), dtype), (1, 2), (0, 3), (1, 2)))
    b.value(ir.DynamicUpdate(y, x, (b.b.index(0), b.b.index(5))))
    b.value(ir.DynamicSlice(y, (b.b.index(1), b.b.index(19)), (2, 10)))
    return b.case()


@over(dtype=["float32", "bfloat16", "int8", "int64", "bool"], axis=[0, 1])
def gather(axis, dtype):
    index = np.random.default_rng(0).integers(0, (6, 30)[axis], (6, 30) if axis else (9, 30)).astype(np.int32)
    b = Bench(array((6, 30), dtype), index)
    x, i = b.loads()
    b.value(ir.Gather(x, i, axis))
    return b.case()


@over(dtype=["float32", "bfloat16", "int8", "int64"])
def scatter(dtype):
    index = np.random.default_rng(0).integers(-3, 25, 30).astype(np.int32)
    b = Bench(array((20,), dtype), index, array((30,), dtype, 1))
    x, i, u = b.loads()
    for fn in ("set", "add", "mul", "min", "max"):
        b.value(ir.Scatter(x, i, u, fn))
    return b.case({"bfloat16": 0.05, "float32": 1e-5}.get(dtype))


# -- reductions, scans, sorts ------------------------------------------------------------------------------------------


AXES = [(0,), (1,), (0, 1), ()]
REDUCTIONS = ("sum", "prod", "max", "min", "and", "or", "xor")


@over(dtype=DTYPES)
def reduce(dtype):
    """All axes for two functions, for each of the others two that change with the dtype: the axes know no function."""
    kind, turn = ir.DTYPES[dtype].kind, DTYPES.index(dtype)
    b = Bench(array((5, 19), dtype), array((5, 19), dtype, low=0.8, high=1.2))
    x, near_one = b.loads()
    for k, fn in enumerate(REDUCTIONS):
        if (fn in ("and", "or", "xor") and kind == "f") or (fn in ("sum", "prod") and kind == "b"):
            continue
        some = AXES if fn in ("sum", "max") or thorough() else [AXES[(turn + k) % 4], AXES[(turn + k + 1) % 4]]
        for axes in some:
            b.name = f"{fn} over {axes}"
            b.value(ir.Reduce(near_one if fn == "prod" else x, fn, axes))
    return b.case({"float32": 3e-5}.get(dtype))


@over(shape=[(3, 5, 33), (4, 1, 16), (2, 7, 1), (9, 64, 4), (1, 1, 1), (2, 0, 3)])
def reduce_shapes(shape):
    b = Bench(array(shape, "float32"))
    (x,) = b.loads()
    for axes in [(0,), (1,), (2,), (0, 2), (1, 2), (0, 1, 2)]:
        b.value(ir.Reduce(x, "sum", axes))
    return b.case(3e-5)


@over()
def reductions_in_one_pass():
    b = Bench(array((7, 50), "float32"))
    (x,) = b.loads()
    mean = b.b.value(ir.Reduce(x, "sum", (1,)))
    square = b.b.value(ir.Reduce(b.b.map("mul", x, x), "sum", (1,)))
    top = b.b.value(ir.Reduce(x, "max", (1,)))
    spread = b.b.map("sub", x, b.b.value(ir.Broadcast(mean, (7, 50), (0,))))
    late = b.b.value(ir.Reduce(b.b.map("mul", spread, spread), "sum", (1,)))
    for v in (mean, square, top, late):
        b.store(v)
    return b.case(3e-5)


@over(dtype=DTYPES)
def arg_reduce(dtype):
    x = array((6, 35), dtype)
    if ir.DTYPES[dtype].kind == "f":
        x[2, 3] = x[2, 9] = np.nan
    b = Bench(x)
    (v,) = b.loads()
    for fn in ("max", "min"):
        for axis in (0, 1):
            b.value(ir.ArgReduce(v, fn, axis, "int32"))
    return b.case()


@over(
    dtype=["float32", "bfloat16", "float64", "int32", "int8"],
    axis_reverse=[(0, False), (1, False), (1, True)],
)
def cumulative(dtype, axis_reverse):
    floating = ir.DTYPES[dtype].kind == "f"
    b = Bench(array((5, 21), dtype, low=0.7, high=1.3) if floating else array((5, 21), dtype))
    (x,) = b.loads()
    for fn in ("sum", "prod", "max", "min", *(["logsumexp"] if floating else [])):
        b.value(ir.Cumulative(x, fn, *axis_reverse))
    return b.case({"float32": 2e-5, "bfloat16": 2e-2}.get(dtype))


@over(dtype=DTYPES)
def sort(dtype):
    x = array((5, 20), dtype)
    if ir.DTYPES[dtype].kind == "f":
        x[1, 3] = np.nan
    b = Bench(x, array((5, 20), "int32", 1))
    args = tuple(b.loads())
    other = [(0, False), (1, True)]
    for axis, descending in [(1, False), *(other if thorough() else [other[DTYPES.index(dtype) % 2]])]:
        b.name = f"axis {axis}, {descending=}"
        for r in b.b.add(ir.Sort(args, axis, 1, descending)).results:
            b.store(r)
    return b.case()


# -- products ----------------------------------------------------------------------------------------------------------

DOTS = ["float32", "float64", "bfloat16", "float16", "int8", "uint8", "int32", "float8_e4m3fn", "int4"]


@over(dtype=DOTS)
def dot(dtype):
    """Alone, added to what is stored and to what is computed; for all sizes but the first one of these in turn."""
    acc = ir.accumulator_dtype(dtype, dtype)
    sizes = [(5, 7, 9), (9, 18, 20), (1, 40, 16), (16, 1, 5), (8, 16, 0)]
    turned = [((m + n) % 2 == 1, k % 4 == 0) for m, n, k in sizes]
    arrays = []
    for (m, n, k), (trans_a, trans_b) in zip(sizes, turned, strict=True):
        arrays.append(array((2, k, m) if trans_a else (2, m, k), dtype))
        arrays.append(array((2, n, k) if trans_b else (2, k, n), dtype, 1))
        arrays.append(array((2, m, n), acc, 2))
    b = Bench(*arrays)
    loads = b.loads()
    for case, (size, turns) in enumerate(zip(sizes, turned, strict=True)):
        x, y, c = loads[3 * case : 3 * case + 3]
        forms = {"alone": lambda c: None, "added": lambda c: c, "to a square": lambda c: b.b.map("mul", c, c)}
        for k, (name, form) in enumerate(forms.items()):
            if case == 0 or thorough() or (case + DOTS.index(dtype)) % 3 == k:
                b.name = f"{size}, turned {turns}, {name}"
                b.value(ir.Dot(x, y, form(c), *turns))
    return b.case({"float8_e4m3fn": 1e-5, "bfloat16": 1e-4}.get(dtype, 2e-5))


@over()
def dot_scaled():
    scales = array((5, 2), "float32", 1), array((4, 9), "float32", 3)
    b = Bench(array((5, 64), "float8_e4m3fn"), scales[0], array((64, 9), "bfloat16", 2), scales[1])
    a, sa, w, sb = b.loads()
    b.value(ir.DotScaled(a, sa, w, sb, None))
    b.value(ir.DotScaled(a, None, w, sb, b.b.full(2.0, (5, 9), "float32")))
    return b.case(1e-4)


# -- memory ------------------------------------------------------------------------------------------------------------


@over(dtype=DTYPES)
def overhang(dtype):
    """Tiles over the edge read the pad and are not written."""
    b = Bench(array((10, 37), dtype))
    i, j = b.b.value(ir.ProgramId(0)), b.b.value(ir.ProgramId(1))
    index = (ir.Tile(i, 4, 4), ir.Tile(j, 16, 16))
    for pad, shapes in ((0, [(12, 48)]), (1, [(10, 37), (12, 48)])):
        t = b.b.value(ir.Load(b.params[0], index, None, pad))
        for shape in shapes:
            b.name = f"pad {pad} to {shape}"
            b.b.add(ir.Store(b.output(shape, dtype), index, t))
    return b.case(grid=(3, 3))


@over(dtype=["float32", "int8", "bfloat16", "int4"])
def masks_and_gathers(dtype):
    """Masked loads and stores, gathered rows and scattered columns with indices outside."""
    rng = np.random.default_rng(0)
    rows = rng.permutation(np.arange(-2, 14))[:8].astype(np.int32)
    cols = rng.permutation(np.arange(-3, 40))[:20].astype(np.int32)
    b = Bench(array((12, 37), dtype), rows, cols, array((8, 20), "bool", 1))
    r, c, m = (b.b.value(ir.Load(p, b.whole(p.shape))) for p in b.params[1:])
    wide = lambda v, d: b.b.value(ir.Broadcast(v, (8, 20), (d,)))
    x = b.params[0]
    b.value(ir.Load(x, (ir.Take(wide(r, 0)), ir.Take(wide(c, 1))), None, 2))
    b.value(ir.Load(x, (ir.Take(r), ir.Span(b.b.index(0), 37)), None, 1))
    b.value(ir.Load(x, (ir.Span(b.b.index(4), 8), ir.Span(b.b.index(1), 20)), m, 1))
    value = b.b.value(ir.Load(x, (ir.Span(b.b.index(0), 8), ir.Span(b.b.index(0), 20))))
    b.b.add(ir.Store(b.output((12, 37), dtype), (ir.Take(wide(r, 0)), ir.Take(wide(c, 1))), value, m))
    return b.case(inits=(None, None, None, 1))


def _undefined(fn: str, dtype: str) -> bool:
    kind = ir.DTYPES[dtype].kind
    return (kind == "f" and fn in ("and", "or", "xor")) or (kind == "b" and fn == "add")


@over(dtype=["float32", "float64", "bfloat16", "float16", "int8", "uint16", "int32", "int64", "bool", "int4"])
def atomics(dtype):
    value = array((16,), dtype, low=0, high=2)
    index = np.random.default_rng(0).permutation(np.arange(-3, 20))[:16].astype(np.int32)
    b = Bench(value, index)
    v, i = b.loads()
    for b.name in (fn for fn in ir.ATOMICS if not _undefined(fn, dtype)):
        compare = b.b.full(1, (16,), dtype) if b.name == "cas" else None
        old = b.b.value(ir.Atomic(b.name, b.output((18,), dtype), (ir.Take(i),), v, compare))
        b.store(old)
    return b.case(inits=(1, None) * (len(b.outs) // 2))


@over(dtype=["float32", "bfloat16", "uint16", "int64", "bool", "int4"])
def atomics_on_scratch(dtype):
    """With indices that are computed on the way and meet: one program runs its lanes in order."""
    index = np.random.default_rng(0).integers(-3, 14, 16).astype(np.int32)
    b = Bench(array((16,), dtype, low=0, high=2), index)
    v, i = b.loads()
    everything = (ir.Span(b.b.index(0), 18),)
    moved = b.b.map("max", b.b.map("mul", i, b.b.full(2, (16,), "int32")), i)
    for b.name in (fn for fn in ir.ATOMICS if not _undefined(fn, dtype)):
        own = b.b.value(ir.Alloc((18,), dtype))
        b.b.add(ir.Store(own, everything, b.b.full(1, (18,), dtype), None))
        compare = b.b.full(1, (16,), dtype) if b.name == "cas" else None
        b.value(ir.Atomic(b.name, own, (ir.Take(moved),), v, compare))
        b.value(ir.Load(own, everything))
    return b.case()
