"""What a kernel may return and close over, and the names of its Refs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jtile import language as jt
from jtile.errors import KernelTypeError, UnsupportedError
from jtile.trace import to_tile_ir, trace
from jtile.trace.tracing import CONST_LIMIT, ref_names

F32 = np.dtype("f")
X = np.arange(6, dtype="f")
OUT = jax.ShapeDtypeStruct((6,), F32)
TABLE = jnp.arange(6, dtype=F32)
SMALL = np.arange(6, dtype="f")
LARGE = np.zeros(CONST_LIMIT + 1, "f")
EPS = jnp.float32(0.5)


def test_returning_a_value(lower):
    def kernel(x, o):
        o[...] = x[...]
        return x[...] * 2

    with pytest.raises(
        KernelTypeError, match=r"kernel kernel returns a value \(float32\[6\]\)[\s\S]*test_tracing.py"
    ) as e:
        lower(kernel, [X], [OUT])
    assert "def kernel(x, o):" in str(e.value)


def test_errors_that_are_not_of_jtile_name_the_kernel_and_its_line(lower):
    def kernel(x, o):
        o[...] = x[...] + jnp.ones(5)

    with pytest.raises(TypeError, match="incompatible shapes") as e:
        lower(kernel, [X], [OUT])
    (note,) = (n for n in e.value.__notes__ if n.startswith("jtile"))
    line = kernel.__code__.co_firstlineno + 1
    assert note == f"jtile: while kernel kernel was traced for x: float32[6], o: float32[6], at {__file__}:{line}"


def test_small_constants(run, lower):
    local = np.array([1.0, 2, 3, 4, 5, 6], "f")

    def kernel(x, o):
        o[...] = x[...] + SMALL + local + EPS + jnp.array([1.0, 1, 1, 1, 1, 1])

    (o,) = run(kernel, [X], [OUT])
    np.testing.assert_array_equal(o, X + SMALL + local + 1.5)
    assert "dense" in [op.mnemonic for op in lower(kernel, [X], [OUT]).body.walk()]


def test_device_arrays_are_refused(lower):
    def kernel(x, o):
        o[...] = x[...] + TABLE

    with pytest.raises(
        KernelTypeError,
        match=r"closes over the array 'TABLE' \(float32\[6\]\); pass it as an argument[\s\S]*x\[...\] \+ TABLE",
    ):
        lower(kernel, [X], [OUT])


def test_large_arrays_are_refused(lower):
    def kernel(x, o):
        o[...] = x[...] + LARGE[:6] + jnp.asarray(LARGE).sum()

    with pytest.raises(KernelTypeError, match=r"closes over.*4096 elements"):
        lower(kernel, [X], [OUT])


def test_tracers_are_refused(lower):
    def outer(w):
        def kernel(x, o):
            o[...] = x[...] * w

        lower(kernel, [X], [OUT])

    with pytest.raises(KernelTypeError, match="closes over the array 'w'"):
        jax.jit(outer)(X)


def test_names():
    def kernel(a, b, *rest, n=3):
        del a, b, rest, n

    t = OUT
    assert ref_names(kernel, [t, {"u": t, "v": [t]}, t, t]) == ["a", "b['u']", "b['v'][0]", "rest[0]", "rest[1]"]
    assert ref_names(max, [t, t]) == ["ref0", "ref1"]


def test_roles_and_scratch(run):
    def kernel(x, o, s):
        s[...] = x[...] * 2
        o[...] = s[::-1]
        assert (x.role, o.role, s.role) == ("in", "out", "scratch")
        assert [x.writable, o.writable, s.writable] == [False, True, True]

    (o,) = run(kernel, [X], [OUT], scratch=[OUT])
    np.testing.assert_array_equal(o, X[::-1] * 2)


def test_unsupported_ref_dtype():
    def kernel(x, o):
        pass

    t = jax.ShapeDtypeStruct((2,), np.complex128)
    with pytest.raises(UnsupportedError, match="complex128"):
        trace(kernel, [t], [t], [], grid=())


def test_the_grid_is_not_baked_in():
    """The same function under several grids: ids and sizes stay primitives."""

    def kernel(o):
        o[jt.program_id(0)] = jt.num_programs(0)

    texts = {str(trace(kernel, [], [jax.ShapeDtypeStruct((9,), np.int32)], [], grid=(n,))) for n in (2, 5, 3)}
    assert len(texts) == 1


def test_equal_kernels_are_equal_text():
    def kernel(x, o):
        o[...] = x.tiles(8, pad=jnp.nan)[0][:6] + jnp.where(x[...] > 0, np.nan, 1.0)

    from jtile.ir.printer import print_kernel

    texts = {
        print_kernel(to_tile_ir(trace(kernel, [OUT], [OUT], [], grid=()), name="k", n_in=1, n_out=1, grid=()))
        for _ in range(3)
    }
    assert len(texts) == 1
