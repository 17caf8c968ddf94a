"""What a rewritten function keeps of its original: lines, metadata, methods."""

from __future__ import annotations

import functools
import inspect
import traceback

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jtile import language as jt
from jtile.errors import KernelSyntaxError, KernelTypeError
from jtile.trace import function, rewrite_loops

F32, I32 = np.dtype("f"), np.dtype("i4")
X = np.arange(24, dtype="f").reshape(6, 4)


def test_lines_are_kept(lower):
    def kernel(x, o):
        acc = 0.0
        for k in jt.range(3):
            acc = acc + x[k, 0]
        o[...] = acc

    first = kernel.__code__.co_firstlineno
    k = lower(kernel, [X], [jax.ShapeDtypeStruct((), F32)])
    lines = {op.mnemonic: op.loc.line - first for op in k.body.walk() if op.mnemonic in ("load", "store", "for")}
    assert lines == {"load": 3, "store": 4, "for": 2}
    assert all(op.loc.file == __file__ for op in k.body.walk())


def test_tracebacks_show_the_user_s_line(lower):
    def kernel(x, o):
        for k in jt.range(3):
            if k == 0:
                o[...] = x[k] @ jnp.ones((7, 7))

    with pytest.raises(TypeError) as e:
        lower(kernel, [X], [jax.ShapeDtypeStruct((4,), F32)])
    frames = [(f.filename, f.line) for f in traceback.extract_tb(e.value.__traceback__)]
    assert (__file__, "o[...] = x[k] @ jnp.ones((7, 7))") in frames


def test_metadata_is_kept():
    def kernel(x: int, o, *, n: int = 3) -> None:
        """Doc."""
        for _ in jt.range(n):
            o[...] = x[...]

    new = rewrite_loops(kernel)
    assert new is not kernel
    assert (new.__name__, new.__doc__, new.__qualname__) == (kernel.__name__, "Doc.", kernel.__qualname__)
    assert inspect.signature(new) == inspect.signature(kernel)
    assert rewrite_loops(new) is new
    assert new.__code__ is rewrite_loops(kernel).__code__


def test_nothing_to_rewrite():
    def kernel(x, o):
        o[...] = x[...]

    assert rewrite_loops(kernel) is kernel
    assert rewrite_loops(len) is len


def test_methods_and_partials(run):
    class Holder:
        n = 3

        def kernel(self, o):
            s = 0
            for k in jt.range(self.n):
                s = s + k
            o[...] = s

    method = rewrite_loops(Holder().kernel)
    partial = rewrite_loops(functools.partial(Holder.kernel, Holder()))
    assert run(lambda o: method(o), [], [((), I32)])[0] == 3
    assert run(lambda o: partial(o), [], [((), I32)])[0] == 3


def test_without_source(lower):
    space = {"jt": jt}
    exec("def kernel(o):\n    for k in jt.range(3):\n        o[...] = k\n", space)
    with pytest.raises(KernelSyntaxError, match=r"linecache, or write jt\.fori"):
        lower(space["kernel"], [], [jax.ShapeDtypeStruct((), I32)])
    exec("def kernel(x, o):\n    if x[0, 0] > 0:\n        o[...] = 1.0\n", space)
    with pytest.raises(KernelTypeError, match=r"this one has none \(it comes from exec.*write it to a file"):
        lower(space["kernel"], [X], [jax.ShapeDtypeStruct((), F32)])


def _undecorated(v):
    if v > 0:
        return v
    return -v


def test_a_helper_that_is_not_decorated(lower):
    with pytest.raises(KernelTypeError, match=r"decorate _undecorated with @jt\.function"):
        lower(lambda x, o: o.__setitem__(..., _undecorated(x[0, 0])), [X], [jax.ShapeDtypeStruct((), F32)])


def test_decorated_functions_in_decorated_functions(run):
    @function
    def outer(x, n):
        @function
        def inner(v):
            for k in jt.range(3):
                v = v + x[k, 1]
                if v > n:
                    break
            return v

        @function
        def plain(v):
            return v + 1.0

        @function
        def numbers():  # a generator stays Python's
            for k in range(2):
                yield plain(k * 1.0)

        for v in numbers():
            n = n + v
        return inner(0.0) + plain(n)

    assert run(lambda x, o: o.__setitem__(..., outer(x, 2.5)), [X], [((), F32)])[0] == 6 + 6.5


@function
def _climb(v, n):
    if n == 0:
        return v
    return _climb(v + 1, n - 1)


def test_a_helper_that_calls_itself(run):
    def down(v, n):
        if n == 0:
            return v
        return down(v - 1, n - 1)

    down = function(down)
    assert run(lambda o: o.__setitem__(..., _climb(1, 3)), [], [((), I32)])[0] == 4
    assert run(lambda o: o.__setitem__(..., down(1, 3)), [], [((), I32)])[0] == -2
