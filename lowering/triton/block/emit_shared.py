"""Shared memory, barriers and fences."""

from __future__ import annotations

import dataclasses

from jtile import ir
from jtile.ir.block import nbytes

from .. import clusters
from ..emitter import memory_elem, padded
from ..features import Features
from ..tma import FP8
from ..ttir import Val
from . import sparse
from .code import FENCE, Mem
from .emitter import BlockEmitter, emits
from .layouts import Plain, Swizzled, swizzled

LINE = 512  # bytes that a warp loads with an instruction
ARRIVALS = 1 << 20  # the least number of arrivals that an mbarrier cannot count


def shared_elem(dtype: str, f: Features) -> str:
    """The element type of buffers of a dtype. 8-bit floats have their own type, since products read it."""
    return FP8[dtype] if dtype in FP8 and dtype in f.fp8 else memory_elem(dtype)


@emits(ir.AllocShared)
def _alloc_shared(em: BlockEmitter, op: ir.AllocShared) -> Mem:
    elem = shared_elem(op.dtype, em.features)
    if ir.DTYPES[op.dtype].bits < 8:
        em.refuse(op, f"no buffers of {op.dtype}: two elements share a byte; take buffers of uint8, and unpack them")
    if not op.shape:
        em.refuse(op, "buffers of one axis or more, got one element: take a buffer of shape (1,)")
    layout = swizzled(op.shape, elem)
    if isinstance(layout, Swizzled) and _in_lines(em, op):
        layout = dataclasses.replace(layout, width=0)
    return _allocated(em, Mem("", op.shape, elem, layout, op.slots))


def _in_lines(em: BlockEmitter, op: ir.AllocShared) -> bool:
    """Whether rows of a buffer are not swizzled: copies fill it, a warp loads a row at once, and nothing else reads it.
    Such a row comes in one copy, a swizzled one in copies of 128 bytes."""
    if len(op.shape) != 2 or op.shape[1] * ir.DTYPES[op.dtype].bits < 8 * LINE:
        return False
    buffers = {op.result}
    for other in em.kernel.body.walk():
        if isinstance(other, ir.Slot) and other.buffer in buffers:
            buffers.add(other.result)
    users = [other for other in em.kernel.body.walk() if buffers & set(other.operands())]
    return all(isinstance(other, ir.Slot | ir.AsyncLoad | ir.Prefetch | ir.LoadShared) for other in users)


def _allocated(em: BlockEmitter, mem: Mem) -> Mem:
    mem = dataclasses.replace(mem, name=em.code.name())
    em.code.do(f"{mem.name} = ttg.local_alloc : () -> {mem.type}")
    return mem


@emits(ir.AllocBarriers)
def _alloc_barriers(em: BlockEmitter, op: ir.AllocBarriers) -> Mem:
    if op.arrivals >= ARRIVALS or 8 * op.count > em.features.shared:
        what = f"barriers of less than {ARRIVALS} arrivals, and shared memory for {em.features.shared // 8} of them"
        em.refuse(op, f"{what}; got {op.count} of {op.arrivals}")
    ring = _allocated(em, Mem("", (1,), "i64", Plain(), op.count))
    everyone = em.cluster.blocks if em.cluster is not None and op.result in em.cluster.rings else 1
    for k in range(op.count):
        one = slot(em, ring, em.code.i32(k))
        em.code.do(f"ttng.init_barrier {one.name}, {op.arrivals * everyone} : {one.type}")
    return ring


def slot(em: BlockEmitter, ring: Mem, at: Val) -> Mem:
    """One buffer or barrier of a ring."""
    one = dataclasses.replace(ring, name=em.code.name(), slots=None)
    em.code.do(f"{one.name} = ttg.memdesc_index {ring.name}[{at.name}] : {ring.type} -> {one.type}")
    return one


@emits(ir.Slot)
def _slot(em: BlockEmitter, op: ir.Slot) -> Mem:
    return slot(em, em.env[op.buffer], em.env[op.at])


@emits(ir.TransposeShared)
def _transpose_shared(em: BlockEmitter, op: ir.TransposeShared) -> Mem:
    m = em.env[op.buffer]
    if not isinstance(m.layout, Swizzled):
        em.refuse(op, f"no transposed view of a buffer of {op.buffer.type}: its elements are wider than 32 bits")
    layout = dataclasses.replace(m.layout, transposed=not m.layout.transposed)
    whole, part = (None if sides is None else sides[::-1] for sides in (m.whole, m.part))
    out = dataclasses.replace(m, name=em.code.name(), shape=m.shape[::-1], layout=layout, whole=whole, part=part)
    em.code.do(f"{out.name} = ttg.memdesc_trans {m.name} {{order = array<i32: 1, 0>}} : {m.type} -> {out.type}")
    return out


@emits(ir.SliceShared)
def _slice_shared(em: BlockEmitter, op: ir.SliceShared) -> Mem:
    """A part of a buffer, which must begin and end where the swizzle's pattern does: 8 rows, its width in bytes."""
    m = em.env[op.buffer]
    if op.sizes == m.shape:
        return m
    if op.sizes != padded(op.sizes):
        return _first(em, op, m)
    if isinstance(m.layout, Swizzled) and len(m.shape) == 2:
        per = max(m.layout.width * 8 // m.layout.elem_bits, 1)
        units = (per, 8) if m.layout.transposed else (8, per)
        if any(x % u for x, u in zip((*op.starts, *op.sizes), (*units, *units), strict=True)):
            em.refuse(op, f"slices of {op.buffer.type} in multiples of {units[0]} x {units[1]} elements only, "
                          f"got {op.sizes} from {op.starts}")  # fmt: skip
    whole = m.whole or m.shape
    out = dataclasses.replace(m, name=em.code.name(), shape=tuple(op.sizes), whole=whole)
    starts = ", ".join(map(str, op.starts))
    em.code.do(f"{out.name} = ttg.memdesc_subslice {m.name}[{starts}] : {m.type} -> {out.type}")
    return out


def _first(em: BlockEmitter, op: ir.SliceShared, m: Mem) -> Mem:
    """The first rows or columns of a buffer, of a number that is no power of two: products read no further."""
    longer = [axis for axis, n in enumerate(op.sizes) if n != m.shape[axis]]
    ops = list(em.kernel.body.walk())
    views = {op.result, *(x.result for x in ops if isinstance(x, ir.TransposeShared) and x.buffer is op.result)}
    users = [x for x in ops if not isinstance(x, ir.TransposeShared) and not views.isdisjoint(x.operands())]
    if any(op.starts) or len(longer) != 1 or m.part or not all(isinstance(x, ir.DotAsync) for x in users):
        em.refuse(op, f"slices of {op.buffer.type} with sides of powers of two, or its first rows or columns for a "
                      f"product, got {op.sizes} from {op.starts}")  # fmt: skip
    return dataclasses.replace(m, part=tuple(op.sizes))


@emits(ir.LoadShared)
def _load_shared(em: BlockEmitter, op: ir.LoadShared) -> Val:
    m, code = em.env[op.buffer], em.code
    assert em.homes is not None
    with code.within({len(m.shape): em.homes[op.result]}):
        v = code.let(f"ttg.local_load {m.name} : {m.type} -> {code.spell(m.shape, m.elem)}", m.shape, m.elem)
        v = code.bitcast(v, memory_elem(op.result.dtype))
        if _are_places(em, op.result):
            return sparse.whole_words(code, v)
        return code.cmp("ne", v, code.const(0, "i8", v.shape)) if op.result.dtype == "bool" else v


def _are_places(em: BlockEmitter, v: ir.Value) -> bool:
    """Whether sparse products take a tile, or parts of it, as the places of their left operand."""
    if v.dtype != "uint8":
        return False
    ops = list(em.kernel.body.walk())
    parts = {v, *(op.result for op in ops if isinstance(op, ir.Slice) and op.x is v)}
    return any(isinstance(op, ir.DotAsync) and op.places in parts for op in ops)


@emits(ir.StoreShared)
def _store_shared(em: BlockEmitter, op: ir.StoreShared) -> None:
    m, code = em.env[op.buffer], em.code
    assert em.homes is not None
    with code.within({len(m.shape): em.homes[op.value]}):
        v = em.val(op.value)
        v = code.to_int(v, "i8", signed=False) if op.value.dtype == "bool" else code.bitcast(v, m.elem)
        far = em.cluster.far.get(op) if em.cluster is not None else None
        if far is not None:
            assert isinstance(op.buffer.type, ir.SharedType)
            em.say_cluster(f"{clusters.FAR} {far} {nbytes(op.buffer.type)}")
        code.do(f"ttg.local_store {v.name}, {m.name} : {v.type} -> {m.type}")
        if far is not None:
            em.say_cluster(clusters.NEAR)


@emits(ir.FenceShared)
def _fence_shared(em: BlockEmitter, op: ir.FenceShared) -> None:
    em.code.do(FENCE)


# -- barriers ---------------------------------------------------------------------------------------------------------


def _when(em: BlockEmitter, when: ir.Value | None) -> Val:
    return em.code.const(True, "i1") if when is None else em.env[when]


@emits(ir.Expect)
def _expect(em: BlockEmitter, op: ir.Expect) -> None:
    b = slot(em, em.env[op.barrier], em.env[op.at])
    em.code.do(f"ttng.barrier_expect {b.name}, {op.bytes}, {_when(em, op.when).name} : {b.type}")


@emits(ir.Arrive)
def _arrive(em: BlockEmitter, op: ir.Arrive) -> None:
    if op in em.behind_loads:
        em.code.do(FENCE)
    b = slot(em, em.env[op.barrier], em.env[op.at])
    if em.cluster is not None and op.barrier in em.cluster.rings:
        em.say_cluster(clusters.ARRIVE)
    if em.cluster is not None and op in em.cluster.far:
        em.say_cluster(f"{clusters.ARRIVE_AT} {em.cluster.far[op]}")
    em.code.do(f"ttng.arrive_barrier {b.name}, {op.count}, {_when(em, op.when).name} : {b.type}")


@emits(ir.Wait)
def _wait(em: BlockEmitter, op: ir.Wait) -> None:
    b = slot(em, em.env[op.barrier], em.env[op.at])
    if em.cluster is not None and op in em.cluster.awaited:
        em.say_cluster(clusters.AWAIT)
    names = f"{b.name}, {em.env[op.parity].name}, {_when(em, op.when).name}"
    em.code.do(f"ttng.wait_barrier {names} : {b.type}")


@emits(ir.RoleBarrier)
def _role_barrier(em: BlockEmitter, op: ir.RoleBarrier) -> None:
    em.code.do("gpu.barrier")


@emits(ir.KernelsWait)
def _kernels_wait(em: BlockEmitter, op: ir.KernelsWait) -> None:
    em.launches("wait")
    if op in em.within.ops and "devices" in em.memo:
        em.memo["devices"].renew()
    if op.hold:
        em.launches("launch_dependents")


@emits(ir.Clock)
def _clock(em: BlockEmitter, op: ir.Clock) -> Val:
    asm = '"mov.u64 $0, %globaltimer;" {constraints = "=l", packed_element = 1 : i32, pure = false}'
    return em.code.let(f"tt.elementwise_inline_asm {asm} -> i64", (), "i64")
