"""Stable sort along one axis: bottom-up merge sort of a permutation, then every operand is permuted.

The keys of a row are first copied to a contiguous buffer of order-preserving unsigned integers (NaN last, -0 = 0), so
that a comparison is one integer comparison per key.
"""

from __future__ import annotations

from jtile import ir

from . import access
from .access import Lanes
from .convert import emit_cast
from .emitter import Emitter, emits
from .evaluate import Point
from .llvm import Val, const, i64, like
from .nest import emit_nest
from .values import Buffer, Ix


@emits(ir.Sort)
def _sort(em: Emitter, op: ir.Sort) -> None:
    sources = [em.materialise(x) for x in op.xs]
    outs = [em.new_buffer(r.shape, r.dtype) for r in op.results]
    shape, n = op.xs[0].shape, op.xs[0].shape[op.axis] if op.xs[0].shape else 1
    if not shape or n <= 1:
        for x, r in zip(op.xs, op.results, strict=True):
            em.set_buffer(r, em.copy(x, em.new_buffer(r.shape, r.dtype)))
        return
    keys = [em.new_buffer((n,), "uint64" if _wide(x.dtype) else "uint32") for x in op.xs[: op.keys]]
    order, spare = em.new_buffer((n,), "int32"), em.new_buffer((n,), "int32")
    rows = tuple(1 if k == op.axis else s for k, s in enumerate(shape))

    def row(p: Point) -> None:
        for x, key in zip(op.xs, keys, strict=False):
            _fill_keys(em, p, x, key, op)
        final = _merge_sort(em, keys, order, spare, n)
        _permute(em, p, sources, outs, final, n, op.axis)

    emit_nest(em, rows, 32, row, scalar=True, bounds={0: (i64(0), i64(rows[0]))})
    for b in (*sources, *outs, *keys, order, spare):
        em.arena.touch(b.alloc)
    for r, out in zip(op.results, outs, strict=True):
        em.set_buffer(r, out)


def _wide(dtype: str) -> bool:
    return ir.DTYPES[dtype].bits == 64


def _fill_keys(em: Emitter, p: Point, x: ir.Value, key: Buffer, op: ir.Sort) -> None:
    code, n = em.code, key.shape[0]
    src = em.rep(x)
    w = em.isa.lanes(64 if _wide(x.dtype) else 32)

    def one(at: Val, lanes: Lanes) -> None:
        ix = tuple(Ix(at, 1 if lanes.count > 1 else 0) if k == op.axis else i for k, i in enumerate(p.ix))
        value = access.read(code, em.isa, src, ix, lanes)
        bits = sortable(em, value, x.dtype)
        if op.descending:
            bits = code.binary("xor", bits, const(bits.ty, "-1"))
        access.write(code, em.isa, key, (Ix(at, 1 if lanes.count > 1 else 0),), bits, lanes)

    main = n // w * w
    if main:
        with code.loop(0, main, w) as at:
            one(at, Lanes(w))
    with code.loop(main, n) as at:
        one(at, Lanes(1))


def sortable(em: Emitter, x: Val, dtype: str) -> Val:
    """Unsigned integers in the order of the values; all NaNs equal and last."""
    code, info = em.code, ir.DTYPES[dtype]
    word = "i64" if info.bits == 64 else "i32"
    ty = like(x.ty, word)
    top = const(ty, str(-(1 << (int(word[1:]) - 1))))
    if info.kind == "b":
        return code.cast("zext", x, ty)
    if info.kind in "iu":
        x = emit_cast(code, em.isa, x, dtype, "int64" if word == "i64" else "int32") if info.bits < 32 else x
        return x if info.kind == "u" and info.bits >= 32 else code.binary("xor", x, top)
    nan = code.cmp("fcmp", "uno", x, x)
    x = code.binary("fadd", x, const(x.ty, "0.0"))
    bits = code.cast("bitcast", x, ty)
    negative = code.cmp("icmp", "slt", bits, const(ty, "0"))
    flipped = code.select(negative, code.binary("xor", bits, const(ty, "-1")), code.binary("xor", bits, top))
    return code.select(nan, const(ty, "-1"), flipped)


def _merge_sort(em: Emitter, keys: list[Buffer], order: Buffer, spare: Buffer, n: int) -> Val:
    """Sort the indices 0..n-1 by the keys; gives the buffer that holds the result."""
    code = em.code
    with code.loop(0, n) as i:
        code.store(code.cast("trunc", i, "i32"), code.gep("i32", order.ptr, i))
    src, dst = code.var("ptr", order.ptr), code.var("ptr", spare.ptr)
    width = code.var("i64", i64(1))
    head, body, done = code.label("pass"), code.label("merge"), code.label("sorted")
    code.br(head)
    code.place(head)
    w = code.load("i64", width)
    code.cond_br(code.cmp("icmp", "slt", w, i64(n)), body, done)
    code.place(body)
    a, b = code.load("ptr", src), code.load("ptr", dst)
    with code.loop(0, n, code.binary("shl", w, i64(1))) as lo:
        mid = code.intrinsic("smin", "i64", code.binary("add", lo, w), i64(n))
        hi = code.intrinsic("smin", "i64", code.binary("add", mid, w), i64(n))
        _merge(em, keys, a, b, lo, mid, hi)
    code.store(b, src)
    code.store(a, dst)
    code.store(code.binary("shl", w, i64(1)), width)
    code.br(head)
    code.place(done)
    return code.load("ptr", src)


def _merge(em: Emitter, keys: list[Buffer], a: Val, b: Val, lo: Val, mid: Val, hi: Val) -> None:
    """Merge a[lo:mid] and a[mid:hi] into b[lo:hi]; on equal keys the left run goes first."""
    code = em.code
    left, right = code.var("i64", lo), code.var("i64", mid)
    with code.loop(lo, hi) as out:
        i, j = code.load("i64", left), code.load("i64", right)
        i_ok, j_ok = code.cmp("icmp", "slt", i, mid), code.cmp("icmp", "slt", j, hi)
        safe_i = code.select(i_ok, i, lo)
        safe_j = code.select(j_ok, j, lo)
        x = code.load("i32", code.gep("i32", a, safe_i))
        y = code.load("i32", code.gep("i32", a, safe_j))
        right_first = _less(em, keys, code.cast("sext", y, "i64"), code.cast("sext", x, "i64"))
        take_right = code.binary(
            "and", j_ok, code.binary("or", right_first, code.binary("xor", i_ok, Val("i1", "true")))
        )
        code.store(code.select(take_right, y, x), code.gep("i32", b, out))
        step = code.cast("zext", take_right, "i64")
        code.store(code.binary("add", j, step), right)
        code.store(code.binary("add", i, code.binary("sub", i64(1), step)), left)


def _less(em: Emitter, keys: list[Buffer], i: Val, j: Val) -> Val:
    """Does the element at i sort strictly before that at j?"""
    code = em.code
    result: Val | None = None
    for key in reversed(keys):
        ty = "i64" if key.dtype == "uint64" else "i32"
        x, y = code.load(ty, code.gep(ty, key.ptr, i)), code.load(ty, code.gep(ty, key.ptr, j))
        less = code.cmp("icmp", "ult", x, y)
        if result is not None:
            less = code.binary("or", less, code.binary("and", code.cmp("icmp", "eq", x, y), result))
        result = less
    assert result is not None
    return result


def _permute(em: Emitter, p: Point, sources: list[Buffer], outs: list[Buffer], order: Val, n: int, axis: int) -> None:
    code = em.code
    with code.loop(0, n) as i:
        at = code.cast("sext", code.load("i32", code.gep("i32", order, i)), "i64")
        for src, out in zip(sources, outs, strict=True):
            read_ix = tuple(Ix(at) if k == axis else x for k, x in enumerate(p.ix))
            write_ix = tuple(Ix(i) if k == axis else x for k, x in enumerate(p.ix))
            value = access.read(code, em.isa, src, read_ix, Lanes(1))
            access.write(code, em.isa, out, write_ix, value, Lanes(1))
