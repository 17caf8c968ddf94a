"""A headless Chromium for the tests, driven through ChromeDriver by WebDriver's own protocol: JSON over HTTP."""

from __future__ import annotations

import base64
import contextlib
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

# No sandbox: containers run as root. No network of its own: it would ask for updates at every start.
FLAGS = [
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
    "--disable-dev-shm-usage",
    "--mute-audio",
]


def missing() -> str:
    """Why there is no browser; empty where there is one."""
    needed = ("chromium", "chromedriver")
    absent = [name for name in needed if shutil.which(name) is None]
    return f"{' and '.join(absent)} missing: apt-get install chromium chromium-driver" if absent else ""


class Browser:
    """One window. `url`: of the session at ChromeDriver."""

    def __init__(self, client: httpx.Client, url: str):
        self._client, self._url = client, url

    def _ask(self, path: str, **body: Any) -> Any:
        response = self._client.post(f"{self._url}/{path}", json=body)
        value = response.json()["value"]
        assert response.status_code == 200, value
        return value

    def open(self, url: str) -> None:
        self._ask("url", url=url)

    def run(self, script: str, *args: Any) -> Any:
        """What a script returns, the body of a function of `arguments`."""
        return self._ask("execute/sync", script=script, args=args)

    def until(self, script: str, *args: Any, seconds: float = 300) -> Any:
        """Waits until a script gives something true."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if value := self.run(script, *args):
                return value
            time.sleep(0.05)
        raise AssertionError(f"it never came true in the browser: {script}")

    def type(self, text: str, *, shift: bool = False) -> None:
        """Presses the keys of a text in the element that has the focus."""
        hold = [{"type": "keyDown", "value": "\ue008"}] if shift else []
        keys = [{"type": kind, "value": key} for key in text for kind in ("keyDown", "keyUp")]
        free = [{"type": "keyUp", "value": "\ue008"}] if shift else []
        self._ask("actions", actions=[{"type": "key", "id": "keys", "actions": [*hold, *keys, *free]}])

    def devtools(self, command: str, **params: Any) -> Any:
        return self._ask("goog/cdp/execute", cmd=command, params=params)

    def size(self, width: int, height: int) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.devtools("Emulation.setDeviceMetricsOverride", **size)

    def dark(self, on: bool) -> None:
        """What the system prefers, light or dark."""
        feature = {"name": "prefers-color-scheme", "value": "dark" if on else "light"}
        self.devtools("Emulation.setEmulatedMedia", features=[feature])

    def screenshot(self, path: Path) -> None:
        image = self._client.get(f"{self._url}/screenshot").json()["value"]
        path.write_bytes(base64.b64decode(image))


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """Starts a browser with an empty profile, and ends it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        driver = subprocess.Popen(["chromedriver", f"--port={port}"], **quiet)
        try:
            with httpx.Client(timeout=600, trust_env=False) as client:
                url = f"http://127.0.0.1:{port}"
                _wait(client, url)
                options = {"binary": shutil.which("chromium"), "args": [*FLAGS, f"--user-data-dir={folder}"]}
                capabilities = {"alwaysMatch": {"goog:chromeOptions": options}}
                made = client.post(f"{url}/session", json={"capabilities": capabilities}).json()["value"]
                session = f"{url}/session/{made['sessionId']}"
                try:
                    yield Browser(client, session)
                finally:
                    client.delete(session)
        finally:
            driver.terminate()
            driver.wait(60)


def _wait(client: httpx.Client, url: str) -> None:
    for _ in range(6000):
        with contextlib.suppress(httpx.TransportError):
            if client.get(f"{url}/status").json()["value"]["ready"]:
                return
        time.sleep(0.05)
    raise AssertionError("chromedriver does not start")
