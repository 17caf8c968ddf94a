"""Attention of a new token with its way into the cache: the kernel beside products in the interpreter, and the op."""

import functools

import jax
import numpy as np
import pytest
from library import normal
from sass import spills_of_products

import jtile as jt
from jtile import ops
from jtile.errors import KernelTypeError, KernelValueError
from jtile.ops import gpu_tiles, hopper_step
from jtile.ops.hopper_shares import Units
from jtile.ops.step_attention import step_attention, step_attention_reference
from jtile.testing import relative_error
from jtile.testing.evaluate import evaluated

CASES = {  # heads, kv heads, slots, d, lengths; programs, norms, slots of a page
    "rows in parts": ((8, 2, 192, 64, (190, 3)), 3, False, None),
    "norms, several units": ((16, 2, 192, 128, (191,)), 4, True, None),
    "the first token": ((4, 1, 64, 64, (0, 64)), 2, False, None),
    "pages": ((4, 1, 128, 64, (128 - 1, 20)), 2, False, 64),
}


def arguments(heads, kvs, slots, d, lengths, norms=False, page=None, dtype="bfloat16"):
    """The operands of `step_attention`, and its options; what stands behind a length is NaN."""
    batch, lengths = len(lengths), np.array(lengths, np.int32)
    qkv = np.asarray(normal(0, batch, heads + 2 * kvs, d, dtype=dtype))
    cache = [np.asarray(normal(i, batch, slots, kvs, d, dtype=dtype)) for i in (1, 2)]
    behind = np.arange(slots)[None, :, None, None] >= lengths[:, None, None, None]
    cache = [np.where(behind, np.asarray(np.nan, x.dtype), x) for x in cache]
    options = {"heads": heads, "scale": 0.1, "norms": None, "pages": None, "eps": 1e-5}
    if norms:
        options["norms"] = tuple(np.asarray(normal(i, d)) for i in (3, 4))
    if page is not None:
        order = np.random.default_rng(0).permutation(batch * slots // page)
        cache = [x.reshape(-1, page, kvs, d)[np.argsort(order)] for x in cache]
        options["pages"] = order.reshape(batch, -1).astype(np.int32)
    angles = np.asarray(normal(5, batch, d // 2))
    return (qkv, np.cos(angles), np.sin(angles), lengths, *cache), options


def reference(args, options):
    """(What queries get, keys, values), with zeros for what is behind a length."""
    clean = [np.nan_to_num(np.asarray(x, np.float32)).astype(x.dtype) for x in args[4:]]
    found = evaluated(functools.partial(step_attention_reference, **options))(*args[:4], *clean)
    return [np.asarray(x, np.float32) for x in found]


def check(found, want):
    y, *held = (np.asarray(x, np.float32) for x in found)
    assert relative_error(y.reshape(want[0].shape), want[0]) < 4e-3
    for x, exact in zip(held, want[1:], strict=True):
        assert np.abs(np.nan_to_num(x) - exact).max() <= 2**-6 * np.abs(exact).max()  # rounded once


@pytest.mark.parametrize("name", CASES)
def test_in_the_interpreter(name, monkeypatch):
    sizes, programs, norms, page = CASES[name]
    args, options = arguments(*sizes, norms, page)
    monkeypatch.setattr(gpu_tiles, "processors", lambda: programs)
    kernel = functools.partial(hopper_step.hopper_step.interpret, seed=len(name))
    monkeypatch.setattr(hopper_step, "hopper_step", kernel)
    table, of = options.pop("pages"), options.pop("norms")
    found = hopper_step.step(*args, of or (), table, **options)
    check(found, reference(args, {**options, "pages": table, "norms": of}))


def test_the_op():
    """Elsewhere, under vmap, and where launches do not overlap, two kernels do the same."""
    args, options = arguments(4, 2, 128, 64, (100, 5))
    args = (*args[:4], *(np.nan_to_num(x) for x in args[4:]))
    run = functools.partial(step_attention, **options)
    with jt.config(arch="sm_90"):
        assert "rope_append" in str(jax.make_jaxpr(run)(*args))
        with jt.config(overlap=True):
            (choice, *_) = ops.choices(run, *args)
            many = [np.repeat(x, 128, 1) for x in args[4:]]
            assert ops.choices(run, *args[:4], *many)[0].implementation != choice.implementation
            if jax.device_count() == 1:
                assert choice.implementation == "one kernel beside the products"
            several = jax.vmap(run, (0, None, None, None, None, None))
            assert jax.eval_shape(several, np.stack([args[0]] * 3), *args[1:])[1].shape == (3, *args[4].shape)
    with jt.config(interpret=True):
        check(evaluated(run)(*args), reference(args, options))


@pytest.mark.parametrize(("lengths", "slots"), [((), 128), ((3,), 0)])
def test_of_no_rows_or_no_slots(lengths, slots):
    """There is nothing that a program could wait for."""
    args, options = arguments(4, 2, slots, 64, lengths)
    run = functools.partial(step_attention, **options)
    with jt.config(arch="sm_90", overlap=True):
        assert ops.choices(run, *args)[0].implementation == "append, then attend"
        assert jax.eval_shape(run, *args)[0].shape == (len(lengths), 4, 64)


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"heads": 3}, KernelValueError, "heads a multiple of kv_heads"),
        ({"lengths": np.zeros(3, np.int32)}, KernelValueError, "lengths"),
        ({"lengths": np.zeros(2, np.float32)}, KernelTypeError, "lengths"),
        ({"cos": np.zeros((2, 32), np.float16)}, KernelTypeError, "cos is float32"),
        ({"sin": np.zeros((2, 64), np.float32)}, KernelValueError, "sin"),
        ({"values": np.zeros((2, 64, 2, 64), np.float32)}, KernelValueError, "values"),
        ({"norms": (np.zeros(32, np.float32),) * 2}, KernelValueError, "norms"),
        ({"pages": np.zeros((1, 2), np.int32)}, KernelValueError, "pages"),
        ({"keys": np.zeros((3, 128, 2, 64)), "values": np.zeros((3, 128, 2, 64))}, KernelValueError, "keys"),
    ],
)
def test_errors(change, error, match):
    args, options = arguments(4, 2, 128, 64, (100, 5))
    named = dict(zip(("qkv", "cos", "sin", "lengths", "keys", "values"), args, strict=True)) | options | change
    with pytest.raises(error, match=match):
        step_attention(**named)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_on_the_gpu(name):
    sizes, _, norms, page = CASES[name]
    args, options = arguments(*sizes, norms, page)
    with jt.config(overlap=True):
        run = jax.jit(functools.partial(step_attention, **options))
        assert "hopper_step" in str(jax.make_jaxpr(run)(*args))
        found = run(*args)
        assert all(np.array_equal(x, y, equal_nan=True) for x, y in zip(run(*args), found, strict=True))
    check(found, reference(args, options))


@pytest.mark.slow
def test_what_it_compiles_to():
    """A block leaves room for that of a product on its multiprocessor."""
    pytest.importorskip("triton")
    of = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype)
    cache = of("bfloat16", 1, 640, 8, 128)
    args = of("bfloat16", 1, 48, 128), *(of("float32", 1, 64),) * 2, of("int32", 1), cache, cache, (), None
    options = {"heads": 32, "eps": 0.0, "scale": 0.1, "units": Units(640, 64, 8), "parts": 132, "slots": 1}
    found = hopper_step.hopper_step.lower(*args, **options, target="cuda:sm_90")
    assert not spills_of_products(found.texts["sass"])
    for what in ("HGMMA", "UTMALDG", "SYNCS", "USETMAXREG", "ATOMG", "CCTL.IVALL", "ACQBULK"):
        assert what in found.texts["sass"]
    took = found.launch["resources"]
    assert took["registers"] * took["threads"] + 72 * 640 <= 65536 and took["shared"] < 39 << 10
