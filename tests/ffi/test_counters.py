"""Counters of kernels whose programs arrive: memory of a call site on a device and of a stream there, zeroed once, gone
with the site."""

import concurrent.futures
import re

import numpy as np
import pytest
from fake_driver import call_launch, record

from jtile import ffi
from jtile.ffi._run import run_image

COUNTERS = {"kind": "counters", "count": 5}
BUFFER = {"kind": "buffer", "buffer": 0}


def opened(driver, platform="cuda", **changes):
    driver.lib.fake_signature(b"pp")
    return driver.open(record(platform, params=[BUFFER, COUNTERS], **changes), platform)


def address(lines) -> int:
    (line,) = (x for x in lines if x.startswith("launch"))
    return int(re.search(r"args \d+ (\d+)$", line)[1])


@pytest.mark.parametrize("platform", ["cuda", "rocm"])
def test_zeroed_once_before_any_call(driver, platform):
    kernel = opened(driver, platform)
    kernel.initialize()
    made = [x for x in driver.lines() if not x.startswith(("load", "function", "ready"))]
    one = r"allocate 20 on 0\nmemset \d+ 0 x 20 stream 2 on 0\nwait 2"  # two sets: of what launches and of what records
    assert re.fullmatch(rf"{one}\n{one}", "\n".join(made))
    first = kernel.launch((4096, 16))
    assert len(first) == 1  # nothing but the launch: no memset stands in a call
    assert address(first) in [int(re.search(r"memset (\d+)", made[k])[1]) for k in (1, 4)]
    assert kernel.launch((4096, 16)) == first  # where it was: a recorded graph finds it
    kernel.initialize()
    assert driver.lines() == []
    kernel.close()
    assert sorted(driver.lines()) == ["free on 0", "free on 0", "unload on 0"]
    assert driver.lib.fake_alive() == 0


def test_each_device_and_each_site_has_its_own(driver):
    a, b = opened(driver), opened(driver)
    places = {address(kernel.launch((4096, 16), device=device)) for kernel in (a, b) for device in (0, 1)}
    assert len(places) == 4
    a.close(), b.close()
    assert driver.lib.fake_alive() == 0


@pytest.mark.parametrize("platform", ["cuda", "rocm"])
def test_each_stream_has_its_own(driver, platform):
    """Launches of one call that run at the same time, on any number of streams, 0 (the usual one) included."""
    kernel = opened(driver, platform)
    kernel.initialize()
    driver.lines()
    lines = {stream: kernel.launch((4096, 16), stream=stream) for stream in (7, 9, 0, 11)}
    assert [len(x) for x in lines.values()] == [1, 1, 4, 4]  # two are ready; a further one is made when it comes
    places = {stream: address(x) for stream, x in lines.items()}
    assert len(set(places.values())) == 4
    for stream in (11, 0, 7, 9, 7):
        assert address(kernel.launch((4096, 16), stream=stream)) == places[stream]
    assert driver.lib.fake_alive() == 4
    kernel.close()
    assert driver.lib.fake_alive() == 0


def test_streams_of_many_threads(driver):
    kernel = opened(driver)
    streams = [100 + k % 16 for k in range(400)]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda stream: call_launch(kernel, (4096, 16), stream=stream), streams))
    found: dict[str, set[str]] = {}
    for line in driver.lines():
        if line.startswith("launch"):
            found.setdefault(re.search(r"stream (\d+)", line)[1], set()).add(re.search(r"(\d+)$", line)[1])
    assert len(found) == 16 and all(len(x) == 1 for x in found.values())
    assert len(set.union(*found.values())) == 16
    kernel.close()
    assert driver.lib.fake_alive() == 0


def test_no_memory(driver):
    kernel = opened(driver)
    driver.lib.fake_fail(b"cuMemAlloc", 2)
    with pytest.raises(ffi.FfiError, match="kernel k: cuMemAlloc failed with CUDA_ERROR_OUT_OF_MEMORY"):
        kernel.initialize()
    driver.lib.fake_fail(b"cuStreamSynchronize", 700)
    with pytest.raises(ffi.FfiError, match="kernel k: cuStreamSynchronize failed"):
        kernel.initialize()
    assert driver.lib.fake_alive() == 0
    driver.lib.fake_fail(b"", 0)
    kernel.initialize()
    kernel.launch((4096, 16), stream=1), kernel.launch((4096, 16), stream=2)
    driver.lib.fake_fail(b"cuMemAlloc", 2)
    with pytest.raises(ffi.FfiError, match="kernel k: cuMemAlloc failed"):
        kernel.launch((4096, 16), stream=3)
    driver.lib.fake_fail(b"", 0)
    assert len(kernel.launch((4096, 16), stream=3)) == 4
    kernel.close()
    assert driver.lib.fake_alive() == 0


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ([COUNTERS, COUNTERS], "counters in two parameters"),
        ([COUNTERS | {"count": 0}], "number of counters is 0; expected 1 to"),
        ([COUNTERS | {"count": 1 << 25}], "number of counters is 33554432; expected 1 to"),
        ([{"kind": "counters"}], "count"),
    ],
)
def test_records_that_are_refused(driver, params, words):
    with pytest.raises(ffi.FfiError, match=words):
        driver.open(record(params=params))


# On the CPU the image says how many there are, and finds them in the table of callbacks.
ARRIVE = """
    %slot = getelementptr ptr, ptr %host, i64 2
    %counters = load ptr, ptr %slot
    %at = getelementptr i32, ptr %counters, i64 2
    %old = atomicrmw add ptr %at, i32 1 acq_rel
    %come = add i32 %old, 1
    %last = icmp eq i32 %come, 40
    br i1 %last, label %reset, label %on
  reset:
    store i32 0, ptr %at
    %out = load ptr, ptr %bufs
    store i64 %p, ptr %out
    br label %on
  on:
"""


def number(n: int) -> str:
    return f"define i64 @jtile_counters() {{ ret i64 {n} }}"


@pytest.mark.parametrize("threads", [1, 4])
def test_counters_of_a_call_on_the_cpu(emit_object, entry_module, threads):
    code = emit_object(entry_module(ARRIVE, extra=number(3)), arch=ffi._run.host_arch())
    out = np.full(1, -1)
    run_image(code, [out], programs=40, threads=threads)
    assert 0 <= out[0] < 40
    with pytest.raises(ffi.FfiError, match="kernel kernel: 39 programs have arrived at counter 2 when the call ends"):
        run_image(code, [out], programs=39, threads=threads)


@pytest.mark.parametrize("n", [-1, 1 << 25])
def test_numbers_of_counters_that_are_none(emit_object, entry_module, n):
    with pytest.raises(ffi.FfiError, match=f"it has {n} counters"):
        run_image(emit_object(entry_module("", extra=number(n)), arch=ffi._run.host_arch()), [], programs=1)
