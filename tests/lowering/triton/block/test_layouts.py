"""Layouts of TTGIR: their text, what they are as linear maps, and which one each tile of a role gets."""

from __future__ import annotations

import itertools

import block_kernels
import jax
import jax.numpy as jnp
import pytest
from block_tiles import CASES
from machines import machine

import jtile as jt
from jtile import ir
from jtile.lowering.triton import layouts, versions
from jtile.lowering.triton.block.analysis import Homes
from jtile.lowering.triton.block.compile import emit_block_kernel
from jtile.lowering.triton.block.layouts import (
    Blocked,
    Linear,
    Mma,
    Operand,
    Sliced,
    aliased,
    blocked,
    mma,
    sliced,
    swizzled,
    unsliced,
)
from jtile.lowering.triton.block.linear import halved, in_vectors, linear, permuted, registers_along, reshaped
from jtile.lowering.triton.block.passes import steps
from jtile.lowering.triton.features import features

ACC = Mma((4, 1), 64, 16)
LAYOUTS = [
    (ACC, (64, 64)),
    (Mma((4, 2), 32, 16), (128, 64)),
    (Mma((8, 1), 256, 16), (128, 256)),
    (Operand(ACC, 2), (64, 64)),
    (blocked((64, 64), "f32", 4), (64, 64)),
    (blocked((128,), "f32", 1), (128,)),
    (blocked((4,), "i32", 4), (4,)),
    (Sliced(1, ACC), (64,)),
    (Sliced(0, ACC), (64,)),
    (registers_along((64, 32), 0, 4), (64, 32)),
    (registers_along((64,), 0, 4), (64,)),
]


def places(h: Linear) -> list[tuple[int, ...]]:
    """The element that each register of each thread holds."""
    out = []
    bases = [*h.register, *h.lane, *h.warp]
    for bits in itertools.product((0, 1), repeat=len(bases)):
        at = [0] * len(bases[0])
        for bit, base in zip(bits, bases, strict=True):
            at = [a ^ (bit * x) for a, x in zip(at, base, strict=True)]
        out.append(tuple(at))
    return out


@pytest.mark.parametrize(("layout", "shape"), LAYOUTS)
def test_every_element_is_somewhere(layout, shape):
    h = linear(layout, shape)
    assert len(h.lane) == 5
    assert set(places(h)) == set(itertools.product(*map(range, shape)))


def test_a_row_of_a_product():
    """Four lanes share a row, each has pairs of neighbours, and rows 8 apart."""
    h = linear(ACC, (64, 64))
    assert h.register == ((0, 1), (8, 0), (0, 8), (0, 16), (0, 32))
    assert h.lane == ((0, 2), (0, 4), (1, 0), (2, 0), (4, 0))
    assert h.warp == ((16, 0), (32, 0))
    assert linear(Operand(ACC, 2), (64, 64)) == h  # so that a product's result becomes an operand where it is


def test_moves_follow_the_elements():
    h = linear(ACC, (64, 64))
    assert {(r, c // 32, c % 32) for r, c in places(h)} == set(places(reshaped(h, (64, 64), (64, 2, 32))))
    assert places(permuted(h, (1, 0))) == [(c, r) for r, c in places(h)]
    half = halved(permuted(reshaped(h, (64, 64), (64, 2, 32)), (0, 2, 1)))
    assert half == linear(Mma((4, 1), 32, 16), (64, 32))
    assert halved(permuted(h, (1, 0))) is None  # of 64 columns


def test_neighbours_in_registers_side_by_side():
    """The threads of elements stay; what has no neighbours in a thread stays as it is."""
    lane, warp = tuple((1 << k, 0) for k in range(5)), ((0, 0),)
    h = Linear(((0, 2), (32, 0), (0, 4), (0, 1)), lane, warp)
    assert in_vectors(h) == Linear(((0, 1), (0, 2), (0, 4), (32, 0)), lane, warp)
    for other in (Linear(((0, 2), (32, 0)), lane, ((0, 1),)), ACC):
        assert in_vectors(other) == other


def test_an_axis_of_length_1():
    """It has no bits, whatever layout a broadcast along it is to have."""
    whole = linear(ACC, (64, 64))
    assert set(places(linear(whole, (64, 1)))) == {(r, 0) for r in range(64)}
    assert set(places(reshaped(linear(whole, (64, 1)), (64, 1), (32, 2)))) == set(
        itertools.product(range(32), range(2))
    )


def test_slices():
    assert unsliced(sliced(ACC, (0, 1)), (0, 1)) == ACC
    assert unsliced(sliced(ACC, (1,)), (0,)) is None
    assert str(sliced(ACC, (0,))).startswith("#ttg.slice<{dim = 0, parent = #ttg.nvidia_mma<{")


@pytest.mark.parametrize(
    ("m", "n", "warps", "want"),
    [
        (64, 128, 4, Mma((4, 1), 128, 16)),
        (128, 512, 8, Mma((8, 1), 256, 16)),
        (64, 128, 8, Mma((4, 2), 64, 16)),
        (32, 128, 4, None),
        (64, 4, 4, None),
        (64, 64, 2, None),
    ],
)
def test_products(m, n, warps, want):
    assert mma(m, n, 16, warps) == want


def test_buffers():
    assert [getattr(swizzled((64, n), "bf16"), "width", None) for n in (256, 64, 32, 16, 8)] == [128, 128, 64, 32, 0]
    assert swizzled((64, 32), "f32").width == 128
    assert "swizzled_shared" in str(swizzled((64,), "i64"))


def test_short_names():
    text, names = aliased(f"a {ACC} b {Sliced(0, ACC)} c {swizzled((64, 64), 'bf16')} d {blocked((64,), 'f32', 4)}")
    assert text == "a #mma b #ttg.slice<{dim = 0, parent = #mma}> c #shared d #blocked"
    assert list(names) == ["#mma", "#shared", "#blocked"]


# -- homes ------------------------------------------------------------------------------------------------------------


def role_of(kernel: ir.Kernel) -> tuple[ir.Block, Homes]:
    roles = ir.roles_of(kernel)
    return roles.bodies[0], Homes(roles.bodies[0], roles.warps[0])


def named(body: ir.Block, name: str) -> ir.Value:
    values = [r for op in body.walk() for r in op.results]
    values += [p for op in body.walk() for b in op.blocks() for p in b.params]
    return next(v for v in values if v.name == name)


def test_what_attention_carries():
    body, homes = role_of(ir.parse_kernel(block_kernels.attention(d=64, bn=128)))
    scores, out = Mma((4, 1), 128, 16), Mma((4, 1), 64, 16)
    for name, want in {"m": Sliced(1, scores), "l": Sliced(1, scores), "acc": out, "p": Operand(out, 2),
                       "pj": scores, "hn": scores, "alpha": Sliced(1, scores), "of": out}.items():  # fmt: skip
        assert homes[named(body, name)] == want, name


@jt.kernel(out_type=jax.ShapeDtypeStruct((256, 8), "float32"), grid=2)
def every_eighth(a, b, o):
    """Sums of every eighth column of a product."""
    A, B, acc = a.tiles(128, 64), b.tiles(64, 64), jt.zeros((128, 64), jnp.float32)
    for k in jt.range(A.shape[1], stages=2):
        acc = jt.dot(A[jt.program_id(0), k], B[k, 0], acc)
    o.tiles(128, 8)[jt.program_id(0), 0] = acc.reshape(128, 8, 8).sum(1)


def test_sums_over_registers_stay_in_them(monkeypatch):
    """Also where triton folds the wrong threads of other layouts."""
    monkeypatch.setattr(versions, "reduces_any_layout", lambda: False)
    a, b = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((256, 256), (256, 64)))
    planned = steps(every_eighth.lower(a, b).kernel, machine(), {})
    text = emit_block_kernel(planned.kernel, features("sm_90"))[0]
    assert "-> tensor<64x8x8xf32" in text and '"tt.reduce"' in text
    assert not [line for line in text.splitlines() if "ttg.convert_layout" in line and "tensor<64x8x8" in line]
    layouts.check(text)


def test_what_nothing_reaches_lies_as_its_users_want():
    body, homes = role_of(CASES["vector along columns"].kernel)
    assert homes[named(body, "v_r")] == Sliced(0, Mma((4, 1), 64, 16))
    body, homes = role_of(CASES["rows by pointers"].kernel)
    assert isinstance(homes[named(body, "i")], Blocked)


@jt.kernel(out_type=jax.ShapeDtypeStruct((16, 32), "float32"), grid=1)
def in_words(x, o):
    words, numbers, pairs = (
        jt.alloc(s, d) for s, d in (((16, 128), "uint32"), ((32, 4), "float32"), ((16, 16), "float32"))
    )
    with jt.role("one"):
        numbers.store(x.tiles(32, 4)[0, 0])
        words.store(jnp.full((16, 128), 7, jnp.uint32))
        pairs.store(jnp.full((16, 16), 3.0))
        jt.role_barrier()
        factors = numbers.load()
        for k in jt.range(3):
            w = words.load().reshape(16, 32, 4)
            t = sum((w[:, :, n] + jnp.uint32(k)).astype(jnp.float32) * factors[:, n][None] for n in range(4))
            o[:, :] = t * jnp.broadcast_to(pairs.load()[:, :, None], (16, 16, 2)).reshape(16, 32)


def test_parts_stay_in_their_registers():
    """Those of a tile in a loop of a role without products, which lies as loads do; what stands before it comes as
    the loop takes it."""
    artifact = in_words.lower(jax.ShapeDtypeStruct((32, 4), "float32"), target="cuda:sm_90")
    body, homes = role_of(artifact.kernel)
    loads = [op.result for op in body.walk() if isinstance(op, ir.LoadShared)]
    words, factors = (next(v for v in loads if v.shape == shape) for shape in ((16, 128), (32, 4)))
    assert homes[words] == Blocked((1, 4), (1, 32), (4, 1), (1, 0))
    assert linear(homes[factors], (32, 4)).lane == tuple((2**k, 0) for k in range(5))
    moved = [line for line in artifact.texts["ttgir"].splitlines() if "ttg.convert_layout" in line]
    assert all("tensor<32xf32" in line for line in moved), moved  # the same by another name
