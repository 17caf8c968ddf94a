"""Small products in one round of tiles: in the interpreter, as machine code, and for which products they are chosen."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from library import normal

import jtile as jt
from jtile import ops
from jtile.ops import hopper_small as module
from jtile.ops.hopper_small import hopper_small
from jtile.ops.matmul import matmul_reference
from jtile.testing import relative_error
from jtile.tune import small, warpgroups
from jtile.tune.small import Form

SIZES = (136, 168, 200), (72, 136, 136), (128, 264, 904)  # m, n, k: two rounds, and more than the ring has slots
FORMS = (
    Form(64, 64), Form(64, 128, 2), Form(128, 64, 4), Form(64, 128, 1, 2, 64), Form(64, 64, 1, 4, 64),
    Form(64, 128, 2, 1, 64, 2), Form(128, 64, 4, 1, 64, 2),
)  # fmt: skip
ORDERS = [(False, False), (False, True), (True, False), (True, True)]


def arguments(m, n, k, ta=False, tb=False, dtype="bfloat16"):
    return normal(0, *((k, m) if ta else (m, k)), dtype=dtype), normal(1, *((n, k) if tb else (k, n)), dtype=dtype)


def run(form):
    options = dict(ta=False, tb=False, form=form)
    return jax.jit(lambda a, b: hopper_small.with_options(**form.options)(a, b, None, **options))


@pytest.mark.parametrize("sizes", SIZES)
def test_sizes_in_the_interpreter(sizes):
    args = arguments(*sizes)
    y = hopper_small.interpret(*args, None, ta=False, tb=False, form=Form(64, 128, 2), seed=1)
    assert relative_error(y, matmul_reference(*args)) < 4e-3


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("ta", "tb"), ORDERS)
def test_forms_in_the_interpreter(form, ta, tb):
    args, bias = arguments(136, 200, 648, ta, tb), normal(2, 1, 200, dtype="bfloat16")
    y = hopper_small.interpret(*args, bias, ta=ta, tb=tb, form=form, seed=2)
    assert relative_error(y, matmul_reference(*args, bias=bias[0], transpose_a=ta, transpose_b=tb)) < 4e-3


@pytest.mark.parametrize(
    ("m", "n", "k", "options", "why"),
    [
        (1000, 1000, 1000, {}, None),
        (776, 1000, 2008, {}, None),
        (512, 512, 4096, {}, None),
        (1024, 1024, 1024, {"tb": True}, None),
        (640, 640, 2048, {}, None),
        (640, 640, 8192, {}, "as quick"),
        (1000, 1000, 1000, {"activation": "silu"}, "differentiated"),
        (4000, 3000, 2000, {}, "more than a round"),
        (32, 1024, 4096, {"tb": True}, "more than a round"),  # so few rows have kernels of their own
    ],
)
def test_for_which_products_it_is_made(m, n, k, options, why):
    of = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    options = dict(ta=False, tb=False, activation=None, save=False, out_dtype="bfloat16") | options
    b = of(1, n, k) if options["tb"] else of(1, k, n)
    with jt.config(arch="sm_90"):
        found = module.misfit(of(1, m, k), b, **options)
    if jax.device_count() == 1:
        assert found is None if why is None else why in found
    else:
        assert found
        why = "several devices"
    a, b = of(m, k), of(n, k) if options["tb"] else of(k, n)
    with jt.config(arch="sm_90"):
        call = lambda a, b: ops.matmul(a, b, transpose_b=options["tb"], activation=options["activation"])
        chosen = ops.choices(call, a, b)[-1].implementation
    assert (chosen == "one round of tiles") == (why is None)


def test_forms_are_one_round_and_fit_a_block():
    on = warpgroups.Gpu(132)
    for m, n, k in ((1000, 1000, 1000), (512, 512, 4096), (776, 1000, 2008), (128, 1024, 4096), (72, 64, 8192)):
        p = warpgroups.Product(m, n, k, cut=True)
        found = list(small.candidates(p, on))
        assert small.choice(p, on) in (None, *found)
        for form in found:
            first, last = form.grid(m, n)
            assert first * last * form.parts <= 132 and last % form.share == 0 and form.slots() > 1


def test_copies_have_a_role_where_sums_are_long_or_operands_take_long():
    on = warpgroups.Gpu(132)
    found = lambda m, n, k, **order: small.choice(warpgroups.Product(m, n, k, cut=True, **order), on)
    assert found(776, 1000, 2008) == Form(128, 64, 4, terms=64, roles=2)
    assert found(512, 2048, 8192, left=True) == Form(64, 128, 2, terms=64, roles=2)
    assert found(512, 2048, 8192) is None and found(512, 2048, 8192, left=True, transposed=True) is None
    assert found(640, 640, 2048).roles == 1


@pytest.mark.parametrize(
    ("form", "says"), [(Form(64, 128, 2), ".multicast::cluster"), (Form(64, 64, 1, 2), "st.shared::cluster")]
)
def test_blocks_are_in_clusters_and_start_early(form, says):
    pytest.importorskip("triton")
    of = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    kernel = hopper_small.with_options(**form.options)
    found = kernel.lower(of(512, 1000), of(1000, 1000), None, ta=False, tb=False, form=form, target="cuda:sm_90")
    text, record = found.texts["ptx"], json.loads(found.launch["record"])
    # The size of clusters is said once: by the machine code, since no node of a command buffer can.
    assert ".reqnctapercluster 2, 1, 1" in text and says in text
    assert record["grid"] == form.blocks(512, 1000)
    assert (record["cluster"], record["attributes"]) == (1, {"programmatic": True})
    assert text.index("jtile.cluster ready") < text.index("griddepcontrol.wait") < text.index("cp.async.bulk.tensor")


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("sizes", [*SIZES[::2], (520, 400, 1000)])
def test_on_the_gpu(sizes, form):
    args, f = arguments(*sizes), run(form)
    found = f(*args)
    assert all(np.array_equal(f(*args), found) for _ in range(20))
    assert relative_error(found, matmul_reference(*args)) < 4e-3


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
def test_kernels_in_a_row_on_the_gpu(form):
    """Each starts while the one in front, whose result it needs, ends."""
    a, w = arguments(264, 264, 264)
    f, w = run(form), w / 16
    chain = jax.jit(lambda a, w: jax.lax.fori_loop(0, 500, lambda _, a: f(f(a, w), w), a))
    one = a
    for _ in range(1000):
        one = jax.block_until_ready(f(one, w))
    assert np.array_equal(chain(a, w), one)
