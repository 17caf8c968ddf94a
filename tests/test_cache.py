"""The disk cache: whole entries or none, damage found, eviction, many processes at once, folders that do not work."""

import json
import os
import subprocess
import sys
import warnings

import pytest

from jtile import _cache
from jtile._config import config, current
from jtile._errors import CacheError, CacheWarning

# The cache alone: a child that imports jax takes a second of the machine.
WITHOUT_JAX = f"""
import sys, types
package = sys.modules["jtile"] = types.ModuleType("jtile")
package.__path__ = [{os.path.dirname(_cache.__file__)!r}]
from jtile import _cache
"""


@pytest.fixture
def folder(tmp_path):
    with config(cache_dir=str(tmp_path), cache_size=1 << 20):
        yield tmp_path / "kernels"


def stored(folder):
    return sorted(p.name for p in folder.iterdir())


def test_what_is_put_comes_back(folder):
    payload = bytes(range(256)) * 3 + b"\n\x00\n"
    _cache.put("k1", {"launch": {"workspace": 64}, "text": "ü"}, payload)
    entry = _cache.get("k1")
    assert entry == _cache.Entry({"launch": {"workspace": 64}, "text": "ü"}, payload)
    assert _cache.get("k2") is None
    assert stored(folder) == ["k1.jtile"]


def test_only_the_owner_may_touch_the_folder(folder):
    _cache.put("k", {}, b"x")
    assert folder.stat().st_mode & 0o77 == 0
    assert (folder / "k.jtile").stat().st_mode & 0o77 == 0


def test_empty_payload_and_overwriting(folder):
    _cache.put("k", {"n": 1}, b"")
    assert _cache.get("k") == _cache.Entry({"n": 1}, b"")
    _cache.put("k", {"n": 2}, b"x")
    assert _cache.get("k") == _cache.Entry({"n": 2}, b"x")


def test_key_depends_on_every_part_and_on_their_borders():
    keys = [_cache.key("ab", "c"), _cache.key("a", "bc"), _cache.key("abc"), _cache.key("ab", "c", None)]
    assert len(set(keys)) == 4
    assert _cache.key("ab", "c") == keys[0]


def test_key_is_the_same_in_every_process(subprocess_env):
    # without the part that follows edits of the source, which may come between the two processes
    code = WITHOUT_JAX + "_cache._build = lambda: ''; print(_cache.key('kernel', 'target'))"
    got = {
        subprocess.run(
            [sys.executable, "-c", code],
            env=subprocess_env | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert len(got) == 1


def damage_truncated(data):
    return data[: len(data) // 2]


def damage_one_bit(data):
    return data[:-3] + bytes([data[-3] ^ 1]) + data[-2:]


def damage_header_value(data):
    return data.replace(b"workspace", b"workspacE")


def damage_no_json(data):
    return b"\x7fELF" + data


def damage_json_of_another_kind(data):
    return b"[1, 2]\n" + data


def damage_header_is_a_number(data):
    head, _, rest = data.partition(b"\n")
    return json.dumps(json.loads(head) | {"header": 3}).encode() + b"\n" + rest


def damage_longer(data):
    return data + b"x"


def damage_empty(data):
    return b""


DAMAGES = [f for name, f in sorted(globals().items()) if name.startswith("damage_")]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_entry_is_deleted_and_never_trusted(folder, damage):
    _cache.put("k", {"launch": {"workspace": 64}}, b"machine code")
    path = folder / "k.jtile"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(CacheError, match="is damaged"):
        _cache.read(path)
    with pytest.warns(CacheWarning, match=r"k\.jtile is damaged"):
        assert _cache.get("k") is None
    assert stored(folder) == []
    _cache.put("k", {}, b"again")
    assert _cache.get("k").payload == b"again"


def test_an_entry_under_another_name_is_refused(folder):
    _cache.put("k", {}, b"code of k")
    os.rename(folder / "k.jtile", folder / "other.jtile")
    with pytest.warns(CacheWarning):
        assert _cache.get("other") is None


def test_the_entries_used_last_survive_eviction(tmp_path):
    with config(cache_dir=str(tmp_path), cache_size=10_000):
        for k in range(6):
            _cache.put(f"k{k}", {}, bytes(1500))
            os.utime(tmp_path / "kernels" / f"k{k}.jtile", (k, k))
        assert _cache.get("k0") is not None  # the oldest, used just now
        _cache.put("new", {}, bytes(1500))
        left = {name.removesuffix(".jtile") for name in stored(tmp_path / "kernels")}
        assert {"k0", "new", "k5"} <= left
        assert "k1" not in left
        assert _cache.info().size <= 10_000


def test_an_entry_larger_than_the_limit_is_not_stored(tmp_path):
    with config(cache_dir=str(tmp_path), cache_size=1000):
        _cache.put("small", {}, bytes(100))
        _cache.put("large", {}, bytes(2000))
        assert stored(tmp_path / "kernels") == ["small.jtile"]


def test_files_of_dead_writers_go(folder):
    _cache.put("k", {}, b"x")
    for name, age in (("old", 7200), ("young", 5)):
        path = folder / f".{name}.tmp"
        path.write_bytes(b"half")
        now = path.stat().st_mtime
        os.utime(path, (now - age, now - age))
    _cache.put("k2", {}, bytes(1 << 17))  # so much that it looks at the folder
    assert stored(folder) == [".young.tmp", "k.jtile", "k2.jtile"]


def test_the_folder_is_not_looked_at_for_every_entry(tmp_path, monkeypatch):
    looks, entries = [], _cache._entries
    monkeypatch.setattr(_cache, "_entries", lambda folder: looks.append(folder) or entries(folder))
    with config(cache_dir=str(tmp_path), cache_size=1 << 20):
        for k in range(100):
            _cache.put(f"k{k}", {}, bytes(3000))
        assert 3 < len(looks) < 15
        before = len(looks)
        for k in range(100, 500):
            _cache.put(f"k{k}", {}, bytes(3000))
            assert sum(f.stat().st_size for f in (tmp_path / "kernels").iterdir()) <= 1 << 20
        assert len(looks) > before + 20  # ever more often


def test_clear_and_info(folder):
    assert _cache.info() == _cache.Info(current().cache_dir, 0, 0, 1 << 20)
    _cache.put("a", {}, bytes(100))
    _cache.put("b", {}, bytes(100))
    info = _cache.info()
    assert info.entries == 2
    assert 200 < info.size < 1000
    _cache.clear()
    assert _cache.info().entries == 0
    _cache.clear()  # of an empty folder, and of one that is not there
    folder.rmdir()
    _cache.clear()


def test_switched_off(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with config(cache_dir=""):
        _cache.put("k", {}, b"x")
        assert _cache.get("k") is None
        assert _cache.info().entries == 0
        assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_warns_once(tmp_path):
    (tmp_path / "file").write_text("no folder")
    with config(cache_dir=str(tmp_path / "file" / "below")):
        with pytest.warns(CacheWarning, match="JTILE_CACHE_DIR"):
            _cache.put("k", {}, b"x")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            _cache.put("k", {}, b"x")
            assert _cache.get("k") is None


def test_a_folder_that_cannot_be_made_warns(tmp_path, monkeypatch):
    def absent(self, *args, **kwargs):
        raise FileNotFoundError(2, "No such file or directory", str(self))  # what /proc says to any new folder

    with config(cache_dir=str(tmp_path / "absent")):
        monkeypatch.setattr("pathlib.Path.mkdir", absent)
        with pytest.warns(CacheWarning, match="JTILE_CACHE_DIR"):
            _cache.put("k", {}, b"x")


WRITERS = (
    WITHOUT_JAX
    + """
for n in range(60):
    k = f"k{n % 7}"
    body = (k * 500).encode()
    entry = _cache.get(k)
    assert entry is None or entry.payload == body, (k, len(entry.payload))
    _cache.put(k, {"n": n}, body)
    if n % 20 == 19:
        _cache.clear()
"""
)


def test_eight_processes_at_once(tmp_path, subprocess_env):
    # Small enough that every writer also evicts; -W error: a half-written entry would be a CacheWarning.
    env = subprocess_env | {"JTILE_CACHE_DIR": str(tmp_path), "JTILE_CACHE_SIZE": "8000"}
    command = [sys.executable, "-W", "error::UserWarning", "-c", WRITERS]
    running = [subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True) for _ in range(8)]
    outcomes = [(p.communicate()[1], p.returncode) for p in running]
    assert outcomes == [("", 0)] * 8
    with config(cache_dir=str(tmp_path)):
        for path in (tmp_path / "kernels").iterdir():
            _cache.read(path)
