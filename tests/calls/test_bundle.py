"""`jt.export_bundle`: what a folder holds, and that what is in it runs, against a fake libascendcl and a fake torch.

The vendor's tools are themselves where they are installed; elsewhere a stored text of ours stands for what they make.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import ascend_texts
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jtile as jt
from jtile import errors
from jtile.lowering.ascend import compile as compiling
from jtile.lowering.ascend import tools

TESTS = Path(__file__).resolve().parents[1]
VECTOR = jax.ShapeDtypeStruct((10000,), jnp.float32)
TOOLS = pytest.mark.skipif(
    not all(map(tools.find, (tools.ADAPTER, tools.COMPILER))),
    reason="the vendor's tools are not installed: make ascend-tools",
)


@jt.kernel(out_type=lambda x, y, **_: jt.like(x), grid=lambda x, y, *, b, **_: jt.cdiv(x.shape[0], b))
def add(x, y, o, *, b=1024):
    i = jt.program_id(0)
    o.tiles(b)[i] = x.tiles(b)[i] + y.tiles(b)[i]


@jt.kernel(out_type=lambda x: (jt.like(x), jt.like(x)), grid=(4,), alias={"x": "o"}, init=(None, float("-inf")))
def in_place(x, o, most):
    i = jt.program_id(0)
    t = o.tiles(8, 32)[i, 0]
    most.tiles(8, 32)[i, 0] = t
    o.tiles(8, 32)[i, 0] = t * 2


@pytest.fixture(autouse=True)
def without_poison():
    """Poisoned outputs would be arguments more."""
    with jt.config(poison=False):
        yield


@pytest.fixture
def stored(monkeypatch):
    ascend_texts.stored(monkeypatch)


def manifest_of(folder: Path) -> dict:
    return json.loads((folder / "manifest.json").read_text())


def test_what_a_bundle_holds(stored, tmp_path):
    out = jt.export_bundle(add, VECTOR, VECTOR, target="ascend:910b3", out=tmp_path / "a" / "add", b=2048)
    m = manifest_of(out)
    assert [m["target"], m["arch"], m["state"]] == [
        "ascend:910b3", "Ascend910B3", "compiled and checked, not run on an NPU"]  # fmt: skip
    assert m["inputs"] == [{"name": n, "dtype": "float32", "shape": [10000]} for n in "xy"]
    assert m["outputs"] == [{"name": "o", "dtype": "float32", "shape": [10000]}]
    assert m["results"] == [{"kernel": 0, "output": 0, "partials": 0}]
    assert m["made_by"]["sha256"] == {"triton-adapter-opt": "stored", "bishengir-compile": "texts"}
    (k,) = m["kernels"]
    assert [k["symbol"], k["kind"], k["task"], k["workspace"]] == ["jtile_add", "aiv", 10, 0]
    assert k["record"]["grid"] == 5
    assert [p["buffer"] for p in k["record"]["params"]] == [0, 1, 2]
    assert k["checked"] == "addresses, flags and races of HIVM: no defect found"
    assert set(k["texts"]) == {"jaxpr", "tile_ir", "tile_ir_opt", "sharding", "resources", "ttir", "linalg", "hivm"}
    assert all((out / file).is_file() for file in k["texts"].values())
    assert "tt.func public @jtile_add" in (out / k["texts"]["ttir"]).read_text()
    assert "not run on an NPU" in (out / "README.md").read_text()
    assert os.access(out / "build.sh", os.X_OK)
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == ["add"]


def test_folders_that_are_there(stored, tmp_path):
    out = tmp_path / "bundle"
    out.mkdir()
    jt.export_bundle(add, VECTOR, VECTOR, target="ascend:910b1", out=out)  # empty: it is taken
    (out / "mine").write_text("x")
    with pytest.raises(
        errors.KernelValueError, match="exists and is not empty: name another folder, or pass overwrite"
    ):
        jt.export_bundle(add, VECTOR, VECTOR, target="ascend:910b1", out=out)
    jt.export_bundle(add.lower(VECTOR, VECTOR, target="ascend:910b4"), out=out, overwrite=True)
    assert manifest_of(out)["arch"] == "Ascend910B4"
    assert not (out / "mine").exists()
    assert [p.name for p in tmp_path.iterdir()] == ["bundle"]


def test_a_defect_of_the_compiler_leaves_nothing(stored, tmp_path, monkeypatch):
    plain = compiling.to_hivm
    flag = "hivm.hir.wait_flag[<PIPE_V>, <PIPE_MTE3>, <EVENT_ID0>]"
    broken = lambda *args: (plain(*args)[0].replace(flag, ""), 2)
    monkeypatch.setattr(compiling, "to_hivm", broken)
    with pytest.raises(errors.JtileError, match="kernel add, compiled for Ascend: line "):
        jt.export_bundle(add, VECTOR, VECTOR, target="ascend:910b1", out=tmp_path / "b")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("args", "options", "error", "says"),
    [
        ((add, VECTOR, VECTOR), {"target": "cpu"}, errors.UnsupportedError, "not for platform 'cpu'.*jax.export"),
        ((add, VECTOR, VECTOR), {"target": "cuda:sm_90"}, errors.UnsupportedError, "not for platform 'cuda'"),
        ((add, VECTOR, VECTOR), {}, errors.UnsupportedError, "not for platform 'cpu'"),
        ((add, VECTOR, VECTOR), {"target": "ascend:310p"}, errors.KernelValueError, "unknown Ascend NPU '310p'"),
        ((add.lower(VECTOR, VECTOR, target="cpu"),), {}, errors.UnsupportedError, "not for platform 'cpu'"),
        ((add.lower(VECTOR, VECTOR), VECTOR), {}, errors.KernelTypeError, "is lowered already"),
        ((jnp.add, VECTOR), {}, errors.KernelTypeError, "expected a kernel, or what its lower"),
        ((add, *[jax.ShapeDtypeStruct((4096,), jnp.int4)] * 2), {"target": "ascend:910b1"}, errors.UnsupportedError,
         "x is of int4, which torch has no dtype for"),
    ],
)  # fmt: skip
def test_what_is_refused(stored, tmp_path, args, options, error, says):
    with pytest.raises(error, match=says):
        jt.export_bundle(*args, out=tmp_path / "b", **options)
    assert not list(tmp_path.iterdir())


def test_sizes_are_fixed(stored, tmp_path):
    lowered = add.lower(jt.dynamic(VECTOR), jt.dynamic(VECTOR), target="ascend:910b1")
    with pytest.raises(
        errors.UnsupportedError, match="kernel add has dynamic dimensions, and a bundle is of fixed sizes"
    ):
        jt.export_bundle(lowered, out=tmp_path / "b")


def test_without_the_tools(tmp_path, monkeypatch):
    monkeypatch.setattr(tools, "find", lambda name: None)
    with pytest.raises(errors.UnsupportedError, match="make ascend-tools"):
        jt.export_bundle(add, VECTOR, VECTOR, target="ascend:910b1", out=tmp_path / "b")
    assert not list(tmp_path.iterdir())


# -- run.py -----------------------------------------------------------------------------------------------------------


class Tensor:
    """What `run.py` asks of a tensor of torch, over an array of NumPy."""

    def __init__(self, array):
        self.array, self.shape, self.dtype, self.device = array, array.shape, array.dtype, "npu"

    def is_contiguous(self):
        return self.array.flags["C_CONTIGUOUS"]

    def data_ptr(self):
        return self.array.ctypes.data

    def clone(self):
        return Tensor(self.array.copy())

    def to(self, dtype):
        return Tensor(self.array.astype(dtype)) if isinstance(dtype, np.dtype) else self

    def sum(self, axis):
        return Tensor(self.array.sum(axis))

    def zero_(self):
        self.array[...] = 0


@pytest.fixture
def torch(monkeypatch):
    made = types.SimpleNamespace(
        **{name: np.dtype(name) for name in ("float32", "float16", "int32", "uint8")},
        empty=lambda shape, dtype, device: Tensor(np.full(shape, 7, dtype)),
        full=lambda shape, value, dtype, device: Tensor(np.full(shape, value, dtype)),
        npu=types.SimpleNamespace(current_stream=lambda: types.SimpleNamespace(npu_stream=77)),
    )
    monkeypatch.setitem(sys.modules, "torch", made)
    return made


@pytest.fixture(scope="module")
def acl(tmp_path_factory):
    path = tmp_path_factory.mktemp("acl") / "libfake.so"
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", str(TESTS / "ffi" / "fake_acl.c"), "-o", str(path)], check=True)
    lib = ctypes.CDLL(str(path))
    lib.fake_log.restype = ctypes.c_char_p
    return lib, str(path)


def running(folder: Path, acl, run):
    """The program of a folder, whose kernels do `run(addresses, blocks)`; and what was logged."""
    spec = importlib.util.spec_from_file_location("bundle_run", folder / "run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    lib, path = acl
    kind = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32)
    kernel = kind(lambda args, size, blocks: run(np.frombuffer(ctypes.string_at(args, size), np.uint64), blocks))
    lib.fake_reset()
    lib.fake_kernel(kernel)
    bundle = module.Bundle(runtime=module.Runtime(path))
    bundle.keep = kernel
    return bundle, module.BundleError


def floats(address, n):
    return np.ctypeslib.as_array((ctypes.c_float * n).from_address(int(address)))


def test_run_on_tensors(stored, tmp_path, torch, acl):
    out = jt.export_bundle(add, VECTOR, VECTOR, target="ascend:910b1", out=tmp_path / "b")

    def run(words, blocks):
        assert blocks == 10
        assert list(words[:3]) == [0, 0, 0]
        assert list(words[6:].view(np.int32)) == [10, 1, 1, 0]
        floats(words[5], 10000)[:] = floats(words[3], 10000) + floats(words[4], 10000)

    bundle, error = running(out, acl, run)
    x, y = (Tensor(np.arange(10000, dtype=np.float32) + k) for k in range(2))
    with pytest.raises(error, match=r"kernel\.o is not there: run build\.sh"):
        bundle(x, y)
    (out / manifest_of(out)["kernels"][0]["object"]).write_bytes(b"\x7fELF of add")
    np.testing.assert_array_equal(bundle(x, y).array, x.array + y.array)
    said = acl[0].fake_log().decode().splitlines()
    assert said == ["load  of add magic 41415246 type 2 x 1", "function jtile_add", "launch 10 blocks, 64 bytes"]
    for wrong in ([x], [x, Tensor(y.array[:-1])], [x, Tensor(y.array.astype(np.float16))], [x, Tensor(y.array[::-1])]):
        with pytest.raises(error, match="expected"):
            bundle(*wrong)
    acl[0].fake_fail(b"aclrtLaunchKernelWithHostArgs", 3)
    with pytest.raises(error, match="aclrtLaunchKernelWithHostArgs failed with error 3"):
        bundle(x, y)


def test_run_in_place_and_with_starts(stored, tmp_path, torch, acl):
    """An input that the kernel writes over stays the caller's; an output starts from its number."""
    x = jax.ShapeDtypeStruct((32, 32), jnp.float32)
    out = jt.export_bundle(in_place, x, target="ascend:910b1", out=tmp_path / "b")
    (k,) = manifest_of(out)["kernels"]
    assert k["starts"] == [{"shape": [32, 32], "dtype": "float32", "value": "-inf"}]
    assert k["aliases"] == [[0, 0], [1, 1]]
    (out / k["object"]).write_bytes(b"\x7fELF")
    seen = []

    def run(words, blocks):
        seen.extend(words[3:7])
        floats(words[5], 1024)[:] *= 2

    bundle, _ = running(out, acl, run)
    given = Tensor(np.arange(1024, dtype=np.float32).reshape(32, 32))
    o, most = bundle(given)
    assert seen[0] == seen[2] != given.data_ptr()
    assert seen[1] == seen[3]
    np.testing.assert_array_equal(o.array, 2 * given.array)
    assert np.isneginf(most.array).all()
    np.testing.assert_array_equal(given.array, np.arange(1024).reshape(32, 32))


def test_the_launchers_pack_alike():
    """`run.py` and the launcher of `ffi/csrc` put numbers of all kinds at the same places."""
    from jtile.lowering.ascend.run import pack

    kinds = [{"kind": "buffer", "buffer": 0}, {"kind": "i32", "value": -3}, {"kind": "i64", "value": 1 << 40},
             {"kind": "i32", "value": 5}]  # fmt: skip
    words = np.frombuffer(pack(kinds, [4096], 6, sync=1, workspace=2), np.uint64)
    assert list(words[:4]) == [1, 0, 2, 4096]
    assert list(words[4:5].view(np.int32)) == [-3, 0]
    assert words[5] == 1 << 40
    assert list(words[6:].view(np.int32)) == [5, 6, 1, 1]


# -- with the vendor's tools ----------------------------------------------------------------------------------------

HIVMC = """#!/bin/sh
[ "$1" = --version ] && { echo "hivmc 0.3.0"; exit 0; }
while [ $# -gt 1 ]; do [ "$1" = -o ] && printf '\\177ELF of hivmc' > "$2"; shift; done
"""


@TOOLS
def test_from_a_kernel_to_its_launch(tmp_path, torch, acl, monkeypatch):
    """The whole way with the vendor's compiler, but for `hivmc`, which CANN has, and the NPU."""
    out = jt.export_bundle(add, VECTOR, VECTOR, target="ascend:910b1", out=tmp_path / "b")
    (k,) = manifest_of(out)["kernels"]
    assert k["checked"] == "addresses, flags and races of HIVM: no defect found"
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "hivmc").write_text(HIVMC)
    (tmp_path / "bin" / "hivmc").chmod(0o755)
    environment = os.environ | {"JTILE_BISHENGIR": str(tools.find(tools.COMPILER))}
    failed = subprocess.run(["sh", out / "build.sh"], env=environment, capture_output=True, text=True, check=False)
    assert (failed.returncode, failed.stderr.startswith("hivmc was not found")) == (1, True)
    environment["PATH"] = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    subprocess.run(["sh", out / "build.sh"], env=environment, check=True, capture_output=True)
    assert (out / k["object"]).read_bytes() == b"\x7fELF of hivmc"
    bundle, _ = running(out, acl, lambda words, blocks: floats(words[5], 10000).fill(blocks))
    x = Tensor(np.zeros(10000, np.float32))
    np.testing.assert_array_equal(bundle(x, x).array, np.full(10000, 10))
    text = out / k["texts"]["hivm"]  # as another version of the compiler would make it
    text.write_text(text.read_text().replace("arith.constant 10 : i8", "arith.constant 32 : i8"))
    other = subprocess.run(["sh", out / "build.sh"], env=environment, capture_output=True, text=True, check=False)
    assert "the object is launched otherwise than manifest.json says" in other.stderr
    assert other.returncode == 1 and not (out / k["object"]).exists()
