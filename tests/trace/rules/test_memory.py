from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jtile import language as jt
from jtile.errors import KernelAssertionError, UnsupportedError

F = np.random.default_rng(0).standard_normal((5, 4, 3)).astype("f")


def test_jax_refs(check):
    def fn(x):
        r = jax.new_ref(x)
        r[1:3] += 2.0
        r[0] = r[4]
        r[jnp.array([1, 2])] = r[jnp.array([3, 0])]
        r[2, :, 1] = r[3, :, 2] * 2
        old = jax.ref.swap(r, (4,), x[0])
        return r[...], old, r[1, :, jnp.array([0, 2])], jax.freeze(r)

    check(fn, F)


def test_jax_refs_in_loops(check):
    def fn(x):
        total = jax.new_ref(jnp.zeros((4, 3)))

        def add(k, _):
            total[...] += x[k]
            jax.ref.addupdate(total, (slice(None), 0), jnp.ones(4))

        jax.lax.fori_loop(0, 5, add, None)
        return total[...]

    check(fn, F)


def test_jt_on_jax_refs(run):
    def kernel(x, o):
        r = jax.new_ref(x[...])
        jt.store(r, (jt.ds(0, 2), ...), jt.load(r, (jt.ds(3, 2), ...)))
        o[...] = jt.load(r, ...)

    (got,) = run(kernel, [F], [(F.shape, F.dtype)])
    want = F.copy()
    want[:2] = F[3:]
    np.testing.assert_array_equal(got, want)


def test_alloc(run):
    def kernel(x, o):
        r = jt.alloc((8,), jnp.float32)
        r[jt.ds(0, 5)] = x[:, 0, 0]
        r[jt.ds(5, 3)] = jnp.zeros(3)
        o[...] = r[::-1]

    (got,) = run(kernel, [F], [((8,), F.dtype)])
    np.testing.assert_array_equal(got, np.concatenate([F[:, 0, 0], np.zeros(3, "f")])[::-1])


def test_program_ids(run):
    def kernel(o):
        i, j = jt.program_id(0), jt.program_id(1)
        o[i, j] = i * 100 + j * 10 + jt.num_programs(0) + jt.num_programs(1)

    (got,) = run(kernel, [], [((2, 3), np.dtype("i4"))], grid=(2, 3))
    np.testing.assert_array_equal(got, np.arange(2)[:, None] * 100 + np.arange(3) * 10 + 5)


def test_print_and_assert(run, lower):
    def kernel(x, o):
        jt.print("first {} of {}", x[0, 0, 0], x[...])
        jt.print(x[0, 0, 0], 1)
        jt.assert_(x[...] < 100.0, "too large")
        jt.assert_(jt.program_id(0) == 1, "wrong program")
        o[...] = x[...]

    out = jax.ShapeDtypeStruct(F.shape, F.dtype)
    ops = [op for op in lower(kernel, [F], [out], grid=(1,)).body.walk() if op.effect == "io"]
    assert [getattr(op, "format", None) or op.message for op in ops] == [
        "first {} of {}",
        "{} {}",
        "too large",
        "wrong program",
    ]
    with pytest.raises(KernelAssertionError, match="wrong program"):
        run(kernel, [F], [out], grid=(1,))


def test_unsupported_primitives_name_the_line(lower):
    def kernel(x, o):
        o[...] = x[...]
        jax.debug.print("{}", x[0, 0, 0])

    with pytest.raises(UnsupportedError, match=r"jt.print[\s\S]*test_memory.py:\d+[\s\S]*jax.debug.print"):
        lower(kernel, [F], [jax.ShapeDtypeStruct(F.shape, F.dtype)])


def test_ref_views_of_jax_are_refused(lower):
    def kernel(x, o):
        r = jax.new_ref(x[...])
        o[...] = r.at[1:3].at[0:1][...]

    with pytest.raises(UnsupportedError, match="index the Ref once"):
        lower(kernel, [F], [jax.ShapeDtypeStruct((1, 4, 3), F.dtype)])
