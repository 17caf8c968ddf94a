"""Printed values read as NumPy prints them, whole lines at a time."""

import json
import threading

import ml_dtypes
import numpy as np
import pytest

from jtile import ffi

INTEGERS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
SMALL_FLOATS = ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3", "float8_e3m4", "float8_e4m3fnuz",
                "float8_e5m2fnuz", "float8_e4m3b11fnuz", "float8_e8m0fnu", "float4_e2m1fn"]  # fmt: skip
SHAPES = [(), (0,), (2, 0), (1,), (3,), (40,), (3, 4), (2, 3, 4), (30, 2), (2, 30), (1001,), (11, 100), (2, 2, 300)]


def site(fmt, *arrays):
    args = [{"dtype": str(a.dtype), "shape": list(a.shape)} for a in arrays]
    return {"kind": "print", "format": fmt, "where": "k.py:1", "args": args}


@pytest.fixture
def printed(images, capfd):
    """What one program prints for a format and arrays, without the prefix and the line's end."""

    def run(fmt, *arrays):
        arrays = [np.ascontiguousarray(a).reshape(np.shape(a)) for a in arrays]
        ffi.run_image(images["print"], arrays, programs=1, sites=[site(fmt, *arrays)], name="k")
        out = capfd.readouterr().out
        prefix = "[k (0, 0, 7)] "
        assert out.startswith(prefix) and out.endswith("\n")
        return out[len(prefix) : -1]

    return run


def samples(dtype, rng):
    """Arrays of many shapes: scalars, empty, padded, wrapped and summarised ones."""
    for shape in SHAPES:
        bits = np.dtype(dtype).itemsize * 8
        raw = rng.integers(0, 2 ** min(bits, 63), shape, np.uint64).astype(f"uint{bits}")
        yield raw.view(dtype) if shape else np.array([raw]).view(dtype).reshape(())


@pytest.mark.parametrize("dtype", ["bool", *INTEGERS])
def test_integers_and_bools_as_numpy(printed, dtype):
    rng = np.random.default_rng(3)
    for x in samples("uint8" if dtype == "bool" else dtype, rng):
        x = x % 2 == 1 if dtype == "bool" else x
        assert printed("{}", x) == str(x)
    if dtype != "bool":
        info = np.iinfo(dtype)
        assert printed("{}", np.array([info.min, 0, info.max], dtype)) == str(np.array([info.min, 0, info.max], dtype))
        assert printed("{}", np.array(info.max, dtype)) == str(info.max)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_floats_as_numpy(printed, dtype):
    rng = np.random.default_rng(4)
    with np.errstate(over="ignore"):
        for scale in (1, 1e-3, 1e-6, 100, 12345, 1e7, 1e30):
            for shape in [(), (1,), (5,), (40,), (3, 4), (2, 3, 4), (1003,), (12, 90)]:
                x = np.asarray(rng.standard_normal(shape) * scale).astype(dtype)
                assert printed("{}", x) == str(x), x.tolist()
                x = np.round(x)
                assert printed("{}", x) == str(x), x.tolist()
        for x in samples(dtype, rng):
            if x.size <= 40:
                assert printed("{}", x) == str(x), x.tolist()


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_special_values_as_numpy(printed, dtype):
    odd = [[np.nan], [np.inf, 1], [-np.inf, 1, np.nan], [0.0, -0.0]]
    for case in [*odd, [1e-4, 1], [9e-5, 1], [1, 1000], [1, 1001], [0.1, 0.25, 100]]:
        for x in (np.array(case, dtype), np.array(case[0], dtype)):
            assert printed("{}", x) == str(x)


@pytest.mark.parametrize("dtype", SMALL_FLOATS)
def test_small_floats_as_ml_dtypes(printed, dtype):
    kind = np.dtype(getattr(ml_dtypes, dtype))
    codes = np.arange(16 if dtype == "float4_e2m1fn" else 256, dtype=np.uint8)
    if dtype == "bfloat16":
        codes = np.random.default_rng(5).integers(0, 2**16, 400).astype(np.uint16)
    values = codes.view(kind)
    assert printed("{}", values) == str(values)
    assert printed("{}", values[:12].reshape(3, 4)) == str(values[:12].reshape(3, 4))
    for x in values:
        assert printed("{}", np.array(x)) == str(x)


def test_int4_takes_one_byte_and_ignores_the_high_half(printed):
    codes = np.array([0, 7, 8, 15, 0xF8, 0x73], np.uint8)
    assert printed("{}", codes.view(np.int8).astype(ml_dtypes.int4)) == "[0 7 -8 -1 -8 3]"
    assert printed("{}", codes.view(ml_dtypes.int4)) == "[0 7 -8 -1 -8 3]"
    assert printed("{}", codes.view(ml_dtypes.uint4)) == "[0 7 8 15 8 3]"


def test_format_fields(printed):
    x, n = np.float32(3.14159), np.int32(-42)
    assert printed("x {}, n {}", x, n) == "x 3.14159, n -42"
    assert printed("{1} {0} {1}", x, n) == "-42 3.14159 -42"
    assert printed("{{}} {{{}}} 100%", n) == "{} {-42} 100%"
    assert printed("{:.2f}|{:8.3e}|{:+g}|{:.1%}", x, x, x, x) == "3.14|3.142e+00|+3.14159|314.2%"
    assert printed("{:6d}|{:<6}|{:06d}|{:x}|{:b}", n, n, n, n, np.int8(5)) == "   -42|-42   |-00042|-2a|101"
    assert printed("{:5.1f}", np.array([[1, 22.25], [-3, 0]], np.float32)) == "[[  1.0  22.2]\n [ -3.0   0.0]]"
    assert printed("no fields", x) == "no fields"
    assert printed("é 😀 'q'\t\\") == "é 😀 'q'\t\\"


@pytest.mark.parametrize(
    ("fmt", "message"),
    [
        ("{", "lone '{'"),
        ("a } b", "lone '}'"),
        ("{} {}", "names argument 1 of 1"),
        ("{1}", "names argument 1 of 1"),
        ("{x}", "is not a number"),
        ("{:d}", "does not fit a value of dtype float32"),
        ("{:.99f}", "does not fit"),
        ("{:9999}", "does not fit"),
    ],
)
def test_bad_formats_are_refused_before_the_run(images, fmt, message):
    with pytest.raises(ffi.FfiError, match=message.replace("{", "\\{").replace("}", "\\}")):
        ffi.LoadedImage(images["print"], programs=1, sites=[site(fmt, np.float32(1))])


def print_of(dtype, shape):
    return json.dumps([{"kind": "print", "format": "{}", "where": "", "args": [{"dtype": dtype, "shape": shape}]}])


BAD_SITES = [
    "[",
    "[{}]",
    "{}",
    "[1]",
    '[{"kind": "pr',
    "nul",
    "[] []",
    "[" * 100000,
    '["\\ud800"]',
    '["\\u12"]',
    "[1.5]",
]
BAD_SITES += ['[{"kind": "shout", "where": ""}]', print_of("complex64", []), print_of("int8", [-1])]
BAD_SITES += [print_of("int8", [99999999999, 99999999999]), print_of("int8", [2**32] * 3), print_of("int8", [1] * 33)]


@pytest.mark.parametrize("text", BAD_SITES)
def test_bad_sites_are_refused(images, text):
    with pytest.raises(ffi.FfiError, match=r"JSON|attribute text|unknown|a side of|rank"):
        ffi.LoadedImage(images["print"], programs=1, sites=text)


def test_every_program_prints_its_own_line_from_many_threads(images, capfd):
    programs = 400
    x = np.arange(600, dtype=np.int32).reshape(200, 3)
    sites = [site("{}" + f" end {p}", x) for p in range(programs)]
    loaded = ffi.LoadedImage(images["print"], programs=programs, sites=sites, name="rows")
    runs = 2
    runners = [threading.Thread(target=loaded.run, args=([x],), kwargs={"threads": 3}) for _ in range(runs)]
    for runner in runners:
        runner.start()
    for runner in runners:
        runner.join()
    out = capfd.readouterr().out
    records = out.split("[rows (")[1:]
    expected = sorted(f"{p}, 0, 7)] {x} end {p}\n" for p in range(programs) for _ in range(runs))
    assert sorted(records) == expected


def test_sites_may_be_json_text(images, capfd):
    x = np.ones((), np.float32)
    ffi.run_image(images["print"], [x], programs=1, sites=json.dumps([site("{}", x)]), name="\u03b1")
    assert capfd.readouterr().out == "[\u03b1 (0, 0, 7)] 1.0\n"
