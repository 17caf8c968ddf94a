"""`jtile inspect`: how it reads types, meta-parameters and names."""

import jax
import jax.numpy as jnp
import pytest

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
class Kernel:
    def lower(self, *args, target, **meta): ...
    def interpret(self, *args): ...
mine = Kernel()
other = 3
"""


def test_find_in_a_file(tmp_path):
    path = tmp_path / "inspected_kernels.py"
    path.write_text(FILE)
    assert type(levels.find(f"{path}:mine")).__name__ == "Kernel"
    with pytest.raises(KernelValueError, match=r"'other' is no kernel; .* has: mine$"):
        levels.find(f"{path}:other")
    with pytest.raises(KernelValueError, match=r"'nothing' does not exist; .* has: mine$"):
        levels.find(f"{path}:nothing")


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
