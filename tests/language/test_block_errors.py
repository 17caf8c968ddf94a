"""The block level of the language: what is refused when a kernel is traced, with its line."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import jtile as jt
from jtile.errors import KernelSyntaxError, KernelTypeError, KernelValueError, TransformError

BF16 = jnp.bfloat16
X = jax.ShapeDtypeStruct((64, 64), BF16)


def traced(body) -> None:
    jt.call(body, out_type=X, grid=(1,)).lower(X)


def _in_role(action, *allocations):
    """A kernel whose one role does `action(x, o, A, full)`."""

    def kernel(x, o):
        A, full = jt.alloc((64, 64), x.dtype, **dict(allocations)), jt.barrier(2)
        with jt.role("all"):
            action(x, o, A, full)

    return kernel


def product_by(multiply):
    """What stores a product of x with itself."""
    return lambda x, o, A, full: jt.store(o, ..., multiply(x[...], x[...]).astype(o.dtype))


def nested(x, o):
    with jt.role("a"), jt.role("b"):
        o[...] = x[...]


def in_a_loop(x, o):
    for k in jt.range(3):
        with jt.role("a"):
            o[k, 0] = x[0, 0]


def in_a_branch(x, o):
    if jt.program_id(0) > 0:
        with jt.role("a"):
            o[...] = x[...]


def same_name(x, o):
    for _ in range(2):
        with jt.role("a"):
            o[...] = x[...]


def of_another_role(x, o):
    with jt.role("a"):
        y = x[0, 0]
    with jt.role("b", warps=1):
        for k in jt.range(3):
            o[k, 0] = y


def carried_from_another_role(x, o):
    y = 0
    with jt.role("a"):
        for k in jt.range(3):
            y = y + k
    with jt.role("b", warps=1):
        for k in jt.range(3):
            y = y + k
        o[0, 0] = y.astype(o.dtype)


def of_a_role_after_it(x, o):
    with jt.role("a"):
        y = x[0, 0]
    o[0, 0] = y


def store_outside(x, o):
    with jt.role("a"):
        o[...] = x[...]
    o[0, 0] = 1


def load_outside(x, o):
    y = x[0, 0]
    with jt.role("a"):
        o[0, 0] = y


def wait_outside(x, o):
    jt.barrier()[0].wait(0)


def alloc_inside(x, o):
    with jt.role("a"):
        jt.alloc((64, 64), x.dtype)


def ring_without_roles(x, o):
    jt.alloc((64, 64), x.dtype, slots=2)
    o[...] = x[...]


def view_of_scratch(x, o):
    A = jt.alloc((64, 64), x.dtype)
    o[...] = A.T.load()


def one_warp_first(x, o):
    with jt.role("a", warps=1):
        o[...] = x[...]


def odd_registers(x, o):
    with jt.role("a", registers=20):
        o[...] = x[...]


def early_by_a_number(x, o):
    with jt.role("a", early=1):
        o[...] = x[...]


def early_alone(x, o):
    with jt.role("a", early=True):
        o[...] = x[...]


def early_store(x, o):
    with jt.role("a"):
        x[...]
    with jt.role("b", early=True):
        o[...] = x[...]


def too_many_registers(x, o):
    for n in "abcd":
        with jt.role(n, registers=240):
            o[...] = x[...]


def too_many_warps(x, o):
    for k in range(9):
        with jt.role(f"r{k}"):
            o[k, 0] = x[k, 0]


def three_warps_second(x, o):
    with jt.role("a"):
        o[0, 0] = x[0, 0]
    with jt.role("b", warps=3):
        o[1, 0] = x[1, 0]


def round_before_the_first(x, o):
    A, full, empty = jt.alloc((64, 64), x.dtype, slots=3), jt.barrier(3), jt.barrier(3)
    with jt.role("reader"):
        for k in jt.range(5):
            full.at(k).wait()
            o[...] = A.at(k).load()
            empty.at(k - 1).arrive()
    with jt.role("writer", warps=1):
        for k in jt.range(5):
            empty.at(k).wait(before=True)
            A.at(k).store(x[...])
            full.at(k).arrive()


def read_after_handing_back(x, o):
    A, full, empty = jt.alloc((64, 64), x.dtype, slots=2), jt.barrier(2), jt.barrier(2)
    with jt.role("reader"):
        for k in jt.range(4):
            full.at(k).wait()
            empty.at(k).arrive()
            o[...] = A.at(k).load()
    with jt.role("writer", warps=1):
        for k in jt.range(4):
            empty.at(k).wait(before=True)
            full.at(k).expect(A.nbytes)
            jt.async_copy(x.at[:, :], A.at(k), full.at(k))


def arrives_in_a_branch(x, o):
    A, full, empty = jt.alloc((64, 64), x.dtype), jt.barrier(), jt.barrier()
    with jt.role("reader"):
        for k in jt.range(4):
            full.at(k).wait()
            o[...] = A.load()
            if k % 2 == 0:
                empty.at(k).arrive()
    with jt.role("writer", warps=1):
        for k in jt.range(4):
            empty.at(k).wait(before=True)
            full.at(k).expect(A.nbytes)
            jt.async_copy(x.at[:, :], A, full.at(k))


def changed_buffer(x, o):
    A = jt.alloc((64, 64), x.dtype, slots=2)
    with jt.role("a"):
        b = A[0]
        for k in jt.range(3):
            o[...] = b.load()
            b = A.at(k)


def copy(src, dst, **more):
    return lambda x, o, A, full: jt.async_copy(
        *(v(x, o, A) for v in (src, dst)), **{k: v(full) if callable(v) else v for k, v in more.items()}
    )


first = lambda full: full[0]
tile, buffer = lambda x, o, A: x.tiles(64, 64).at[0, 0], lambda x, o, A: A
RING = ("slots", 2)

REFUSED = {
    "nested": (nested, KernelSyntaxError, "role 'b' stands inside of role 'a'"),
    "in a loop": (in_a_loop, KernelSyntaxError, "role 'a' stands in a loop or branch"),
    "in a branch": (in_a_branch, KernelSyntaxError, "role 'a' stands in a loop or branch"),
    "same name": (same_name, KernelValueError, "two roles are called 'a'"),
    "of another role": (of_another_role, KernelSyntaxError, "role 'b' uses a value of role 'a'"),
    "carried on": (carried_from_another_role, KernelSyntaxError, "role 'b' goes on with .* role 'a' gave to 'y'"),
    "of a role after it": (of_a_role_after_it, KernelSyntaxError, "code outside of roles uses a value of role 'a'"),
    "store outside": (store_outside, KernelSyntaxError, "store stands outside of roles"),
    "load outside": (load_outside, KernelSyntaxError, "load .* stands outside of roles"),
    "wait outside": (wait_outside, KernelSyntaxError, "wait belongs to the warps of a role"),
    "alloc inside": (alloc_inside, KernelSyntaxError, "jt.alloc stands outside of roles"),
    "ring without roles": (ring_without_roles, KernelSyntaxError, "jt.alloc with slots belongs to a kernel with roles"),
    "view of scratch": (view_of_scratch, KernelTypeError, r"scratch of a tile-level kernel has no \.T"),
    "one warp first": (one_warp_first, KernelValueError, "the first 4 or 8"),
    "odd registers": (odd_registers, KernelValueError, "a multiple of 8 between 24 and 240"),
    "early by a number": (early_by_a_number, KernelTypeError, "early is True or False, got 1"),
    "early alone": (early_alone, KernelValueError, "all roles are early.* no loop or branch"),
    "early store": (early_store, KernelValueError, "store in an early role writes memory while kernels in front"),
    "too many registers": (too_many_registers, KernelValueError, "122880 registers"),
    "too many warps": (too_many_warps, KernelValueError, "= 36 warps, a block has 32"),
    "three warps": (three_warps_second, KernelValueError, "the first 4 or 8; got 3"),
    "round before the first": (round_before_the_first, KernelValueError, "%empty has no slot -1"),
    "read after handing back": (read_after_handing_back, KernelValueError, r"reads %A\[0\] while a copy that role"),
    "arrives in a branch": (arrives_in_a_branch, KernelValueError, "role writer waits at %empty"),
    "changed buffer": (changed_buffer, KernelTypeError, "'b' changes its kind in this loop: it was Shared"),
    "jt.dot": (_in_role(product_by(jt.dot)), KernelTypeError, "write jt.dot_async"),
    "jnp product": (_in_role(product_by(jnp.matmul)), KernelTypeError, "write jt.dot_async"),
    "no barrier": (_in_role(copy(tile, buffer)), KernelTypeError, "names the barrier that counts its bytes"),
    "whole barrier": (_in_role(copy(tile, buffer, barrier=lambda f: f)), KernelTypeError, "names the barrier"),
    "two arrays": (_in_role(copy(tile, tile)), KernelTypeError, "to a buffer of shared memory or back"),
    "asked for no place": (_in_role(lambda x, o, A, f: jt.prefetch(A, A)), KernelTypeError, "prefetch takes a place"),
    "barrier of a store": (
        _in_role(copy(buffer, lambda x, o, A: o.at[:, :], barrier=first)), KernelTypeError, "waited for with",
    ),
    "combining load": (_in_role(copy(tile, buffer, barrier=first, fn="add")), KernelValueError, "for copies to arrays"),
    "combine": (_in_role(copy(buffer, lambda x, o, A: o.at[:, :], fn="mul")), KernelValueError, "fn is set, add"),
    "forgotten soon": (
        _in_role(copy(tile, buffer, barrier=first, evict="soon")), KernelValueError, 'evict is "first" or "last"',
    ),
    "forgotten store": (
        _in_role(copy(buffer, lambda x, o, A: o.at[:, :], evict="first")), KernelValueError, "copies to shared memory",
    ),
    "to an input": (_in_role(copy(buffer, lambda x, o, A: x.at[:, :])), KernelTypeError, "x is an input"),
    "shape": (
        _in_role(copy(lambda x, o, A: x.tiles(32, 64).at[0, 0], buffer, barrier=first)), KernelTypeError, "32, 64",
    ),
    "gather": (
        _in_role(copy(lambda x, o, A: x.at[jt.arange(64), :], buffer, barrier=first)), KernelTypeError, "no gather",
    ),
    "backwards": (_in_role(copy(lambda x, o, A: x.at[::-1, :], buffer, barrier=first)), KernelTypeError, "forwards"),
    "pad": (
        _in_role(copy(lambda x, o, A: x.tiles(64, 64, pad=1).at[0, 0], buffer, barrier=first)), KernelValueError, "0 o",
    ),
    "ring as a buffer": (_in_role(copy(tile, buffer, barrier=first), RING), KernelTypeError, "got a ring of 2"),
    "no such slot": (
        _in_role(lambda x, o, A, f: A[2].load(), RING), KernelValueError, "no number 2 of the ring: the count is 2",
    ),
    "no ring": (_in_role(lambda x, o, A, f: A.at(0)), KernelTypeError, "is for a ring"),
    "element": (_in_role(lambda x, o, A, f: A[0, :]), KernelTypeError, "with slices only"),
    "traced part": (_in_role(lambda x, o, A, f: A[jt.program_id(0) :, :]), KernelTypeError, "are Python ints"),
    "empty part": (_in_role(lambda x, o, A, f: A[64:, :]), KernelValueError, "leaves"),
    "assignment": (_in_role(lambda x, o, A, f: A.__setitem__(..., 0)), KernelTypeError, "X.store"),
    "arithmetic": (_in_role(lambda x, o, A, f: A + 1), KernelTypeError, "is memory, not a value"),
    "stored dtype": (_in_role(lambda x, o, A, f: A.store(jt.zeros((64, 64)))), KernelTypeError, "x.astype"),
    "stored shape": (_in_role(lambda x, o, A, f: A.store(x[0:32, :])), KernelTypeError, "this buffer holds"),
    "parity": (_in_role(lambda x, o, A, f: f[0].wait(2)), KernelValueError, "a parity is 0 or 1"),
    "arrivals": (_in_role(lambda x, o, A, f: f[0].arrive(2)), KernelValueError, "takes 1 to 1 arrivals"),
    "when": (_in_role(lambda x, o, A, f: f[0].arrive(when=jt.arange(2) > 0)), KernelTypeError, "a bool scalar"),
    "bytes": (_in_role(lambda x, o, A, f: f[0].expect(jt.program_id(0))), KernelValueError, "a Python int"),
    "contraction": (_in_role(lambda x, o, A, f: jt.dot_async(A, A[0:32, :])), KernelTypeError, "cannot contract"),
    "accumulator": (_in_role(lambda x, o, A, f: jt.dot_async(A, A, x[...])), KernelTypeError, "the accumulator of"),
    "tile on the right": (_in_role(lambda x, o, A, f: jt.dot_async(A, x[...])), KernelTypeError, "b is a buffer"),
    "Ref": (_in_role(lambda x, o, A, f: jt.dot_async(x, A)), KernelTypeError, "is the Ref x; copy it"),
    "keep": (_in_role(lambda x, o, A, f: jt.dot_async(A, A, keep=True)), KernelTypeError, "nothing to keep"),
    "pending": (_in_role(lambda x, o, A, f: jt.dot_wait(pending=-1)), KernelValueError, "not negative"),
    "inner vmap": (
        _in_role(lambda x, o, A, f: jax.vmap(lambda i: A[i].load())(jt.arange(2)), RING), TransformError, "block level",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    body, error, match = REFUSED[name]
    with pytest.raises(error, match=match) as e:
        traced(body)
    assert e.value.where[0] == __file__


def test_outside_of_a_kernel():
    alloc = lambda **slots: lambda: jt.alloc((4,), BF16, **slots)
    for action in (jt.barrier, alloc(), alloc(slots=2), lambda: jt.role("a").__enter__(), jt.clock):
        with pytest.raises(KernelSyntaxError, match="only inside of a kernel"):
            action()
