"""Files of entries: merged, shipped ones under the user's, damaged ones ignored, written at once."""

import ast
import errno
import importlib
import json
import re
import threading
from pathlib import Path

import jax
import pytest

import jtile as jt
from jtile import ops
from jtile._errors import CacheError, CacheWarning
from jtile.tune import choose, device
from jtile.tune import store as module
from jtile.tune.programs import trace
from jtile.tune.space import source_hash
from jtile.tune.store import Entry, Store, merge, read, user_path, write


def entry(us, **config):
    return Entry(config, us, 10.0, 3, 8, "0.1.0", "2026-01-01T00:00:00+00:00")


def test_write_and_read(tmp_path):
    entries = {"a": entry(1.0, bm=64, pair=(1, 2)), "b": entry(2.0)}
    write(tmp_path / "new" / "x.json", "gpu", entries)
    assert read(tmp_path / "new" / "x.json") == ("gpu", entries)
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["x.json"]


def test_merge_takes_the_faster():
    assert merge({"a": entry(2.0, bm=1), "b": entry(1.0)}, {"a": entry(1.0, bm=2)}, {"a": entry(3.0, bm=3)}) == {
        "a": entry(1.0, bm=2),
        "b": entry(1.0),
    }


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"format": "jtile-tune-1"}',
        '{"format": "another", "device": "d", "entries": {}}',
        '{"format": "jtile-tune-1", "device": "d", "entries": {"a": {"config": 3, "time_us": 1, "default_us": 1}}}',
        '{"format": "jtile-tune-1", "device": "d", "entries": {"a": {"config": {}}}}',
        '{"format": "jtile-tune-1", "device": "d", "entries": {"a": {"config": {}, "time_us": 1, "default_us": ""}}}',
        '{"format": "jtile-tune-1", "device": "d", "entries": {"a": {"config": {}, "time_us": NaN, "default_us": 1}}}',
        '{"format": "jtile-tune-1", "device": "d", "entries": {"a": {"config": {}, "time_us": 1e999, "default_us":1}}}',
        "[" * 100000,
    ],
)
def test_a_damaged_file_is_ignored_with_a_warning_and_replaced(text, folder):
    folder.mkdir(exist_ok=True)
    (folder / "d.json").write_text(text)
    with pytest.raises(CacheError):
        read(folder / "d.json")
    own = Store()
    with pytest.warns(CacheWarning, match="ignored"):
        assert own.lookup("d", "a") is None
    with pytest.warns(CacheWarning, match=r"ignored, and kept as .*d\.damaged"):
        own.put("d", "a", entry(1.0))
    assert read(folder / "d.json")[1] == {"a": entry(1.0)}
    assert (folder / "d.damaged").read_text() == text


def test_every_damaged_file_is_kept(folder):
    """Each may hold hours of measurements."""
    folder.mkdir()
    for text, name in (("one", "d.damaged"), ("two", "d.damaged-1"), ("three", "d.damaged-2")):
        (folder / "d.json").write_text(text)
        with pytest.warns(CacheWarning) as said:
            Store().put("d", "a", entry(1.0))
        assert str(said[-1].message).endswith(f"kept as {folder / name}")
        assert (folder / name).read_text() == text
    assert (folder / "d.damaged").read_text() == "one"


@pytest.mark.parametrize("why", [errno.EMFILE, errno.EIO, errno.EACCES])
def test_a_file_that_cannot_be_read_now_is_left_alone(folder, monkeypatch, why):
    write(folder / "d.json", "d", {"a": entry(1.0)})

    def fails(path):
        raise OSError(why, "passing")

    own = Store()
    with monkeypatch.context() as patch:
        patch.setattr(module, "read", fails)
        with pytest.warns(CacheWarning) as said:
            own.put("d", "b", entry(2.0))
    assert "nothing can be added to the tuning file" in str(said[-1].message)
    assert own.lookup("d", "b") == entry(2.0)
    assert read(folder / "d.json")[1] == {"a": entry(1.0)}
    own.put("d", "c", entry(3.0))
    assert set(read(folder / "d.json")[1]) == {"a", "c"}
    assert not list(folder.glob("*.damaged*"))


def test_a_file_of_another_device_is_ignored(folder):
    write(folder / "d.json", "e", {"a": entry(1.0)})
    with pytest.warns(CacheWarning, match="device 'e'"):
        assert Store().lookup("d", "a") is None


def test_the_users_entries_stand_above_those_shipped(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "RECORDS", tmp_path / "shipped")
    write(tmp_path / "shipped" / "d.json", "d", {"a": entry(1.0, bm=1), "b": entry(1.0, bm=1)})
    Store().put("d", "a", entry(2.0, bm=2))
    found = Store()
    assert found.lookup("d", "a").config == {"bm": 2}
    assert found.lookup("d", "b").config == {"bm": 1}
    assert set(read(user_path("d"))[1]) == {"a"}


def test_writers_at_once_lose_nothing(folder):
    def work(k):
        with jt.config(cache_dir=str(folder.parent)):  # options are each thread's own
            for n in range(10):
                Store().put("d", f"{k}.{n}", entry(1.0))

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(read(folder / "d.json")[1]) == 40
    assert {p.suffix for p in folder.iterdir()} == {".json", ".lock"}


def test_shipped_records_are_sound():
    for path in module.RECORDS.glob("*.json"):
        device, entries = read(path)
        assert device == path.stem
        assert all(e.time_us <= e.default_us and "#" in name for name, e in entries.items())
        assert json.loads(path.read_text())["format"] == module.FORMAT


def test_shipped_records_are_of_kernels_as_they_are():
    """An entry of a kernel that has changed since is never found: tune it again (docs/tuning.md), or take it out."""
    parts = (importlib.import_module(f"jtile.ops.{p.stem}") for p in Path(ops.__file__).parent.glob("[a-z]*.py"))
    kernels = [k for part in parts for k in vars(part).values() if isinstance(k, jt.Kernel) and k._tuning]
    known = {f"{k.name}#{source_hash(k)}" for k in kernels}
    for path in module.RECORDS.glob("*.json"):
        assert {name.split()[0] for name in read(path)[1]} <= known, path


FUNCTIONS = {  # kernel -> the public function that calls it; entries of others need a line here
    "matmul": lambda a, b, *, tb, **_: ops.matmul(a[0], b[0], transpose_b=tb),
    "gated_mlp": lambda x, gate, up, *, tb, **_: ops.gated_mlp(x, gate, up, transpose=tb),
    "rms_norm_rows": lambda x, w, **_: ops.rms_norm(x, w),
    "layer_norm_rows": lambda x, *params, **_: ops.layer_norm(x, *params),
    "softmax_rows": lambda x, **_: ops.softmax(x),
}


def call_of(name: str):
    """The call of a public function that an entry is for."""
    arrays = [jax.ShapeDtypeStruct(tuple(map(int, s.split(","))), d) for d, s in re.findall(r"(\w+)\[([\d,]+)\]", name)]
    options = {k: ast.literal_eval(v) for k, v in re.findall(r" (\w+)=('\w+'|[\d.e-]+|True|False|None)(?= |$)", name)}
    (call,) = trace(lambda *args: FUNCTIONS[name.split("#")[0]](*args, **options), *arrays)[1]
    return call


@pytest.mark.parametrize("name", list(read(module.RECORDS / "nvidia-h200.json")[1]))
def test_shipped_records_are_used_and_change_something(monkeypatch, name):
    """An entry that says what the call takes anyway is dead weight: take it out."""
    entry = read(module.RECORDS / "nvidia-h200.json")[1][name]
    assert entry.default_us >= 1.02 * entry.time_us
    monkeypatch.setattr(device, "kind", lambda: "nvidia-h200")
    with jt.config(arch="sm_90"), jax.default_matmul_precision(None):
        call = call_of(name)
        assert call.name == name, "the function has changed: tune it again (docs/tuning.md), or take the entry out"
        assert choose.lookup(call) == entry
        taken, otherwise = call.bound(entry.config).program, call.bound({}).program
        assert taken != otherwise
        assert taken.kernel.grid != otherwise.kernel.grid or taken.options != otherwise.options


def test_without_a_cache_folder_entries_live_in_memory():
    with jt.config(cache_dir=""):
        own = Store()
        own.put("d", "a", entry(1.0))
        assert user_path("d") is None
        assert own.lookup("d", "a") == entry(1.0)
