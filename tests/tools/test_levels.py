"""`jtile inspect`: how it reads types, meta-parameters and names."""

import re
import sys

import jax
import jax.numpy as jnp
import pytest

import jtile as jt
from jtile._errors import KernelTypeError, KernelValueError
from jtile.tools import levels


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("f32[128,256]", [((128, 256), jnp.float32)]),
        ("f32[128, 256], bf16[7],i32", [((128, 256), jnp.float32), ((7,), jnp.bfloat16), ((), jnp.int32)]),
        ("bool[0],u4[2],f8e4m3[1]", [((0,), jnp.bool_), ((2,), jnp.uint4), ((1,), jnp.float8_e4m3fn)]),
        ("float16[3]", [((3,), jnp.float16)]),
        ("", []),
    ],
)
def test_types(text, expected):
    assert levels.parse_types(text) == [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in expected]


@pytest.mark.parametrize("text", ["f32[128", "f32[1];f32[2]", "[3]", "f32[-1]", "f33[2]", "object[2]"])
def test_bad_types(text):
    with pytest.raises(KernelTypeError):
        levels.parse_types(text)


def test_meta_parameters():
    assert levels.parse_meta(["bm=64", "causal=True", "kind=gelu", "shape=(2, 3)"]) == {
        "bm": 64,
        "causal": True,
        "kind": "gelu",
        "shape": (2, 3),
    }
    with pytest.raises(KernelValueError, match="write name=value"):
        levels.parse_meta(["bm"])


FILE = """
import jax, jtile as jt

@jt.kernel(out_type=lambda x: jt.like(x), grid=lambda x, *, block: jt.cdiv(x.shape[0], block))
def double(x, o, *, block=64):
    i = jt.program_id(0)
    o.tiles(block)[i] = x.tiles(block)[i] * 2

@jax.jit
def twice(x, block=64):
    return jax.lax.fori_loop(0, 3, lambda _, y: double(y, block=32), double(double(x, block=32)))

def plain(x):
    return x + 1

other = 3
"""


@pytest.fixture
def module(tmp_path):
    path = tmp_path / "inspected_kernels.py"
    path.write_text(FILE)
    return str(path)


def test_find_in_a_file(module):
    assert levels.find(f"{module}:double").name == "double"
    with pytest.raises(KernelValueError, match=r"'other' is no kernel or function; .* has: double, plain, twice$"):
        levels.find(f"{module}:other")
    with pytest.raises(KernelValueError, match=r"'nothing' does not exist; .* has: double, plain, twice$"):
        levels.find(f"{module}:nothing")


def test_a_file_may_import_its_neighbours(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.path", [*sys.path])
    (tmp_path / "inspected_neighbour.py").write_text("SCALE = 3\n")
    (tmp_path / "inspected_main.py").write_text(
        "import jtile as jt\nfrom inspected_neighbour import SCALE\n\n"
        "@jt.kernel(out_type=lambda x: jt.like(x))\ndef scaled(x, o):\n    o[...] = x[...] * SCALE\n"
    )
    assert levels.find(f"{tmp_path}/inspected_main.py:scaled").name == "scaled"


def test_a_file_runs_once_until_it_changes(tmp_path, capsys):
    path = tmp_path / "inspected_printing.py"
    path.write_text("def f(x):\n    return x\nprint('read')\n")
    assert levels.find(f"{path}:f") is levels.find(f"{path}:f")
    assert capsys.readouterr().out == "read\n"
    path.write_text("def f(x):\n    return 2 * x\nprint('read again')\n")
    assert levels.find(f"{path}:f")(2) == 4
    assert capsys.readouterr().out == "read again\n"


def test_the_kernels_of_a_function_are_found_once_each(module):
    types = levels.parse_types("f32[100]")
    found = levels.lower(levels.find(f"{module}:twice"), types, "cpu", {})
    assert [low.program.kernel.grid for low in found] == [(4,), (2,)]
    with pytest.raises(
        KernelValueError, match=r"'plain' calls no kernel .*: XLA compiles all that it does; `jt\.fuse` makes"
    ):
        levels.lower(levels.find(f"{module}:plain"), types, "cpu", {})
    with pytest.raises(KernelValueError, match=r"XLA compiles all that it does$"):
        levels.lower(jt.fuse(levels.find(f"{module}:plain")), types, "cpu", {})
    with pytest.raises(KernelValueError, match="one of them has no elements"):
        levels.lower(levels.find("jtile.ops:softmax"), levels.parse_types("f32[0,3]"), "cpu", {})


def test_rows_that_are_left_to_xla_say_so():
    types = levels.parse_types("bf16[8,65536],bf16[65536]")
    with pytest.raises(KernelValueError, match=r'says "On a GPU rows of more than 32768 elements are left to XLA\."$'):
        levels.lower(levels.find("jtile.ops:rms_norm"), types, "cuda:sm_90", {})
    assert levels.lower(levels.find("jtile.ops:rms_norm"), types, "cpu", {})


def test_tiles_of_a_function_are_those_of_the_target():
    types = levels.parse_types("bf16[4096,4096],bf16[4096,4096]")
    find = lambda target: levels.lower(levels.find("jtile.ops:matmul"), types, target, {})[0].program.kernel.grid
    with jt.config(arch="sm_90"):
        expected = find("cpu")
    assert find("cuda:sm_90") == expected != find("cpu")


def test_show_prints_every_level(module, capsys):
    levels.show(f"{module}:double", "f32[100]", ["block=32"], target="cpu:avx2", only=[])
    out = capsys.readouterr().out
    for expected in ("double: tile_ir_opt", "kernel @double(%x: ref<100xf32>, %o: ref<100xf32, out>) grid(4)", "ymm"):
        assert expected in out
    levels.show(f"{module}:double", "f32[100]", [], target="cpu", only=["tile_ir"])
    assert capsys.readouterr().out.startswith("kernel @double")
    with pytest.raises(KernelValueError, match="no level 'nope' for target 'cpu': it has jaxpr, tile_ir"):
        levels.show(f"{module}:double", "f32[100]", [], target="cpu", only=["nope"])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("softmax", "write module:kernel"),
        ("jtile.ops:", "write module:kernel"),
        ("no_such_module.part:softmax", "there is no module no_such_module.part"),
        ("missing/file.py:softmax", "there is no file missing/file.py"),
    ],
)
def test_find_says_what_is_missing(name, message):
    with pytest.raises(KernelValueError, match=message):
        levels.find(name)


def test_what_a_module_offers_is_named():
    with pytest.raises(KernelValueError, match=r"'nope' does not exist; jtile.ops has: .*\bmatmul\b.*\bsoftmax\b"):
        levels.find("jtile.ops:nope")


@pytest.mark.parametrize(
    ("types", "meta", "message"),
    [
        ("", [], r"twice does not take the arguments \(\): missing a required argument: 'x'"),
        ("f32[3],f32[],f32[]", [], r"\(float32\[3\], float32\[\], float32\[\]\): too many positional arguments"),
        ("f32[3]", ["nope=1"], r"\(float32\[3\], nope=1\): got an unexpected keyword argument 'nope'"),
    ],
)
def test_arguments_that_a_function_does_not_take(module, types, meta, message):
    with pytest.raises(KernelTypeError, match=message):
        levels.show(f"{module}:twice", types, meta, target="cpu", only=[])


def test_a_function_that_fails_is_one_sentence():
    with pytest.raises(KernelValueError, match=r"^math:sin fails for \(float32\[3\]\): TypeError: Only scalar arrays"):
        levels.show("math:sin", "f32[3]", [], target="cpu", only=[])


def test_types_of_64_bits_stay(module, capsys):
    """They became 32 bits with no more than a warning."""
    levels.show(f"{module}:double", "f64[100]", [], target="cpu", only=["tile_ir"])
    assert "ref<100xf64>" in capsys.readouterr().out
    levels.show("jtile.ops:softmax", "f64[4,4]", [], target="cuda:sm_90", only=["tile_ir"])
    assert "ref<4x4xf64>" in capsys.readouterr().out


FORMS = ("ttir", "ttgir", "llir")
RESOURCES = (
    r"\n\d+ registers, \d+ bytes spilled, \d+ bytes of shared memory, \d+ threads a block, \d+ blocks a multip.*%"
)


@pytest.mark.parametrize(
    ("target", "names", "code"),
    [
        ("cuda:sm_90", ("schedule", *FORMS, "ptx", "sass"), ("tt.func", "ttg.", "define", ".target sm_90", "EXIT")),
        ("rocm:gfx942", (*FORMS, "amdgcn"), ("tt.func", "ttg.", "define", "s_endpgm")),
    ],
)  # fmt: skip
def test_the_levels_of_a_gpu(module, capsys, target, names, code):
    levels.show(f"{module}:double", "f32[100]", [], target=target, only=[])
    out = capsys.readouterr().out
    for name in names:
        assert f"double: {name} " in out
    for text in code:
        assert text in out
    assert re.search(RESOURCES, out)
