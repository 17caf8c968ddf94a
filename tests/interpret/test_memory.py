"""What the interpreter allows and refuses: bounds, races, undefined elements; and what it records."""

from __future__ import annotations

import numpy as np
import pytest

from jtile._errors import (
    InterpreterError,
    KernelTypeError,
    KernelValueError,
    OutOfBoundsError,
    RaceError,
    UninitializedReadError,
)
from jtile.interpret import interpret, poison
from jtile.ir import parse_kernel
from jtile.ir.types import DTYPES


def run(head: str, body: str, *inputs, **kw):
    """Interpret a kernel written as text; `head` is its parameters and grid."""
    lines = "\n".join("  " + line.strip() for line in body.strip().splitlines())
    return interpret(parse_kernel(f'kernel @k{head} @"k.py":1 {{\n{lines}\n}}'), list(inputs), **kw)


X = np.arange(10, dtype=np.float32)
CONST = "".join(f"%{'m' if n < 0 else 'c'}{abs(n)} = full {n} : i32\n" for n in (-1, 0, 1, 2, 3, 4, 9, 10, 11))


def load(index: str, *more: str, shape: str = "", head: str = "(%x: ref<10xf32>, %o: ref<SHAPE, out>)", **kw):
    """Load `index` of 0..9 and store the tile to an output of its shape."""
    typed = f"{shape}xf32" if shape else "f32"
    dims = [f"%c0:+{n}" for n in shape.split("x")] if shape else []
    body = f"{CONST}{''.join(m + chr(10) for m in more)}%a = load %x{index} pad=-7.0\nstore %o[{', '.join(dims)}], %a"
    (out,) = run(head.replace("SHAPE", typed), body, X, **kw)
    return out.tolist()


def test_overhang_reads_the_pad():
    assert load("[%c9:+4]", shape="4") == [9, -7, -7, -7]
    assert load("[%c10:+2]", shape="2") == [-7, -7]
    assert load("[%c1:+4:3]", shape="4") == [1, 4, 7, -7]
    assert load("[tile(%c2, 4)]", shape="4") == [8, 9, -7, -7]
    assert load("[tile(%c3, 4, step=3)]", shape="4") == [9, -7, -7, -7]
    assert load("[take(%t)]", "%t = dense (3, -1, 10, 9, -9) : tile<5xi64>", shape="5") == [3, -7, -7, 9, -7]
    assert load("[take(%t)]", f"%t = dense ({2**64 - 1}, 2) : tile<2xu64>", shape="2") == [-7, 2]
    assert load("[%c4]") == 4


OUTSIDE = [
    ("[%m1]", "", "index -1 is outside axis 0, which has 10 elements"),
    ("[%c10]", "", "index 10 is outside"),
    ("[%m1:+4]", "4", "a span that starts at -1 leaves axis 0"),
    ("[%c11:+4]", "4", "a span that starts at 11"),
    ("[tile(%m1, 4)]", "4", "tile index -1"),
    ("[tile(%c3, 4)]", "4", "tile index 3 is outside axis 0, which has 3 tiles (10 elements in steps of 4)"),
    ("[tile(%c4, 4, step=3)]", "4", "which has 4 tiles"),
]


@pytest.mark.parametrize(("index", "shape", "why"), OUTSIDE)
def test_out_of_bounds(index, shape, why):
    with pytest.raises(OutOfBoundsError) as e:
        load(index, shape=shape)
    assert why in str(e.value)
    assert "kernel k, program (), Ref x: load out of bounds" in str(e.value)
    # without the check such lanes read the pad, where they are outside
    load(index, shape=shape, check=False)


def test_out_of_bounds_on_store_and_atomic_names_program_and_line():
    for op in ("store %o[%i], %f", "%old = atomic add %o[%i], %f"):
        with pytest.raises(OutOfBoundsError) as e:
            run(
                "(%o: ref<2xf32, out>) grid(3) init(%o = 0)",
                f'%i = program_id 0\n%f = full 1.0 : f32\n{op} @"kernel.py":8',
            )
        assert "program (2,), Ref o" in str(e.value)
        assert e.value.where == ("kernel.py", 8)


def test_masked_lanes_may_leave_the_array():
    off, part = "%m = full false : bool", "%m = dense (false, true) : tile<2xbool>"
    assert load("[%c10] mask=%m", off) == -7
    assert load("[%m1:+2] mask=%m", "%m = full false : tile<2xbool>", shape="2") == [-7, -7]
    with pytest.raises(OutOfBoundsError):
        load("[%m1:+2] mask=%m", part, shape="2")
    (out,) = run("(%o: ref<2xf32, out>) init(%o = 0)", f"{CONST}{off}\n%f = full 1.0 : f32\nstore %o[%c10], %f mask=%m")
    assert out.tolist() == [0, 0]


def test_overhang_is_never_written():
    out, a = run(
        "(%o: ref<5xf32, out>) grid(2) init(%o = 0)",
        "%i = program_id 0\n%f = full 1.0 : tile<4xf32>\nstore %o[tile(%i, 4)], %f",
        trace_accesses=True,
    )
    assert out[0].tolist() == [1] * 5
    assert a.written[0].tolist() == [True] * 5
    (out,) = run(
        "(%o: ref<5xf32, out>) init(%o = 0)",
        "%t = dense (4, -1, 2, 5, 2) : tile<5xi32>\n"
        "%f = dense (1., 2., 3., 4., 5.) : tile<5xf32>\nstore %o[take(%t)], %f",
    )
    assert out.tolist() == [0, 0, 5, 0, 1]  # of two lanes for one element the last stays


def test_mixed_indices():
    x = np.arange(2 * 3 * 4 * 5, dtype=np.float32).reshape(2, 3, 4, 5)
    rows, cols = np.array([[0, 2], [1, 9]]), np.array([[4, 0], [5, 1]])
    (out,) = run(
        "(%x: ref<2x3x4x5xf32>, %r: ref<2x2xi32>, %c: ref<2x2xi32>, %o: ref<2x2x3xf32, out>)",
        "%c0 = full 0 : i32\n%c1 = full 1 : i32\n"
        "%rs = load %r[%c0:+2, %c0:+2]\n%cs = load %c[%c0:+2, %c0:+2]\n"
        "%a = load %x[%c1, take(%rs), %c1:+3, take(%cs)] pad=-1.0\nstore %o[%c0:+2, %c0:+2, %c0:+3], %a",
        x, rows.astype(np.int32), cols.astype(np.int32),
    )  # fmt: skip
    for i, j, k in np.ndindex(2, 2, 3):
        r, c = rows[i, j], cols[i, j]
        assert out[i, j, k] == (x[1, r, 1 + k, c] if r < 3 and c < 5 else -1)


def test_an_index_beyond_64_bits_does_not_wrap():
    body = f"%b = full {2**62} : i64\n%a = load %x[tile(%b, 16)]\n"
    with pytest.raises(OutOfBoundsError):
        run("(%x: ref<10xf32>)", body, X)
    run("(%x: ref<10xf32>)", body, X, check=False)


def test_empty_arrays():
    empty = np.zeros((0, 4), np.float32)
    head = "(%x: ref<0x4xf32>, %o: ref<4xf32, out>)"
    (out,) = run(
        head,
        "%c0 = full 0 : i32\n%a = load %x[tile(%c0, 2), tile(%c0, 4)] pad=2.0\n"
        "%s = reduce sum %a axes=(0)\nstore %o[%c0:+4], %s",
        empty,
    )
    assert out.tolist() == [4] * 4
    with pytest.raises(OutOfBoundsError, match="1 tiles"):
        run(head, "%c1 = full 1 : i32\n%a = load %x[tile(%c1, 2), tile(%c1, 4)]", empty)
    # no lane, no access: whatever the index is
    run("(%x: ref<10xf32>)", "%m1 = full -5 : i32\n%a = load %x[%m1:+0]\n", X)
    out = run("(%o: ref<3xf32, out>) grid(4, 0)", "%c9 = full 9 : i32\n%f = full 0.0 : f32\nstore %o[%c9], %f")
    assert np.isnan(out[0]).all()


# -- races ------------------------------------------------------------------------------------------------------------

PID = "%i = program_id 0\n%c0 = full 0 : i32\n%f = full 1.0 : f32\n"
RACES = [
    ("store %o[%c0], %f", "writes element (0,), which program"),
    ("%z = atomic add %o[%c0], %f\nstore %o[%c0], %f", "which program"),
    ("store %o[%i], %f\n%a = load %o[%c0:+3]", "race"),
    ("%a = load %o[%c0]\nstore %o[%i], %f", "race"),
    ("%z = atomic add %o[%c0], %f\n%a = load %o[%c0]", "race"),
    ("%a = load %o[%c0:+3]\n%z = atomic add %o[%i], %f", "race"),
]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("body", "why"), RACES)
def test_races(body, why, seed):
    """Found in every order of the programs."""
    with pytest.raises(RaceError) as e:
        run("(%o: ref<3xf32, out>) grid(3) init(%o = 0)", PID + body, seed=seed)
    assert why in str(e.value)
    assert "Ref o" in str(e.value)
    run("(%o: ref<3xf32, out>) grid(3) init(%o = 0)", PID + body, seed=seed, check=False)


FINE = [
    "store %o[%i], %f\n%a = load %o[%i]\nstore %o[%i], %a",
    "%z = atomic add %o[%c0], %f\n%y = atomic max %o[%c0], %f",
    "%a = load %o[%c0:+3]",
    "%z = atomic add %o[%i], %f\n%a = load %o[%i]\nstore %o[%i], %a",
]


@pytest.mark.parametrize("body", FINE)
def test_no_race(body):
    run("(%o: ref<3xf32, out>) grid(3) init(%o = 0)", PID + body)


def test_a_race_through_an_alias():
    with pytest.raises(RaceError, match=r"Ref [xo]: race"):
        run(
            "(%x: ref<3xf32>, %o: ref<3xf32, out>) grid(3) alias(%x = %o)",
            PID + "store %o[%i], %f\n%a = load %x[%c0:+3]",
            X[:3],
        )


def test_scratch_is_private():
    (out,) = run(
        "(%o: ref<3xi32, out>, %s: ref<1xi32, scratch>) grid(3)",
        "%i = program_id 0\n%c0 = full 0 : i32\nstore %s[%c0], %i\n%a = load %s[%c0]\nstore %o[%i], %a",
    )
    assert out.tolist() == [0, 1, 2]


def test_the_order_is_seeded_and_complete():
    body = '%i = program_id 0\n%j = program_id 1\n%n = num_programs 1\n%m = mul %i, %n\n%k = add %m, %j\nprint "{}" %k'
    seen = set()
    for seed in range(4):
        import contextlib
        import io

        text = io.StringIO()
        with contextlib.redirect_stdout(text):
            run("() grid(2, 3)", body, seed=seed)
        order = [int(line.split()[-1]) for line in text.getvalue().splitlines()]
        assert sorted(order) == list(range(6))
        seen.add(tuple(order))
    assert len(seen) > 1


# -- undefined elements -----------------------------------------------------------------------------------------------


def test_poison():
    for d in DTYPES.values():
        p = poison((2, 3), d.name)
        assert (p.shape, p.dtype) == ((2, 3), d.numpy)
        if d.kind == "f" and d.name != "float4_e2m1fn":
            assert np.isnan(p.astype(np.float32)).all()
    assert poison((1,), "uint32").tolist() == [0xAAAAAAAA]
    assert poison((2,), "bool").tolist() == [True, True]
    assert poison((), "int8").item() == 0xAA - 256


def test_outputs_start_undefined():
    out = run("(%a: ref<4xf32, out>, %b: ref<4xu8, out>, %c: ref<2xf16, out>) init(%c = 1.5)", "%c0 = full 0 : i32")
    assert np.isnan(out[0]).all()
    assert out[1].tolist() == [0xAA] * 4
    assert out[2].tolist() == [1.5, 1.5]


UNDEFINED = [
    ("(%o: ref<4xf32, out>)", "%a = load %o[%c0:+4]", "element (2,)"),
    ("(%o: ref<4xf32, out>)", "%a = load %o[%c2]", "element (2,)"),
    ("(%o: ref<4xf32, out>)", "%a = atomic add %o[%c2], %f", "atomic reads"),
    ("(%o: ref<4xf32, scratch>)", "%a = load %o[%c0:+4]", "Ref o"),
    (
        "()",
        "%o = alloc : ref<4xf32, scratch>\nstore %o[%c0:+2], %t\n%a = load %o[%c0:+4]",
        "element (2,), which nobody wrote",
    ),
]


@pytest.mark.parametrize(("head", "body", "why"), UNDEFINED)
def test_undefined_reads(head, body, why):
    start = "%c0 = full 0 : i32\n%c2 = full 2 : i32\n%f = full 1.0 : f32\n%t = full 1.0 : tile<2xf32>\n"
    if "alloc" not in body:
        start += "store %o[%c0:+2], %t\n"
    with pytest.raises(UninitializedReadError) as e:
        run(head, start + body)
    assert why in str(e.value)
    run(head, start + body, check=False)
    # masked lanes and lanes outside are not read
    mask = "%m = dense (true, true, false, false) : tile<4xbool>\n"
    if "load %o[%c0:+4]" in body:
        run(head, start + mask + body + " mask=%m")


def test_scratch_is_undefined_again_in_every_program_and_alloc_in_every_trip():
    body = PID + "%y = eq %i, %c0\nif %y {\nstore %s[%c0], %f\n}\n%a = load %s[%c0]"
    with pytest.raises(UninitializedReadError):
        run("(%s: ref<1xf32, scratch>) grid(2)", body)
    body = """%c0 = full 0 : i32\n%c1 = full 1 : i32\n%c2 = full 2 : i32\n%f = full 1.0 : f32
    for %k in %c0..%c2 step %c1 {
      %s = alloc : ref<1xf32, scratch>
      %y = eq %k, %c0
      if %y { store %s[%c0], %f }
      %a = load %s[%c0]
    }"""
    with pytest.raises(UninitializedReadError):
        run("()", body)


def test_an_alias_starts_from_its_input_and_leaves_it_alone():
    x = X[:3].copy()
    (out,) = run(
        "(%x: ref<3xf32>, %o: ref<3xf32, out>) alias(%x = %o) grid(2)",
        PID
        + "%a = load %x[%i]\n%b = add %a, %f\nstore %o[%i], %b\n%c = load %x[%i]\n%d = eq %b, %c\n"
        + 'assert %d message="one buffer"',
        x,
    )
    assert out.tolist() == [1, 2, 2]
    assert x.tolist() == [0, 1, 2]


def test_accesses_are_recorded():
    _, a = run(
        "(%x: ref<10xf32>, %o: ref<10xf32, out>, %s: ref<4xf32, scratch>) init(%o = 0)",
        CONST + "%m = dense (true, false, true, true) : tile<4xbool>\n"
        "%a = load %x[tile(%c2, 4)] mask=%m\nstore %s[%c0:+4], %a\n"
        "%t = dense (1, 99) : tile<2xi32>\n%f = full 2.0 : tile<2xf32>\n%z = atomic add %o[take(%t)], %f",
        X, trace_accesses=True,
    )  # fmt: skip
    read, written = [np.flatnonzero(r).tolist() for r in a.read], [np.flatnonzero(w).tolist() for w in a.written]
    assert read == [[8], [1], []]
    assert written == [[], [1], [0, 1, 2, 3]]


# -- inputs -----------------------------------------------------------------------------------------------------------


def test_inputs_must_fit():
    with pytest.raises(KernelTypeError, match="takes 1 inputs, got 2"):
        run("(%x: ref<10xf32>)", "", X, X)
    with pytest.raises(KernelValueError, match=r"input x of kernel k is ref<10xf32>, got float64\[10\]"):
        run("(%x: ref<10xf32>)", "", X.astype(np.float64))
    with pytest.raises(KernelValueError, match=r"got float32\[9\]"):
        run("(%x: ref<10xf32>)", "", X[:9])


def test_an_op_that_fails_in_numpy_is_an_interpreter_error():
    with pytest.raises(InterpreterError, match=r"kernel k, program \(\): full failed") as e:
        run("()", '%a = full 300 : u8 @"k.py":5')
    assert e.value.where == ("k.py", 5)
