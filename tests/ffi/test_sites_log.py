"""Prints and assertions of GPU kernels: from the log that a kernel leaves to lines and errors."""

import ctypes
import struct

import numpy as np
import pytest
from fake_driver import record

from jtile import ffi

FIRST = 2**63 - 1


def printing(fmt="x = {}", shape=(3,), dtype="float32", **more):
    args = [{"dtype": dtype, "shape": list(shape)}]
    return {"kind": "print", "format": fmt, "where": "k.py:1", "args": args} | more


def asserting(**more):
    return {"kind": "assert", "message": "flags must be set", "where": "k.py:3", "args": []} | more


def entry(site, program, *args):
    body = b"".join(a.tobytes() + bytes(-a.nbytes % 8) for a in map(np.asarray, args))
    return struct.pack("<iiq", site, 16 + len(body), program) + body


def log(*entries, used=None, failure=0, dropped=0):
    body = b"".join(entries)
    return struct.pack("<4Q", len(body) if used is None else used, failure, dropped, 0) + body


class Run:
    """A kernel whose launches leave a log."""

    def __init__(self, driver, sites, grid=(4,), size=1024, platform="cuda", dims=()):
        self.driver, self.array = driver, np.full(size, 255, np.uint8)
        fields = {"buffer": 0, "bytes": size, "grid": list(grid), "list": sites}
        self.kernel = driver.open(record(platform, sites=fields, zeroed=[0], dims=list(dims)), platform)

    def __call__(self, content, **kwargs):
        self.content = content
        to, size = ctypes.c_void_p(self.array.ctypes.data), ctypes.c_size_t(len(content))
        self.driver.lib.fake_kernel(to, ctypes.c_char_p(content), size)
        return self.kernel.launch((self.array.ctypes.data, self.array.nbytes), **kwargs)


@pytest.mark.parametrize("platform", ["cuda", "rocm"])
def test_prints_come_in_the_order_of_programs(driver, capfd, platform):
    two = {"dtype": "int32", "shape": []}
    sites = [printing(), printing("n {} and {:d}") | {"args": [two, two]}]
    run = Run(driver, sites, grid=(2, 2), platform=platform)
    x = np.array([1, 2.5, -3], np.float32)
    lines = run(log(entry(0, 3, x), entry(1, 0, np.int32(7), np.int32(-8)), entry(0, 0, x * 2)))
    assert [line for line in lines if line.startswith("read ")] == ["read 32 stream 7 on 0", "read 96 stream 7 on 0"]
    expected = ["[k (0, 0, 0)] n 7 and -8", "[k (0, 0, 0)] x = [ 2.  5. -6.]", "[k (1, 1, 0)] x = [ 1.   2.5 -3. ]"]
    assert capfd.readouterr().out.splitlines() == expected
    assert run(log())[-1] == "wait 7" and capfd.readouterr().out == ""


def test_lines_that_were_lost_are_counted(driver, capfd):
    run = Run(driver, [printing()], size=96)
    x = np.zeros(3, np.float32)
    run(log(entry(0, 0, x), entry(0, 1, x), used=1000, dropped=30))
    out = capfd.readouterr().out.splitlines()
    assert out[:2] == ["[k (0, 0, 0)] x = [0. 0. 0.]", "[k (1, 0, 0)] x = [0. 0. 0.]"]
    assert out[2:] == ["[k] 30 more prints were lost: the log of a launch holds 96 bytes"]


def test_a_failed_assertion_comes_after_the_prints(driver, capfd):
    run = Run(driver, [printing(), asserting()], grid=(5, 3))
    with pytest.raises(ffi.FfiError) as error:
        run(log(entry(0, 0, np.zeros(3, np.float32)), failure=FIRST - (7 << 16 | 1)))
    expected = "kernel k: assertion failed: flags must be set (program (2, 1, 0))\n  at k.py:3"
    assert str(error.value) == expected
    assert capfd.readouterr().out == "[k (0, 0, 0)] x = [0. 0. 0.]\n"
    assert run(log())[-1] == "wait 7"  # the next launch is a new one


def test_ids_under_vmap_and_of_dynamic_grids(driver, capfd):
    sites = [printing(axes=2, lanes=1)]
    run = Run(driver, sites, grid=(4, ["s0"], 2), dims=(0, 0, 0, 1))
    run(log(entry(0, (3 * 5 + 4) * 2 + 1, np.zeros(3, np.float32))), sizes=(5,))
    assert capfd.readouterr().out == "[k (4, 1), lane 3] x = [0. 0. 0.]\n"


def test_values_of_every_width(driver, capfd):
    dtypes = ["bool", "int4", "float16", "float64", "uint8"]
    values = [np.array([True, False]), np.array([7, 255], np.uint8), np.array([0.5, -2], np.float16)]
    values += [np.array([1e300, 0.1]), np.array([3, 200], np.uint8)]
    args = [{"dtype": d, "shape": [2]} for d in dtypes]
    run = Run(driver, [printing(" ".join("{}" for _ in dtypes)) | {"args": args}])
    run(log(entry(0, 2, *values)))
    expected = "[ True False] [7 -1] [ 0.5 -2. ] [1.e+300 1.e-001] [  3 200]"
    assert capfd.readouterr().out == f"[k (2, 0, 0)] {expected}\n"


@pytest.mark.parametrize(
    "content",
    [
        log(entry(5, 0, np.zeros(3, np.float32))),
        log(entry(1, 0, np.zeros(3, np.float32))),
        log(entry(-1, 0)),
        log(entry(0, 0)),
        log(entry(0, -1, np.zeros(3, np.float32))),
        log(struct.pack("<iiq", 0, 10_000, 0)),
        log(struct.pack("<iiq", 0, -16, 0)),
        log(struct.pack("<iiq", 0, 35, 0), bytes(40)),
    ],
)
def test_a_damaged_log_is_an_error(driver, content):
    with pytest.raises(ffi.FfiError, match="kernel k: the log of its sites"):
        Run(driver, [printing(), asserting()])(content)


def test_a_kernel_that_failed_on_the_device(driver):
    run = Run(driver, [asserting()])
    driver.lib.fake_fail(b"cuStreamSynchronize", 700)
    with pytest.raises(
        ffi.FfiError, match=r"kernel k: cuStreamSynchronize failed with CUDA_ERROR_700 .*interpret=True"
    ):
        run(log())


@pytest.mark.parametrize("site", [asserting(lanes=2), asserting(lanes=300), {"kind": "trap"}])
def test_sites_that_do_not_fit_are_refused(driver, site):
    with pytest.raises(ffi.FfiError, match="kernel k: the launch record is refused"):
        Run(driver, [site], grid=(4,))
