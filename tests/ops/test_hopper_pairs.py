"""Products with a 2:4 weight in pairs: by the sparse tensor cores of Hopper, in the interpreter, and elsewhere."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from library import agree, gradients_agree, normal
from sass import spills_of_products

import jtile as jt
from jtile import ops
from jtile.errors import KernelValueError
from jtile.ops import gpu_tiles, hopper_tiles
from jtile.ops import hopper_pairs as module
from jtile.ops.hopper_pairs import hopper_pairs
from jtile.ops.two_of_four import sparse24_matmul_reference
from jtile.testing import relative_error
from jtile.tune.pairs import Form

FORMS = {  # rows of x, the form, dtypes: rows that fill no tile, and more tiles than programs
    "a tile": (3, Form(1, 8, 128, 2, 2), "bfloat16", "float32"),
    "programs with several tiles": (70, Form(2, 40, 64, 3, 2, band=2, programs=3), "float16", "float16"),
}


@pytest.mark.parametrize("name", FORMS)
def test_in_the_interpreter(name):
    m, form, dtype, out_dtype = FORMS[name]
    x, w = normal(0, m, 384, dtype=dtype), ops.sparse24(normal(1, 256, 384, dtype=dtype), order="pairs")
    y = hopper_pairs.interpret(x, w.values, w.codes, seed=m, form=form, out_dtype=out_dtype)
    assert relative_error(y, sparse24_matmul_reference(x, w, out_dtype=out_dtype)) < (1e-6 if m == 3 else 1e-3)


def test_orders():
    weight = normal(0, 6, 48)
    halves, pairs = (ops.sparse24(weight, order=order) for order in ("halves", "pairs"))
    assert (halves.order, halves.values.shape, pairs.values.shape) == ("halves", (6, 4, 6), (6, 24))
    np.testing.assert_array_equal(pairs.dense(), halves.dense())
    jax.tree.map(np.testing.assert_array_equal, pairs.ordered("halves"), halves)
    jax.tree.map(np.testing.assert_array_equal, halves.ordered("pairs"), pairs)
    assert pairs.ordered("pairs") is pairs and ops.sparse24(weight).order == "halves"
    kept = np.asarray(pairs.dense()).reshape(6, 12, 4)
    np.testing.assert_array_equal(pairs.values.reshape(6, 12, 2), [[g[g != 0] for g in row] for row in kept])
    for wrong, match in [
        (lambda: ops.sparse24(weight, order="rows"), "halves or pairs, got 'rows'"),
        (lambda: dataclasses.replace(pairs, order="rows").dense(), "halves or pairs, got 'rows'"),
        (lambda: dataclasses.replace(pairs, order="halves").dense(), r"in halves has shape \(6, 24\)"),
        (lambda: dataclasses.replace(halves, order="pairs").dense(), r"in pairs has shape \(6, 4, 6\)"),
    ]:
        with pytest.raises(KernelValueError, match=match):
            wrong()


def test_rows_on_several_devices():
    """Their order changes where axes are named by types, too."""
    halves = ops.sparse24(normal(0, 6, 48))
    mesh = jax.sharding.AbstractMesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))
    named = lambda x: jax.ShapeDtypeStruct(
        x.shape, x.dtype, sharding=jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d"))
    )
    for weight, order in ((halves, "pairs"), (halves.ordered("pairs"), "halves")):
        turned = jax.eval_shape(lambda w, order=order: w.ordered(order), jax.tree.map(named, weight))
        assert {x.sharding.spec[0] for x in jax.tree.leaves(turned)} == {"d"}


def test_default_where_products_may_be_shared_out(monkeypatch):
    made = lambda: jax.eval_shape(ops.sparse24, jax.ShapeDtypeStruct((64, 256), jnp.bfloat16)).order
    with jt.config(arch="sm_90"):
        monkeypatch.setattr(jax, "device_count", lambda: 2)
        assert made() == "halves"
        with gpu_tiles.beside([jnp.zeros(1)]):
            assert made() == "pairs"


@pytest.mark.parametrize("arch", [None, "sm_90"])
def test_products_and_gradients(arch):
    """Where no instruction takes pairs, or a derivative is wanted, they are brought into halves."""
    pair = (ops.sparse24_matmul, sparse24_matmul_reference)
    with jt.config(arch=arch):
        x, w = normal(0, 5, 48), ops.sparse24(normal(1, 6, 48), order="pairs")
        agree(*pair, x, w)
        gradients_agree(*[lambda x, v, f=f: f(x, ops.Sparse24Tensor(v, w.codes, "pairs")) for f in pair], x, w.values)


def test_choice():
    S, bf16 = jax.ShapeDtypeStruct, jnp.bfloat16
    with jt.config(arch="sm_90"), gpu_tiles.beside([jnp.zeros(1)]):  # whatever devices the host has
        chosen = lambda x, w: ops.choices(ops.sparse24_matmul, x, w)[0]
        pairs, halves = (functools.partial(ops.sparse24, order=order) for order in ("pairs", "halves"))
        made = lambda n, k, dtype=bf16, by=ops.sparse24: jax.eval_shape(by, S((n, k), dtype))
        found = chosen(S((700, 256), bf16), made(64, 256))
        assert (found.implementation, found.elsewhere) == ("sparse tensor cores", "the dense weight in memory")
        for n, k in ((96, 256), (64, 192)):
            assert "no whole tiles" in str(chosen(S((3, k), bf16), made(n, k, by=pairs)))
            assert made(n, k).order == "halves"
        assert "stand in halves" in str(chosen(S((3, 256), bf16), made(64, 256, by=halves)))
        assert "rows are float32" in module.misfit(S((3, 256), "float32"), made(64, 256), out_dtype="float32")
    for m, n, itemsize in ((1, 64, 4), (33, 192, 2), (300, 192, 4), (4096, 8192, 2)):
        form = hopper_tiles.pairs(m, n, 8192, itemsize)
        assert n % form.rows == 0 and form.tiles(m, n)[1] % form.band == 0 and form.slots >= 3


def test_machine_code():
    """The products of a round run together, none waits for the one before; nothing spills, and nothing writes to the
    registers with places from a product on until all have been waited for."""
    S, form = jax.ShapeDtypeStruct, Form(2, 256, 64, 5, 3, programs=2)
    operands = S((512, 256), jnp.bfloat16), S((256, 128), jnp.bfloat16), S((256, 32), jnp.uint8)
    sass = hopper_pairs.lower(*operands, form=form, out_dtype="bfloat16", target="cuda:sm_90").texts["sass"]
    assert len(re.findall(r"HGMMA\.SP\.64x256x32\.F32\.BF16", sass)) == sass.count("HGMMA") == 8
    assert sass.count("WARPGROUP.ARRIVE") == 4
    assert not spills_of_products(sass)
    places: set[str] = set()
    for line in sass.splitlines():
        if m := re.search(r"HGMMA\.SP.*, (R\d+), 0x[01]", line):
            places.add(m[1])
        elif re.search(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x0", line):
            places = set()
        elif m := re.search(r"^\s*/\*\w+\*/\s+(?:@!?U?P\d\s+)?[A-Z][\w.]*\s+(R\d+)[,. ]", line):
            assert m[1] not in places or "NANOSLEEP" in line, line
    assert not places and len(re.findall(r"NANOSLEEP R\d+", sass)) == 4


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 40, 300, 4096])
def test_on_the_device(m):
    """Sums of whole numbers are exact, in every run."""
    draw = lambda seed, *shape: jax.random.randint(jax.random.key(seed), shape, -2, 3).astype(jnp.bfloat16)
    x, w = draw(0, m, 4096), ops.sparse24(draw(1, 2048, 4096), order="pairs")
    wanted = np.asarray(sparse24_matmul_reference(x, w))
    for _ in range(5):
        np.testing.assert_array_equal(ops.sparse24_matmul(x, w), wanted)
