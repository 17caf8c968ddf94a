"""Schemas that no answer fits, or that take for ever: requests are refused, and nobody else waits for them."""

import asyncio
import json
import signal
import subprocess
import sys
import threading

import pytest

from jtile._errors import PromptError
from jtile.models import Grammar

pytest.importorskip("starlette", reason="starlette is not installed: pip install 'jtile[serve]'")
pytest.importorskip("llguidance", reason="llguidance is not installed: pip install 'jtile[serve]'")

from jtile.models.serving.http import compiling
from jtile.models.serving.http.compiling import SECONDS, Compilers
from jtile.models.serving.http.errors import ApiError
from jtile.models.serving.http.schema import ChatBody

ENDLESS = {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}, "required": ["n"]}


def forever() -> str:
    """A grammar that takes 2^40 times as long as one with a single pattern; `Grammar.json` would refuse it."""
    from llguidance import LLMatcher

    schema = {"allOf": [{"pattern": f".*{i}.*"} for i in range(40)]}
    return LLMatcher.grammar_from_json_schema(json.dumps(schema))


def test_schemas_that_no_answer_fits(engine):
    """An endless one; one of many patterns at once, which takes exponential time; and a very long one."""
    with pytest.raises(PromptError, match="no answer of it ever ends"):
        engine.stream("a", grammar=Grammar.json({"$defs": {"n": ENDLESS}, "$ref": "#/$defs/n"}))
    six = {"allOf": [{"pattern": f".*{c}.*"} for c in "abcdef"]}
    with pytest.raises(PromptError, match=r"at most 10 patterns for one text \(allOf\), this one 12"):
        Grammar.json({"properties": {"x": {"allOf": [six, six]}, "y": six}})
    with pytest.raises(PromptError, match="this one 13"):  # in a property that is called so; beside a choice
        Grammar.json({"properties": {"allOf": {**six, "pattern": "x", "anyOf": [{"type": "null"}, six]}}})
    around = {"next~": {"$ref": "#/$defs/a"}, "a": {**six, "properties": {"b": {"$ref": "#/$defs/next~0"}}}}
    with pytest.raises(PromptError, match="this one 12"):  # behind references, of which some go round
        Grammar.json({"$defs": around, "allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/next~0"}]})
    with pytest.raises(PromptError, match="at most 262144 characters"):
        Grammar.json({"const": "x" * 270_000})


def known(monkeypatch, **options) -> Compilers:
    """Compilers that start no process."""
    compilers = Compilers(**options)
    monkeypatch.setattr(compilers, "prove", lambda grammar: None)
    return compilers


def test_work_that_takes_for_ever(monkeypatch):
    """Its request is told so; it keeps one of few places until it ends, of which known grammars need none."""
    release, compilers = threading.Event(), known(monkeypatch, at_once=1, seconds=0.05)

    def wrong():
        raise PromptError("wrong")

    async def main():
        with pytest.raises(ApiError) as slow:
            await compilers.run(release.wait, "a")
        with pytest.raises(ApiError) as full:
            await compilers.run(wrong, "b")
        compilers._known[compiling._digest("c")] = None
        with pytest.raises(PromptError, match="wrong"):
            await compilers.run(wrong, "c")
        release.set()
        patient = known(monkeypatch, at_once=1)
        both = await asyncio.gather(*(patient.run(lambda i=i: i, "d") for i in range(3)))
        with pytest.raises(PromptError, match="wrong"):
            await patient.run(wrong, "e")
        return slow.value.status, full.value.status, both

    assert asyncio.run(main()) == (400, 429, [0, 1, 2])


def test_grammars_are_compiled_elsewhere_first(monkeypatch):
    """Where a process can be ended: one that takes for ever leaves its place. What has an end is remembered."""
    started, popen = [], subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **more: started.append(popen(*a, **more)) or started[-1])
    compilers = Compilers(at_once=1, seconds=0.2)  # of work the system allows a whole second
    with pytest.raises(ApiError) as slow:
        compilers.prove(forever())
    assert slow.value.status == 400 and started[-1].returncode == -signal.SIGKILL
    patient, few = Compilers(), [Grammar.json({"const": i}).text for i in range(2)]
    monkeypatch.setattr(compiling, "KNOWN", 1)
    for text, more in zip([few[0], few[0], few[1], few[0], "no grammar"], (1, 0, 1, 1, 1), strict=True):
        before = len(started)
        patient.prove(text)
        assert len(started) == before + more and started[-1].returncode == 0


def test_a_process_that_nobody_ends():
    """The system ends it after some seconds of work."""
    command = [sys.executable, "-P", str(compiling.PROGRAM), "1"]
    assert subprocess.run(command, input=forever().encode(), check=False).returncode == -signal.SIGXCPU


def test_a_grammar_that_takes_all_memory(monkeypatch, tmp_path):
    """A process of its own ends, too, where there is no memory left."""
    small = tmp_path / "try_grammar.py"
    small.write_text(compiling.PROGRAM.read_text().replace("MEMORY = 1 << 30", "MEMORY = 1 << 26"))
    monkeypatch.setattr(compiling, "PROGRAM", small)
    with pytest.raises(ApiError, match="or too much memory") as refused:
        Compilers().prove(forever())
    assert refused.value.status == 400
    Compilers().prove(Grammar.json({"const": 1}).text)


def test_time_and_places_that_others_took(monkeypatch):
    """Work has its whole time, however long it waited for a place; where the system has no thread, a place is free."""
    compilers, times, wait_for = known(monkeypatch, at_once=1), [], asyncio.wait_for
    monkeypatch.setattr(asyncio, "wait_for", lambda it, seconds: times.append(seconds) or wait_for(it, seconds))

    async def main():
        compilers._take()
        late = asyncio.ensure_future(compilers.run(lambda: 1, "a"))
        await asyncio.sleep(0.05)
        compilers._give_back()
        assert (await late, times) == (1, [SECONDS])

        def full(_):
            raise RuntimeError("no thread")

        monkeypatch.setattr(threading.Thread, "start", full)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="no thread"):
                await compilers.run(lambda: 1, "a")

    asyncio.run(main())


def test_which_requests_have_a_form():
    tool = {"type": "function", "function": {"name": "f"}}
    of = lambda **more: ChatBody.model_validate({"messages": [{"role": "user", "content": "a"}], **more}).formed()
    assert of(response_format={"type": "json_object"})
    assert of(tools=[tool], tool_choice="required")
    assert not of(tools=[tool], response_format={"type": "text"})
