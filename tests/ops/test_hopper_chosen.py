"""The mixture of experts of one token behind an RMS norm, at the block level: by the interpreter, beside `jnp`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from library import normal

import jtile as jt
from jtile.models import experts
from jtile.ops import gpu_tiles, hopper_chosen
from jtile.testing import relative_error
from jtile.testing.evaluate import evaluated

COUNT, FEATURES, HIDDEN = 8, 256, 264


def operands(dtype="bfloat16"):
    of = lambda seed, *shape, **options: np.asarray(normal(seed, *shape, **options)) / 4
    norm, router = 1 + of(2, HIDDEN), of(3, COUNT, HIDDEN)
    matrices = of(4, COUNT, 2 * FEATURES, HIDDEN, dtype=dtype), of(5, COUNT, HIDDEN, FEATURES, dtype=dtype)
    return of(0, 1, HIDDEN, dtype=dtype), of(1, 1, HIDDEN, dtype=dtype), norm, router, *matrices


@pytest.mark.parametrize("chosen", [(5, 0, 7), (2,)])
def test_products(monkeypatch, chosen):
    """Of several tiles a program; the last piece of a row of experts side by side has fewer numbers than others."""
    monkeypatch.setattr(gpu_tiles, "processors", lambda: 5)
    x, residual, norm, router, gate_up, down = operands()
    index, share = np.array(chosen, np.int32), np.linspace(0.2, 0.9, len(chosen)).astype(np.float32)
    with jt.config(arch="sm_90", interpret=True, overlap=True):
        run = lambda *of: hopper_chosen.products(*of[:3], index, share, *of[3:], eps=1e-2)
        y = evaluated(run)(x, residual, norm, gate_up, down)
        scores, total = evaluated(lambda *of: hopper_chosen.normed_scores(*of, eps=1e-2))(x, residual, norm, router)
    x, residual, gate_up, down = (a.astype(np.float32) for a in (x, residual, gate_up, down))
    n = x + residual
    np.testing.assert_array_equal(np.asarray(total), n.astype(jnp.bfloat16))
    n = n / np.sqrt((n * n).mean() + 1e-2) * norm
    assert relative_error(scores, n @ router.T) < 3e-6
    gate, up = np.split(gate_up[index] @ n[0], 2, axis=1)
    want = np.einsum("k,khf,kf->h", share, down[index], gate / (1 + np.exp(-gate)) * up)
    assert relative_error(y[0], want) < 6e-3


def test_the_mixture_takes_it_where_kernels_overlap():
    """On other targets, and where it is differentiated, one kernel after the other does the same."""
    args, options = operands(), dict(k=2, normalised=True, eps=1e-2)
    with jt.config(arch="sm_90"):
        assert experts.mixture_behind_norm.choice(*args, **options).implementation == "one kernel after the other"
        with jt.config(overlap=True):
            choice = experts.mixture_behind_norm.choice(*args, **options)
            assert (choice.implementation, choice.elsewhere) == (
                "streams of the chosen matrices", "one kernel after the other",
            )  # fmt: skip
            with jt.config(interpret=True):
                total, y = evaluated(lambda *of: experts._streamed(*of, **options))(*args)
    want = evaluated(lambda *of: experts.mixture_behind_norm(*of, **options))(*args)
    assert relative_error(total, want[0]) == 0 and relative_error(y, want[1]) < 2e-2
    with jt.config(overlap=True):
        of = evaluated(
            jax.grad(lambda x: experts.mixture_behind_norm(x, *args[1:], **options)[1].sum().astype("float32"))
        )
        assert np.isfinite(np.asarray(of(args[0]), np.float32)).all()


def test_what_it_refuses():
    shape = lambda *of, dtype="bfloat16": jax.ShapeDtypeStruct(of, dtype)
    x, router, matrices = (
        shape(1, 2048),
        shape(128, 2048, dtype="float32"),
        (shape(128, 1536, 2048), shape(128, 2048, 768)),
    )
    why = lambda *args: hopper_chosen.misfit(*args) or ""
    with jt.config(arch="sm_90"):
        assert why(x, router, *matrices, 8) == "kernels do not overlap"
    with jt.config(arch="sm_90", overlap=True):
        assert why(x, router, *matrices, 8) == ""
        assert "2 tokens" in why(shape(2, 2048), router, *matrices, 8)
        assert "float32" in why(shape(1, 2048, dtype="float32"), router, *matrices, 8)
        assert "more than 16" in why(x, router, *matrices, 17)
        assert "columns" in why(x, router, matrices[0], shape(128, 2048, 760), 8)
        assert "the router is large" in why(x, shape(4096, 2048, dtype="float32"), *matrices, 8)
        wide = shape(8, 28672, 4096), shape(8, 4096, 14336)
        assert "no room" in why(shape(1, 4096), shape(8, 4096, dtype="float32"), *wide, 2)


@pytest.mark.gpu
def test_on_the_gpu():
    """As one kernel after the other gives it, and the same bits in every run."""
    args, options = operands(), dict(k=3, normalised=False, eps=1e-2)
    with jt.config(overlap=True):
        run = jax.jit(lambda *of: experts.mixture_behind_norm(*of, **options))
        assert "hopper_chosen_sum" in str(jax.make_jaxpr(run)(*args))
        found = run(*args)
        assert all(np.array_equal(a, b) for _ in range(9) for a, b in zip(run(*args), found, strict=True))
    want = jax.jit(lambda *of: experts._one_by_one(*of, **options))(*args)
    for a, b in zip(found, want, strict=True):
        assert relative_error(a, b) < 2e-2
