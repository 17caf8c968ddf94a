"""Loading and running objects without jax."""

import ctypes
import gc
import hashlib
import json
import subprocess
import sys

import numpy as np
import pytest

from jtile import ffi


def vadd_arrays(programs):
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(256 * programs).astype(np.float32) for _ in range(2))
    return a, b, np.full_like(a, np.nan)


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("programs", [1, 2, 7, 1000])
def test_vector_add(images, programs, threads):
    a, b, c = vadd_arrays(programs)
    ffi.run_image(images["vadd"], [a, b, c], programs=programs, threads=threads)
    np.testing.assert_array_equal(c, a + b)


@pytest.mark.parametrize("cost", [0, 100, 10**9])
@pytest.mark.parametrize("programs", [1, 3, 4, 5, 63, 4097])
def test_every_program_runs_once(images, programs, cost):
    """With less programs than threads, with parts that differ by one, in single programs and in chunks of many."""
    loaded = ffi.LoadedImage(images["count"], programs=programs, cost=cost)
    out = np.zeros(programs + 1, np.int64)
    calls = [(threads, k) for threads in (1, 2, 4, 7) for k in range(5)]
    for threads, _ in calls:
        loaded.run([out], threads=threads)
    np.testing.assert_array_equal(out, [*[len(calls)] * programs, 0])


def test_only_the_grids_programs_run(images):
    a, b, c = vadd_arrays(4)
    ffi.run_image(images["vadd"], [a, b, c], programs=3)
    assert np.isnan(c[768:]).all() and not np.isnan(c[:768]).any()


@pytest.mark.parametrize("threads", [1, 3])
def test_empty_grid_and_empty_arrays(images, threads):
    c = np.full(256, 5, np.float32)
    ffi.run_image(images["vadd"], [c, c, c], programs=0, threads=threads)
    assert (c == 5).all()
    ffi.run_image(images["vadd"], [np.zeros((0, 3), np.float32)] * 3, programs=0, threads=threads)
    ffi.run_image(images["vadd"], [], programs=0, threads=threads)


@pytest.mark.parametrize("opt", [0, 2])
@pytest.mark.parametrize("reloc", ["pic", "static"])
def test_relocations_against_data_code_and_got(emit_object, sources, opt, reloc):
    out = np.zeros(9, np.int64)
    ffi.run_image(emit_object(sources["linked"], arch=ffi._run.host_arch(), opt=opt, reloc=reloc), [out], programs=9)
    np.testing.assert_array_equal(out, [11, 22, 33, 44, 11, 22, 33, 44, 11])


@pytest.mark.parametrize("workspace", [1 << 20, (64 << 20) + 1])
@pytest.mark.parametrize("threads", [1, 4])
def test_workspaces_are_aligned_and_private(images, workspace, threads):
    out = np.zeros(64, np.int64)
    loaded = ffi.LoadedImage(images["scratch"], programs=64, workspace=workspace)
    used = set()
    for _ in range(1000):  # a busy machine may leave the helpers no time to begin
        loaded.run([out], threads=threads)
        assert (out % 64 == 0).all() and (out != 0).all()
        distinct = np.unique(out)
        assert len(distinct) <= threads
        assert (np.diff(distinct) >= workspace).all()
        used |= set(distinct)
        if len(used) > 1 or threads == 1:
            break
    assert len(used) > 1 or threads == 1


@pytest.mark.early
def test_equal_images_are_loaded_once(images):
    gc.collect()  # what other tests left
    alive, loads = ffi.images_alive(), ffi.images_loaded()
    first = [ffi.LoadedImage(images["vadd"], programs=n) for n in range(50)]
    other = ffi.LoadedImage(images["linked"], programs=1)
    assert (ffi.images_alive() - alive, ffi.images_loaded() - loads) == (2, 2)
    for loaded in first:
        loaded.close()
        loaded.close()
    assert ffi.images_alive() == alive + 1
    with pytest.raises(ffi.FfiError, match="closed"):
        first[0].run([])
    del other
    gc.collect()
    assert ffi.images_alive() == alive
    ffi.LoadedImage(images["vadd"], programs=1)
    assert ffi.images_loaded() == loads + 3


SITES = json.dumps([
    {"kind": "assert", "message": "x must be \u00e4bove 0", "where": "kernel.py:12", "args": []},
    {"kind": "assert", "message": "never negative", "where": "kernel.py:14"},
])  # fmt: skip


@pytest.mark.parametrize("threads", [1, 4])
def test_lowest_failing_program_wins(images, threads):
    flags, out = np.ones(500, np.int32), np.zeros(500, np.int64)
    flags[[499, 70, 300]] = 0, -1, 0
    loaded = ffi.LoadedImage(images["assert"], programs=500, sites=SITES, name="scale")
    for _ in range(20):
        with pytest.raises(ffi.FfiError) as error:
            loaded.run([flags, out], threads=threads)
        message = "kernel scale: assertion failed: never negative (program (70, 0, 7))\n  at kernel.py:14"
        assert str(error.value) == message
    assert (out[:71] == np.arange(1, 72)).all()  # the kernel goes on behind a failed assertion
    flags[70] = 1
    with pytest.raises(ffi.FfiError, match=r"x must be äbove 0 \(program \(300, 0, 7"):
        loaded.run([flags, out], threads=threads)
    flags[:] = 1
    loaded.run([flags, out], threads=threads)
    assert (out == np.arange(1, 501)).all()


def test_sites_that_do_not_exist(images):
    flags, out = np.zeros(1, np.int32), np.zeros(1, np.int64)
    with pytest.raises(ffi.FfiError, match="unknown site 0"):
        ffi.run_image(images["assert"], [flags, out], programs=1)
    with pytest.raises(ffi.FfiError, match="prints at site 0, which does not exist"):
        ffi.run_image(images["print"], [flags], programs=1)


def test_non_zero_return_is_an_internal_error(emit_object):
    text = "define i32 @jtile_entry(ptr %a, ptr %b, i64 %c, i64 %d, ptr %e, ptr %f) { ret i32 42 }"
    with pytest.raises(ffi.FfiError, match="kernel k: internal error 42 of the compiled code in programs 0 to 6"):
        ffi.run_image(emit_object(text, arch=ffi._run.host_arch()), [], programs=7, name="k")


def test_bad_arguments(images):
    a = np.zeros((4, 4), np.float32)
    with pytest.raises(ValueError, match="array 1 is not C-contiguous"):
        ffi.run_image(images["vadd"], [a, a.T, a], programs=1)
    with pytest.raises(ffi.FfiError, match="grid has -1 programs"):
        ffi.run_image(images["vadd"], [a], programs=-1)
    with pytest.raises(ffi.FfiError, match="workspace has -8 bytes"):
        ffi.run_image(images["vadd"], [a], programs=1, workspace=-8)


@pytest.mark.skipif(ffi._run.host_arch() != "x86_64", reason="names of x86 features")
def test_isa_is_checked_against_the_machine(images):
    c = np.zeros(256, np.float32)
    ffi.run_image(images["vadd"], [c, c, c], programs=1, isa="x86_64:sse2,a-feature-of-the-future")
    ffi.run_image(images["vadd"], [c, c, c], programs=1, isa="x86_64:")
    with pytest.raises(ffi.FfiError, match="compiled for 'aarch64', but this machine is x86_64"):
        ffi.run_image(images["vadd"], [c, c, c], programs=1, isa="aarch64:neon")
    # No machine has AMD's fma4 and Intel's tiles.
    with pytest.raises(ffi.FfiError, match=r"lacks: .*; compile it again"):
        ffi.check_isa("x86_64:sse2,fma4,amx-tile,xop,amx-fp16")


@pytest.mark.skipif(ffi._run.host_arch() != "x86_64", reason="names of x86 features")
def test_machine_features_are_those_of_llvm():
    import llvmlite.binding as llvm

    host = llvm.get_host_cpu_features()
    ffi.check_isa("x86_64:" + ",".join(name for name, on in host.items() if on))
    families = ("avx", "sse", "fma", "bmi", "amx-tile", "f16c", "xop")
    for name, on in host.items():
        if not on and name.startswith(families) and name != "avx10.2":
            with pytest.raises(ffi.FfiError, match=name):
                ffi.check_isa(f"x86_64:{name}")


def test_sha256_of_every_padding_case():
    for n in [*range(130), 4095, 4096, 100_003]:
        data, digest = bytes(k * 7 % 256 for k in range(n)), ctypes.create_string_buffer(32)
        ffi._library.library().jtile_sha256(data, n, digest)
        assert digest.raw == hashlib.sha256(data).digest()


def test_missing_library_says_how_to_build_it(monkeypatch, tmp_path):
    monkeypatch.setattr(ffi._library, "_NAME", "_no_such_library.so")
    with pytest.raises(ffi.FfiError, match=r"pip install -e \."):
        ffi.library_path()


def test_a_library_that_cannot_be_loaded_is_no_error_of_the_import():
    script = """
import ctypes, jax
def refuse(path, *args):
    raise OSError("no such library")
ctypes.CDLL = refuse
import jtile
try:
    jtile.ffi.register()
except jtile.ffi.FfiError as e:
    print(e)
"""
    path = ":".join(p for p in sys.path if p)
    env = {"PYTHONPATH": path, "JAX_PLATFORMS": "no_such_platform"}  # any use of a backend would raise
    done = subprocess.run([sys.executable, "-P", "-c", script], check=True, env=env, capture_output=True, text=True)
    assert "cannot be loaded (no such library)" in done.stdout
