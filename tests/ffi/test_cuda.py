"""The launcher of NVIDIA's GPUs on a driver that writes down what it is asked for: no GPU, no XLA."""

import gc
import json
import threading
from importlib.metadata import entry_points

import fake_driver
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fake_driver import image, record

from jtile import ffi
from jtile.ffi._library import library
from jtile.ffi._register import handlers

LOADED = ["load on 0: code", "function jtile_k", "ready"]


def buffer(k):
    return {"kind": "buffer", "buffer": k}


def tensor_map(k=0, **changes):
    base = {"kind": "tensormap", "buffer": k, "dtype": 9, "dims": [64, 128], "strides": [128], "box": [64, 32]}
    return base | {"swizzle": 3, "fill": "zero"} | changes


def signature(driver, letters):
    driver.lib.fake_signature(letters.encode())


def test_arguments_of_a_launch(driver):
    params = [buffer(1), buffer(0), {"kind": "i32", "value": -5}, {"kind": "i64", "value": 1 << 40}, {"kind": "null"}]
    kernel = driver.open(record(params=params, grid=12, threads=256, shared=1024))
    signature(driver, "ppilp")
    launch = "launch 12x1x1 blocks of 256x1x1 shared 1024 stream 7 attributes on 0"
    assert kernel.launch((4096, 16), (8192, 16)) == [*LOADED, f"{launch} args 8192 4096 -5 1099511627776 0"]
    assert kernel.launch((16, 16), (32, 16)) == [f"{launch} args 32 16 -5 1099511627776 0"]


def test_more_than_48_kib_of_shared_memory_are_asked_for_once(driver):
    kernel = driver.open(record(shared=232448))
    assert kernel.launch()[:4] == [*LOADED[:2], "attribute 8 = 232448", "ready"]
    assert not [line for line in kernel.launch() if line.startswith("attribute")]
    assert "attribute" not in " ".join(driver.open(record(shared=49152)).launch()[:-1])


def test_attributes_of_a_launch(driver):
    both = {"programmatic": True, "cooperative": True}
    assert "attributes 6:1 2:1 on" in driver.open(record(attributes=both)).launch()[-1]
    assert "attributes on" in driver.open(record(attributes=dict.fromkeys(both, False))).launch()[-1]


def test_nodes_of_a_graph(driver):
    """What XLA adds to its command buffer: kernels that are to overlap. Others are traced, and those that ask for more
    than a node can say."""
    params = [buffer(1), buffer(0), {"kind": "i32", "value": -5}, {"kind": "i64", "value": 1 << 40}, {"kind": "null"}]
    eight = lambda n: n.to_bytes(8, "little").hex()
    values = f"{eight(8192)} {eight(4096)} fbffffff {eight(1 << 40)} {eight(0)}"
    for early in (False, True):
        attributes = {"node": True, "programmatic": early}
        text = record(params=params, grid=12, threads=256, shared=1024, attributes=attributes)
        assert driver.open(text).node((4096, 16), (8192, 16)) == f"jtile_k 12 256 1024 {early:d} {values}"
    assert driver.open(record(grid=0, attributes={"node": True})).node() == ""
    node = {"attributes": {"node": True}}
    more = [{}, node | {"cluster": 2}, node | {"params": [buffer(0)], "zeroed": [0]}]
    more += [{"attributes": {"node": True, "cooperative": True}}]
    assert [driver.open(record(**change)).node((4096, 16)) for change in more] == [""] * 4
    assert not [line for line in driver.lines() if line.startswith("launch")]


@pytest.mark.parametrize(("cluster", "portable"), [(2, True), (8, True), (16, False)])
def test_clusters(driver, cluster, portable):
    lines = driver.open(record(cluster=cluster, grid=3)).launch()
    assert f"launch {3 * cluster}x1x1 blocks" in lines[-1]
    assert f"attributes 4:{cluster}x1x1 5:1 on" in lines[-1]
    assert ("attribute 14 = 1" in lines) == (not portable)


def test_sizes_of_a_call(driver):
    dims = [0, 0, 0, 16, 1, 1, 1, 1]  # operand 0 has 16 * s0 rows, operand 1 has s1 columns
    params = [{"kind": "i32", "value": ["s0"]}, {"kind": "i64", "value": ["s0", "s1", "mul", 7, "sub"]}]
    grid = ["s0", 3, "cdiv", "s1", "mul"]
    kernel = driver.open(record(params=params, dims=dims, grid=grid))
    signature(driver, "il")
    for rows, columns in ((64, 5), (160, 1)):
        line = kernel.launch((16, 4), (16, 4), sizes=(rows, columns))[-1]
        assert line.startswith(f"launch {-(-rows // 16 // 3) * columns}x1x1 ")
        assert line.endswith(f"args {rows // 16} {rows // 16 * columns - 7}")
    with pytest.raises(ffi.FfiError, match=r"kernel k: axis 0 of operand 0 has 65 elements; .* a multiple of 16"):
        kernel.launch((16, 4), (16, 4), sizes=(65, 5))


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ([-7, 2, "floordiv"], -4), ([-7, 2, "cdiv"], -3), ([-7, 2, "mod"], 1), ([7, -2, "floordiv"], -4),
        ([7, -2, "cdiv"], -3), ([7, -2, "mod"], -1), ([7, 2, "cdiv"], 4), ([-8, 2, "cdiv"], -4), ([3, 9, "max"], 9),
        ([3, 9, "min"], 3), ([3, 9, "sub", 2, "mul"], -12), (5, 5), ([5], 5), (["s0", 2, "floordiv"], 4),
    ],
)  # fmt: skip
def test_expressions(driver, expression, value):
    kernel = driver.open(record(params=[{"kind": "i64", "value": expression}], dims=[0, 0, 0, 1]))
    signature(driver, "l")
    assert kernel.launch((16, 4), sizes=(9,))[-1].endswith(f" args {value}")


def test_tensor_maps(driver):
    maps = [tensor_map(0), tensor_map(1, dims=[8], strides=[], box=[8], swizzle=0, fill="nan", dtype=7)]
    kernel = driver.open(record(params=[*maps, buffer(0)]))
    signature(driver, "mmp")
    lines = kernel.launch((4096, 16), (8192, 16))
    assert lines[3:-1] == [
        "encode 4096 dtype 9 dims 64 128 strides 128 box 64 x 1 32 x 1 modes 0 3 2 0",
        "encode 8192 dtype 7 dims 8 strides box 8 x 1 modes 0 0 2 1",
    ]
    assert lines[-1].endswith("args map(4096,1) map(8192,1) 4096")
    # A map is made anew only where its array has moved.
    assert len(kernel.launch((4096, 16), (8192, 16))) == 1
    moved = kernel.launch((4096, 16), (16384, 16))
    assert [line.split()[1] for line in moved[:-1]] == ["16384"] and "map(4096,1) map(16384,1)" in moved[-1]


def test_tensor_maps_of_dynamic_sizes(driver):
    sides = {"dims": [64, ["s0"]], "strides": [["s0", 2, "mul", 128, "mul"]]}
    kernel = driver.open(record(params=[tensor_map(0, **sides)], dims=[0, 0, 0, 1]))
    for n in (100, 7):
        line = kernel.launch((4096, 16), sizes=(n,))[-2]
        assert f"dims 64 {n} strides {n * 256} box" in line
    assert len(kernel.launch((4096, 16), sizes=(7,))) == 1


def test_each_device_has_its_own_module_and_maps(driver):
    kernel = driver.open(record(params=[tensor_map(0)]))
    for device in (0, 1):
        lines = kernel.launch((4096, 16), device=device)
        assert lines[0] == f"load on {device}: code" and lines[3].startswith("encode")
        assert lines[4].startswith("launch") and f" on {device} " in lines[4]
    assert len(kernel.launch((4096, 16), device=0)) == 1


@pytest.mark.early
def test_equal_images_are_loaded_once_a_device(driver):
    gc.collect()  # what other tests left
    alive, loaded = ffi.modules_alive(), ffi.modules_loaded()
    kernels = [driver.open(record(grid=k)) for k in range(1, 5)]
    for kernel in kernels:
        kernel.initialize(0)
        kernel.initialize(1)
    assert driver.lines() == [*LOADED, "load on 1: code", *LOADED[1:]]
    assert (ffi.modules_alive(), ffi.modules_loaded()) == (alive + 2, loaded + 2)
    kernels[0].close()
    assert driver.lines() == []
    for kernel in kernels[1:]:
        kernel.close()
    assert sorted(driver.lines()) == ["unload on 0", "unload on 1"]
    assert ffi.modules_alive() == alive


def test_one_image_from_many_threads(driver):
    kernels = [driver.open(record(grid=k, params=[tensor_map(0)])) for k in range(1, 9)]
    signature(driver, "m")
    barrier = threading.Barrier(8)

    def work(k):
        barrier.wait()
        for n in range(50):
            fake_driver.call_launch(kernels[(k + n) % 8], (16 * (1 + n % 3), 16), device=n % 2)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    lines = driver.lines()
    launches = [line for line in lines if line.startswith("launch")]
    assert len(launches) == 400 and sum(line.startswith("load") for line in lines) == 2
    assert not [line for line in launches if not line.endswith(("map(16,1)", "map(32,1)", "map(48,1)"))]


def test_arrays_that_start_from_zero(driver):
    arrays = [np.ones(40, np.uint8) for _ in range(2)]
    kernel = driver.open(record(zeroed=[1], params=[buffer(0), buffer(1)]))
    lines = kernel.launch(*((a.ctypes.data, 40) for a in arrays))
    assert lines[3] == f"memset {arrays[1].ctypes.data} 0 x 40 stream 7 on 0" and lines[4].startswith("launch")
    assert arrays[0].all() and not arrays[1].any()
    assert not any("memset" in line for line in kernel.launch((16, 40), (0, 0)))  # an array without elements


def test_empty_grids_launch_nothing(driver):
    x = np.ones(40, np.uint8)
    assert driver.open(record(grid=0)).launch() == LOADED
    lines = driver.open(record(grid=["s0", "s0", "sub"], dims=[0, 0, 0, 1], zeroed=[0])).launch(
        (x.ctypes.data, 40), sizes=(3,)
    )
    assert "memset" in lines[-1] and not x.any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"grid": 2**31}, "its grid has 2147483648 programs of 1 blocks; a launch has at most 2147483647"),
        ({"grid": 2**30, "cluster": 2}, "1073741824 programs of 2 blocks"),
        ({"grid": -1}, "its grid has -1 programs"),
        ({"params": [buffer(2)]}, "its record speaks of 3 arrays, and the call has 2"),
        ({"params": [buffer(0), buffer(1)]}, "array 1 .* begins at address 8200, which is no multiple of 16"),
        ({"params": [{"kind": "i32", "value": 2**31}]}, "parameter 0 is 2147483648, which does not fit into 32 bits"),
        ({"dims": [0, 0, 0, 1], "grid": [2**62, "s0", "mul"]}, "does not fit into 64 bits"),
        ({"dims": [0, 0, 0, 1], "grid": [1, "s0", 8, "sub", "cdiv"]}, "divided by 0"),
        (
            {"shared": 300_000},
            r"needs 300000 bytes of shared memory, and device 0 \(Fake 0\) has 232448.* fewer stages",
        ),
        ({"arch": "sm_80"}, r"its code is for sm_80, and device 0 is sm_90 \(Fake 0\).* for the target 'cuda:sm_90'"),
        ({"symbol": "other"}, r"cuModuleGetFunction failed with CUDA_ERROR_500 \(it did not work\)"),
        ({"sites": {"buffer": 1, "bytes": 64, "grid": [1], "list": []}}, "its log has 16 bytes, not 64"),
    ],
)
def test_launches_that_cannot_be(driver, change, message):
    kernel = driver.open(record(**change))
    with pytest.raises(ffi.FfiError, match=f"kernel k: .*{message}"):
        kernel.launch((4096, 16), (8200, 16), sizes=(8,))
    assert not any(line.startswith("launch") for line in driver.lines())


@pytest.mark.parametrize(("arch", "device"), [("sm_80", 2), ("sm_90", 0), ("sm_90", 1)])
def test_architectures_that_run(driver, arch, device):
    assert f"on {device} " in driver.open(record(arch=arch)).launch(device=device)[-1]


@pytest.mark.parametrize("arch", ["sm_75", "sm_86", "sm_89", "sm_90", "sm_100"])
def test_architectures_that_do_not_run(driver, arch):
    with pytest.raises(ffi.FfiError, match=f"its code is for {arch}, and device 2 is sm_80"):
        driver.open(record(arch=arch)).initialize(2)


@pytest.mark.parametrize(
    ("function", "code", "message"),
    [
        (
            "cuModuleLoadData",
            209,
            r"cuModuleLoadData failed with CUDA_ERROR_209 \(it did not work\); .*update the driver",
        ),
        ("cuModuleLoadData", 2, r"CUDA_ERROR_OUT_OF_MEMORY \(out of memory\); free device memory"),
        ("cuFuncSetAttribute", 1, r"cuFuncSetAttribute\(8, 100000\) failed with CUDA_ERROR_1"),
        ("cuLaunchKernelEx", 701, "cuLaunchKernelEx failed with CUDA_ERROR_701.*smaller tiles or more warps"),
        ("cuLaunchKernelEx", 719, "interpret=True"),
        ("cuTensorMapEncodeTiled", 1, "of array 0 with dims 64 128, strides 128, box 64 32, dtype 9, swizzle 3 failed"),
    ],
)
def test_errors_of_the_driver(driver, function, code, message):
    kernel = driver.open(record(params=[tensor_map(0)], shared=100_000))
    driver.lib.fake_fail(function.encode(), code)
    with pytest.raises(ffi.FfiError, match=f"kernel k: .*{message}"):
        kernel.launch((4096, 16))
    driver.lib.fake_reset()  # and then it works
    assert kernel.launch((4096, 16))[-1].startswith("launch")


def test_devices_that_are_not_there(driver):
    kernel = driver.open(record())
    for device, message in ((3, r"cuDeviceGet\(3\) failed .*nvidia-smi"), (64, "0 to 63"), (-1, "device -1")):
        with pytest.raises(ffi.FfiError, match=message):
            kernel.initialize(device)


def test_a_machine_without_the_driver(driver, tmp_path):
    driver.file = str(tmp_path / "libcuda.so.1")
    kernel = driver.open(record())  # reading it needs no driver
    with pytest.raises(
        ffi.FfiError, match=r"kernel k: the driver of platform CUDA cannot be opened .*JAX_PLATFORMS=cpu"
    ):
        kernel.initialize()


def test_a_launch_asks_the_driver_for_nothing_else(driver):
    for params in ([buffer(k) for k in range(4)], [tensor_map(k) for k in range(4)]):
        kernel = driver.open(record(params=params))
        assert len(kernel.launch(*[(16, 16)] * 4)) > 1  # the module is loaded, maps are encoded
        assert [[line.split()[0] for line in kernel.launch(*[(16, 16)] * 4)] for _ in range(3)] == [["launch"]] * 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"threads": 0}, "its threads is 0; expected 1 to 1024"),
        ({"threads": 2048}, "its threads is 2048"),
        ({"cluster": 17}, "its cluster is 17"),
        ({"shared": -1}, "its shared is -1"),
        ({"grid": "s0"}, "'an expression' has the wrong kind"),
        ({"grid": ["s0"]}, "unknown word 's0'"),
        ({"grid": [1, "pow"]}, "unknown word 'pow'"),
        ({"grid": [1, "add"]}, "lacks a value"),
        ({"grid": [1, 2]}, "leaves 2 values"),
        ({"grid": []}, "leaves 0 values"),
        ({"grid": [1] * 40}, "nested more than 32 deep"),
        ({"grid": [1, 0, "mod"]}, "divided by 0"),
        ({"params": [{"kind": "f32"}]}, "unknown kind 'f32'"),
        ({"params": [{"buffer": 0}]}, "the key 'kind' is missing"),
        ({"params": [buffer(-1)]}, "its buffer is -1"),
        ({"params": [buffer(0)] * 513}, "more than 512 parameters"),
        ({"params": [tensor_map(0)] * 33}, "more than 32 tensor maps"),
        ({"params": [tensor_map(0, dtype=16)]}, "its dtype of a tensor map is 16"),
        ({"params": [tensor_map(0, swizzle=4)]}, "its swizzle is 4"),
        ({"params": [tensor_map(0, fill="one")]}, "unknown fill 'one'"),
        ({"params": [tensor_map(0, strides=[1, 2])]}, "2 dims, 2 strides and a box of 2 sides"),
        ({"params": [tensor_map(0, box=[64, 257])]}, "box is 257"),
        ({"params": [tensor_map(0, dims=[1] * 6, strides=[1] * 5, box=[1] * 6)]}, "a tensor map of 6 dims"),
        ({"zeroed": ["a"]}, "'buffer' has the wrong kind"),
        ({"dims": [0, 0, 0]}, "3 numbers, not fours"),
        ({"dims": [0, 0, 1, 1]}, "a symbol of its 2 is the size of no dimension"),
        ({"dims": [0, 0, 64, 1]}, "more than 64 symbols"),
        ({"attributes": {"priority": True}}, "unknown attribute 'priority'"),
        ({"attributes": {"cooperative": 1}}, "'cooperative' has the wrong kind"),
        ({"sites": {"buffer": 0, "bytes": 8, "grid": [], "list": []}}, "its bytes of a log is 8"),
    ],
)
def test_bad_records_are_refused(driver, change, message):
    with pytest.raises(ffi.FfiError, match=f"kernel k: the launch record is refused: .*{message}"):
        driver.open(record(**change))


def test_records_that_are_none(driver):
    for text in ("", "[]", "{}", '{"name": 1}', record()[:-1]):
        with pytest.raises(ffi.FfiError):
            driver.open(text)
    for key in json.loads(record()):
        with pytest.raises(ffi.FfiError, match=f"the key '{key}' is missing"):
            driver.open(json.dumps({k: v for k, v in json.loads(record()).items() if k != key}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: b"", "no ELF object"),
        (lambda x: b"junk" * 100, "no ELF object"),
        (lambda x: image("rocm"), "for machine 224, not for NVIDIA"),
        (lambda x: x[:40] + (10**6).to_bytes(8, "little") + x[48:], "cut off"),
        (lambda x: x[:54] + b"\x40\0\xff\xff" + x[58:], "cut off"),
    ],
)
def test_bad_images_are_refused(driver, change, message):
    with pytest.raises(ffi.FfiError, match=f"kernel k: its image is .*{message}"):
        driver.open(record(), image_bytes=change(image()))


# -- inside XLA -------------------------------------------------------------------------------------------------------


def test_targets_are_registered_for_every_platform():
    for platform in ("cpu", "cuda", "rocm", "ascend"):
        ffi.register(platform)
    assert {"jtile_cuda_door", "jtile_cuda_io", "jtile_rocm", "jtile_rocm_io", "jtile_ascend"} < {
        h.target for found in handlers().values() for h in found
    }
    with pytest.raises(
        ffi.FfiError, match="no custom call handler for platform 'tpu'; expected one of 'ascend', 'cpu', 'cuda'"
    ):
        ffi.register("tpu")


@pytest.fixture(scope="module")
def call_on_cpu():
    """XLA's CPU runtime takes the handlers too: it instantiates them, and only lacks a stream when it runs them."""
    jax.devices("cpu")
    for target in ("jtile_cuda", "jtile_cuda_io"):
        stages = {
            stage: jax.ffi.pycapsule(getattr(library(), f"{target}_{stage}"))
            for stage in ("instantiate", "initialize", "execute")
        }
        jax.ffi.register_ffi_target(f"{target}_on_cpu", stages, platform="cpu")

    def compiled(target="jtile_cuda", **attributes):
        attributes = {"image": image(), "record": record()} | attributes
        call = jax.ffi.ffi_call(f"{target}_on_cpu", jax.ShapeDtypeStruct((8,), jnp.float32))
        return jax.jit(lambda x: call(x, **{k: v for k, v in attributes.items() if v is not None})).lower(
            jax.ShapeDtypeStruct((8,), jnp.float32)
        )

    return compiled


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"record": "{"}, "not valid JSON"),
        ({"record": record(threads=0)}, "kernel k: the launch record is refused: its threads is 0"),
        ({"record": None}, "the attribute 'record' of a jtile_cuda call"),
        ({"image": b"ELF"}, "its image is no ELF object"),
        ({"image": image("rocm"), "record": record("rocm")}, "'gfx942', and the call is for platform CUDA"),
        ({"record": record(sites={"buffer": 1, "bytes": 32, "grid": [], "list": []})}, "call the target jtile_cuda_io"),
    ],
)
def test_bad_calls_are_refused_when_xla_compiles_them(call_on_cpu, attributes, message):
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        call_on_cpu(**attributes).compile()


@pytest.mark.skipif(bool(entry_points(group="jax_plugins")), reason="XLA's GPU plugin has the state's type already")
def test_compiling_needs_no_driver(call_on_cpu):
    log = record(sites={"buffer": 1, "bytes": 32, "grid": [], "list": []})
    call_on_cpu("jtile_cuda_io", record=log).compile()
    with pytest.raises(jax.errors.JaxRuntimeError, match="stream"):
        call_on_cpu().compile()(jnp.zeros(8))


def test_importing_opens_no_driver(run_python):
    script = """
        import jtile
        maps = open("/proc/self/maps").read().splitlines()
        print(sorted({line.split()[-1] for line in maps if "libcuda.so" in line or "amdhip" in line}))
        from jtile.ffi._register import _registered
        print(sorted(_registered))
    """
    out = run_python(script).splitlines()
    assert out == ["[]", str(sorted(handlers()))]
