"""Convolutions, and gradients of them, by boxes of points at the block level: interpreted, and as machine code."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from library import normal
from sass import spills_of_products

import jtile as jt
from jtile import ops
from jtile.errors import KernelTypeError
from jtile.ops import convolution_boxes as boxes
from jtile.ops.convolution_points import points_of
from jtile.ops.convolutions import convolution_reference, convolution_transpose_reference
from jtile.ops.hopper_convolution import Form, hopper_convolution
from jtile.ops.hopper_convolution_sums import hopper_convolution_sums
from jtile.testing import relative_error

CASES = {  # shapes of x and of the weight, and what differs from strides, gaps and groups of 1 and no padding
    "one axis": ((2, 41, 32), (5, 32, 48), {"pads": ((2, 2),)}),
    "one axis, a stride": ((2, 40, 16), (4, 16, 32), {"pads": ((1, 1),), "stride": (2,)}),
    "two axes": ((3, 9, 11, 24), (3, 3, 24, 40), {"pads": ((1, 1), (1, 1))}),
    "gaps": ((2, 9, 8, 16), (2, 3, 16, 16), {"dilation": (3, 2), "pads": ((1, 2), (0, 3))}),
    "strides": ((2, 9, 8, 32), (3, 4, 32, 16), {"stride": (3, 2), "pads": ((2, 2), (1, 3))}),
    "strides, no tap for some": ((2, 8, 6, 16), (2, 1, 16, 16), {"stride": (4, 2)}),
    "strides and gaps": (
        (1, 12, 8, 16),
        (3, 2, 16, 16),
        {"stride": (3, 2), "dilation": (2, 3), "pads": ((0, 1), (1, 0))},
    ),
    "groups": ((2, 5, 6, 64), (3, 3, 32, 96), {"groups": 2, "pads": ((1, 1), (1, 1))}),
    "groups, a stride": ((1, 6, 8, 96), (3, 2, 48, 32), {"groups": 2, "stride": (2, 2), "pads": ((1, 1), (0, 1))}),
    "small groups": ((2, 5, 6, 32), (3, 3, 4, 64), {"groups": 8, "pads": ((1, 1), (1, 1))}),
    "small groups, a stride": ((1, 6, 8, 64), (3, 2, 8, 96), {"groups": 8, "stride": (2, 2), "pads": ((1, 1), (0, 1))}),
    "planes that consumers share": ((1, 9, 12, 16), (3, 2, 16, 16), {"pads": ((1, 1), (1, 0))}),
    "planes, three axes": ((2, 5, 4, 9, 16), (2, 3, 2, 16, 24), {"pads": ((0, 1), (1, 1), (1, 0))}),
    "planes with gaps": ((1, 9, 20, 24), (2, 3, 24, 16), {"dilation": (2, 1), "pads": ((1, 2), (0, 1))}),
    "planes, remainders": ((2, 8, 20, 16), (4, 4, 16, 16), {"stride": (2, 2), "pads": ((1, 1), (1, 1))}),
    "three axes": ((1, 4, 5, 6, 16), (2, 3, 2, 16, 24), {"pads": ((0, 1), (1, 1), (1, 0))}),
    "many channels": ((1, 5, 4, 136), (2, 2, 136, 264), {}),
}


def arguments(name, dtype=jnp.float16):
    """x, the weight, cotangents, and the options."""
    shape, window, more = CASES[name]
    rank = len(shape) - 2
    options = {"stride": (1,) * rank, "dilation": (1,) * rank, "groups": 1, "pads": ((0, 0),) * rank, **more}
    points = points_of(shape[1:-1], window[:-2], *(options[k] for k in ("stride", "dilation", "pads")))
    shapes = shape, window, (shape[0], *points, window[-1])
    return *(normal(k, *s).astype(dtype) for k, s in enumerate(shapes)), options


def reference(name, dtype=jnp.float16):
    """What `results` gives, in lax."""
    x, w, g, options = arguments(name, dtype)
    of = {**options, "padding": options["pads"]}
    y, back = jax.vjp(functools.partial(convolution_reference, **{k: v for k, v in of.items() if k != "pads"}), x, w)
    return y, *back(g)


def results(name, dtype=jnp.float16):
    """The convolution, and its gradients by both operands."""
    x, w, g, options = arguments(name, dtype)
    of_dx = {k: v for k, v in options.items() if k != "pads"} | {"low": tuple(lo for lo, _ in options["pads"])}
    of_dw = options | {"window": w.shape[:-2]}
    dw = boxes.dw(x, g, **of_dw).astype(dtype)
    return boxes.convolved(x, w, **options), boxes.dx(g, w, shape=x.shape, **of_dx), dw


@pytest.mark.parametrize("name", CASES)
def test_in_the_interpreter(name):
    want = reference(name)
    with jt.config(arch="sm_90", interpret=True, seed=len(name)):
        found = results(name)
    for one, other in zip(found, want, strict=True):
        assert one.shape == other.shape and relative_error(one, other) < 2e-3


@pytest.mark.long
@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("planes")])
def test_planes_that_consumers_share(name, kept, monkeypatch):
    """Consumers are neighbours along the first axis, whatever is the quickest for so few points."""
    slid, chosen = [], boxes._form

    def sliding(images, axes, outputs, terms, groups):
        if axes[0].stride > 1:
            return chosen(images, axes, outputs, terms, groups)
        box = (1, 1, *boxes.box_of(tuple(a.points for a in axes[1:])))
        slid.append(Form(box, 16, 16, tiles=2, slots=2, width=16, slide=True, kept=kept))
        return slid[-1]

    monkeypatch.setattr(boxes, "_form", sliding)
    want = reference(name)
    with jt.config(arch="sm_90", interpret=True, seed=len(name)):
        found = results(name)
    assert slid
    for one, other in zip(found, want, strict=True):
        assert one.shape == other.shape and relative_error(one, other) < 2e-3


@pytest.mark.parametrize("name", ["strides, no tap for some", "strides and gaps", "groups, a stride", "many channels"])
def test_tiles_in_a_line(name, monkeypatch):
    """Programs share out the tiles of all remainders, groups and columns, whatever is the quickest here."""
    lined = []

    def in_a_line(images, axes, outputs, terms, groups):
        box, width = boxes.box_of((images, *(a.points for a in axes))), 8 if terms == 136 else 16
        lined.append(Form(box, 16, width, slots=2, width=16, lined=3))
        return lined[-1]

    monkeypatch.setattr(boxes, "_form", in_a_line)
    want = reference(name)
    with jt.config(arch="sm_90", interpret=True, seed=len(name)):
        found = results(name)
    assert len(lined) == 2
    for one, other in zip(found, want, strict=True):
        assert one.shape == other.shape and relative_error(one, other) < 2e-3


@pytest.mark.parametrize("batched", [(0, None), (None, 0), (0, 0)])
def test_mapped(batched):
    """Tensor maps of arrays with another axis in front may have too many."""
    x, w, g, options = arguments("strides and gaps")
    of_dx = {k: v for k, v in options.items() if k != "pads"} | {"low": (0, 1), "shape": x.shape}
    more = lambda z, axis: z if axis is None else jnp.stack([z, -2 * z])
    runs = (
        (boxes.convolved, (x, w), options), (boxes.dx, (g, w), of_dx), (boxes.dw, (x, g), options | {"window": (3, 2)})
    )  # fmt: skip
    with jt.config(arch="sm_90", interpret=True):
        for run, operands, given in runs:
            run = functools.partial(run, **given)
            one, many = run(*operands), jax.vmap(run, batched)(*map(more, operands, batched))
            scale = -2.0 if None in batched else 4.0
            assert relative_error(many[0], one) < 1e-6 and relative_error(many[1], scale * one) < 2e-3


@pytest.mark.parametrize("batched", [(0, None), (None, 0), (0, 0)])
def test_mapped_over_nothing(batched):
    x, w, g, options = arguments("two axes")
    of = functools.partial(ops.convolution, padding=options["pads"])
    none = lambda z, axis: z if axis is None else jnp.zeros((0, *z.shape), z.dtype)
    back = lambda x, w: (of(x, w), *jax.vjp(of, x, w)[1](g))
    with jt.config(arch="sm_90"):
        found = jax.jit(jax.vmap(back, batched))(*map(none, (x, w), batched))
    assert [z.shape for z in found] == [(0, *z.shape) for z in (g, x, w)]


def test_boxes_cover_points_with_few_in_vain():
    assert boxes.box_of((64, 2048)) == (1, 64)
    assert boxes.box_of((64, 56, 56)) == (1, 8, 8)
    form = boxes.sum_form_of((64, 56, 56), 64, 64, 9, 1, 132)
    assert (form.columns, form.consumers, form.splits) == (64, 3, 44)
    assert boxes.sum_form_of((64, 2048), 256, 256, 5, 1, 132).columns == 256
    assert boxes.sum_form_of((128, 7, 7), 512, 512, 9, 1, 132).splits == 1  # what is added up is as large as all else
    assert math.prod(map(jt.cdiv, (64, 28, 28), boxes.box_of((64, 28, 28)))) * 64 == 64 * 28 * 28


def test_consumers_share_planes_where_copies_are_the_limit():
    def of(images, sides, channels, window):
        ones, pads = (1,) * len(sides), tuple((k // 2, k // 2) for k in window)
        axes = boxes.axes_of(sides, window, ones, ones, pads)
        return boxes.form_of((images, *sides), channels, channels, 1, axes, 132)[0]

    cube, plane = of(64, (16, 28, 28), 32, (3, 3, 3)), of(64, (56, 56), 64, (3, 3))
    assert cube.slide and plane.slide and min(cube.slots, plane.slots) >= 4
    assert not of(64, (28, 28), 128, (3, 3)).slide and not of(64, (14, 14), 256, (3, 3)).slide


def test_tiles_stand_in_a_line_where_they_take_unequal_times():
    def of(sides, window, stride, channels, groups=1):
        axes = boxes.axes_of_dx(sides, window, stride, (1, 1), (0, 0))
        return boxes.form_of((64, *(a.points for a in axes)), channels, channels, groups, axes, 132)[0]

    assert of((28, 28), (1, 1), (2, 2), 512).lined == 132  # three of four remainders have no point of the window
    assert of((14, 14), (3, 3), (1, 1), 64, groups=8).lined == 132  # 8 groups are no equal shares of 132 programs
    assert not of((28, 28), (3, 3), (1, 1), 128).lined


@pytest.mark.usefixtures("on_the_cpu")
def test_choices():
    def of(shape, window, dtype=jnp.bfloat16, op=ops.convolution, **o):
        like = (jax.ShapeDtypeStruct(s, dtype) for s in (shape, window))
        with jt.config(arch="sm_90"):
            return ops.choices(functools.partial(op, **o), *like)[0].implementation

    assert of((64, 2048, 256), (5, 256, 256)) == "boxes of points"
    assert of((64, 28, 28, 128), (4, 4, 64, 128), op=ops.convolution_transpose, stride=2) == "boxes of points"
    assert of((64, 2048, 256), (5, 256, 256), jnp.float32) == "points of the window"
    assert of((64, 57, 57, 128), (3, 3, 128, 128), stride=2) == "points of the result"  # no remainders of equal size
    assert of((64, 28, 28, 256), (1, 1, 256, 512)) == "points of the result"  # a product of matrices


@pytest.mark.parametrize("name", CASES)
def test_what_stands_in_elsewhere_gives_the_same_shapes(name):
    x, w, g, options = arguments(name)
    given = {k: v for k, v in options.items() if k != "pads"} | {"padding": options["pads"]}
    back = lambda g, x, w: jax.vjp(functools.partial(ops.convolution, **given), x, w)[1](g)
    turned = lambda g, x, w: jax.vjp(functools.partial(ops.convolution_transpose, **given), g, w)[0]
    with jt.config(arch="sm_90"):
        assert [z.shape for z in jax.eval_shape(back, g, x, w)] == [x.shape, w.shape]
        assert jax.eval_shape(turned, g, x, w).shape[-1] == x.shape[-1]


@pytest.mark.long
def test_derivatives_of_a_transposed_one():
    """The reverse is the convolution, and there are derivatives forwards besides, of the reverse, too."""
    x, w, t, u = (normal(k, *s).astype(jnp.float16) for k, s in enumerate([(2, 5, 6, 16), (4, 3, 32, 16)] * 2))
    of = functools.partial(ops.convolution_transpose, stride=2)
    good = functools.partial(convolution_transpose_reference, stride=2)
    ct = normal(5, 2, 10, 12, 32).astype(jnp.float16)

    def every(f):
        back = lambda x, w: jax.vjp(f, x, w)[1](ct)
        return jax.tree.leaves((back(x, w), jax.jvp(f, (x, w), (t, u))[1], jax.jvp(back, (x, w), (t, u))[1]))

    with jt.config(arch="sm_90"):
        found = ops.choices(lambda x, w: jax.vjp(of, x, w)[1](ct), x, w)
    names = [(one.op, one.implementation) for one in found]
    assert names.count(("convolution", "boxes of points")) == 1  # and not one for each remainder
    with jt.config(arch="sm_90", interpret=True):
        for one, other in zip(every(of), every(good), strict=True):
            assert one.shape == other.shape and relative_error(one, other) < 3e-3


@pytest.mark.parametrize(("channels", "groups"), [(32, 8), (64, 4), (24, 1)])
def test_derivatives_of_groups(channels, groups):
    """The reverse is of x as it is: nothing with its padding is kept."""
    given = {"groups": groups, "padding": 1}
    x, t = (normal(k, 2, 5, 6, channels).astype(jnp.float16) for k in (0, 1))
    w, u = (normal(k, 3, 3, channels // groups, channels).astype(jnp.float16) for k in (2, 3))
    of, good = (functools.partial(f, **given) for f in (ops.convolution, convolution_reference))

    def every(f):
        return (*jax.vjp(f, x, w)[1](t), jax.jvp(f, (x, w), (t, u))[1])

    with jt.config(arch="sm_90"):
        kept = jax.tree.leaves(jax.eval_shape(lambda x, w: jax.vjp(of, x, w)[1], x, w))
        assert kept and all(a.size <= max(x.size, w.size) for a in kept)
    with jt.config(arch="sm_90", interpret=True):
        for one, other in zip(every(of), every(good), strict=True):
            assert one.shape == other.shape and relative_error(one, other) < 3e-3


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_on_the_gpu(name):
    want = reference(name, jnp.bfloat16)
    run = jax.jit(functools.partial(results, name, jnp.bfloat16))
    found = run()
    for again in (run() for _ in range(3)):
        assert all(map(np.array_equal, found, again))
    for one, other in zip(found, want, strict=True):
        assert relative_error(one, other) < 6e-3


of = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)


@pytest.mark.parametrize("share", [1, 2])
def test_neighbours_share_the_weight(share):
    """A copy of a box of images and points is one instruction; with `share`, parts of the weight go to both."""
    pytest.importorskip("triton")
    axes = boxes.axes_of((28, 28), (3, 3), (1, 1), (1, 1), ((1, 1), (1, 1)))
    form = Form((4, 4, 4), 128, tiles=3, slots=4, share=share)
    given = {"axes": axes, "form": form, "groups": 1, "turned": False, "target": "cuda:sm_90"}
    found = hopper_convolution.with_options(**form.options).lower(of(64, 28, 28, 64), of(9, 64, 128), **given)
    assert found.texts["ptx"].count("cp.async.bulk.tensor.4d.shared") == form.consumers
    assert ("multicast::cluster" in found.texts["ptx"]) == (share > 1)
    assert not spills_of_products(found.texts["sass"])


@pytest.mark.slow
def test_sums_have_no_spills():
    pytest.importorskip("triton")
    axes = boxes.axes_of((2048,), (5,), (1,), (1,), ((2, 2),))
    form = boxes.sum_form_of((64, 2048), 256, 256, 5, 1, 132)
    given = {"axes": axes, "form": form, "groups": 1, "target": "cuda:sm_90"}
    found = hopper_convolution_sums.lower(of(64, 2048, 256), of(64, 2048, 256), **given)
    assert not spills_of_products(found.texts["sass"])


# -- copies of boxes of more axes than their buffer has ----------------------------------------------------------------


def _moved(start: int, rows: int = 8):
    """A kernel that copies a box of x [3, 4, 8] that begins at (start, start) into a matrix, and the matrix out."""

    def body(x, o):
        buffer = jt.alloc((rows, 8), x.dtype)
        full = jt.barrier()
        with jt.role("copies", warps=4):
            full[0].expect(buffer.nbytes)
            at = jt.program_id(0) + start
            jt.async_copy(x.at[jt.ds(at, 2), jt.ds(at, 4), :], buffer, full[0])
            full.at(0).wait()
            jt.async_copy(buffer, o.at[jt.ds(1, 2), jt.ds(0, 4), :])
            jt.store_wait()

    return jt.call(body, out_type=jax.ShapeDtypeStruct((3, 4, 8), jnp.float32), grid=(1,))


@pytest.mark.parametrize("start", [-1, 0, 1])
def test_rows_of_a_box(start):
    """What lies in front of an array, or behind it, is zero."""
    x = np.asarray(normal(0, 3, 4, 8))
    y = np.asarray(_moved(start).interpret(x))
    around = np.pad(x, ((1, 4), (1, 4), (0, 0)))[1 + start :][:2, 1 + start :][:, :4]
    assert np.array_equal(y[1:3], around)


def test_a_box_with_other_rows_is_refused():
    with pytest.raises(KernelTypeError, match="the rows of a tile of more axes"):
        _moved(0, rows=4).interpret(np.zeros((3, 4, 8), np.float32))
