"""What the language refuses of kernels that talk to other devices, and where it says so."""

import jax
import numpy as np
import pytest
from device_kernels import numbers, shift

import jtile as jt
from jtile._errors import KernelTypeError, KernelValueError, TransformError, UnsupportedError

X = numbers(4, 3)
LIKE = {"out_type": lambda x: jt.like(x)}


def fails(kind, words, body, scratch=None, **mesh):
    k = jt.kernel(**LIKE, scratch=scratch)(body)
    mesh = mesh or {"x": 4}
    with pytest.raises(kind, match=words) as e:
        k.interpret(np.zeros((*mesh.values(), 3), np.float32), mesh=mesh)
    assert e.value.where is not None and e.value.where[0] == __file__, e.value.where


def test_outside_of_a_mesh():
    with pytest.raises(
        KernelValueError, match=r"jt.axis_size names the axis 'x' .* outside of jax.shard_map.*interpret"
    ):
        shift(X, axis="x")
    with pytest.raises(KernelValueError, match=r"outside of jax\.shard_map"):
        jax.vmap(lambda x: shift(x, axis="x"), axis_name="x")(X)


def test_an_axis_that_the_mesh_lacks():
    with pytest.raises(KernelValueError, match=r"the mesh has no axis 'rows'.*did you mean 'row'\?"):
        shift.interpret(X, axis="rows", mesh={"row": 4})
    fails(KernelTypeError, "the name of an axis of the mesh, a string, got 0", lambda x, o: jt.axis_barrier(0))


def test_refs_that_other_devices_have_not():
    def body(x, o):
        x.on("x", 0)[...] = x[...]

    fails(KernelTypeError, r"x\.on: other devices have no x, .* jt\.symmetric|scratch=\[jt\.symmetric", body)


@pytest.mark.parametrize(
    ("words", "use"),
    [
        ("there are 4 devices along this axis", lambda s: s.on("x", 4)),
        ("the place of a device .* is an int scalar, got 1.5", lambda s: s.on("x", 1.5)),
        ("counts from 0 and is below 2, got 2", lambda s: s[2]),
        ("this index has 2 numbers", lambda s: s[0, 0]),
        (r"jt.wait takes one signal: s has shape \(2,\)", jt.wait),
        ("a device waits for its own signals", lambda s: jt.wait(s.on("x", 0)[1])),
        ("what a signal is waited for to reach is at least 1, got 0", lambda s: jt.wait(s[0], 0)),
        ("the value of a signal is an int scalar, got 0.5", lambda s: jt.signal(s[0], 0.5)),
        ("op is one of 'add', 'set', got 'or'", lambda s: jt.signal(s[0], op="or")),
        ("s are signals, no values", lambda s: jt.zeros(2, np.int32) + s),
        (r"s are signals: jt.signal\(s\[k\]\)", lambda s: s.__setitem__(0, 1)),
        ("s cannot be iterated", list),
    ],
)
def test_signals(words, use):
    fails((KernelTypeError, KernelValueError), words, lambda x, o, s: use(s), [jt.signals(2)])


def test_signals_are_what_signal_takes():
    fails(KernelTypeError, "jt.signal takes signals .*, got Ref", lambda x, o: jt.signal(o))


def test_vmap_inside_of_a_kernel():
    def body(x, o, s):
        jax.vmap(lambda k: jt.signal(s.on("x", k)[0]))(jt.arange(0, 2))

    fails(TransformError, "signal|on under jax.vmap inside of a kernel", body, [jt.signals(2)])


def test_memory_that_every_device_has_is_scratch():
    k = jt.kernel(out_type=lambda x: jt.symmetric(x.shape, x.dtype))(lambda x, o: None)
    with pytest.raises(KernelTypeError, match=r"out_type of kernel .* jt\.symmetric, which belongs into scratch"):
        k.interpret(X, mesh={"x": 4})
    fails(KernelTypeError, "holds no complex numbers", lambda x, o, b: None, [jt.symmetric(3, np.complex64)])


def test_a_kernel_that_names_no_axis():
    fails(
        KernelValueError,
        "s .* belongs to all devices of a call, and it names no axis",
        lambda x, o, s: jt.store(o, ..., x[...]),
        [jt.signals()],
    )


def test_roles_have_no_barrier_of_devices():
    def body(x, o, s):
        with jt.role("one", warps=4):
            o[...] = x[...]
            jt.axis_barrier("x")

    fails(KernelValueError, "a role has no barrier of devices: raise a signal of each", body, [jt.signals()])


def test_the_mesh_is_part_of_what_a_call_is_traced_for():
    for n in (2, 3, 2):
        x = numbers(n, 2)
        np.testing.assert_array_equal(shift.interpret(x, axis="x", mesh={"x": n}), np.roll(x, 1, 0))


def test_a_kernel_is_lowered_for_a_mesh_without_devices():
    lowered = shift.lower(X[0], axis="x", mesh={"x": 4})
    assert "devices(x=4)" in lowered.texts["tile_ir"]
    with pytest.raises(UnsupportedError, match="target 'rocm:gfx942' cannot run op"):
        shift.lower(X[0], axis="x", mesh={"x": 4}, target="rocm:gfx942").image
