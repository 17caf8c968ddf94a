"""`jtile view --serve`: the page changes with the file, and errors stand above the last page."""

import json
import threading
import urllib.error
import urllib.request

import pytest

from jtile.errors import KernelValueError
from jtile.explorer import serve
from jtile.tools import viewing

KERNEL = """import neighbour
import jtile as jt

@jt.kernel(out_type=lambda x: jt.like(x), grid=1)
def scaled(x, o):
    o[...] = x[...] * neighbour.FACTOR  # FIRST
"""


@pytest.fixture
def server(tmp_path, monkeypatch):
    monkeypatch.setattr(serve, "POLL", 0.02)
    monkeypatch.setattr(serve, "_WAIT", 600.0)  # an answer is what has changed, and none that the time is up
    (tmp_path / "neighbour.py").write_text("FACTOR = 3.5\n")
    (tmp_path / "mine.py").write_text(KERNEL)
    options = dict(args="f32[8]", meta=[], target="cpu", gradient=False, run=False)
    server = viewing.server_of(f"{tmp_path / 'mine.py'}:scaled", port=0, **options)
    thread = threading.Thread(target=server.run)
    thread.start()
    yield server
    server.close()
    thread.join()


def get(server, path=""):
    with urllib.request.urlopen(server.url + path, timeout=600) as answer:
        return answer.read().decode()


def write(path, text):
    path.with_suffix(".new").write_text(text)
    path.with_suffix(".new").rename(path)  # as editors do


def test_the_page_is_made_anew(server, tmp_path):
    first = get(server)
    assert "FIRST" in first and "3.5" in first and "let seen = 1;" in first
    write(tmp_path / "neighbour.py", "FACTOR = 12.25\n")
    assert json.loads(get(server, "news?seen=1")) == {"version": 2, "error": ""}
    assert "12.25" in get(server)
    write(tmp_path / "mine.py", KERNEL.replace("x[...] *", "x[..] *"))
    news = json.loads(get(server, "news?seen=2"))
    assert news["version"] == 3 and news["error"].startswith("SyntaxError")
    assert "12.25" in get(server) and "let seen = 2;" in get(server)  # the browser asks, and hears of the error
    write(tmp_path / "mine.py", KERNEL.replace("FIRST", "LAST"))
    assert json.loads(get(server, "news?seen=3")) == {"version": 4, "error": ""}
    assert "LAST" in get(server)
    with pytest.raises(urllib.error.HTTPError, match="404"):
        get(server, "news?seen=x")


def test_errors(tmp_path, server):
    options = dict(args="f32[8]", meta=[], target="cpu", gradient=False, run=False)
    with pytest.raises(KernelValueError, match=r"looks after a file: write file\.py:kernel"):
        viewing.server_of("jtile.ops:softmax", port=0, **options)
    taken = int(server.url.rstrip("/").rpartition(":")[2])
    with pytest.raises(KernelValueError, match=f"nobody can listen at port {taken}"):
        viewing.server_of(f"{tmp_path / 'mine.py'}:scaled", port=taken, **options)
