"""The block level of the language: the Tile IR that it is traced to."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jtile as jt
from jtile import ir

BF16 = jnp.bfloat16
X = jax.ShapeDtypeStruct((64, 64), BF16)


def traced(body, *inputs, out=X, grid=(1,)) -> ir.Kernel:
    return jt.call(body, out_type=out, grid=grid).lower(*(inputs or (X,))).program.kernel


def body_of(body, *inputs, **options) -> list[str]:
    """The lines of a kernel after the passes, without head and indentation."""
    kernel = jt.call(body, **({"out_type": X, "grid": (1,)} | options)).lower(*(inputs or (X,))).kernel
    ir.verify(kernel, "block")
    return [line.strip() for line in ir.print_kernel(kernel).splitlines()[1:-1]]


# -- what it is traced to ---------------------------------------------------------------------------------------------


def test_copies_products_and_barriers_become_their_cards():
    def kernel(x, o):
        i = jt.program_id(0)
        A, C = jt.alloc((64, 32), x.dtype, slots=2), jt.alloc((64, 64), o.dtype)
        full, empty = jt.barrier(2), jt.barrier(1, arrivals=2)
        with jt.role("consumer", warps=8):
            full[i].wait(0)
            s = jt.dot_async(A[i], A[i].T, fast=True)
            s = jt.dot_wait(jt.dot_async(A[i], A[i].T, s, keep=i > 0))
            empty[0].arrive(2)
            C.store(s.astype(o.dtype))
            jt.role_barrier()
            C[0:32, :].store(C.load()[32:])
            jt.fence_shared()
            jt.async_copy(C, o.at[:, jt.ds(0, 64)], fn="add")
            jt.store_wait(0)
        with jt.role("producer", warps=1, registers=24):
            full[i].expect(A.nbytes)
            jt.async_copy(x.tiles(64, 32, pad=jnp.nan).at[0, i], A[i], full[i], when=i >= 0)
            empty.at(0).wait(when=i > 0)

    lines = body_of(kernel, grid=(2,))
    assert lines == EXPECTED.splitlines()


EXPECTED = """\
%0 = program_id 0 : i32
%A = alloc_shared : shared<64x32xbf16, slots 2>
%C = alloc_shared : shared<64x64xbf16>
%full = alloc_barriers : barrier<2, arrivals 1>
%empty = alloc_barriers : barrier<1, arrivals 2>
roles {
role consumer warps=8 {
%c0 = full 0 : i32
wait %full[%0], %c0
%1 = slot %A[%0] : shared<64x32xbf16>
%2 = transpose_shared %1 : shared<32x64xbf16>
%3 = dot_async %1, %2 fast=true : tile<64x64xf32>
%4 = gt %0, %c0 : bool
%5 = dot_async %1, %2 acc=%3 keep=%4 : tile<64x64xf32>
%6 = dot_wait %5 : tile<64x64xf32>
arrive %empty[%c0] count=2
%7 = cast %6 : tile<64x64xbf16>
store_shared %C, %7
role_barrier
%8 = slice_shared %C starts=(0, 0) sizes=(32, 64) : shared<32x64xbf16>
%9 = load_shared %C : tile<64x64xbf16>
%10 = slice %9 starts=(32, 0) stops=(64, 64) strides=(1, 1) : tile<32x64xbf16>
store_shared %8, %10
fence_shared
async_store %o[%c0:+64, %c0:+64] <- %C fn="add"
store_wait 0
}
role producer warps=1 registers=24 {
expect %full[%0] bytes=4096
%11 = slot %A[%0] : shared<64x32xbf16>
%c0_1 = full 0 : i32
async_load %x[tile(%c0_1, 64), tile(%0, 32)] -> %11, %full[%0] pad=nan
%12 = gt %0, %c0_1 : bool
wait %empty[%c0_1], %c0_1 when=%12
}
}
"""


@pytest.mark.parametrize("slots", [1, 3, 4])
def test_rounds_name_slot_and_parity(slots):
    def kernel(x, o):
        A, full, empty = jt.alloc((64, 64), x.dtype, slots=slots), jt.barrier(slots), jt.barrier(slots)
        with jt.role("reader"):
            for k in jt.range(10):
                full.at(k).wait()
                o[...] = A.at(k).load()
                empty.at(k).arrive()
        with jt.role("writer"):
            for k in jt.range(10):
                empty.at(k).wait(before=True)
                A.at(k).store(x[...])
                full.at(k).arrive()

    kernel = traced(kernel)
    full, empty = (op for op in kernel.body.walk() if isinstance(op, ir.Wait))
    slots_of = [op for op in kernel.body.walk() if isinstance(op, ir.Slot)]
    loops = [op for op in kernel.body.walk() if isinstance(op, ir.For)]
    for k in (0, 1, slots, 2 * slots - 1, 7):
        value = lambda v, k=k: _evaluate(v, {loop.body.params[0]: k for loop in loops})
        assert [value(op.at) for op in (full, empty, *slots_of)] == [k % slots] * 4
        assert (value(full.parity), value(empty.parity)) == ((k // slots) & 1, 1 - ((k // slots) & 1))


def _evaluate(v, known) -> int:
    if v in known:
        return known[v]
    args = [np.asarray(_evaluate(x, known), x.dtype) for x in v.op.operands()]
    out = v.op.reference(*args)
    return int(out[0] if isinstance(out, tuple) else out)


def test_rounds_that_are_python_numbers():
    def kernel(x, o):
        A, full = jt.alloc((64, 64), x.dtype, slots=3), jt.barrier(3)
        with jt.role("all"):
            for k in (7, -1):
                A[k % 3 if k > 0 else k].store(x[...])
            full.at(7).arrive()
            full.at(7).wait()
            full.at(10).wait(before=True)
            o[...] = A.at(7).load() + A[-1].load()

    kernel = traced(kernel)
    waits = [(op.at.op.value, op.parity.op.value) for op in kernel.body.walk() if isinstance(op, ir.Wait)]
    assert [op.at.op.value for op in kernel.body.walk() if isinstance(op, ir.Slot)] == [1, 2, 1, 2]
    assert waits == [(1, 0), (1, 0)]


def test_loops_branches_and_helpers_inside_of_roles():
    @jt.function
    def copy(A, full, empty, x, n):
        for k in jt.range(n):
            empty.at(k).wait(before=True)
            if k > 1:
                full.at(k).expect(A.nbytes)
                jt.async_copy(x.at[jt.ds(0, 64), :], A.at(k), full.at(k))
            else:
                A.at(k).store(x[...])
                full.at(k).arrive()

    def kernel(x, o):
        A, full, empty = jt.alloc((64, 64), x.dtype, slots=2), jt.barrier(2), jt.barrier(2, arrivals=2)
        for w in range(2):
            with jt.role(f"reader{w}"):
                total, k = jt.zeros((64, 64), jnp.float32), jt.program_id(0) * 0
                while k < 5:
                    full.at(k).wait()
                    total += A.at(k).load().astype(jnp.float32)
                    empty.at(k).arrive()
                    k += 1
                o[...] = total.astype(o.dtype)
        with jt.role("writer", warps=1):
            copy(A, full, empty, x, 5)

    kernel = traced(kernel)
    (roles,) = (op for op in kernel.body.ops if isinstance(op, ir.Roles))
    inside = [[op.mnemonic for op in b.walk()] for b in roles.bodies]
    assert roles.names == ("reader0", "reader1", "writer")
    assert inside[0] == inside[1] and {"for", "wait", "load_shared", "store"} <= set(inside[0])
    assert inside[2].index("for") < inside[2].index("if") < inside[2].index("expect") < inside[2].index("async_load")


def test_persistent_loops_of_roles_that_end_early():
    """A computed step, and a `break` whose flag is the role's own."""

    def kernel(x, o):
        buffer, full, empty = jt.alloc((16, 64), x.dtype, slots=2), jt.barrier(2), jt.barrier(2)
        with jt.role("consumer", warps=4):
            it = 0
            for t in jt.range(jt.program_id(0), 4, jt.num_programs(0)):
                if t >= 3:
                    break
                full.at(it).wait()
                o.tiles(16, 64)[t, 0] = buffer.at(it).load()
                empty.at(it).arrive()
                it += 1  # noqa: SIM113
        with jt.role("producer", warps=1):
            it = 0
            for t in jt.range(jt.program_id(0), 4, jt.num_programs(0)):
                if t >= 3:
                    break
                empty.at(it).wait(before=True)
                full.at(it).expect(buffer.nbytes)
                jt.async_copy(x.tiles(16, 64).at[t, 0], buffer.at(it), full.at(it))
                it += 1  # noqa: SIM113

    x = np.arange(64 * 64).reshape(64, 64).astype(BF16)
    got = jt.call(kernel, out_type=X, grid=(2,), init=0).interpret(x)
    np.testing.assert_array_equal(got, np.where(np.arange(64)[:, None] < 48, x, 0))


def test_memory_is_shared_where_there_are_roles_and_scratch_elsewhere():
    def with_roles(x, o):
        A = jt.alloc((64, 64), x.dtype)
        B = A.T
        with jt.role("all"):
            A.store(x[...])
            o[...] = B.load()

    def without(x, o):
        A = jt.alloc((64, 64), x.dtype)
        A[...] = x[...]
        o[...] = A[...].T

    kinds = lambda kernel: {op.mnemonic for op in traced(kernel).body.walk()}
    assert {"alloc_shared", "transpose_shared"} <= kinds(with_roles) and "alloc" not in kinds(with_roles)
    assert "alloc" in kinds(without) and "alloc_shared" not in kinds(without)


def test_tiles_computed_before_the_roles_are_computed_in_each():
    def kernel(x, o):
        n = jt.program_id(0) * 2
        y = jt.arange(64)[:, None] + np.arange(64)[None, :]
        unused = y * 2
        del unused
        with jt.role("a"):
            o[...] = (y + n).astype(o.dtype)
        with jt.role("b", warps=1):
            o[...] = y.astype(o.dtype)
        with jt.role("c", warps=1):
            o[0, 0] = x[0, 0]

    kernel = traced(kernel)
    (roles,) = (op for op in kernel.body.ops if isinstance(op, ir.Roles))
    assert all(not v.shape for op in kernel.body.ops for v in op.results)
    assert [sum(op.mnemonic == "iota" for op in b.ops) for b in roles.bodies] == [1, 1, 0]


def test_vmap_adds_an_axis_to_copies():
    def kernel(x, o):
        A, full = jt.alloc((64, 64), x.dtype), jt.barrier()
        with jt.role("all"):
            full[0].expect(A.nbytes)
            jt.async_copy(x.tiles(64, 64).at[0, 0], A, full[0])
            full[0].wait(0)
            jt.async_copy(A, o.tiles(64, 64).at[0, 0])
            jt.store_wait()

    call = jt.call(kernel, out_type=X, grid=(1,)).with_options(interpret=True)
    x = np.random.default_rng(0).standard_normal((3, 2, 64, 64)).astype(BF16)
    np.testing.assert_array_equal(jax.jit(jax.vmap(jax.vmap(call)))(x), x)
    np.testing.assert_array_equal(call(x[0, 0]), x[0, 0])


def test_clocks_are_numbers():
    def kernel(x, o):
        with jt.role("all"):
            t = jt.clock()
            o[0] = (jt.clock() - t).astype(jnp.int32)

    out = jt.call(kernel, out_type=jax.ShapeDtypeStruct((1,), jnp.int32), grid=(1,)).interpret(np.zeros((64, 64), BF16))
    assert out[0] >= 0
