"""Kernels that talk to other devices on a driver without GPUs: what the launcher prepares on 2, 4 and 8 devices, the
kernels' own code over it, and what becomes of faults."""

import device_programs
import fake_driver
import jax
import numpy as np
import pytest
from device_kernels import gather, numbers, shift
from fake_driver import record
from fake_peers import FakeSite

from jtile import ffi


@pytest.fixture(scope="module")
def fake_driver_file(tmp_path_factory):
    """A driver of its own: one remembers the devices that it has opened, and here there are more of them."""
    return fake_driver.build(tmp_path_factory.mktemp("peers"))


OTHERS = [1, 0, 3, 4, 5, 6, 7, 8]  # any order; device 2 is of another architecture


def lowered(kernel, x, devices, **meta):
    return kernel.lower(jax.ShapeDtypeStruct(x.shape[1:], x.dtype), mesh={"x": devices}, axis="x", **meta).kernel


def site_of(driver, n, *, groups=1, timeout=10.0, **meta):
    x = numbers(n, 3, 5)
    return FakeSite(driver, lowered(shift, x, n, **meta), OTHERS[: n * groups], timeout), x


def parts(x):
    return [[part] for part in x]


@pytest.mark.parametrize("n", [2, 4, 8])
def test_calls(driver, n):
    """The devices meet once; from then on a call is a launch, with nothing else, of the same block."""
    site, x = site_of(driver, n)
    assert site.begin() == [None] * n
    lines = driver.lines()
    assert sum(line.startswith("load") for line in lines) == n
    assert sum(line.startswith("reach") for line in lines) == n * (n - 1)
    assert lines.index("room for blocks of 128 with 0") < max(k for k, x in enumerate(lines) if "reach" in x)
    assert {line for line in lines if line.startswith("host")} == {"host 24 flags 3"}
    for call in range(4):
        got = site.on_devices(parts(x), seed=call)
        np.testing.assert_array_equal(np.stack([o for (o,) in got]), np.roll(x, 1, 0))
        assert site.begin() == [None] * n and driver.lines() == []
    assert site.launched(2) == site.launched(2)
    site.launcher.close()
    assert driver.lib.fake_alive() == 0


def test_groups(driver):
    """Two groups of two devices: each talks to its own."""
    site, _ = site_of(driver, 2, groups=2)
    assert site.begin() == [None] * 4
    reached = {tuple(map(int, line.split()[1::2][:1] + line.split()[3:])) for line in driver.lines() if "reach" in line}
    assert reached == {(0, 1), (1, 0), (3, 4), (4, 3)}
    site.launcher.close()


def test_tensor_maps_of_other_devices(driver):
    """They are of the blocks of the devices, wherever these are, and are made once."""
    at = dict(kind="tensormap", dtype=9, dims=[64, 2], strides=[256], box=[64, 1], swizzle=3, fill="zero")
    maps = [at | {"device": k, "offset": 512} for k in (1, 0, -1)]
    kernel = lowered(shift, numbers(2, 3, 5), 2)
    site = FakeSite(driver, kernel, [3, 1, 0, 4], params=[{"kind": "devices"}, *maps])
    driver.lib.fake_signature(b"p")
    assert site.begin() == [None] * 4
    driver.lines()
    blocks, mapped = [], []
    for ordinal in site.ordinals:
        *encoded, launch = site.launcher.launch(device=ordinal)
        blocks.append(int(launch.split()[-1]))
        mapped.append([int(line.split()[1]) for line in encoded])
        assert len(site.launcher.launch(device=ordinal)) == 1
    want = [[blocks[k] + 512, blocks[k - 1] + 512, own + 512] for k, own in zip((1, 1, 3, 3), blocks, strict=True)]
    assert mapped == want
    site.launcher.close()
    astray = FakeSite(driver, kernel, [3, 1], params=[{"kind": "devices"}, at | {"device": 2, "offset": 512}])
    assert astray.begin() == [None] * 2
    with pytest.raises(Exception, match="a tensor map is of byte 512 of device 2 of 2"):
        astray.launcher.launch(device=3)


def test_programs_that_wait(driver):
    driver.lib.fake_links(1, -1, -1)
    x = numbers(2, 3, 5)  # four multiprocessors with a block each
    site = FakeSite(driver, lowered(gather, x, 2), [0, 1])
    assert site.begin() == [None] * 2
    got = site.on_devices(parts(x))
    np.testing.assert_array_equal(np.stack([o for (o,) in got]), np.broadcast_to(x, (2, *x.shape)))
    x = numbers(2, 5, 5)
    found = FakeSite(driver, lowered(gather, x, 2), [0, 1]).begin()
    assert all("its 5 programs wait for each other, and device" in str(e) for e in found)
    assert "has room for 4 at once: make the grid smaller" in str(found[0])


@pytest.mark.parametrize(
    ("links", "words"),
    [((2, 1, -1), "cannot reach the memory of device 1"), ((2, -1, 1), "cannot update atomically what lies in the")],
)
def test_devices_without_links(driver, links, words):
    driver.lib.fake_links(*links)
    site, _ = site_of(driver, 2)
    found = site.begin()
    assert words in str(found[1]) and "use the collectives of jax.lax there" in str(found[1])
    assert all(isinstance(e, ffi.FfiError) for e in found)  # the other one hears of it, and does not wait


def test_one_that_never_begins(driver):
    site, _ = site_of(driver, 4, timeout=0.05)
    found = site.begin(OTHERS[:3])
    assert all("waited 0.05 s for device (x=3), GPU 4, which has not begun the call" in str(e) for e in found)
    assert site.begin() == [None] * 4  # the next call finds all of them


def test_one_that_cannot_begin(driver):
    """Its error is that of all; the next call tries again."""
    site, x = site_of(driver, 2)
    driver.lib.fake_fail(b"cuMemHostAlloc", 2)
    driver.lib.fake_fail_on(1)
    found = site.begin()
    assert all("cuMemHostAlloc failed with CUDA_ERROR_OUT_OF_MEMORY" in str(e) for e in found)
    driver.lib.fake_fail(b"", 0)
    assert site.begin() == [None] * 2
    np.testing.assert_array_equal(site.on_devices(parts(x))[1][0], x[0])
    site.launcher.close()
    assert driver.lib.fake_alive() == 0


def test_a_wait_that_nobody_ends(driver):
    """The next call fails on all devices, in a sentence; the one behind it runs."""
    site, x = site_of(driver, 2, at_least=2, barrier=False)
    site.begin()
    site.on_devices(parts(x))
    found = [str(e) for e in site.begin()]
    words = r"kernel shift: in a call before this one, device (x="
    assert all(words in text for text in found)
    assert all("program (0, 0, 0): waited 10 s for came to reach 2: it stands at 1\n  at " in text for text in found)
    assert "device_kernels.py:" in found[0]
    assert site.begin() == [None] * 2  # each has been told
    blocks = site.launched(2)
    assert len(set(blocks)) == 2


def test_healed(driver):
    """A site on which a call has failed is as new: signals, epochs and barriers begin anew."""
    steps, x = device_programs.with_fault(0, "no signal"), device_programs.inputs(3, 1, 0)
    right = device_programs.script(0)
    site = FakeSite(driver, lowered(device_programs.follow, x, 3, steps=steps), [0, 1, 3])
    good = FakeSite(driver, lowered(device_programs.follow, x, 3, steps=right), [0, 1, 3])
    for _ in range(2):
        assert site.begin() == [None] * 3
        site.on_devices(parts(x))
        driver.lines()
        assert all("waited 10 s for came[0, " in str(e) for e in site.begin())
        assert sorted(line for line in driver.lines() if "idle" in line) == ["idle 0", "idle 1", "idle 3"]
        assert good.begin() == [None] * 3  # other sites know nothing of it
        got = good.on_devices(parts(x))
        np.testing.assert_array_equal(np.stack([o for (o,) in got]), device_programs.expected(x, right))


def test_told_by_the_call_itself(driver):
    """Whoever waits for a call (`debug=True`), and a further launch, hear of the fault at once, and only once."""
    site, x = site_of(driver, 2, at_least=2)
    site.begin()
    site.on_devices(parts(x))
    for ordinal in site.ordinals:
        with pytest.raises(
            ffi.FfiError, match=r"kernel shift: device \(x=\d\), GPU \d, program .*waited 10 s for came"
        ):
            site.launcher.finish(ordinal)
    assert site.begin() == [None] * 2  # all have been told
    site.on_devices(parts(x))
    with pytest.raises(ffi.FfiError, match="waited 10 s for came"):
        site.launcher.launch((4096, 16), (4096, 16), device=0)
    assert all("in a call before this one" in str(e) for e in site.begin())  # one had not


def test_it_is_a_node_where_kernels_overlap(driver):
    """Elsewhere a graph traces it, though it starts early."""
    kernel = lowered(shift, numbers(2, 3, 5), 2)
    for node in (True, False):
        site = FakeSite(driver, kernel, OTHERS[:2], attributes={"programmatic": True, "node": node})
        site.begin()
        assert bool(site.launcher.node((4096, 16), (4096, 16))) == node


def test_calls_that_are_refused(driver):
    site, _ = site_of(driver, 2)
    driver.lib.fake_devices(9)
    with pytest.raises(ffi.FfiError, match="device 3 is none of the 2 that its call names"):
        site.launcher.initialize(3)
    with pytest.raises(ffi.FfiError, match="has not met the others"):
        site.launcher.launch((4096, 16), (4096, 16), device=0)
    fields = {"params": site.record.params, "devices": site.facts}
    for numbers_, words in ([0, 1, 2], "names 3 devices, in groups of 2"), ([1, 1], "names a device twice"):
        with pytest.raises(ffi.FfiError, match=words):
            driver.open(record(**fields)).talk(*numbers_)
    with pytest.raises(ffi.FfiError, match="does not say which devices it talks to"):
        driver.open(record(**fields)).initialize()
    with pytest.raises(ffi.FfiError, match="it has to say of what devices its parameter is"):
        driver.open(record(params=site.record.params))
    for change in {"table": 8}, {"memory": 0}, {"waits": 3}:
        with pytest.raises(ffi.FfiError, match="the launch record is refused"):
            driver.open(record(params=site.record.params, devices=site.facts | change))


def test_other_platforms(driver):
    site, _ = site_of(driver, 2)
    kernel = driver.open(record("rocm", params=site.record.params, devices=site.facts), "rocm").talk(0, 1)
    with pytest.raises(ffi.FfiError, match="kernels that talk to other devices do not run on platform ROCM"):
        kernel.initialize()
