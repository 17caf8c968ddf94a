"""Derivatives and batches of random kernels equal those of their functional form, by JAX's own rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from draws import draws
from functional import functional
from hypothesis import given
from hypothesis import strategies as st
from random_gradients import Case, gradient_kernels

from jtile.testing.evaluate import evaluated

pytestmark = pytest.mark.usefixtures("by_numpy")


def differences(got: Any, want: Any) -> list[float]:
    """The relative error of each leaf; numbers below a hundredth count as such, since sums may cancel."""
    out = []
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        if a.dtype == jax.dtypes.float0:
            continue
        x, y = np.asarray(a, np.float64), np.asarray(b, np.float64)
        undefined = np.isnan(x) & np.isnan(y)  # poison that neither wrote
        x, y = np.where(undefined, 0, x), np.where(undefined, 0, y)
        out.append(float(np.linalg.norm(x - y) / (np.linalg.norm(y) + 1e-2)))
    return out


class Derivatives:
    """A kernel of the float arguments of a case, beside its functional form, and random directions for both."""

    def __init__(self, case: Case):
        self.case, self.kernel = case, case.define()
        self.floats = [k for k, a in enumerate(case.args) if jnp.issubdtype(a.dtype, np.floating)]
        self.primals = [case.args[k] for k in self.floats]
        self.rng = np.random.default_rng(len(case.source))
        self.tangents = [self.like(x) for x in self.primals]
        self.cotangents = tuple(self.like(x) for x in jax.eval_shape(self.ours(interpret=False), *self.primals))

    def like(self, x: Any) -> jax.Array:
        return jnp.asarray(self.rng.uniform(-1, 1, x.shape).astype(np.float32).astype(x.dtype))

    def with_floats(self, floats: tuple[Any, ...]) -> list[Any]:
        args = list(self.case.args)
        for k, x in zip(self.floats, floats, strict=True):
            args[k] = x
        return args

    def ours(self, interpret: bool) -> Callable[..., Any]:
        kernel = self.kernel.with_options(interpret=interpret)
        return lambda *floats: kernel(*self.with_floats(floats))

    def reference(self, *floats: Any) -> Any:
        return functional(self.kernel, *self.with_floats(floats))

    def vjp(self, f: Callable[..., Any]) -> Any:
        def run(primals, cotangents):
            out, pull = jax.vjp(f, *primals)
            return out, pull(cotangents)

        return run, (self.primals, self.cotangents)

    def jvp(self, f: Callable[..., Any]) -> Any:
        return lambda primals, tangents: jax.jvp(f, primals, tangents), (self.primals, self.tangents)

    def agree(self, transform: Callable[..., Any], *interpret: bool) -> None:
        expected, args = transform(self.reference)
        want = evaluated(expected)(*args)
        limit = 3e-2 if self.case.narrow else 1e-4
        for i in interpret:
            errors = differences(evaluated(transform(self.ours(i))[0])(*args), want)
            if not all(e <= limit for e in errors):
                where = "in the interpreter" if i else "of native code"
                pytest.fail(f"relative errors {errors} {where} of outputs, then cotangents, of {self.case}")


def batch(case: Case, sizes: list[bool], place: int) -> tuple[list[Any], list[int | None]]:
    """Three slices of every argument that `sizes` picks, at axis `place` where it has that many."""
    axes = [min(place, a.ndim) if yes else None for a, yes in zip(case.args, sizes, strict=False)]
    axes += [None] * (len(case.args) - len(axes))
    axes[0] = 0 if not any(a is not None for a in axes) else axes[0]
    scale = lambda a, f: a * jnp.asarray(f, a.dtype) if jnp.issubdtype(a.dtype, np.floating) else a
    args = [a if k is None else jnp.stack([a, scale(a, 0.5), scale(a, -1)], k) for a, k in zip(case.args, axes)]
    return args, axes


@pytest.mark.long
@draws(70, quick=24)
@given(gradient_kernels(), st.sampled_from([(True, False), (True,)]))
def test_vjp(case: Case, interpret: tuple[bool, ...]):
    """In the interpreter, and of native code too in every other case."""
    d = Derivatives(case)
    d.agree(d.vjp, *interpret)


@pytest.mark.long
@draws(25)
@given(gradient_kernels(), st.booleans())
def test_jvp(case: Case, interpret: bool):
    d = Derivatives(case)
    d.agree(d.jvp, interpret)


@draws(20)
@given(gradient_kernels(), st.booleans(), st.lists(st.booleans(), min_size=3, max_size=8), st.integers(0, 2))
def test_vmap(case: Case, interpret: bool, sizes: list[bool], place: int):
    kernel = case.define().with_options(interpret=interpret)
    args, axes = batch(case, sizes, place)
    reference = jax.vmap(lambda *a: functional(kernel, *a), axes)
    errors = differences(evaluated(jax.vmap(kernel, axes))(*args), evaluated(reference)(*args))
    assert all(e <= (2e-2 if case.narrow else 1e-4) for e in errors), f"{errors} with axes {axes} of {case}"


@pytest.mark.long
@draws(20)
@given(gradient_kernels())
def test_the_functional_form_is_what_the_interpreter_computes(case: Case):
    kernel = case.define()
    want = kernel.interpret(*case.args)
    errors = differences(evaluated(lambda *args: functional(kernel, *args))(*case.args), want)
    assert all(e <= (2e-2 if case.narrow else 1e-5) for e in errors), f"{errors} of {case}"
