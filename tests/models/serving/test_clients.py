"""Clients that nobody here wrote, over real connections: the package `openai`, and `curl`. Their answers are the
engine's."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import subprocess
from typing import Any, Literal

import httpx
import numpy as np
import pytest
from serving_checks import idle, until

pytest.importorskip("starlette", reason="starlette is not installed: pip install 'jtile[serve]'")
pytest.importorskip("llguidance", reason="llguidance is not installed: pip install 'jtile[serve]'")

from pydantic import BaseModel, Field

from jtile.models.serving.http import make_app
from jtile.models.serving.http.schema import ChatBody, CompletionBody, EmbeddingBody

HI = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
PROMPT = "[system]Be brief.\n[user]Hi\n[assistant]"

openai: Any = None


@pytest.fixture(scope="module", autouse=True)
def _openai():
    """The package takes a second to import: only a worker that comes to these tests does."""
    globals()["openai"] = pytest.importorskip("openai", reason="openai is not installed: pip install openai")


@pytest.fixture(scope="module")
def url(engine, started, _openai):
    """The address of a server that asks for a key."""
    server, url, thread = started(make_app(engine, "tiny", api_keys=["key"]))
    yield f"{url}/v1"
    server.handle_exit(signal.SIGTERM, None)
    thread.join(600)


@pytest.fixture(scope="module")
def client(url):
    with openai.OpenAI(base_url=url, api_key="key", max_retries=0, timeout=600) as client:
        yield client


@pytest.fixture(scope="module")
def answer(engine):
    """What the engine itself says."""
    return engine.generate([PROMPT], max_tokens=12)[0].text


def test_a_chat(client, answer):
    assert [model.id for model in client.models.list()] == ["tiny"]
    options = dict(model="tiny", messages=HI, max_tokens=12, temperature=0, logprobs=True, top_logprobs=2, n=2)
    whole = client.chat.completions.create(**options)
    assert [choice.message.content for choice in whole.choices] == [answer, answer]
    assert (whole.choices[0].finish_reason, whole.usage.completion_tokens) == ("length", 24)
    rates = whole.choices[0].logprobs.content
    assert len(rates) == 12 and all(rate.top_logprobs[0].logprob == rate.logprob for rate in rates)


def test_a_stream(client, answer):
    options = dict(model="tiny", messages=HI, max_tokens=12, temperature=0)
    pieces = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices) == answer
    assert pieces[-1].usage.completion_tokens == 12
    text = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=12, temperature=0, stream=True)
    assert "".join(piece.choices[0].text for piece in text) == answer


class Wish(BaseModel, extra="forbid"):
    """An answer that has to be one."""

    to: Literal["x", "yz"]
    often: list[bool] = Field(max_length=2)


def test_answers_of_a_schema(client):
    """Also parsed by the package, from a class of pydantic's."""
    options = dict(model="tiny", messages=HI, max_tokens=70, temperature=1, response_format=Wish)
    for seed in range(3):
        made = client.chat.completions.parse(**options, seed=seed).choices[0]
        assert made.finish_reason == "stop" and isinstance(made.message.parsed, Wish)


@pytest.mark.slow
def test_two_hundred_answers_of_a_schema(url):
    """At temperature 1, eight at a time: every one of them parses."""

    async def main() -> list[bool]:
        gate = asyncio.Semaphore(8)
        async with openai.AsyncOpenAI(base_url=url, api_key="key", max_retries=0, timeout=600) as client:

            async def one(seed: int) -> bool:
                options = dict(model="tiny", messages=HI, max_tokens=70, temperature=1, response_format=Wish)
                async with gate:
                    made = (await client.chat.completions.parse(**options, seed=seed)).choices[0]
                return made.finish_reason == "stop" and isinstance(made.message.parsed, Wish)

            return await asyncio.gather(*map(one, range(200)))

    assert asyncio.run(main()).count(True) == 200


class Go(BaseModel, extra="forbid"):
    """Short enough for the context of the tiny model."""

    to: Literal["x", "yz"]


def test_calls_of_tools(client):
    tool = openai.pydantic_function_tool(Go, name="go")
    options = dict(model="tiny", messages=HI[1:], max_tokens=60, temperature=1, seed=1, tools=[tool])
    (choice,) = client.chat.completions.create(**options, tool_choice="required").choices
    (call,) = choice.message.tool_calls
    assert (choice.finish_reason, call.type, call.function.name) == ("tool_calls", "function", "go")
    Go.model_validate_json(call.function.arguments)
    after = {"role": "tool", "tool_call_id": call.id, "content": "done"}
    said = choice.message.model_dump(exclude_none=True)
    again = client.chat.completions.create(**options | {"messages": [said, after], "max_tokens": 5})
    assert again.usage.completion_tokens == 5
    named = {"type": "function", "function": {"name": "go"}}
    with client.chat.completions.stream(**options, tool_choice=named) as stream:
        (streamed,) = stream.get_final_completion().choices
    assert streamed.message.tool_calls[0].function.name == "go"


def test_embeddings(client, engine):
    """The package asks for base64 unless it is told otherwise."""
    rows = [item.embedding for item in client.embeddings.create(model="tiny", input=["abc", "a longer text"]).data]
    plain = client.embeddings.create(model="tiny", input="abc", encoding_format="float").data[0].embedding
    np.testing.assert_allclose(rows[0], plain, atol=1e-7)
    assert len(rows[1]) == engine.lm.config.hidden_size and abs(np.linalg.norm(rows[1]) - 1) < 1e-5


def test_errors_are_those_of_the_package(client, url):
    ask = lambda client, **more: client.completions.create(**{"model": "tiny", "prompt": "a", "max_tokens": 1} | more)
    with pytest.raises(openai.AuthenticationError, match="a wrong API key"):
        ask(client.with_options(api_key="other"))
    with pytest.raises(openai.NotFoundError, match="there is no model 'gpt'"):
        ask(client, model="gpt")
    with pytest.raises(openai.BadRequestError, match="has 200 tokens") as error:
        ask(client, prompt="a" * 200)
    assert error.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="an input has 200 tokens; a text has at most") as error:
        client.embeddings.create(model="tiny", input=["a", "a" * 200])
    assert error.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="temperature"):
        ask(client, temperature=-1)


def test_a_client_that_leaves_a_stream(url, engine):
    async def main() -> int:
        async with openai.AsyncOpenAI(base_url=url, api_key="key", max_retries=0) as client:
            options = {"model": "tiny", "prompt": "abc", "max_tokens": 90, "extra_body": {"ignore_eos": True}}
            async with await client.completions.create(**options, stream=True) as stream:
                async for _ in stream:
                    return 1
        return 0

    assert asyncio.run(main()) == 1
    until(lambda: idle(engine))


def test_fields_that_are_null_are_left_out(url):
    """As in OpenAI's interface: many clients send every field that they know."""
    chat = dict(messages=HI, max_tokens=5, temperature=0)
    whole = dict(prompt="abc", max_tokens=5, temperature=0)
    with httpx.Client(headers={"Authorization": "Bearer key"}, timeout=600, trust_env=False) as client:
        post = lambda path, **body: client.post(path, json=body)
        for path, form, body in (("chat/completions", ChatBody, chat), ("completions", CompletionBody, whole)):
            fields = form.model_fields.keys() - body.keys()
            assert {"n", "stream", "logprobs", "stop", "ignore_eos"} < fields
            path, nulls = f"{url}/{path}", dict.fromkeys(fields)
            plain, same = (post(path, **body, **more).json()["choices"] for more in ({}, nulls))
            assert plain == same
            streamed = post(path, **body, stream=True, stream_options={"include_usage": None})
            assert streamed.status_code == 200 and "usage" not in streamed.text
        nulls = dict.fromkeys(EmbeddingBody.model_fields.keys() - {"input"})
        plain, same = (post(f"{url}/embeddings", input="abc", **more).json() for more in ({}, nulls))
        assert plain == same and plain["data"]


def test_a_call_without_arguments():
    """Some servers write the arguments of a function that has none as no text."""
    call = {"type": "function", "function": {"name": "go", "arguments": ""}}
    body = ChatBody.model_validate({"messages": [{"role": "assistant", "tool_calls": [call]}]})
    assert body.messages[0].plain()["tool_calls"][0]["function"] == {"name": "go", "arguments": {}}


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl: apt-get install curl")
def test_curl(url, answer):
    def curl(body: dict, key: str = "key") -> str:
        command = ["curl", "-sN", "--noproxy", "*", f"{url}/chat/completions", "-d", json.dumps(body)]
        command += ["-H", "Content-Type: application/json", "-H", f"Authorization: Bearer {key}"]
        return subprocess.run([*command, "-w", "%{http_code}"], capture_output=True, text=True).stdout

    body = {"messages": HI, "max_tokens": 12, "temperature": 0}
    said, status = curl(body)[:-3], curl(body, key="other")[-3:]
    assert json.loads(said)["choices"][0]["message"]["content"] == answer and status == "401"
    events = [line[6:] for line in curl(body | {"stream": True})[:-3].splitlines() if line]
    assert events.pop() == "[DONE]"
    assert "".join(json.loads(event)["choices"][0]["delta"].get("content", "") for event in events) == answer
