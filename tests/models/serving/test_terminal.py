"""`jtile chat` and `jtile generate --batch`, on the engine of these tests; what `jtile serve` is told."""

from __future__ import annotations

import contextlib
import json
import signal
from pathlib import Path

import pytest
from typer.testing import CliRunner

from jtile._errors import PromptError
from jtile.models import batch, chat
from jtile.models.chat import Chat
from jtile.models.console import run_serve
from jtile.tools import cli

pytest.importorskip("llguidance", reason="llguidance is not installed: pip install 'jtile[serve]'")


def talk(engine, *lines, monkeypatch=None, stop_after=None, **options) -> Chat:
    """A conversation of these lines; Ctrl-C comes with piece `stop_after` of each answer."""
    given = iter(lines)

    def read(prompt):
        line = next(given, None)
        if line is None:
            raise EOFError
        if isinstance(line, BaseException):
            raise line
        return line

    if stop_after is not None:
        write, count = chat.write, iter(range(10**9))

        def interrupted(text):
            write(text)
            if next(count) == stop_after:
                signal.raise_signal(signal.SIGINT)

        monkeypatch.setattr(chat, "write", interrupted)
    talked = Chat(engine, options=dict(temperature=0.0, max_tokens=8) | options, read=read)
    # a shell starts what runs in its background with Ctrl-C ignored
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        talked.run()
    finally:
        signal.signal(signal.SIGINT, before)
    return talked


def answer(engine, prompt: str, count: int = 8, **options) -> str:
    return engine.generate([prompt], max_tokens=count, **options)[0].text


def said(talked: Chat) -> list[str]:
    return [message["content"] for message in talked.messages]


def test_a_conversation(engine, capsys):
    """Each answer goes on with all that was said; a system prompt and a reset begin anew."""
    talked = talk(engine, "Hi", "", "again")
    first = answer(engine, "[user]Hi\n[assistant]")
    second = answer(engine, f"[user]Hi\n[assistant]{first}\n[user]again\n[assistant]")
    assert said(talked) == ["Hi", first, "again", second]
    assert capsys.readouterr().out == f"{first}\n{second}\n"
    talked = talk(engine, "Hi", "/system Be brief", "a", "/quit", "never")
    assert said(talked) == ["a", answer(engine, "[system]Be brief\n[user]a\n[assistant]")]
    assert said(talk(engine, "Hi", "/reset")) == []
    retried = talk(engine, "Hi", "/set max_tokens 3", "/retry")
    assert said(retried) == ["Hi", answer(engine, "[user]Hi\n[assistant]", 3)]


def test_messages_of_several_lines(engine):
    for lines in (['"""a', " b", 'c"""'], ["a\\", " b\\", "c"], ['"""', "a", " b", "c", '"""'], ['"""a\n b\nc"""']):
        assert said(talk(engine, *lines, max_tokens=1))[0] == "a\n b\nc"
    assert said(talk(engine, '"""a', KeyboardInterrupt(), "b", max_tokens=1))[0] == "b"


def test_control_c_stops_the_answer_and_not_the_program(engine, monkeypatch):
    """What there is of it stays in the conversation."""
    talked = talk(engine, "Hi", "/set max_tokens 2", "more", monkeypatch=monkeypatch, stop_after=3, max_tokens=60)
    whole = answer(engine, "[user]Hi\n[assistant]", 60)
    _, cut, *rest = said(talked)
    assert whole.startswith(cut) and 0 < len(cut) < len(whole)
    assert rest == ["more", answer(engine, f"[user]Hi\n[assistant]{cut}\n[user]more\n[assistant]", 2)]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/nonsense", "no command /nonsense; /help"),
        ("/retry", "no message to answer again"),
        ("/set colour 3", "no option 'colour'"),
        ("/set temperature hot", "temperature is a number"),
        ("/set temperature -1", "temperature must be"),
        ("/set max_tokens 0", "max_tokens is an int"),
        ("a" * 200, "/reset begins a new conversation"),
    ],
)
def test_what_a_conversation_refuses(engine, capsys, line, message):
    """It goes on."""
    assert len(said(talk(engine, line, "b", max_tokens=1))) == 2
    assert message in capsys.readouterr().err


def test_a_message_that_cannot_be_asked_again_stays(engine):
    talked = talk(engine, "Hi", max_tokens=1)
    before = said(talked)
    talked._options["top_k"] = -1
    with pytest.raises(PromptError, match="top_k must be"):
        talked._retry("")
    assert len(before) == 2 and said(talked) == before


def test_commands_that_show_something(engine, capsys):
    talk(engine, "/help", "/system", "/set top_k 5", "/set seed none", "/set")
    out = capsys.readouterr().out
    assert "/reset" in out and "(the model has its own" in out and "top_k 5\n" in out and "seed" not in out[-30:]


def test_seeds_of_answers(engine):
    """They differ from answer to answer, and are the same the next time."""
    lines = ("Hi", "/reset", "Hi", "Hi")
    one = said(talk(engine, *lines, temperature=1.0, seed=3))
    assert one == said(talk(engine, *lines, temperature=1.0, seed=3))
    assert one[1] == answer(engine, "[user]Hi\n[assistant]", temperature=1.0, seed=3)


def test_jtile_chat(engine, monkeypatch, capsys):
    monkeypatch.setattr(chat, "load_over", lambda *_, **__: engine.lm)
    monkeypatch.setattr(chat, "Engine", lambda *_, **__: contextlib.nullcontext(engine))
    result = CliRunner().invoke(cli.app, ["chat", "-n", "4", "--temperature", "0", "--stats"], input="Hi\n")
    assert result.exit_code == 0
    assert result.stdout == answer(engine, "[user]Hi\n[assistant]", 4) + "\n"
    assert "prompt 20 tokens" in result.stderr and "answer 4 tokens" in result.stderr
    monkeypatch.setattr(engine.lm.tokenizer, "chat_template", None)
    assert chat.run_chat() == 1
    assert "knows no chats" in capsys.readouterr().err


# -- batches ----------------------------------------------------------------------------------------------------------

GOOD = [
    {"prompt": "abc"},
    {"id": "x", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3},
    {"id": 7, "prompt_ids": [5, 6, 7], "temperature": 1.0, "seed": 3, "logprobs": True},
    {"prompt": "a", "json_schema": {"enum": ["yes"]}, "max_tokens": 20},
]
BAD = [
    ('{"prompt": ', "not JSON"),
    ('{"prompt": "\xff"}'.encode("latin1"), "not JSON"),
    ("[" * 100_000, "not JSON"),
    ("3", "a line is a JSON object"),
    ('{"id": []}', "the id of a line"),
    ('{"prompt": "a", "prompt_ids": [1]}', "has prompt and prompt_ids"),
    ("{}", "has none"),
    ('{"prompt": 3}', "prompt is a text"),
    ('{"prompt": "\\ud800"}', "half of a character"),
    ('{"prompt_ids": 3}', "prompt_ids is a list"),
    ('{"prompt_ids": [1e30]}', "must be integers"),
    ('{"prompt_ids": [999]}', "outside the vocabulary"),
    ('{"messages": "a"}', "messages is a list"),
    ('{"messages": [{"role": "user"}], "prompt": null, "n": 3}', "no field 'n'"),
    ('{"prompt": "a", "max_tokens": "3"}', "max_tokens is an int"),
    ('{"prompt": "a", "temperature": NaN}', "temperature must be"),
    ('{"prompt": "a", "temperature": {"a": 1}}', "temperature must be"),
    ('{"prompt": "a", "seed": 1e3}', "seed must be"),
    ('{"prompt": "a", "stop": 3}', "stop is a string"),
    ('{"prompt": "a", "stop": {"a": 1}}', "stop is a string"),
    ('{"prompt": "a", "ignore_eos": "no"}', "ignore_eos is true or false"),
    ('{"messages": [{"role": "user", "content": "a", "tool_calls": 3}]}', "chat template fails"),
    ('{"prompt": "a", "logit_bias": {"x": 1}}', "logit_bias maps token ids"),
    ('{"prompt": "a", "logit_bias": [1]}', "logit_bias"),
    ('{"prompt": "a", "logprobs": 99}', "logprobs is a bool"),
    ('{"prompt": "a", "json_schema": {"type": "nonsense"}}', "grammar or schema"),
    ('{"prompt": "a", "json_schema": 3}', "schema"),
]


@pytest.fixture
def here(engine, monkeypatch):
    """Batches run on the engine of these tests."""
    monkeypatch.setattr(batch, "load_over", lambda *_, **__: engine.lm)
    monkeypatch.setattr(batch, "Engine", lambda *_, **__: contextlib.nullcontext(engine))


def written(path, lines) -> str:
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines))
    return str(path)


def test_a_batch(engine, here, tmp_path):
    """Answers in the order of the lines, whatever is wrong with some of them."""
    lines = [json.dumps(line) for line in GOOD] + [line for line, _ in BAD] + ["", json.dumps(GOOD[0])]
    out = tmp_path / "out.jsonl"
    asked = ["generate", "--batch", written(tmp_path / "in.jsonl", lines), "--out", str(out), "-n", "6"]
    result = CliRunner().invoke(cli.app, asked)
    assert result.exit_code == 1
    assert f"{len(BAD)} of {len(GOOD) + len(BAD) + 1} requests failed" in result.stderr
    got = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["id"] for line in got[:4]] == [1, "x", 7, 4]
    assert got[0]["text"] == got[-1]["text"] == answer(engine, "abc", 6)
    assert got[1]["text"] == answer(engine, "[user]Hi\n[assistant]", 3)
    (third,) = engine.generate([[5, 6, 7]], max_tokens=6, temperature=1.0, seed=3, logprobs=True)
    assert (got[2]["ids"], got[2]["logprobs"]) == (third.ids, [token.logprob for token in third.tokens])
    assert (got[2]["prompt_tokens"], got[2]["new_tokens"], got[2]["finish_reason"]) == (3, 6, "length")
    assert (got[3]["text"], got[3]["finish_reason"]) == ('"yes"', "stop")
    for (line, message), answered in zip(BAD, got[len(GOOD) :], strict=False):
        assert message in answered["error"]["message"], line
    assert not list(tmp_path.glob("*.part"))


def test_a_batch_goes_on_after_an_interruption(engine, here, tmp_path, monkeypatch, capsys):
    """With the same file and options only; an answer that was cut off is made again, and nothing is overwritten."""
    path = written(tmp_path / "in.jsonl", [json.dumps({"prompt": f"{i}"}) for i in range(6)])
    out = tmp_path / "out.jsonl"
    made = batch._answer

    def interrupted(number, *rest):
        if number == 4:
            raise KeyboardInterrupt
        return made(number, *rest)

    monkeypatch.setattr(batch, "_answer", interrupted)
    options = dict(out=str(out), max_tokens=3)
    assert batch.run_batch(path, **options) == 130
    assert not out.exists()
    (part,) = tmp_path.glob("*.part")
    monkeypatch.setattr(batch, "_answer", made)
    part.write_text(part.read_text() + "\0" * 9 + '\n{"id": 4}\n{"id": 5, "te')  # what a disk without power keeps
    with part.open() as held:
        batch.fcntl.flock(held, batch.fcntl.LOCK_EX)
        assert batch.run_batch(path, **options) == 1
    assert "another process writes" in capsys.readouterr().err
    asked = engine.stats()["requests_total"]
    assert batch.run_batch(path, **options) == 0
    assert "3 of 6 answers are there" in capsys.readouterr().err
    assert engine.stats()["requests_total"] == asked + 3
    got = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["id"] for line in got] == [1, 2, 3, 4, 5, 6]
    assert [line["text"] for line in got] == [answer(engine, f"{i}", 3) for i in range(6)]
    assert batch.run_batch(path, **options) == 1
    assert "is there already" in capsys.readouterr().err


def test_a_batch_that_cannot_be(here, tmp_path, monkeypatch, capsys):
    assert batch.run_batch(str(tmp_path / "none")) == 1
    assert "cannot read the requests" in capsys.readouterr().err
    path = written(tmp_path / "in.jsonl", ['{"prompt": "a"}'])
    assert batch.run_batch(path, out=str(tmp_path / "no" / "out")) == 1
    assert "cannot write the answers" in capsys.readouterr().err
    monkeypatch.setattr(
        batch.os, "fsync", lambda _: batch.os.write(batch.os.open("/dev/full", batch.os.O_WRONLY), b"x")
    )
    assert batch.run_batch(path, out=str(tmp_path / "out"), max_tokens=1) == 1
    assert "cannot write the answers: No space left" in capsys.readouterr().err
    for wrong in (["--out", "x"], ["--batch", path, "--raw"], ["text", "--batch", path], ["--batch", path, "--json"]):
        assert CliRunner().invoke(cli.app, ["generate", *wrong]).exit_code == 2
    result = CliRunner().invoke(cli.app, ["generate", "--batch", "-", "-n", "2"], input='{"prompt": "a"}')
    assert result.exit_code == 0
    assert json.loads(result.stdout)["new_tokens"] == 2


def test_jtile_serve_says_what_is_missing(monkeypatch, capsys):
    """A package, a model, or numbers that fit."""
    assert CliRunner().invoke(cli.app, ["serve", "no such file", "--name", "x"]).exit_code == 1
    assert run_serve("no such file") == 1
    assert "there is no model at" in capsys.readouterr().err
    monkeypatch.setitem(__import__("sys").modules, "jtile.models.serving.http.serve", None)
    monkeypatch.delitem(__import__("sys").modules, "jtile.models.serving.http.serve")
    monkeypatch.setitem(__import__("sys").modules, "uvicorn", None)
    assert run_serve() == 1
    assert "pip install 'jtile[serve]'" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["serve"], ["chat"], ["generate", "--batch", "one.jsonl", "--model"]])
def test_devices_of_the_commands(command, tmp_path, monkeypatch, write_gguf):
    monkeypatch.chdir(tmp_path)
    Path("one.jsonl").write_text('{"prompt": "a"}')
    path = str(write_gguf(tmp_path / "tiny.gguf"))
    result = CliRunner().invoke(cli.app, [*command, path, "--devices", "3x"])
    assert result.exit_code == 1 and "devices is a number, as 2" in result.stderr


def test_adapters_of_the_command(monkeypatch, capsys):
    asked = {}
    monkeypatch.setattr("jtile.models.serving.http.serve.serve", lambda *a: asked.update(a[-1]) or 0)
    assert run_serve(adapters=["sql=/a/b=c", "/x/prose/"]) == 0
    assert asked["adapters"] == {"sql": "/a/b=c", "prose": "/x/prose/"}
    assert run_serve(adapters=["sql=/a", "/x/sql"]) == 1
    assert "two adapters have one name" in capsys.readouterr().err
