"""`jtile view --serve`: the page of a kernel over HTTP, made anew when its source changes."""

from __future__ import annotations

import contextlib
import functools
import json
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

POLL = 0.2  # seconds between two looks at the files
_WAIT = 20.0  # seconds for which a browser's question for news stays open

# The address keeps what is looked at, so that a page that is loaded anew shows the same.
_RELOAD = """
<script>
(async function () {
  let seen = @VERSION@;
  const note = document.createElement("pre");
  note.style.cssText = "position:fixed;inset:auto 0 0 0;margin:0;padding:1em;max-height:50%;overflow:auto;z-index:9;" +
    "background:#7f1d1d;color:#fff;white-space:pre-wrap";
  note.setAttribute("role", "alert");
  for (;;) {
    try {
      const news = await (await fetch("/news?seen=" + seen)).json();
      if (news.error) { note.textContent = news.error; document.body.append(note); seen = news.version; }
      else if (news.version !== seen) { location.reload(); return; }
    } catch { await new Promise(done => setTimeout(done, 1000)); }
  }
})();
</script>
"""


class Server:
    """A page that is made anew when a file changes.

    Args:
      make: gives the page, as HTML; its errors are shown above the last page.
      files: gives the files that the page comes from; asked after each making.
      port: to listen at, on this machine only; 0: any that is free.
    """

    def __init__(self, make: Callable[[], str], files: Callable[[], list[Path]], port: int = 0):
        self._make, self._files = make, files
        self._changed = threading.Condition()
        self._version, self._html, self._error = 0, "", ""
        self._stop = threading.Event()
        self._http = ThreadingHTTPServer(("127.0.0.1", port), _handler(self))
        self._http.daemon_threads = True
        self.make()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_port}/"

    @property
    def error(self) -> str:
        """Why the last making failed; empty where it did not."""
        return self._error

    def run(self) -> None:
        """Answer, and look after the files, until `close`."""
        threading.Thread(target=self._http.serve_forever, args=(0.1,), daemon=True).start()
        try:
            self._watch()
        finally:
            self._http.shutdown()
            self._http.server_close()

    def close(self) -> None:
        self._stop.set()

    def make(self) -> None:
        """Make the page."""
        before = _times(self._files())
        try:
            html, error = self._make(), ""
        except Exception as e:  # the user's file may raise anything
            html, error = self._html, f"{type(e).__name__}: {e}"
        # A file that has changed meanwhile is noted as it was before, so that the change is found.
        self._known = {file: before.get(file, now) for file, now in _times(self._files()).items()}
        with self._changed:
            self._version, self._html, self._error = self._version + 1, html, error
            self._changed.notify_all()

    def page(self) -> str:
        with self._changed:
            script = _RELOAD.replace("@VERSION@", str(self._version if not self._error else self._version - 1))
            return (self._html or "<!doctype html><title>jtile</title><body>") + script

    def news(self, seen: int) -> dict[str, Any]:
        """The number of the page, and the error of its making, when it is another one than `seen`."""
        with self._changed:
            self._changed.wait_for(lambda: self._version != seen or self._stop.is_set(), _WAIT)
            return {"version": self._version, "error": self._error if self._version != seen else ""}

    def _watch(self) -> None:
        while not self._stop.wait(POLL):
            if _times(self._files()) != self._known:
                time.sleep(POLL / 2)  # an editor may still be writing
                self.make()


def neighbours(path: Path) -> list[Path]:
    """A file, and the modules of its folder that it has imported."""
    folder = path.resolve().parent
    found = [file for m in list(sys.modules.values()) if (file := getattr(m, "__file__", None))]
    return [path, *(Path(file) for file in found if file.endswith(".py") and _is_inside(folder, file))]


@functools.lru_cache(maxsize=1 << 14)
def _is_inside(folder: Path, file: str) -> bool:
    """Whether a file lies in a folder or below it. Thousands of modules are looked at several times a second, and
    where a path leads takes 80 us to find out."""
    return folder in Path(file).resolve().parents


def forget(path: Path) -> None:
    """Let the modules of a file's folder be imported anew."""
    folder = path.resolve().parent
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file and name != "__main__" and _is_inside(folder, file):
            del sys.modules[name]


def _times(files: list[Path]) -> dict[Path, tuple[int, int]]:
    out = {}
    for file in files:
        with contextlib.suppress(OSError):  # the file is gone for a moment while an editor replaces it
            about = file.stat()
            out[file] = about.st_mtime_ns, about.st_size
    return out


def _handler(server: Server) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path, _, query = self.path.partition("?")
            if path == "/":
                self._answer(200, "text/html; charset=utf-8", server.page())
            elif path == "/news" and query.removeprefix("seen=").isdigit():
                self._answer(200, "application/json", json.dumps(server.news(int(query.removeprefix("seen=")))))
            else:
                self._answer(404, "text/plain", "not found")

        def _answer(self, status: int, kind: str, text: str) -> None:
            body = text.encode()
            with contextlib.suppress(ConnectionError):  # the browser has gone
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.send_header("Cache-Control", "no-store")
                self.end_headers()
                self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    return Handler
