"""An engine on a tiny model that knows chats, and a server of it on a real socket."""

from __future__ import annotations

import threading
import time

import pytest

import jtile.models
from jtile.models import Engine

TEMPLATE = (
    "{% for t in tools or [] %}[tool]{{ t.function.name }}\n{% endfor %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<{{ c.function.arguments.to }}>{% endfor %}{{ '\\n' }}{% endfor %}[assistant]"
)
LENGTH = 96


@pytest.fixture(scope="module")
def lm(short):
    """A small Llama of one layer, whose caches have pages of 8 tokens."""
    lm = short("llama", 1, noise=0.3)
    lm.page_size = 8
    return lm


@pytest.fixture(scope="package")
def engine(short, write_gguf, tmp_path_factory):
    lm = short("llama", 1, noise=0.3)
    lm.page_size = 8
    path = write_gguf(tmp_path_factory.mktemp("gguf") / "x.gguf", tokenizer__chat_template=TEMPLATE)
    lm.tokenizer = jtile.models.load(path).tokenizer
    sizes = dict(rows=4, shapes=(24,), cache_tokens=256, max_length=LENGTH, max_waiting=8)
    with Engine(lm, **sizes, launch_steps=2) as engine:  # so that servers are tested with launches of both kinds
        yield engine


@pytest.fixture(scope="package")
def started():
    """started(app) -> (the server, its address, its thread); `server.handle_exit` stops it."""
    uvicorn = pytest.importorskip("uvicorn", reason="uvicorn is not installed: pip install 'jtile[serve]'")
    from jtile.models.serving.http.serve import Graceful

    def start(app):
        config = uvicorn.Config(app, port=0, log_level="error", access_log=False, lifespan="off")
        server = Graceful(config, app.state.server)
        thread = threading.Thread(target=server.run)
        thread.start()
        while not server.started:
            time.sleep(0.01)
        return server, f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}", thread

    return start
