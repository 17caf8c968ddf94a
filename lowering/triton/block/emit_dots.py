"""Asynchronous products of a warpgroup, and waiting for them."""

from __future__ import annotations

import dataclasses

from jtile import ir

from ..emit_dot import PROMOTE
from ..emitter import elem_of
from ..ttir import Val
from . import sparse
from .analysis import is_free, operand_layout, product_layout
from .code import Mem
from .emit_shared import shared_elem
from .emitter import BlockEmitter, emits
from .layouts import Mma, Swizzled, places

OPERANDS = ("float16", "bfloat16", "float32", "int8", "float8_e4m3fn", "float8_e5m2")
EXACT = 1 << 30  # terms that are summed in the tensor cores before they go to float32


@emits(ir.DotAsync)
def _dot_async(em: BlockEmitter, op: ir.DotAsync) -> Val:
    out = _checked(em, op)
    _count_columns(em, op, out)
    a, b = _left(em, op), em.env[op.b]
    em.flying = [v for v in em.flying if v is not op.acc] + [op.result]
    if ir.DTYPES[op.a.dtype].bits == 8 and op.result.dtype == "float32" and not op.fast:
        return _promoted(em, op, a, b, out)
    with em.code.within({2: out}):
        zero = em.code.const(0, elem_of(op.result.dtype), op.result.shape)
    acc = zero if op.acc is None else em.tile(op.acc, out)
    keep = em.code.const(op.acc is not None, "i1") if op.keep is None else em.env[op.keep]
    if op.places is not None:
        return _sparse(em, op, a, b, acc, keep)
    return product(em, op, a, b, acc, keep)


def product(em: BlockEmitter, op: ir.DotAsync, a: Val | Mem, b: Mem, acc: Val, keep: Val) -> Val:
    """Start the product a @ b, which is added to `acc` where `keep` is true, else to 0."""
    attributes = "inputPrecision = 0 : i32, isAsync = true"  # 0: tf32 for float32; other dtypes ignore it
    if ir.DTYPES[op.a.dtype].bits == 8 and op.result.dtype == "float32":
        attributes += f", maxNumImpreciseAcc = {EXACT} : i32"
    out = dataclasses.replace(acc, name=em.code.name(), fill=None, number=None)
    operands = f"{a.name}, {b.name}, {acc.name}, {keep.name} {{{attributes}}}"
    em.code.do(f"{out.name} = ttng.warp_group_dot {operands} : {a.type} * {b.type} -> {out.type}")
    return out


def _promoted(em: BlockEmitter, op: ir.DotAsync, a: Val | Mem, b: Mem, out: Mma) -> Val:
    """A product as a sum, in float32, of products of `PROMOTE` terms each. Each is waited for at once, so that a later
    wait finds the result finished."""
    code, k = em.code, op.a.shape[1]
    with code.within({2: out}):
        zero = code.const(0.0, "f32", op.result.shape)
        total = zero if op.acc is None else em.tile(op.acc, out)
        if op.keep is not None:
            total = code.select(em.env[op.keep], total, zero)
        for first in range(0, k, PROMOTE):
            part = min(PROMOTE, k - first)
            x = a if part == k or isinstance(a, Val) else _columns(em, a, first, part, 1)
            y = b if part == k else _columns(em, b, first, part, 0)
            if part != k and isinstance(a, Val):
                em.refuse(op, f"exact products of 8-bit floats in registers up to {PROMOTE} columns, got {k}")
            flying = product(em, op, x, y, zero, code.const(False, "i1"))
            (done,) = wait(em, [flying], 0)
            total = done if op.acc is None and not first else code.op("arith.addf", total, done)
    return total


def _sparse(em: BlockEmitter, op: ir.DotAsync, a: Mem, b: Mem, acc: Val, keep: Val) -> Val:
    """A product whose left operand has two of every four numbers: a dense product of one instruction for each 32 terms,
    over the first 16 of these, of which `sparse.py` makes one for sparse operands. A comment in front of it names the
    register with the places."""
    k = op.b.shape[0]
    codes, steps, yes = em.tile(op.places, places(k)), k // sparse.TERMS, em.code.const(True, "i1")
    em.held.append(codes)
    for step in range(steps):
        sparse.marked(em.code, codes, step, steps)
        left = _columns(em, a, sparse.TERMS // 2 * step, sparse.TERMS // 2, 1)
        right = _columns(em, b, sparse.TERMS * step, sparse.TERMS // 2, 0)
        acc = product(em, op, left, right, acc, yes if step else keep)
    return acc


def _columns(em: BlockEmitter, m: Mem, first: int, part: int, axis: int) -> Mem:
    """A part of a buffer along an axis."""
    shape = tuple(part if k == axis else n for k, n in enumerate(m.shape))
    starts = ", ".join(str(first if k == axis else 0) for k in range(2))
    out = dataclasses.replace(m, name=em.code.name(), shape=shape, whole=m.whole or m.shape)
    em.code.do(f"{out.name} = ttg.memdesc_subslice {m.name}[{starts}] : {m.type} -> {out.type}")
    return out


def _left(em: BlockEmitter, op: ir.DotAsync) -> Val | Mem:
    if isinstance(op.a.type, ir.SharedType):
        return em.env[op.a]
    layout = operand_layout(op, em.warps, em.widest)
    assert layout is not None
    v = em.tile(op.a, layout)
    elem = shared_elem(op.a.dtype, em.features)
    with em.code.within({2: layout}):
        return em.code.bitcast(v, elem)


def _count_columns(em: BlockEmitter, op: ir.DotAsync, out: Mma) -> None:
    """Note how many columns a product's instructions have. Those that triton writes have a power of two; `ptx.narrowed`
    makes narrow ones of them, by their number of columns.

    Raises:
      UnsupportedError: the product is narrow, and not all others of the same instruction are as narrow as it.
    """
    columns, wide, m = op.b.shape[1], op.result.shape[1], em.env[op.b]
    if op.narrow:
        what = f"a product with {columns} of {wide} columns"
        if op.a.dtype not in OPERANDS[:2]:
            em.refuse(op, f"{what} of 16-bit floats, got {op.a.dtype}")
        if m.part is None or m.shape[1] != wide:
            em.refuse(op, f"{what} whose right operand is the first columns of a buffer that has {wide}")
        if out.n != wide:
            em.refuse(op, f"{what} where one instruction has {wide}, here {out.n}: take fewer columns, or fewer warps")
    number = columns if op.narrow else out.n
    if em.record.columns.setdefault(out.n, number) != number:
        em.refuse(op, f"products of one kernel that have {number} and {em.record.columns[out.n]} of {out.n} columns: "
                      "give them accumulators of different widths")  # fmt: skip


def _checked(em: BlockEmitter, op: ir.DotAsync) -> Mma:
    """The layout of the result of a product that warpgroups can compute.

    Raises:
      UnsupportedError: warpgroups cannot compute this product.
    """
    (m, k), n, dtype = op.a.shape, op.b.shape[1], op.a.dtype
    width = ir.DTYPES[dtype].bits
    out = product_layout(op, em.warps, em.widest)
    if dtype not in OPERANDS or (op.b.dtype != dtype and not {dtype, op.b.dtype} <= set(OPERANDS[4:])):
        em.refuse(op, f"asynchronous products of {', '.join(OPERANDS)}, got {dtype} and {op.b.dtype}: cast them")
    if out is None:
        em.refuse(op, f"asynchronous products of 64 rows for each four warps and 8 columns or more, got {m} x {n} in a "
                      f"role of {em.warps} warps")  # fmt: skip
    if k * width % 256:
        em.refuse(op, f"asynchronous products over multiples of {256 // width} {dtype} elements, got {k}")
    for v, axis, what in ((op.a, 1, "left"), (op.b, 0, "right")):
        mem = em.env[v] if isinstance(v.type, ir.SharedType) else None
        if mem is None:
            continue
        if not isinstance(mem.layout, Swizzled) or mem.layout.width == 0:
            em.refuse(op, f"products from buffers with rows of 32 bytes or more, got {v.type}")
        if width != 16 and mem.layout.transposed != (axis == 0):
            how = "as it is" if axis else "transposed (stored [n, k])"
            em.refuse(op, f"products of {dtype} whose {what} operand has its summed axis innermost in memory: take the "
                          f"buffer {how}")  # fmt: skip
    assert out is not None
    if op.places is not None:
        _check_sparse(em, op, out)
    return out


def _check_sparse(em: BlockEmitter, op: ir.DotAsync, out: Mma) -> None:
    """Refuse a product with places that is more than one instruction for each 32 terms.

    Raises:
      UnsupportedError: the operands are others.
    """
    (m, n), k = op.result.shape, op.b.shape[0]
    for holds, what in (
        (op.a.dtype in OPERANDS[:2], f"sparse products of 16-bit floats, got {op.a.dtype}"),
        (isinstance(op.a.type, ir.SharedType), "sparse products whose left operand is a buffer, got a tile"),
        (em.warps == 4 and m == 64, f"sparse products of 64 rows in a role of 4 warps, got {m} in {em.warps} warps"),
        (out.n == n, f"sparse products of one instruction, of at most {out.n} columns here, got {n}"),
        (k % 64 == 0, f"sparse products over multiples of 64 terms, got {k}"),
        (_waited_for(em, op), "sparse products that are waited for, all of them, in the block that they start in"),
    ):
        if not holds:
            em.refuse(op, what)


def _waited_for(em: BlockEmitter, op: ir.DotAsync) -> bool:
    """Whether a wait for all products stands behind a product in its block: what holds its places stands there."""
    assert em.within is not None
    behind = em.within.ops[em.within.ops.index(op) :]
    return any(isinstance(x, ir.DotWait) and not x.pending for x in behind)


# -- waiting ----------------------------------------------------------------------------------------------------------


@emits(ir.DotWait)
def _dot_wait(em: BlockEmitter, op: ir.DotWait) -> list[Val]:
    values = list(op.values)
    tied = values or em.flying
    if not tied:
        if op.pending == 0:
            em.refuse(op, "nothing to wait for here: a dot_wait without values stands behind the products that it is "
                          "meant for, in the same block")  # fmt: skip
        return []
    assert em.homes is not None
    made = [em.tile(v, em.homes[v]) if is_free(v) else em.env[v] for v in tied]  # free: zeros of a loop that never ran
    done = wait(em, made, op.pending)
    for v, d in zip(tied, done, strict=True):
        if em.places[v][0] is em.within and not is_free(v):  # products that still run go on under this name
            em.env[v] = d
    em.flying = [v for v in em.flying if v not in values]
    if not op.pending:
        for codes in em.held:
            sparse.hold(em.code, codes)
        em.held = []
    return done[: len(values)]


def wait(em: BlockEmitter, values: list[Val], pending: int) -> list[Val]:
    """Wait until at most `pending` products run; returns the values behind the wait."""
    code = em.code
    name, many = code.name(), len(values) > 1
    names, types = ", ".join(v.name for v in values), ", ".join(v.type for v in values)
    left = f"{name}:{len(values)}" if many else name
    code.do(f"{left} = ttng.warp_group_dot_wait {names} {{pendings = {pending} : i32}} : {types}")
    return [dataclasses.replace(v, name=f"{name}#{k}" if many else name) for k, v in enumerate(values)]
