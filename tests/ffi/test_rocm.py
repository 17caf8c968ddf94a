"""The launcher of AMD's GPUs on a driver that writes down what it is asked for."""

import pytest
from fake_driver import image, record

from jtile import ffi

BUFFERS = [{"kind": "buffer", "buffer": k} for k in range(2)]
TENSOR_MAP = {"kind": "tensormap", "buffer": 0, "dtype": 9, "dims": [64], "strides": [], "box": [64]}


def test_arguments_of_a_launch(driver):
    params = [*BUFFERS, {"kind": "i32", "value": 3}, {"kind": "null"}, {"kind": "null"}]
    kernel = driver.open(record("rocm", params=params, grid=5, threads=256, shared=1024), "rocm")
    driver.lib.fake_signature(b"ppipp")
    launch = "launch 5x1x1 blocks of 256x1x1 shared 1024 stream 7 on 1 args 4096 8192 3 0 0"
    assert kernel.launch((4096, 16), (8192, 16), device=1) == ["load on 1: code", "function jtile_k", launch]
    assert kernel.launch((4096, 16), (8192, 16), device=1) == [launch]
    assert kernel.launch((4096, 16), (8192, 16), device=0)[0] == "load on 0: code"
    kernel.close()
    assert sorted(driver.lines()) == ["unload on 0", "unload on 1"]


def test_cooperative_launches(driver):
    kernel = driver.open(record("rocm", attributes={"cooperative": True}), "rocm")
    assert kernel.launch()[-1].startswith("launch together 1x1x1")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cluster": 2}, "clusters and programmatic launches are NVIDIA's alone"),
        ({"attributes": {"programmatic": True}}, "NVIDIA's alone"),
        ({"params": [TENSOR_MAP | {"swizzle": 0, "fill": "zero"}]}, "NVIDIA's alone"),
        ({"arch": "sm_90"}, "its code is for 'sm_90', and the call is for platform ROCM"),
    ],
)
def test_records_that_no_amd_gpu_runs(driver, change, message):
    with pytest.raises(ffi.FfiError, match=f"kernel k: .*{message}"):
        driver.open(record("rocm", **change), "rocm")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"arch": "gfx1100"}, r"its code is for gfx1100, and device 0 is gfx942 \(Fake 0\).* target 'rocm:gfx942'"),
        ({"arch": "vega"}, "its code is for 'vega', which is no architecture of AMD"),
        ({"shared": 65537}, "needs 65537 bytes of shared memory, and device 0 .* has 65536"),
    ],
)
def test_launches_that_cannot_be(driver, change, message):
    with pytest.raises(ffi.FfiError, match=f"kernel k: .*{message}"):
        driver.open(record("rocm", **change), "rocm").launch()


def test_another_architecture(driver):
    driver.open(record("rocm", arch="gfx1100"), "rocm").initialize(2)
    assert driver.lines()[0] == "load on 2: code"


@pytest.mark.parametrize(
    ("function", "code", "message"),
    [
        ("hipModuleLoadData", 209, r"hipModuleLoadData failed with hipErrorOther \(it did not work\)"),
        ("hipModuleLaunchKernel", 2, r"hipModuleLaunchKernel failed with hipErrorOutOfMemory \(out of memory\)"),
    ],
)
def test_errors_of_the_driver(driver, function, code, message):
    driver.lib.fake_fail(function.encode(), code)
    with pytest.raises(ffi.FfiError, match=f"kernel k: {message}"):
        driver.open(record("rocm"), "rocm").launch()


def test_a_machine_without_the_driver(driver, tmp_path):
    driver.file = str(tmp_path / "libamdhip64.so")
    kernel = driver.open(record("rocm"), "rocm")
    with pytest.raises(ffi.FfiError, match="kernel k: the driver of platform ROCM cannot be opened"):
        kernel.initialize()


def test_images_of_the_other_platform(driver):
    with pytest.raises(ffi.FfiError, match="for machine 190, not for AMD"):
        driver.open(record("rocm"), "rocm", image("cuda"))
