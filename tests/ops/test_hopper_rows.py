"""A few rows of x times a matrix, at the block level: in the interpreter, roles interleaved by seeds, and the ops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from library import normal
from sass import spills_of_products

import jtile as jt
from jtile import ops
from jtile.ops import gpu_tiles, hopper_rows
from jtile.ops.gated_mlp import gated_mlp_reference
from jtile.ops.matmul import matmul_reference
from jtile.testing import relative_error
from jtile.testing.evaluate import evaluated

CASES = {  # rows, out, in, weights; programs, dtype
    "tiles in parts": (5, 200, 520, 1, 3, "bfloat16"),
    "a tile in many parts": (16, 64, 1536, 1, 5, "float16"),
    "whole tiles among others": (3, 700, 256, 1, 4, "bfloat16"),
    "programs without work": (8, 64, 256, 1, 3, "bfloat16"),
    "two weights": (9, 200, 520, 2, 3, "bfloat16"),
    "rows over the edge": (13, 300, 264, 1, 3, "bfloat16"),
    "two weights of whole tiles": (16, 256, 512, 2, 3, "float16"),
}


def arguments(m, out, inner, count, dtype="bfloat16"):
    x, *weights = (np.asarray(normal(i, n, inner, dtype=dtype)) for i, n in enumerate((m, *[out] * count)))
    return x, tuple(weights), np.asarray(normal(9, 1, out))


def reference(x, weights, bias):
    one, *other = (np.asarray(x, np.float32) @ np.asarray(w, np.float32).T for w in weights)
    one = one + bias
    return one / (1 + np.exp(-one)) * other[0] if other else one


@pytest.mark.parametrize("name", CASES)
def test_in_the_interpreter(name, monkeypatch):
    *sizes, programs, dtype = CASES[name]
    monkeypatch.setattr(gpu_tiles, "processors", lambda: programs)
    x, weights, bias = arguments(*sizes, dtype)
    meta = hopper_rows.choice(len(x), len(weights))
    meta |= dict(parts=programs, activation="silu" if len(weights) == 2 else None, out_dtype="float32")
    y, _ = hopper_rows.hopper_rows.interpret(x, weights, bias, seed=len(name), **meta)
    assert relative_error(y, reference(x, weights, bias)) < 2e-6


@pytest.mark.parametrize("programs", [1, 2, 3, 7, 132])
@pytest.mark.parametrize(("rounds", "tiles"), [(1, 5), (4, 3), (16, 64), (5, 100)])
def test_shares(rounds, tiles, programs, monkeypatch):
    """All rounds are somebody's, a tile's parts are those of the programs that it names, and a whole tile comes last
    where a program has one."""

    def of(p, k):
        monkeypatch.setattr(jt, "program_id", lambda axis: p)
        share = hopper_rows._share(rounds, tiles, programs)
        u = share.at(k)
        return share.count, u, share.left(u), *share.programs(jax.lax.div(u, jnp.int32(rounds)))

    numbers = np.arange(programs, dtype=np.int32), np.arange(jt.cdiv(rounds * tiles, programs), dtype=np.int32)
    found = evaluated(jax.vmap(jax.vmap(of, (None, 0)), (0, None)))(*numbers)
    seen = {}
    for p, (counts, units, left, first, last) in enumerate(zip(*(x.tolist() for x in map(np.asarray, found)))):
        order, k = [], 0
        while k < counts[0]:
            order.append(left[k] == rounds)
            assert left[k] > 0 and first[k] <= p <= last[k] and (left[k] == rounds) == (first[k] == last[k])
            for j in range(left[k]):
                assert units[k + j] == units[k] + j
                seen.setdefault(units[k + j], []).append(p)
            k += left[k]
        assert not any(order) or order[-1]
    assert sorted(seen) == list(range(rounds * tiles)) and all(len(who) == 1 for who in seen.values())


def test_which_rows_it_takes():
    """Up to 8 rows any matrix, up to 16 those of few rows."""
    of = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    with jt.config(arch="sm_90", overlap=True):
        if jax.device_count() > 1:
            return
        takes = lambda m, *weights: hopper_rows.misfit(of(m, 4096), tuple(of(n, 4096) for n in weights)) is None
        assert takes(8, 6144) and takes(8, 14336, 14336) and takes(9, 4096) and takes(16, 4096)
        assert not takes(9, 6144) and not takes(16, 4096, 4096) and not takes(17, 4096) and not takes(2, 4096)


def test_the_ops_call_it():
    """Where kernels overlap; elsewhere, and where they are differentiated, other kernels do the same."""
    x, (gate, up), bias = arguments(5, 72, 128, 2)
    x, bias = x[None], bias[0]
    product = lambda x, w, bias: ops.matmul(x, w, bias=bias, activation="silu", transpose_b=True, out_dtype="float32")
    exact = lambda x, w, bias: matmul_reference(
        x, w, bias=bias, activation="silu", transpose_b=True, out_dtype="float32"
    )
    gated = lambda x, gate, up: ops.gated_mlp(x, gate, up, transpose=True)
    exactly = lambda x, gate, up: gated_mlp_reference(x, gate, up, transpose=True)
    for op, want, args in ((product, exact, (x, gate, bias)), (gated, exactly, (x, gate, up))):
        with jt.config(arch="sm_90"):
            assert "hopper_rows" not in str(jax.make_jaxpr(op)(*args))
            with jt.config(overlap=True):
                (choice, *_) = ops.choices(op, *args)
                if jax.device_count() == 1:
                    assert choice.implementation == "few rows against it, by tensor cores"
                    assert "hopper_rows" in str(jax.make_jaxpr(op)(*args))
                many = np.repeat(args[0], 4, 1)
                assert ops.choices(op, many, *args[1:])[0].implementation == "tiles"
                total = [lambda *a, f=f: (f(*a).astype(jnp.float32) ** 2).sum() for f in (op, want)]
                got, exact_gradients = (evaluated(jax.grad(f, (0, 1, 2)))(*args) for f in total)
        for a, b in zip(got, exact_gradients, strict=True):
            assert relative_error(a, b) < 1e-2


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_on_the_gpu(name):
    *sizes, _, dtype = CASES[name]
    x, weights, bias = arguments(*sizes, dtype)
    bias = None if len(weights) == 2 else bias
    with jt.config(overlap=True):
        options = dict(activation="silu" if len(weights) == 2 else None, out_dtype="float32")
        run = jax.jit(lambda *args: hopper_rows.product(*args, **options))
        found = run(x, weights, bias)
        assert all(np.array_equal(run(x, weights, bias), found) for _ in range(3))
    assert relative_error(found, reference(x, weights, 0 if bias is None else bias)) < 3e-6


@pytest.mark.slow
@pytest.mark.parametrize(("m", "count"), [(8, 1), (8, 2), (16, 1), (16, 2)])
def test_what_it_compiles_to(m, count):
    pytest.importorskip("triton")
    of = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    meta = hopper_rows.choice(m, count)
    meta |= dict(parts=132, activation="silu" if count == 2 else None, out_dtype="bfloat16", early=True)
    args = of(m, 4096), (of(14336, 4096),) * count, None
    found = hopper_rows.hopper_rows.lower(*args, **meta, target="cuda:sm_90")
    assert not spills_of_products(found.texts["sass"])
    for what in ("HGMMA", "UTMALDG", "ATOMG", "CCTL.IVALL", "ACQBULK"):
        assert what in found.texts["sass"]
