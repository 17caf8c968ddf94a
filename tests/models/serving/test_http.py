"""OpenAI's interface: what clients get, and what they are told."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import json
import signal
import socket
import threading

import httpx
import numpy as np
import pytest
import stateless
from serving_checks import idle, until

from jtile._errors import EngineError, PromptError
from jtile.models import Grammar
from jtile.models.serving.engine import Stream

pytest.importorskip("starlette", reason="starlette is not installed: pip install 'jtile[serve]'")
pytest.importorskip("llguidance", reason="llguidance is not installed: pip install 'jtile[serve]'")
uvicorn = pytest.importorskip("uvicorn", reason="uvicorn is not installed: pip install 'jtile[serve]'")

from pydantic import ValidationError  # noqa: E402

from jtile.models.serving.http import make_app  # noqa: E402
from jtile.models.serving.http.errors import api_error  # noqa: E402
from jtile.models.serving.http.rates import Rates  # noqa: E402
from jtile.models.serving.http.schema import ChatBody, CompletionBody, EmbeddingBody  # noqa: E402
from jtile.models.serving.http.tools import CallReader  # noqa: E402


@pytest.fixture(scope="module")
def app(engine):
    return make_app(engine, "tiny", origins=["http://page"], body_limit=20_000)


def call(app, *requests, headers=None):
    """The responses to (method, path, options of httpx) at once."""

    async def main():
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://x", headers=headers, timeout=600) as client:
            return await asyncio.gather(*(client.request(m, path, **options) for m, path, options in requests))

    return asyncio.run(main())


def post(app, path: str, **body):
    return call(app, ("POST", path, {"json": body}))[0]


def events(response) -> list:
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def text_of(engine, prompt, count: int, **options) -> str:
    return engine.generate([prompt], max_tokens=count, **options)[0].text


def test_completions(app, engine):
    body = dict(model="tiny", prompt="Once upon", max_tokens=12, temperature=0)
    got = post(app, "/v1/completions", **body).json()
    text = text_of(engine, "Once upon", 12)
    (choice,) = got["choices"]
    assert (choice["text"], choice["finish_reason"], choice["logprobs"]) == (text, "length", None)
    assert (got["object"], got["model"], got["usage"]["total_tokens"]) == ("text_completion", "tiny", 21)
    pieces = events(post(app, "/v1/completions", **body, stream=True, echo=True))
    assert "".join(p["choices"][0]["text"] for p in pieces) == "Once upon" + text
    assert pieces[-1]["choices"][0]["finish_reason"] == "length"
    stop = text[3:5]
    (stopped,) = post(app, "/v1/completions", **body, stop=[stop]).json()["choices"]
    assert (stopped["text"], stopped["finish_reason"]) == (text[: text.index(stop)], "stop")


def test_several_prompts_and_choices(app, engine):
    """Each has the seed of its number; token ids are prompts, too."""
    prompts = [[5, 6, 7], [8, 9]]
    got = post(app, "/v1/completions", prompt=prompts, n=2, max_tokens=6, temperature=1, seed=3).json()
    expected = [text_of(engine, p, 6, temperature=1.0, seed=3 + i) for p in prompts for i in range(2)]
    assert [c["text"] for c in got["choices"]] == expected
    assert [c["index"] for c in got["choices"]] == [0, 1, 2, 3]
    assert got["usage"]["prompt_tokens"] == 5
    assert got["usage"]["completion_tokens"] == 24


def test_chat(app, engine):
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
    ]
    prompt = "[system]Be brief.\n[user]Hi\n[assistant]"
    text = text_of(engine, prompt, 8)
    body = dict(messages=messages, max_completion_tokens=8, temperature=0, logprobs=True, top_logprobs=2)
    got = post(app, "/v1/chat/completions", **body).json()
    (choice,) = got["choices"]
    assert choice["message"] == {"role": "assistant", "content": text, "refusal": None}
    rates = choice["logprobs"]["content"]
    assert len(rates) == 8
    assert all(r["top_logprobs"][0]["logprob"] == r["logprob"] and len(r["top_logprobs"]) == 2 for r in rates)
    pieces = events(post(app, "/v1/chat/completions", **body, stream=True, stream_options={"include_usage": True}))
    assert pieces[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert pieces[-1]["usage"]["completion_tokens"] == 8
    assert "".join(p["choices"][0]["delta"].get("content", "") for p in pieces[:-1]) == text
    assert sum(len(p["choices"][0]["logprobs"]["content"]) for p in pieces[:-1] if p["choices"][0]["logprobs"]) == 8
    count = post(app, "/tokenize", messages=messages).json()
    assert count["count"] == len(count["tokens"]) == got["usage"]["prompt_tokens"]
    assert post(app, "/detokenize", tokens=count["tokens"]).json() == {"prompt": prompt}


SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "yz"]}, "b": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


def test_answers_of_a_schema(app, engine):
    """At temperature 1, beside others that have none: all of them parse, and the others are what they are alone."""
    chat = {"messages": [{"role": "user", "content": "a"}], "temperature": 1, "max_tokens": 60}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    free = {"prompt": "abc", "max_tokens": 20, "temperature": 0}
    requests = [
        ("POST", "/v1/chat/completions", {"json": chat | {"response_format": form, "seed": i}}) for i in range(9)
    ]
    *guided, other = call(app, *requests, ("POST", "/v1/completions", {"json": free}))
    assert other.json()["choices"][0]["text"] == text_of(engine, "abc", 20)
    answers = [json.loads(response.json()["choices"][0]["message"]["content"]) for response in guided]
    assert {response.json()["choices"][0]["finish_reason"] for response in guided} == {"stop"}
    assert all(answer["a"] in ("x", "yz") and len(answer["b"]) <= 3 for answer in answers)
    assert len({json.dumps(answer) for answer in answers}) > 2


CALL = '{"name": "go", "arguments": {"to": "x"}}'
OTHER = '{"name": "go", "parameters": {"to": "y"}}'


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (CALL, "", ["x"]),
        (f" [{CALL}, {OTHER}]", "", ["x", "y"]),
        (f"[TOOL_CALLS] [{OTHER}]", "", ["y"]),
        (f"I go.<tool_call>\n{CALL}\n</tool_call>\n<tool_call>{OTHER}", "I go.", ["x", "y"]),
        ('{"name": "stay", "arguments": {}}', None, []),
        ('{"name": "go", "arguments": 3}', None, []),
        ("<tool_call>{</tool_call>", None, []),
        ("[1] says so", None, []),
        ("a < b <tool", None, []),
    ],
)
def test_calls_of_tools_in_texts(text, content, calls):
    """Letter by letter and at once; what is no call of a tool that there is stays text."""
    for pieces in (text, [text]):
        reader = CallReader(["go"])
        free = "".join(reader.push(piece) for piece in pieces)
        rest, found = reader.finish()
        assert free + rest == (text if content is None else content)
        assert [json.loads(call["function"]["arguments"])["to"] for call in found] == calls


def test_tools(app, engine, monkeypatch):
    """The template is told of them, and of earlier calls; the call of an answer, forced by a schema, comes as one."""
    call = {"type": "object", "properties": {"name": {"const": "go"}, "arguments": {"const": {"to": "x"}}}}
    call |= {"required": ["name", "arguments"], "additionalProperties": False}
    tool = {"type": "function", "function": {"name": "go", "parameters": {"type": "object"}}}
    past = {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "go", "arguments": '{"to": "y"}'}}]}
    messages = [{"role": "user", "content": "a"}, past, {"role": "tool", "tool_call_id": "1", "content": "b"}]
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": call}}
    body = {"messages": messages, "tools": [tool], "max_tokens": 60, "response_format": form}
    got = post(app, "/v1/chat/completions", **body).json()
    assert got["usage"]["prompt_tokens"] == len("[tool]go\n[user]a\n[assistant]<y>\n[tool]b\n[assistant]")
    (choice,) = got["choices"]
    (made,) = choice["message"]["tool_calls"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
    assert made["function"] == {"name": "go", "arguments": '{"to": "x"}'}
    *_, called, end = events(post(app, "/v1/chat/completions", **body, stream=True))
    assert called["choices"][0]["delta"]["tool_calls"][0]["function"] == made["function"]
    assert end["choices"][0]["finish_reason"] == "tool_calls"
    plain = post(app, "/v1/chat/completions", **body, tool_choice="none").json()["choices"][0]
    assert (plain["finish_reason"], json.loads(plain["message"]["content"])["name"]) == ("stop", "go")
    monkeypatch.setattr(engine.lm.tokenizer, "chat_template", "{{ messages[0].content }}")
    assert "knows no tools" in post(app, "/v1/chat/completions", **body).json()["error"]["message"]


def test_calls_that_are_forced(app):
    """Of one of the tools, or of the one that is named, with arguments of its form, which may refer to definitions."""
    kind = {"$ref": "#/$defs/Kind"}
    whole = {"anyOf": [{"type": "null"}, {"$ref": "#"}]}
    stay = {"type": "object", "properties": {"a": kind, "b": whole}, "required": ["a"], "additionalProperties": False}
    tools = [
        {"type": "function", "function": {"name": name, "parameters": stay | {"$defs": {"Kind": {"enum": kinds}}}}}
        for name, kinds in (("go", ["x"]), ("stay", ["y", "z"]))
    ]
    chat = {"messages": [{"role": "user", "content": "a"}], "tools": tools, "max_tokens": 60, "temperature": 1}
    named = {"type": "function", "function": {"name": "stay"}}
    bodies = [chat | {"tool_choice": choice, "seed": i} for i in range(4) for choice in ("required", named)]
    made = [
        response.json()["choices"][0]
        for response in call(app, *(("POST", "/v1/chat/completions", {"json": body}) for body in bodies))
    ]
    assert {choice["finish_reason"] for choice in made} == {"tool_calls"}
    functions = [choice["message"]["tool_calls"][0]["function"] for choice in made]
    kinds = {"go": ["x"], "stay": ["y", "z"]}
    assert all(json.loads(f["arguments"])["a"] in kinds[f["name"]] for f in functions)
    assert {f["name"] for f in functions[1::2]} == {"stay"} and {f["name"] for f in functions[::2]} >= {"go"}


def test_grammars_in_python(engine):
    """Of a regular expression and in the form of Lark; one that is cut off ends by its length."""
    (digits,) = engine.generate(["a"], max_tokens=20, grammar=Grammar.regex("[0-9]{7}"), logprobs=True)
    assert digits.text.isdigit() and len(digits.text) == 7 and digits.finish_reason == "stop"
    (cut,) = engine.generate(["a"], max_tokens=3, grammar=Grammar.lark('start: "abcdef"'))
    assert (cut.text, cut.finish_reason) == ("abc", "length")
    with pytest.raises(PromptError, match="the grammar or schema"):
        engine.stream("a", grammar=Grammar.regex("(("))
    with pytest.raises(PromptError, match="grammar is a Grammar"):
        engine.stream("a", grammar="[0-9]")
    with pytest.raises(PromptError, match="no JSON schema"):
        Grammar.json({"a": {1, 2}})


def test_embeddings(app, engine):
    """Of the newest token behind the last norm, of length 1; in base64 too, and cut."""
    texts = ["abc", "a longer text"]
    got = post(app, "/v1/embeddings", input=texts, model="tiny").json()
    rows = np.array([item["embedding"] for item in got["data"]], np.float32)
    ids = engine.lm.tokenizer.encode("abc")
    hidden = np.asarray(stateless.run(lambda model, x: model.hidden_states(x)[-1], engine.lm.model, np.array([ids])))[
        0, -1
    ]
    np.testing.assert_allclose(rows[0], hidden / np.linalg.norm(hidden), atol=1e-5)
    assert got["usage"]["prompt_tokens"] == 3 + 13
    (packed,) = post(app, "/v1/embeddings", input=[ids], encoding_format="base64", dimensions=8).json()["data"]
    short = np.frombuffer(base64.b64decode(packed["embedding"]), np.float32)
    np.testing.assert_allclose(short, rows[0][:8] / np.linalg.norm(rows[0][:8]), atol=1e-6)


def test_what_a_server_tells_of_itself(app):
    health, models, model, metrics, missing = call(
        app, *(("GET", path, {}) for path in ("/health", "/v1/models", "/v1/models/tiny", "/metrics", "/v1/models/x"))
    )
    assert health.json() == {"status": "ok"}
    assert [m["id"] for m in models.json()["data"]] == ["tiny"] == [model.json()["id"]]
    assert "jtile_new_tokens_total " in metrics.text and "jtile_first_token_seconds_bucket" in metrics.text
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")


def forced(parameters: dict) -> dict:
    """A call of a tool with such arguments."""
    return {"tool_choice": "required"} | {
        "tools": [{"type": "function", "function": {"name": "go", "parameters": parameters}}]
    }


NO_SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}
TOOLS = [{"type": "function", "function": {"name": "go"}}]
FORCED_FORM = {"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}}
NO_PATTERN = {"type": "json_schema", "json_schema": {"schema": {"type": "string", "pattern": "("}}}
DEEP_CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[" * 15_000}}]}
BROKEN_CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}
OK = {"prompt": "a", "max_tokens": 1}
IMAGE = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}
CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}


@pytest.mark.parametrize(
    ("path", "options", "status", "message"),
    [
        ("/v1/completions", {"content": b'{"prompt": '}, 400, "the body is not JSON"),
        ("/v1/completions", {"content": b'{"prompt": "\xff"}'}, 400, "the body is not JSON"),
        ("/v1/completions", {"content": b"x" * 30_000}, 413, "more than 20000 bytes"),
        ("/v1/completions", {"json": []}, 400, "should be an object"),
        ("/v1/completions", {"json": {}}, 400, "prompt: Field required"),
        ("/v1/completions", {"json": OK | {"prompt": [1, "a"]}}, 400, "prompt: should be a text or a list of ints or"),
        ("/v1/completions", {"json": OK | {"prompt": []}}, 400, "the prompt is empty"),
        ("/v1/completions", {"json": OK | {"prompt": [999]}}, 400, "outside the vocabulary"),
        ("/v1/completions", {"json": OK | {"prompt": [-(10**30)]}}, 400, "prompt"),
        ("/v1/completions", {"json": OK | {"prompt": "a" * 200}}, 400, "has 200 tokens"),
        ("/v1/completions", {"json": OK | {"max_tokens": 0}}, 400, "max_tokens is an int"),
        ("/v1/completions", {"json": OK | {"n": 10**9}}, 400, "n: Input should be less than"),
        ("/v1/completions", {"json": OK | {"prompt": ["a"] * 99, "n": 2}}, 400, "at most 128 answers"),
        ("/v1/completions", {"json": OK | {"prompt": ["a"] * 99}}, 400, "room for 12 answers"),
        ("/v1/completions", {"json": OK | {"n": 13}}, 400, "room for 12 answers"),
        ("/v1/completions", {"json": OK | {"temperature": "hot"}}, 400, "temperature"),
        ("/v1/completions", {"json": OK | {"temperature": 1e300}}, 400, "temperature"),
        ("/v1/completions", {"json": OK | {"logit_bias": {"x": 1}}}, 400, "logit_bias"),
        ("/v1/completions", {"json": OK | {"stop": [""]}}, 400, "stop is a string"),
        ("/v1/completions", {"json": OK | {"best_of": 3}}, 400, "best_of is not supported"),
        ("/v1/completions", {"json": OK | {"suffix": "x"}}, 400, "suffix is not supported"),
        ("/v1/completions", {"json": OK | {"echo": True, "logprobs": 1}}, 400, "echo with logprobs"),
        ("/v1/completions", {"json": OK | {"model": "gpt"}}, 404, "there is no model 'gpt'"),
        ("/v1/chat/completions", {"json": CHAT | {"messages": []}}, 400, "messages"),
        ("/v1/chat/completions", {"json": {"messages": [{"role": "king", "content": "a"}]}}, 400, "role"),
        ("/v1/chat/completions", {"json": {"messages": [IMAGE]}}, 400, "text only; a message has a part 'image_url'"),
        ("/v1/chat/completions", {"json": CHAT | {"tools": [{}]}}, 400, "tools.0.type: Field required"),
        ("/v1/chat/completions", {"json": CHAT | {"tool_choice": "required"}}, 400, "'required' takes tools"),
        ("/v1/chat/completions", {"json": CHAT | {"tool_choice": "maybe"}}, 400, "tool_choice: should be 'none'"),
        ("/v1/chat/completions", {"json": CHAT | {"tool_choice": {"type": "function"}}}, 400, "or a function, {"),
        ("/v1/chat/completions", {"json": {"messages": [{"role": "user", "content": 3}]}}, 400, "should be a text or"),
        ("/v1/chat/completions", {"json": CHAT | {"tool_choice": {"function": {"name": "x"}}}}, 400, "none of the"),
        ("/v1/chat/completions", {"json": CHAT | FORCED_FORM}, 400, "leave response_format out"),
        ("/v1/chat/completions", {"json": CHAT | forced({"type": "nonsense"})}, 400, "Invalid type: nonsense"),
        ("/v1/chat/completions", {"json": CHAT | forced({"$defs": [1], "type": "string"})}, 400, "is unsatisfiable"),
        ("/v1/chat/completions", {"json": CHAT | {"response_format": NO_PATTERN}}, 400, "error: unclosed group"),
        ("/v1/chat/completions", {"json": {"messages": [DEEP_CALL]}}, 400, "arguments of a tool call are JSON"),
        ("/v1/chat/completions", {"json": {"messages": [BROKEN_CALL]}}, 400, "arguments of a tool call are JSON"),
        ("/v1/chat/completions", {"json": CHAT | {"top_logprobs": 2}}, 400, "top_logprobs takes logprobs"),
        ("/v1/chat/completions", {"json": CHAT | {"response_format": {"type": "xml"}}}, 400, "response_format"),
        ("/v1/chat/completions", {"json": CHAT | {"response_format": {"type": "json_schema"}}}, 400, "takes a json"),
        ("/v1/chat/completions", {"json": CHAT | {"response_format": NO_SCHEMA}}, 400, "Invalid type: nonsense"),
        ("/v1/embeddings", {"json": {"input": []}}, 400, "the prompt is empty"),
        ("/v1/embeddings", {"json": {"input": ["a"] * 2000}}, 400, "at most 1024 inputs"),
        ("/v1/embeddings", {"json": {"input": "a", "dimensions": 65}}, 400, "dimensions are 1 to 64"),
        ("/v1/embeddings", {"json": {"input": "a" * 600}}, 400, "has 600 tokens"),
        ("/tokenize", {"json": {}}, 400, "either a prompt or messages"),
        ("/detokenize", {"json": {"tokens": [256]}}, 400, "tokens: token ids are from 0 to 255"),
        ("/v1/completions", {"json": {"prompt": [-1], "echo": True}}, 400, "prompt: token ids are from 0 to 255"),
        ("/v1/nothing", {}, 404, "Not Found"),
    ],
)  # fmt: skip
def test_errors_have_openais_form(app, path, options, status, message):
    (response,) = call(app, ("POST", path, options))
    error = response.json()["error"]
    assert response.status_code == status, error
    assert message in error["message"]
    assert set(error) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("form", "body", "place", "message"),
    [
        (CompletionBody, {"prompt": [{}] * 1000}, "prompt", "should be a text or a list of ints or"),
        (CompletionBody, {"prompt": [""] * 20_000}, "prompt", "at most 16384 items"),
        (CompletionBody, {"prompt": "a", "stop": [1] * 1000}, "stop", "a list of texts"),
        (CompletionBody, {"prompt": "a", "logit_bias": dict.fromkeys(map(str, range(1000)), "x")}, "logit_bias", "'0'"),
        (ChatBody, {"messages": [{}] * 1000}, "messages.0.role", "required"),
        (ChatBody, {"messages": [{"role": "user", "content": [5] * 1000}]}, "messages.0.content", "should be a text"),
        (ChatBody, CHAT | {"tools": [{}] * 1000}, "tools.0.type", "required"),
        (EmbeddingBody, {"input": [[""]] * 1000}, "input", "should be a text"),
    ],
)
def test_of_many_wrong_things_few_are_noted(form, body, place, message):
    """The event loop would take minutes for millions of them."""
    with pytest.raises(ValidationError) as caught:
        form.model_validate_json(json.dumps(body))
    assert caught.value.error_count() <= 5
    error = api_error(caught.value).content["error"]
    assert error["param"] == place and message in error["message"]


def test_keys_and_pages_of_others(app, engine):
    locked = make_app(engine, "tiny", api_keys=["one", "two"])
    models = ("GET", "/v1/models", {})
    for header, status in ((None, 401), ("Bearer three", 401), ("two", 401), ("Bearer two", 200), ("bearer  two", 200)):
        (response,) = call(locked, models, headers={"Authorization": header} if header else None)
        assert response.status_code == status
    assert call(locked, ("GET", "/health", {}))[0].status_code == 200
    for origin, allowed in (("http://page", "http://page"), ("http://other", None)):
        (response,) = call(app, models, headers={"Origin": origin})
        assert response.headers.get("access-control-allow-origin") == allowed


def test_requests_a_minute(engine):
    """Of each key, or of each address; others do not count, nor do those that only look."""
    limited = make_app(engine, "tiny", api_keys=["one", "two"], requests_per_minute=2)
    asked = ("POST", "/tokenize", {"json": {"prompt": "a"}})
    responses = [call(limited, asked, headers={"Authorization": "Bearer one"})[0] for _ in range(3)]
    assert [response.status_code for response in responses] == [200, 200, 429]
    assert responses[0].headers["x-ratelimit-remaining-requests"] == "1"
    assert responses[2].json()["error"]["code"] == "rate_limit_exceeded"
    assert 25 <= int(responses[2].headers["retry-after"]) <= 30
    assert call(limited, asked, headers={"Authorization": "Bearer two"})[0].status_code == 200
    assert call(limited, ("GET", "/v1/models", {}), headers={"Authorization": "Bearer one"})[0].status_code == 200
    assert call(limited, asked)[0].status_code == 401
    free = make_app(engine, "tiny", requests_per_minute=1)
    assert [call(free, asked)[0].status_code for _ in range(2)] == [200, 429]


def test_requests_come_back_evenly(monkeypatch):
    now = 0.0
    rates = Rates(60, clock=lambda: now)
    assert [rates.take("a") for _ in range(60)] == [0] * 60
    assert rates.take("a") == pytest.approx(1)
    now = 2.5
    assert [rates.take("a") == 0 for _ in range(3)] == [True, True, False]
    now = 1000.0
    assert rates.take("a") == 0
    assert rates.headers("a")["x-ratelimit-remaining-requests"] == "59"
    monkeypatch.setattr("jtile.models.serving.http.rates.KNOWN", 1)
    rates.take("b")
    assert rates.headers("a")["x-ratelimit-remaining-requests"] == "60"


def test_an_answer_that_fails(app, engine, monkeypatch):
    """In the middle of a stream there is no status to tell it by; the last event does."""

    async def fail(self):
        raise EngineError("it broke")

    monkeypatch.setattr(Stream, "__anext__", fail)
    assert post(app, "/v1/completions", **OK).status_code == 503
    response = post(app, "/v1/completions", **OK, stream=True)
    assert "it broke" in json.loads(response.text.split("\n\n")[0].removeprefix("data: "))["error"]["message"]


def test_a_port_that_is_taken_is_told_of_before_the_model_is_loaded(capsys, monkeypatch):
    from jtile.models.serving.http import serve

    monkeypatch.setattr(serve, "load_over", lambda **_: pytest.fail("the model is loaded"))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert serve.serve(None, "127.0.0.1", port, None, (), (), None, "", {}, {}) == 1
    assert f"port {port} of 127.0.0.1 cannot be used: " in capsys.readouterr().err


def test_a_server_stops_when_its_requests_have_ended(engine, started, monkeypatch):
    """The first SIGTERM lets those under way end, over a real connection; new ones are refused."""
    step, refusing = engine._core.step, threading.Event()
    monkeypatch.setattr(engine._core, "step", lambda *of: (refusing.wait(0.02), step(*of)))
    app = make_app(engine, "tiny")
    server, url, thread = started(app)
    body = {"prompt": "abc", "max_tokens": 90, "temperature": 0, "stream": True, "ignore_eos": True}
    with (
        httpx.Client(base_url=url, timeout=600) as client,
        client.stream("POST", "/v1/completions", json=body) as stream,
    ):
        lines = stream.iter_lines()
        first = next(lines)
        server.handle_exit(signal.SIGTERM, None)
        refused = httpx.post(f"{url}/v1/completions", json=body, timeout=600)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "stopping")
        assert httpx.get(f"{url}/health", timeout=600).status_code == 503
        refusing.set()  # until then steps take their time
        rest = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert first.startswith("data: ")
    assert rest[-1]["choices"][0]["finish_reason"] == "length"
    thread.join(600)
    assert not thread.is_alive()
    until(lambda: idle(engine))


def test_adapters_are_models_by_name(engine, monkeypatch):
    """They are listed, answer under their names, and are no models for embeddings."""
    monkeypatch.setattr(engine, "settings", dataclasses.replace(engine.settings, adapters=("sql", "prose")))
    asked, submit = [], engine.submit
    monkeypatch.setattr(engine, "submit", lambda request: asked.append(request.adapter) or submit(request))
    app = make_app(engine, "tiny")
    models = call(app, ("GET", "/v1/models", {}))[0].json()["data"]
    assert [(m["id"], m["parent"]) for m in models] == [("tiny", None), ("sql", "tiny"), ("prose", "tiny")]
    for name, number in (("prose", 2), ("sql", 1), ("tiny", 0), (None, 0)):
        got = post(app, "/v1/completions", model=name, prompt=[1], max_tokens=1).json()
        assert (got["model"], asked.pop()) == (name or "tiny", number)
    assert post(app, "/v1/completions", model="other", prompt=[1]).status_code == 404
    error = post(app, "/v1/embeddings", model="sql", input="x").json()["error"]
    assert error["message"] == "embeddings are those of 'tiny'; its adapters have none"


def test_tokens_that_have_come_together_are_one_event(app, engine):
    """A client that reads slowly, or an engine that makes several at a time, costs no event for each."""
    answer = app.state.server._answer(CompletionBody(prompt="a"), "text_completion", False)

    async def read(logprobs: bool):
        answer.logprobs = logprobs
        stream = engine.stream("Once upon", max_tokens=12, logprobs=logprobs)
        stream.result()
        return [event["choices"][0]["text"] async for event in app.state.server._events([stream], answer, False, 1)]

    text = text_of(engine, "Once upon", 12)
    assert asyncio.run(read(False)) == ["", text, ""]
    apart = asyncio.run(read(True))
    assert len(apart) == 14 and "".join(apart) == text
