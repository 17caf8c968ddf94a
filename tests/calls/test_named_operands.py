"""Operands that belong together: structures with named fields, in which Refs stand for the arrays; and Refs that a call
may leave out."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jtile as jt
from jtile.errors import KernelTypeError

pytestmark = pytest.mark.usefixtures("by_numpy")


class Epilogue(NamedTuple):
    bias: Any = None
    residual: Any = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Weight:
    codes: Any
    scale: Any
    minimum: Any
    kind: str = dataclasses.field(metadata=dict(static=True))

    def row(self, i):
        """A method of a structure is an ordinary function over its Refs."""
        w = self.codes[i, :] * self.scale[i]
        return w if self.minimum is None else w + self.minimum[i]


@jt.kernel(out_type=lambda x, w, epilogue, **_: jt.like(x), grid=lambda x, *_: x.shape[0])
def scaled(x, w: Weight, epilogue: Epilogue, y, sums=None):
    """The second output, if out_type asks for it, is what comes before the residual."""
    i = jt.program_id(0)
    t = x[i, :] * w.row(i)
    t = t if epilogue.bias is None else t + epilogue.bias[...]
    if sums is not None:
        sums[i, :] = t
    y[i, :] = -t if w.kind == "negative" else t if epilogue.residual is None else t + epilogue.residual[i, :]


both = jt.call(scaled.__wrapped__, out_type=lambda x, *_: (jt.like(x), jt.like(x)), grid=lambda x, *_: x.shape[0])


def arrays(*shape, seed=0):
    return jnp.asarray(np.random.default_rng([seed, *shape]).standard_normal(shape, np.float32))


X, B, R = arrays(3, 4), arrays(4, seed=1), arrays(3, 4, seed=2)
W = Weight(arrays(3, 4, seed=3), arrays(3, seed=4), arrays(3, seed=5), "plain")
FORMS = {
    "all": (W, Epilogue(B, R)),
    "bias": (dataclasses.replace(W, minimum=None), Epilogue(B)),
    "residual": (W, Epilogue(residual=R)),
    "static fields": (dataclasses.replace(W, kind="negative"), Epilogue(B)),
}


def wanted(x, w, epilogue):
    t = x * (w.codes * w.scale[:, None] + (0 if w.minimum is None else w.minimum[:, None]))
    t = t if epilogue.bias is None else t + epilogue.bias[None, :]
    return -t if w.kind == "negative" else t if epilogue.residual is None else t + epilogue.residual


@pytest.mark.parametrize("form", FORMS)
def test_in_every_transformation(form):
    """Values, jit, vmap of some fields, gradients in the structure of the arguments."""
    w, epilogue = FORMS[form]
    close = lambda got, want: jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, want
    )
    close(jax.jit(scaled)(X, w, epilogue), wanted(X, w, epilogue))
    close(scaled.interpret(X, w, epilogue), scaled(X, w, epilogue))
    total = lambda f: jax.grad(lambda *args: (f(*args) ** 2).sum(), (0, 1, 2))
    gradients = total(scaled)(X, w, epilogue)
    assert isinstance(gradients[1], Weight) and gradients[1].kind == w.kind and isinstance(gradients[2], Epilogue)
    close(gradients, total(wanted)(X, w, epilogue))
    if epilogue.bias is not None:
        axes = (None, None, Epilogue(0, None) if epilogue.residual is not None else Epilogue(0))
        several = epilogue._replace(bias=jnp.stack([B, -B]))
        close(*(jax.vmap(f, axes)(X, w, several) for f in (scaled, wanted)))


def test_fields_name_the_refs():
    text = scaled.lower(X, W, Epilogue(residual=R)).texts["tile_ir"].replace("\n   ", "")
    assert "( %x: ref<3x4xf32>, %w_codes: ref<3x4xf32>, %w_scale: ref<3xf32>, %w_minimum: ref<3xf32>" in text
    assert "%epilogue_residual: ref<3x4xf32>, %y: ref" in text and "bias" not in text
    with pytest.raises(KernelTypeError, match=r"argument epilogue\.bias of kernel scaled is a str"):
        scaled(X, W, Epilogue("text"))


def test_a_last_ref_that_out_type_may_leave_out():
    y, sums = both(X, W, Epilogue(B, R))
    np.testing.assert_allclose(y, scaled(X, W, Epilogue(B, R)))
    np.testing.assert_allclose(sums + R, y, rtol=1e-6)
    with pytest.raises(KernelTypeError, match=r"has 5 Refs \(x, w, epilogue, y, sums=None\).* gives 2 arguments and"):
        jt.call(scaled.__wrapped__, out_type=lambda x, *_: jt.like(x))(X, W)
    with pytest.raises(KernelTypeError, match="the default None alone marks a last Ref"):
        jt.call(lambda x, o, s=1: None, out_type=X)


def test_a_rule_of_ones_own_gives_cotangents_field_by_field():
    def gradient(back):
        kernel = jt.call(scaled.__wrapped__, out_type=lambda x, *_: jt.like(x), grid=lambda x, *_: x.shape[0])
        kernel.defvjp(lambda *args: (kernel(*args), ()), back)
        return jax.grad(lambda b: kernel(X, W, Epilogue(b)).sum())(B)

    np.testing.assert_array_equal(gradient(lambda _, g: (None, None, Epilogue(g.sum(0)))), jnp.full(4, 3.0))
    with pytest.raises(KernelTypeError, match=r"cotangent of structure .* for epilogue: expected that of the argument"):
        gradient(lambda _, g: (None, None, Epilogue(g.sum(0), g)))  # there is no residual
