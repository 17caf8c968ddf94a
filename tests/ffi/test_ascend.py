"""The launcher for Ascend NPUs, through XLA's CPU platform and a fake libascendcl: what is copied, packed and launched,
and what goes wrong with which words. No kernel of jtile's was ever run on an NPU."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
from pathlib import Path

import ascend_texts
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jtile as jt
from jtile import errors, ffi
from jtile.lowering.ascend import objects, tools

RUN = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32)
OBJECT = b"\x7fELF" + b"an object".ljust(60)


def record(**other) -> str:
    """Of a kernel with two operands, one result and a number that is the first operand's size."""
    fields = {
        "name": "adds", "symbol": "jtile_adds", "arch": "Ascend910B1", "grid": ["s0", 64, "cdiv"], "zeroed": [],
        "dims": [0, 0, 0, 1], "attributes": {}, "task": 10, "kind": "aiv", "workspace": 0, "lock": 0,
        "params": [{"kind": "buffer", "buffer": 0}, {"kind": "i32", "value": ["s0"]}, {"kind": "buffer", "buffer": 1},
                   {"kind": "buffer", "buffer": 2}],
    }  # fmt: skip
    return json.dumps(fields | other)


def call(*arrays, image=OBJECT, device=0, aliases=None, **other):
    """`jtile_ascend` on arrays; the result is like the first one."""
    out = jax.ShapeDtypeStruct(arrays[0].shape, arrays[0].dtype)
    inner = jax.ffi.ffi_call("jtile_ascend", out, input_output_aliases=aliases)
    return inner(*arrays, image=image, record=record(**other), device=np.int64(device))


@pytest.fixture(scope="module")
def fake(tmp_path_factory):
    """The fake library, which every later dlopen("libascendcl.so") of this process finds by its name."""
    ffi.register("ascend")
    path = tmp_path_factory.mktemp("acl") / "libascendcl.so"
    source = Path(__file__).with_name("fake_acl.c")
    flags = ["-O1", "-shared", "-fPIC", "-Wl,-soname,libascendcl.so"]
    subprocess.run(["cc", *flags, str(source), "-o", str(path)], check=True)
    a = jax.device_put(np.ones(128, np.float32), jax.devices("cpu")[0])  # the default device may be a GPU here
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"kernel adds: the driver of platform ascend cannot be opened"
                       r".*libascendcl.*install CANN and source its set_env\.sh"):  # fmt: skip
        call(a, a)
    lib = ctypes.CDLL(str(path))
    lib.fake_log.restype = ctypes.c_char_p
    return lib


@pytest.fixture
def acl(fake):
    fake.fake_reset()
    seen = []

    @RUN
    def adds(args, size, blocks):
        seen.append((ctypes.string_at(args, size), blocks))
        words = np.frombuffer(seen[-1][0], np.int64)
        n = int(words[4] & 0xFFFFFFFF)
        x, y, out = (np.ctypeslib.as_array((ctypes.c_float * n).from_address(int(words[k]))) for k in (3, 5, 6))
        out[:] = x + y

    fake.fake_kernel(adds)
    fake.seen, fake.keep = seen, adds
    yield fake
    assert fake.fake_alive() == 0
    fake.fake_kernel(RUN())


def log(acl) -> list[str]:
    return acl.fake_log().decode().splitlines()


def test_a_call_inside_jit(acl):
    a, b = np.arange(100, dtype=np.float32), np.full(100, 2, np.float32)
    f = jax.jit(lambda a, b: call(a * 2, b) + 1)
    np.testing.assert_array_equal(f(a, b), a * 2 + 3)
    said = log(acl)
    loaded = next(k for k, line in enumerate(said) if line.startswith("load an object"))
    assert said[loaded - 1 : loaded + 2 : 2] == ["device 0", "function jtile_adds"]
    assert said[loaded].endswith(" magic 41415246 type 2 x 1")  # that of vector cores
    assert said.count("malloc 400 policy 0") == 3
    assert said.count("copy 400 of 400 there") == 2
    assert said[-3:] == ["launch 2 blocks, 72 bytes", "wait", "copy 400 of 400 back"]
    packed, blocks = acl.seen[0]
    words, numbers = np.frombuffer(packed, np.int64), np.frombuffer(packed, np.int32)
    assert blocks == 2
    assert list(words[:3]) == [0, 0, 0]  # flags between cores, lock, workspace
    assert numbers[8] == 100  # the number, in 4 bytes; the address behind it at a multiple of 8
    assert list(numbers[14:17]) == [2, 1, 1]  # the grid
    np.testing.assert_array_equal(f(b, b), b * 2 + 3)
    assert sum(line.startswith("load") for line in log(acl)) <= 1


def test_workspace_flags_zeros_and_shared_arrays(acl):
    a = jnp.arange(64, dtype=jnp.float32)
    f = jax.jit(lambda a: call(a, a, aliases={0: 0}, task=32, workspace=1000, zeroed=[2]))
    np.testing.assert_array_equal(f(a), a)  # operand 0 and the result are one array, which was zeroed
    words = np.frombuffer(acl.seen[0][0], np.int64)
    assert words[0] == 0x5555
    assert words[2] != 0
    assert words[3] == words[6]
    assert "malloc 1000 policy 0" in log(acl)
    assert any(line.endswith("magic 43554245 type 2 x 1") for line in log(acl))


@pytest.mark.parametrize(
    ("function", "code", "says"),
    [
        ("aclrtMalloc", 207001, "kernel adds: an array of 512 bytes: aclrtMalloc failed with error 207001"),
        ("aclrtLaunchKernelWithHostArgs", 5, "failed with error 5: the fake says no"),
        ("aclrtSynchronizeStream", 507011, "aclrtSynchronizeStream failed with error 507011"),
        ("aclrtMemcpy", 7, "aclrtMemcpy to the device failed with error 7"),
        ("aclrtSetDevice", 8, "aclrtSetDevice failed with error 8"),
    ],
)
def test_errors_of_the_driver(acl, function, code, says):
    a = np.ones(128, np.float32)
    acl.fake_fail(function.encode(), code)
    with pytest.raises(jax.errors.JaxRuntimeError, match=says):
        call(a, a)
    acl.fake_reset()
    np.testing.assert_array_equal(call(a, a), a * 2)  # nothing of it is left


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (
            {"image": b'{"format": 1}'},
            "its image is text and no object: it was compiled where hivmc, a part of CANN, is",
        ),
        ({"arch": "sm_90", "task": None}, "the launch record is refused"),
        ({"task": 5}, "its task is 5; expected 10 to 49"),
        ({"lock": 8}, "its blocks take turns"),
        ({"params": [{"kind": "counters", "count": 1}]}, "tensor maps, counters and logs are those of GPUs"),
        ({"params": [{"kind": "buffer", "buffer": 7}]}, "its record speaks of 8 arrays, and the call has 3"),
        ({"params": [{"kind": "i32", "value": 1 << 40}]}, "which does not fit into 32 bits"),
        ({"grid": 1 << 20}, "its grid has 1048576 blocks; a launch has at most 65535"),
        ({"device": 5}, "aclrtSetDevice failed with error 107001"),
    ],
)
def test_calls_that_are_refused(acl, other, says):
    a = np.ones(128, np.float32)
    with pytest.raises(jax.errors.JaxRuntimeError, match=says):
        call(a, a, **other)


def test_a_gpu_refuses_the_record_of_an_npu(tmp_path):
    with pytest.raises(ffi.FfiError, match="its code is for 'Ascend910B1'"):
        from jtile.ffi._library import call as c_call

        c_call("jtile_gpu_open", b"rocm", None, OBJECT, len(OBJECT), record().encode(), ctypes.byref(ctypes.c_void_p()))


# -- kernels of jtile's, inside jit ---------------------------------------------------------------------------------


@jt.kernel(out_type=lambda x, y, **_: jt.like(x), grid=lambda x, y, *, b, **_: jt.cdiv(x.shape[0], b))
def add(x, y, o, *, b=64):
    i = jt.program_id(0)
    o.tiles(b)[i] = x.tiles(b)[i] + y.tiles(b)[i]


@pytest.fixture
def sums(acl):
    """The fake NPU adds arrays of 100 floats."""

    @RUN
    def run(args, size, blocks):
        words = np.frombuffer(ctypes.string_at(args, size), np.int64)
        x, y, out = (np.ctypeslib.as_array((ctypes.c_float * 100).from_address(int(words[k]))) for k in (3, 4, 5))
        out[:] = x + y

    acl.fake_kernel(run)
    with jt.config(arch="910b1", poison=False):
        yield run


def program():
    """A new one each time, which no cache of JAX's knows."""
    return jax.jit(lambda x, y: add(x * 2, y) + 1)


def test_the_option_arch_sends_kernels_to_an_npu(sums, acl, monkeypatch):
    ascend_texts.stored(monkeypatch)
    monkeypatch.setattr(objects, "for_launch", lambda image, record: (OBJECT, record))
    x, y = jnp.arange(100.0), jnp.full(100, 3.0)
    f = program()
    np.testing.assert_array_equal(f(x, y), x * 2 + 4)
    assert "launch 2 blocks, 64 bytes" in log(acl)
    acl.fake_reset()
    with jt.config(arch=None):  # jit knows the options apart
        np.testing.assert_array_equal(f(x, y), x * 2 + 4)
    assert not log(acl)


def test_an_exported_program_runs_on_the_cpu_platform(sums, acl, monkeypatch):
    """A reader that takes it although it was exported for another platform."""
    export = pytest.importorskip("jax.export")
    pytest.importorskip("flatbuffers", reason="flatbuffers, which jax.export needs, is not installed")
    ascend_texts.stored(monkeypatch)
    monkeypatch.setattr(objects, "for_launch", lambda image, record: (OBJECT, record))
    checks = [*jt.export_checks(), export.DisabledSafetyCheck.platform()]
    x, y = jnp.arange(100.0), jnp.full(100, 3.0)
    exported = export.export(program(), platforms=["ascend"], disabled_checks=checks)(x, y)
    read = export.deserialize(exported.serialize())
    np.testing.assert_array_equal(jax.jit(read.call)(x, y), x * 2 + 4)
    assert "launch 2 blocks, 64 bytes" in log(acl)


def test_without_hivmc_there_is_no_object(sums, monkeypatch):
    ascend_texts.stored(monkeypatch)
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(jax.errors.JaxRuntimeError, match="kernel add: its image is text and no object"):
        program()(jnp.arange(100.0), jnp.arange(100.0))


HIVMC = """#!/bin/sh
[ "$1" = --version ] && {{ echo "hivmc 0.3.0"; exit 0; }}
echo "hivmc is a fake" >&2
while [ $# -gt 1 ]; do [ "$1" = -o ] && printf '{}' > "$2"; shift; done
"""


@pytest.mark.skipif(
    not all(map(tools.find, (tools.ADAPTER, tools.COMPILER))),
    reason="the vendor's tools are not installed: make ascend-tools",
)
def test_with_the_tools_and_a_fake_hivmc(sums, acl, tmp_path, monkeypatch):
    """The whole way: the vendor's compiler, its closed last step and the NPU played by others."""
    hivmc = tmp_path / "hivmc"
    hivmc.write_text(HIVMC.format("\\177ELF by hivmc"))
    hivmc.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    x, y = jnp.arange(100.0), jnp.full(100, 3.0)
    np.testing.assert_array_equal(program()(x, y), x * 2 + 4)
    assert any(line.startswith("load  by hivmc") for line in log(acl))
    artifact = add.lower(x, y, b=32, target="ascend:910b1")
    image, own = artifact.image, artifact.launch["record"]
    other = json.dumps(json.loads(own) | {"workspace": 7, "kind": "mix"})
    assert objects.for_launch(image, other) == (b"\x7fELF by hivmc", own)  # what the object's own HIVM says
    monkeypatch.setattr(tools, "SECONDS", 1e-3)
    objects.build.cache_clear()
    with pytest.raises(errors.CompileError, match=r"bishengir-compile has not ended after 0.001 seconds: make the"):
        objects.for_launch(image, own)
    monkeypatch.undo()
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    hivmc.write_text(HIVMC.format(""))  # makes nothing
    with pytest.raises(errors.CompileError, match="made no object for Ascend910B1"):
        program()(x[:99], y[:99])
