"""Sums of padded tiles that nowhere meet are tiles put together, bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jtile as jt
from jtile import ir
from jtile.interpret import interpret
from jtile.passes.patches import patches

HEAD = """kernel @k(%x: ref<2x3x4xf32>, %o: ref<{out}xf32, out>) grid() {{
  %c0 = full 0 : i32   %c1 = full 1 : i32   %z = full {pad} : f32
  %a = load %x[%c0, %c0:+3, %c0:+4] : tile<3x4xf32>   %b = load %x[%c1, %c0:+3, %c0:+4] : tile<3x4xf32>
"""
TAIL = "\n  store %o[{index}], %s\n}}"
# {name: (how a and b are padded, the rest, the shape, ops that are left of pads)}
CASES = {
    "side by side": (("low=(0, 0) high=(0, 4)", "low=(0, 4) high=(0, 0)"), "", "3x8", 0),
    "rows, with zeros between": (("low=(4, 0) high=(0, 0)", "low=(0, 0) high=(4, 0)"), "", "7x4", 0),
    "in turns": (("low=(0, 0) high=(0, 1) interior=(0, 1)", "low=(0, 1) high=(0, 0) interior=(0, 1)"), "", "3x8", 0),
    "every third": (
        ("low=(0, 2) high=(0, 0) interior=(0, 2)", "low=(0, 0) high=(0, 2) interior=(0, 2)"), "", "3x12", 0,
    ),
    "over each other": (("low=(0, 0) high=(0, 3)", "low=(0, 3) high=(0, 0)"), "", "3x7", 2),
    "ones around": (("low=(0, 0) high=(0, 4)", "low=(0, 4) high=(0, 0)"), "1.0", "3x8", 2),
    "other axes": (("low=(0, 0) high=(3, 4)", "low=(3, 4) high=(0, 0)"), "", "6x8", 2),
    "every second, but not to the end": (
        ("low=(0, 0) high=(0, 2) interior=(0, 1)", "low=(0, 1) high=(0, 1) interior=(0, 1)"), "", "3x9", 2,
    ),
    "read twice": (("low=(0, 0) high=(0, 4)", "low=(0, 4) high=(0, 0)"), "twice", "3x8", 1),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_sums_of_pads(name):
    pads, rest, out, left = CASES[name]
    shape = f"tile<{out}xf32>"
    lines = []
    for x, p in zip("ab", pads, strict=True):
        p = p if "interior" in p else p + " interior=(0, 0)"
        lines.append(f"  %p{x} = pad %{x}, %z {p} : {shape}")
    lines.append(
        f"  %s = add %pa, %pb : {shape}"
        if rest != "twice"
        else f"  %t = add %pa, %pb : {shape}\n  %s = add %t, %pa : {shape}"
    )
    index = ", ".join(f"%c0:+{n}" for n in out.split("x"))
    pad = rest if rest == "1.0" else "0.0"
    kernel = ir.parse_kernel(
        HEAD.format(out=out, pad=pad) + "\n".join(lines) + TAIL.format(index=index).replace("}}", "}")
    )
    x = np.random.default_rng(0).normal(size=(2, 3, 4)).astype(np.float32)
    x[:, 0, :2] = -0.0
    made = patches(kernel)
    ir.verify(made, "tile")
    found, expected = interpret(made, [x])[0], interpret(kernel, [x])[0]
    np.testing.assert_array_equal(found.view(np.int32), expected.view(np.int32))
    assert sum(isinstance(op, ir.Pad) for op in made.body.walk()) == (2 if name == "read twice" else left)


@jt.kernel(out_type=lambda x: jt.like(x), grid=lambda x: jt.cdiv(x.shape[0], 16))
def halves(x, o):
    i, n = jt.program_id(0), x.shape[1]
    t = x.tiles(16, n)[i, 0]
    a, b = t[:, : n // 2], t[:, n // 2 :]
    c, d = t[:, ::2], t[:, 1::2]
    o.tiles(16, n)[i, 0] = jnp.concatenate([a * b, c / (1 + d * d)], 1)


def test_gradients_of_slices_put_tiles_together():
    x = np.random.default_rng(1).normal(size=(37, 24)).astype(np.float32)

    def plain(x):
        a, b, c, d = x[:, :12], x[:, 12:], x[:, ::2], x[:, 1::2]
        return jnp.concatenate([a * b, c / (1 + d * d)], 1)

    weight = jnp.cos(jnp.arange(x.size, dtype=jnp.float32)).reshape(x.shape)
    got, want = (jax.grad(lambda x, f=f: (f(x) * weight).sum())(x) for f in (halves, plain))
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-6)
    if jax.default_backend() == "cpu":
        assert "masked.scatter" not in halves.lower(x).vjp().pieces[0].texts["llvm"]
