"""Small products in clusters of two blocks, of one role: in the interpreter, and as machine code."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from library import normal

import jtile as jt
from jtile import ops
from jtile.ops.hopper_clusters import hopper_clusters, misfit, product
from jtile.ops.matmul import matmul_reference
from jtile.testing import relative_error

SIZES = ((136, 168, 200), (72, 136, 136), (128, 264, 904))  # m, n, k: two rounds, and more than the ring has slots


def arguments(m, n, k, dtype="bfloat16"):
    return normal(0, m, k, dtype=dtype), normal(1, k, n, dtype=dtype)


@pytest.mark.parametrize("sizes", SIZES)
def test_in_the_interpreter(sizes):
    args = arguments(*sizes)
    y = hopper_clusters.interpret(*args, seed=1)
    assert relative_error(y, matmul_reference(*args)) < 4e-3


@pytest.mark.parametrize(
    ("m", "n", "k", "options", "why"),
    [
        (1000, 1000, 1000, {}, None),
        (1024, 1024, 1024, {}, "share no copies"),  # rows begin with lines
        (1000, 1000, 1000, {"tb": True}, "transposed"),
        (1000, 1000, 1000, {"activation": "silu"}, "follows the product"),
        (4000, 3000, 2000, {}, "share no copies"),  # many rounds of tiles
    ],
)
def test_for_which_products_it_is_made(m, n, k, options, why):
    of = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    options = dict(ta=False, tb=False, activation=None, save=False, out_dtype="bfloat16") | options
    b = of(1, n, k) if options["tb"] else of(1, k, n)
    with jt.config(arch="sm_90"):
        found = misfit(of(1, m, k), b, None, **options)
    if jax.device_count() == 1:
        assert found is None if why is None else why in found
    else:
        assert found
        why = "several devices"
    a, b = of(k, m) if options["ta"] else of(m, k), of(n, k) if options["tb"] else of(k, n)
    with jt.config(arch="sm_90"):
        call = lambda a, b: ops.matmul(a, b, transpose_b=options["tb"], activation=options["activation"])
        chosen = ops.choices(call, a, b)[-1].implementation
    assert (chosen == "one role, in clusters") == (why is None)


def test_blocks_share_copies_and_start_early():
    pytest.importorskip("triton")
    of = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    kernel = hopper_clusters.with_options(multicast=2)
    found = kernel.lower(of(1000, 1000), of(1000, 1000), target="cuda:sm_90")
    text, record = found.texts["ptx"], json.loads(found.launch["record"])
    # The size of clusters is said once: by the machine code, since no node of a command buffer can.
    assert ".reqnctapercluster 2, 1, 1" in text and ".multicast::cluster" in text
    assert (record["grid"], record["cluster"], record["attributes"]) == (128, 1, {"programmatic": True})
    assert text.index("jtile.cluster ready") < text.index("griddepcontrol.wait") < text.index("cp.async.bulk.tensor")


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [*SIZES, (1000, 1000, 1000)])
def test_on_the_gpu(sizes):
    args = arguments(*sizes)
    run = jax.jit(lambda a, b: product(a[None], b[None])[0])
    found = run(*args)
    assert all(np.array_equal(run(*args), found) for _ in range(20))
    assert relative_error(found, matmul_reference(*args)) < 4e-3
