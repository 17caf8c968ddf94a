"""The load of `python -m benchmarks serve`, what it counts, and what it is put on."""

import asyncio
import json
import sys

import numpy as np
import pytest

from benchmarks import __main__ as command
from benchmarks.serve import bound, suite, targets
from benchmarks.serve import load as loads
from benchmarks.serve.load import Call, Goal, Lengths, Load, Seen


def test_calls_of_a_load():
    """The same each time; arrivals at the rate, lengths around their median, prompts that begin alike."""
    load = Load("x", 400, Lengths(100, 0.5, 300), Lengths(7), "poisson", 20.0, shared=50)
    calls = load.calls(1000)
    assert calls == load.calls(1000) != load.calls(1000, seed=1)
    times = np.array([call.at for call in calls])
    assert times[0] == 0 and (np.diff(times) >= 0).all() and 15 < times[-1] < 25
    lengths = [len(call.prompt) for call in calls]
    assert 90 < np.median(lengths) < 112 and min(lengths) >= 51 and max(lengths) == 300
    assert len({tuple(call.prompt[:50]) for call in calls}) == 1 and {call.count for call in calls} == {7}
    assert [c.at for c in Load("x", 4, Lengths(3), Lengths(1), "fixed", 2.0).calls(9)] == [0, 0.5, 1, 1.5]
    assert [c.at for c in Load("x", 2, Lengths(3), Lengths(1)).calls(9)] == [0, 0]


def test_what_clients_saw():
    seen = [Seen(Call(0, [1, 2], 3), 10.0 + i, [10.5 + i, 10.6 + i, 10.8 + i]) for i in range(4)]
    seen += [Seen(Call(0, [1], 3), 10.0, error="it broke")]
    numbers = loads.summary(seen, Goal(600, 200))
    assert (numbers["requests"], numbers["failed"], numbers["error"]) == (5, 1, "it broke")
    assert (numbers["new_tokens"], numbers["prompt_tokens"], numbers["seconds"]) == (12, 8, 3.8)
    assert numbers["tokens_per_s"] == pytest.approx(12 / 3.8, abs=0.01)
    assert (numbers["first_ms_p50"], numbers["between_ms_p50"], numbers["between_ms_p99"]) == (500, 150, 200)
    assert numbers["goodput_per_s"] == pytest.approx(4 / 3.8, abs=0.001)
    assert loads.summary(seen, Goal(400, 200))["goodput_per_s"] == 0
    assert loads.summary(seen[4:], Goal(1, 1))["failed"] == 1
    steady = [Seen(Call(0, [1], 20), 0, [i + 0.1 * k for i in range(20)]) for k in range(3)]
    assert loads.all_decode(steady) == pytest.approx(1, rel=0.1)
    assert loads.all_decode(seen[:2]) is None


def test_clients_wait_and_one_that_fails_does_not_stop_the_others():
    """With two clients no more than two are under way."""
    at_once, most = 0, 0

    async def answer(call):
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        await asyncio.sleep(0.002)
        at_once -= 1
        if call.prompt[0] == 3:
            raise ValueError("three")
        yield 2

    calls = [Call(0, [i], 2) for i in range(6)]
    seen = asyncio.run(loads.drive(calls, answer, clients=2))
    assert most == 2
    assert [len(one.times) for one in seen] == [2, 2, 2, 0, 2, 2]
    assert seen[3].error == "ValueError: three"
    load = Load("x", 2, Lengths(2), Lengths(1), beside=Load("y", 9, Lengths(2), Lengths(1), "fixed", 0.1))
    assert len(asyncio.run(loads.run(load, answer, 9))) == 2  # the other one is ended


def test_what_takes_too_long_is_cut_off():
    """One client gets a token and waits, another waits for its first, and a third never gets to ask."""

    async def answer(call):
        if call.prompt == [1]:
            yield 1
        await asyncio.Event().wait()

    calls = [Call(0, [i], 2) for i in (1, 2, 3)]
    seen = asyncio.run(loads.drive(calls, answer, clients=2, seconds=0.05))
    assert [len(one.times) for one in seen] == [1, 0, 0]
    assert all(one.cut and one.error is None for one in seen) and seen[2].asked == 0
    assert seen[1].first >= 0.04
    numbers = loads.summary(seen, Goal(1e6, 1e6))
    assert (numbers["unfinished"], numbers["failed"], numbers["new_tokens"], numbers["goodput_per_s"]) == (3, 0, 1, 0)
    assert numbers["first_ms_p99"] >= 40
    assert loads.summary(seen[1:], Goal(1, 1))["error"] == "no token in time"


class Batches:
    """In place of a model: its batches are kept."""

    def __init__(self):
        self.asked = []
        self.config = type("Config", (), {"vocab_size": 50})

    def stream(self, ids, count, eos, attention_mask):
        self.asked.append(attention_mask[:, -1].sum())
        return iter(range(count))


def test_a_loop_over_batches():
    """It takes what waits, and everyone gets the tokens."""
    lm, load = Batches(), Load("x", 7, Lengths(5), Lengths(3))
    answer = targets.of_batches(lm, 4, load)
    for _ in range(2):  # in an event loop each
        assert [len(one.times) for one in asyncio.run(loads.run(load, answer, 50))] == [3] * 7
    assert lm.asked[0] == 1 and sum(lm.asked[1:]) == 14 and max(lm.asked) <= 4
    lm = Batches()
    answer = targets.of_batches(lm, 4, load)
    lm.stream = lambda *_, **__: 1 // 0
    assert all("ZeroDivisionError" in one.error for one in asyncio.run(loads.run(load, answer, 50)))


def test_a_server_is_asked_and_one_that_does_not_start_is_told_of():
    program = (
        """
import http.server, json
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.send_response(200 if body["prompt"] == "1 2" else 400); self.end_headers()
        for text in ("a", "b", ""):
            self.wfile.write(b"data: " + json.dumps({"choices": [{"text": text}]}).encode() + b"\\n\\n")
        self.wfile.write(b"data: [DONE]\\n\\n")
http.server.HTTPServer(("127.0.0.1", {port}), Handler).serve_forever()
""".replace("{", "{{")
        .replace("}", "}}")
        .replace("{{port}}", "{port}")
    )
    spell = lambda ids: " ".join(map(str, ids))
    with targets.server([sys.executable, "-c", program], "/") as url:
        calls = [Call(0, [1, 2], 4), Call(0, [3], 4)]
        good, bad = asyncio.run(loads.drive(calls, targets.of_server(url, spell)))
    assert (len(good.times), good.error) == (4, None)
    assert bad.error.startswith("RuntimeError: 400")
    broken = targets.server([sys.executable, "-c", "raise SystemExit('it is broken')"], "/")
    with pytest.raises(RuntimeError, match="it is broken"), broken:
        pass


def test_the_command_keeps_records_and_says_what_they_mean(tmp_path, monkeypatch, capsys):
    @suite.contextlib.contextmanager
    def opened():
        yield lambda load: targets.of_batches(Batches(), 16, load)

    path, lm = tmp_path / "x.gguf", Batches()
    monkeypatch.setattr(suite, "default_model", lambda: path)
    monkeypatch.setattr(suite, "load", lambda _: lm)
    missing = lambda: suite.contextlib.nullcontext(None)
    monkeypatch.setattr(suite, "_targets", lambda *_: [("ours", opened), ("llama.cpp", missing), ("left", opened)])
    file = tmp_path / "records.json"
    asked = ["serve", "--only", "client", "--without", "left", "--json", str(file)]
    loads_of = [Load(name, 3, Lengths(4), Lengths(2), clients=n) for name, n in (("1 client", 1), ("16 clients", 16))]
    monkeypatch.setattr(suite, "LOADS", (*loads_of, Load("other", 1, Lengths(1), Lengths(1))))
    monkeypatch.setattr("jtile.tune.host.measure", lambda: type("Machine", (), {"device": "here"}))
    suite.main(command._arguments(asked))
    rows = json.loads(file.read_text())
    assert [(row["workload"], row["config"], row["device"]) for row in rows] == [
        ("serve", "smollm2, 1 client", "here"), ("serve", "smollm2, 16 clients", "here")
    ]  # fmt: skip
    assert all(set(row["runs"]) == {"ours"} and row["runs"]["ours"]["new_tokens"] == 6 for row in rows)
    said = capsys.readouterr().err
    with pytest.raises(SystemExit, match="no load has a name with nothing; there are: 1 client; 16"):
        suite.main(command._arguments(["serve", "--only", "nothing"]))
    assert "llama.cpp is left out" in said and "16 clients over one: " in said


def test_the_bound_of_a_load():
    """Its operations and bytes are those of a sum over tokens."""
    from benchmarks.gpu import models

    lm = models.make(models.TINY["tiny"])
    load = Load("x", 3, Lengths(10), Lengths(4))
    hidden, features, heads, kv_heads, d = 64, 96, 4, 2, 16
    weights = hidden * (2 * hidden + 2 * kv_heads * d + 3 * features)
    tokens = [2 * weights] * 13  # the last new token goes through no block
    scores = [4 * heads * d * (i + 1) for i in range(10)]
    reads = sum(2 * kv_heads * d * 2 * behind for behind in (11, 12, 13))
    operations = 3 * (sum(tokens) + sum(scores) + 4 * 2 * 128 * hidden)
    assert bound.work_of(lm, load) == (operations, 3 * reads)
