"""Products in tiles of any multiple of eight columns, at the block level: in the interpreter, and as machine code."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from library import normal
from sass import spills_of_products

import jtile as jt
from jtile import ops
from jtile.errors import UnsupportedError
from jtile.ops.hopper_columns import hopper_columns, pieces
from jtile.ops.matmul import matmul_reference
from jtile.testing import relative_error
from jtile.tune import columns, warpgroups
from jtile.tune.columns import Form

CASES = {  # m, n, k, whether W lies as [n, k], form, bias and activation, dtype
    "rows of x": (72, 136, 136, False, Form(False, 1, 48), True, "bfloat16"),
    "more columns than a line of shared memory": (72, 264, 136, False, Form(False, 2, 144), False, "bfloat16"),
    "rows of x, W turned": (136, 88, 64, True, Form(False, 2, 40), True, "float16"),
    "rows of W": (200, 72, 192, False, Form(True, 1, 104), True, "bfloat16"),
    "rows of W, W turned": (56, 136, 72, True, Form(True, 2, 24), False, "float16"),
}


def arguments(name):
    m, n, k, tb, form, whole, dtype = CASES[name]
    x, w = (np.asarray(normal(i, *shape, dtype=dtype)) for i, shape in enumerate(((m, k), (n, k) if tb else (k, n))))
    bias = np.asarray(normal(2, 1, n, dtype=dtype)) if whole else None
    options = dict(tb=tb, form=form, slots=2, activation="silu" if whole else None, out_dtype=dtype)
    return (x, w, bias), options


def reference(x, w, bias, *, tb, activation, out_dtype, **_):
    bias = None if bias is None else bias[0]
    return matmul_reference(x, w, bias=bias, activation=activation, transpose_b=tb, out_dtype=out_dtype)


@pytest.mark.parametrize("name", CASES)
def test_in_the_interpreter(name):
    args, options = arguments(name)
    y = hopper_columns.interpret(*args, seed=len(name), **options)
    assert relative_error(y, reference(*args, **options)) < 4e-3


@pytest.mark.parametrize("n", [8, 24, 32, 104, 176, 200, 256])
def test_pieces_of_columns(n):
    found = pieces(n, 32)
    assert [at for at, _ in found] == [sum(w for _, w in found[:k]) for k in range(len(found))]
    assert sum(w for _, w in found) == n and {w for _, w in found} <= {8, 16, 32}


@pytest.mark.parametrize(
    ("m", "n", "k", "tb", "form"),
    [
        (200, 9216, 4096, False, Form(True, 3, 104)),
        (640, 5120, 5120, True, Form(False, 2, 208)),
        (300, 5120, 5120, True, Form(True, 2, 104)),
        (160, 4096, 14336, True, Form(True, 1, 80)),
        (128, 14336, 4096, True, None),  # as quick in tiles of 128 x 128
        (4096, 4096, 4096, False, None),
    ],
)
def test_choices(m, n, k, tb, form):
    p = warpgroups.Product(m, n, k, transposed=tb, cut=True)
    assert columns.choice(p, warpgroups.Gpu(132)) == form
    of = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    with jt.config(arch="sm_90"):
        product = lambda a, b: ops.matmul(a, b, transpose_b=tb)
        chosen = ops.choices(product, of(m, k), of(n, k) if tb else of(k, n))[-1].implementation
    assert (chosen == "tiles of any columns") == (form is not None and jax.device_count() == 1)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_on_the_gpu(name):
    args, options = arguments(name)
    run = jax.jit(lambda *args: hopper_columns(*args, **options))
    found = run(*args)
    assert all(np.array_equal(run(*args), found) for _ in range(3))
    assert relative_error(found, reference(*args, **options)) < 4e-3


@pytest.mark.parametrize(
    ("form", "instruction"),
    [(Form(False, 2, 144), "n144"), pytest.param(Form(True, 3, 176), "n176", marks=pytest.mark.slow)],
)
def test_instructions(form, instruction):
    """They have the columns of the tile, which is wider in registers, and nothing else multiplies."""
    pytest.importorskip("triton")
    of = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    options = dict(tb=False, form=form, slots=form.slots(), activation="silu", out_dtype="bfloat16")
    found = hopper_columns.lower(of(520, 4096), of(4096, 8192), of(1, 8192), **options, target="cuda:sm_90")
    assert set(re.findall(r"wgmma\.mma_async\S*m64(n\d+)k16", found.texts["ptx"])) == {instruction}
    assert not spills_of_products(found.texts["sass"])


def _narrow(width: int, dtype=jnp.bfloat16, also: bool = False):
    """A kernel with a product of `width` columns of 64, and, with `also`, one of all of them."""

    def body(x, o):
        rows, columns = (jt.alloc((64, 64), x.dtype) for _ in range(2))
        full = jt.barrier()
        with jt.role("multiplies", warps=4):
            full.at(0).wait()
            total = jt.zeros((64, 64), jnp.float32)
            total = jt.dot_wait(jt.dot_async(rows, columns[:width].T, total))
            if also:
                total = jt.dot_wait(jt.dot_async(rows, columns.T, total))
            o[...] = total
        with jt.role("copies", warps=1, registers=24):
            full[0].expect(2 * rows.nbytes)
            for to in (rows, columns):
                jt.async_copy(x.tiles(64, 64).at[0, 0], to, full[0])

    call = jt.call(body, out_type=jax.ShapeDtypeStruct((64, 64), jnp.float32))
    return call, np.asarray(normal(0, 64, 64, dtype=jnp.dtype(dtype).name))


def test_other_columns_stay():
    call, x = _narrow(24)
    y = call.interpret(x)
    want = np.asarray(x, np.float32) @ np.asarray(x, np.float32).T
    assert relative_error(y[:, :24], want[:, :24]) < 1e-6 and not np.asarray(y[:, 24:]).any()


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        (_narrow(24, also=True), "64 and 24 of 64 columns"),
        (_narrow(32), "the first columns of a buffer"),
        (_narrow(24, jnp.float8_e4m3fn), "24 of 64 columns of 16-bit floats"),
    ],
)
def test_what_has_no_instructions(kernel, message):
    pytest.importorskip("triton")
    call, x = kernel
    with pytest.raises(UnsupportedError, match=message):
        _ = call.lower(x, target="cuda:sm_90").image
