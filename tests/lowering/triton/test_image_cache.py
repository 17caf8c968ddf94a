"""Images of GPUs in the disk cache: damaged files, folders that take none, a full disk, processes at the same time."""

import errno
import hashlib
import os
import subprocess
import sys
import textwrap
import warnings

import pytest

import jtile as jt
from jtile import _cache, ir
from jtile._errors import CacheWarning
from jtile.lowering import registry, targets
from jtile.lowering.triton import stages

pytest.importorskip("triton")
TARGETS = ("cuda:sm_90", "rocm:gfx942")
TEXT = """kernel @k(%x: ref<128xf32>, %o: ref<128xf32, out>) {
  %z = full 0 : i32
  %t = load %x[tile(%z, 128)] : tile<128xf32>
  store %o[tile(%z, 128)], %t
}"""


@pytest.fixture
def folder(tmp_path):
    with jt.config(cache_dir=str(tmp_path)):
        registry.forget()
        yield tmp_path / "kernels"
    registry.forget()


def image(name: str) -> bytes:
    """As a fresh process finds or makes it."""
    registry.forget()
    return registry.compile(ir.parse_kernel(TEXT), targets.resolve(name)).image


def flip(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


DAMAGES = {
    "cut off": lambda data: data[:-100],
    "a bit of the image": lambda data: flip(data, len(data) - 500),
    "a bit of the record": lambda data: flip(data, data.index(b"record") + 40),
    "empty": lambda data: b"",
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_image_is_made_anew(folder, target, damage):
    first = image(target)
    (entry,) = folder.iterdir()
    sound = entry.read_bytes()
    entry.write_bytes(DAMAGES[damage](sound))
    with pytest.warns(CacheWarning, match="is damaged.*compiled anew"):
        assert image(target) == first
    assert entry.read_bytes() == sound
    assert image(target) == first


@pytest.mark.parametrize(
    ("code", "words"),
    [(errno.ENOSPC, "No space left"), (errno.EROFS, "Read-only"), (errno.EACCES, "Permission")],
)
def test_a_folder_that_takes_nothing(folder, monkeypatch, code, words):
    def refuse(path, data):
        raise OSError(code, os.strerror(code), str(path))

    monkeypatch.setattr(_cache, "write", refuse)
    monkeypatch.setattr(_cache, "_warned", set())
    with pytest.warns(CacheWarning, match=f"cannot be written.*{words}.*JTILE_CACHE_DIR"):
        first = image("cuda:sm_90")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # said once
        assert image("cuda:sm_90") == first
    assert [*folder.iterdir()] == []


def test_a_write_that_ends_halfway_leaves_nothing(folder, monkeypatch):
    """The disk is full when the file is half there."""

    def full(source, to):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(to))

    monkeypatch.setattr(_cache, "_warned", set())
    monkeypatch.setattr(_cache.os, "replace", full)
    with pytest.warns(CacheWarning, match="No space left"):
        assert image("cuda:sm_90")
    assert [*folder.iterdir()] == []


SCRIPT = f"""
import hashlib, sys, time
from jtile import ir
from jtile.lowering import registry, targets
from jtile.lowering.triton import stages

built = []
build = stages.build
stages.build = lambda *a, **k: built.append(1) or build(*a, **k)
kernel, target = ir.parse_kernel('''{TEXT}'''), targets.resolve("cuda:sm_90")
print("ready", flush=True)
sys.stdin.readline()
found = registry.compile(kernel, target)
print(hashlib.sha256(found.image).hexdigest(), len(built), found.launch["record"])
"""


def test_processes_at_the_same_time(tmp_path, monkeypatch):
    """Both may compile, neither sees half a file, and a third one compiles nothing."""
    paths = [p for p in sys.path if p and os.path.isdir(p)]
    env = os.environ | {"JTILE_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-W", "error::UserWarning", "-c", textwrap.dedent(SCRIPT)]
    pipe = subprocess.PIPE
    start = lambda: subprocess.Popen(command, env=env, stdin=pipe, stdout=pipe, stderr=pipe, text=True)

    def finish(processes):
        for p in processes:
            assert p.stdout.readline() == "ready\n", p.stderr.read()
        for p in processes:
            p.stdin.write("go\n"), p.stdin.flush()
        outcomes = [(*p.communicate(), p.returncode) for p in processes]
        assert [(err, code) for _, err, code in outcomes] == [("", 0)] * len(processes)
        return [out.split(maxsplit=2) for out, _, _ in outcomes]

    (hash_1, _, record_1), (hash_2, _, record_2) = finish([start(), start()])
    monkeypatch.setattr(stages, "build", lambda *a, **k: pytest.fail("it is compiled again"))
    with jt.config(cache_dir=str(tmp_path)):
        registry.forget()
        found = registry.compile(ir.parse_kernel(TEXT), targets.resolve("cuda:sm_90"))
    registry.forget()
    hash_3, record_3 = hashlib.sha256(found.image).hexdigest(), str(found.launch["record"])
    assert hash_1 == hash_2 == hash_3 and record_1.strip() == record_2.strip() == record_3
    assert len([*(tmp_path / "kernels").iterdir()]) == 1
