"""Answers of JSON become whole within `max_tokens`."""

from __future__ import annotations

import json

import numpy as np
import pytest

pytest.importorskip("llguidance", reason="llguidance is not installed: pip install 'jtile[serve]'")

from jtile.models import Grammar
from jtile.models.serving.endings import Place
from jtile.models.serving.grammar import Guide

TEXT, NUMBER = {"type": "string"}, {"type": "number"}
MANY = {"type": "object", "properties": dict.fromkeys("pqrs", TEXT), "required": list("pqrs")}


def of(**properties) -> dict:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


ENDS = [
    (of(a=TEXT, b=NUMBER), '{"a":"","b":0}'),
    (of(a={"type": "array", "items": MANY}), '{"a":[]}'),
    (of(a={"anyOf": [{"type": "null"}, MANY]}, b={"enum": ["red", "blue"]}), '{"a":null,"b":"blue"}'),
    (of(a={"type": "array", "items": NUMBER, "minItems": 2}), '{"a":[0,0]}'),
    (of(a={"type": "number", "exclusiveMinimum": 0, "maximum": 1}), '{"a":0.01}'),
    (of(a={"type": "string", "pattern": "^[x-z]+@[x-z]+[.]x$"}), None),
    ({"type": "object"}, "{}"),
    (NUMBER, "0"),
    ({"type": "integer", "minimum": -5}, "0"),
    ({"anyOf": [{"type": "integer"}, TEXT]}, "0"),
]


def draw(lm, grammar: Grammar, most: int, seed: int) -> tuple[bytes, bool, int]:
    """An answer of tokens that are all equally likely: (its text, whether it ended, how many were chosen again)."""
    guide, rng, again = Guide(lm, grammar, most), np.random.default_rng(seed), 0
    tokens: list[int] = []
    while len(tokens) < most and not guide.ended:
        bits = np.unpackbits(guide.allowed().view(np.uint8), bitorder="little")[: lm.config.vocab_size]
        token = int(rng.choice(np.flatnonzero(bits)))
        verdict = guide.take(token)
        assert verdict in ("taken", "again")
        again += verdict == "again"
        tokens += [token] if verdict == "taken" else []
    return b"".join(guide._spelling.texts[token] for token in tokens), guide.ended, again


@pytest.mark.parametrize(("schema", "shortest"), ENDS)
def test_whole_within_their_tokens(engine, schema, shortest):
    """With as many tokens as the end that is found has, and more, whatever the tokens are."""
    grammar = Grammar.json(schema)
    guide = Guide(engine.lm, grammar, 100)
    end = guide._end
    assert end is not None
    text = b"".join(guide._spelling.texts[token] for token in end).decode()
    assert shortest is None or text == shortest
    json.loads(text)
    for seed, most in enumerate((len(end), len(end) + 1, len(end) + 3, 40, 300)):
        said, ended, _ = draw(engine.lm, grammar, most, seed)
        assert ended
        json.loads(said.decode(errors="replace"))


def test_long_forms(engine):
    """Most of an end may be forced: names of properties that have to be there."""
    schema = of(**{f"property_{i}": {"anyOf": [TEXT, NUMBER]} for i in range(300)})
    shortest = len(json.dumps(dict.fromkeys(schema["required"], 0), separators=(",", ":")))
    assert shortest > 4000
    for more in (0, 40):
        said, ended, _ = draw(engine.lm, Grammar.json(schema), shortest + more, more)
        assert ended and set(json.loads(said.decode(errors="replace"))) == set(schema["required"])


def test_what_does_not_fit_is_chosen_again(engine):
    """An object that cannot end within the tokens that are left is not begun."""
    schema = {"type": "object", "properties": {"a": {"type": "array", "items": MANY}}, "required": ["a"]}
    drawn = [draw(engine.lm, Grammar.json(schema), 30, seed) for seed in range(8)]
    assert all(ended and json.loads(said) for said, ended, _ in drawn) and sum(again for *_, again in drawn) > 0


def test_what_is_opened_far_from_the_end_is_closed(engine):
    """A model that opens arrays for ever: their brackets would take more tokens than the last ones that are watched."""
    schema = {"$ref": "#/$defs/a", "$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}}}}
    guide, taken = Guide(engine.lm, Grammar.json(schema), 560), []
    opens = guide._spelling.texts.index(b"[")
    while len(taken) < 560 and not guide.ended:
        bits = np.unpackbits(guide.allowed().view(np.uint8), bitorder="little")
        token = opens if bits[opens] else int(np.flatnonzero(bits)[0])
        taken += [token] if guide.take(token) == "taken" else []
    said = b"".join(guide._spelling.texts[token] for token in taken)
    assert guide.ended and said.count(b"[") == said.count(b"]") > 256


def test_an_engine_brings_answers_to_their_end(engine):
    """At a high temperature, with penalties; an answer does not depend on those beside it."""
    schema = Grammar.json({"type": "object", "properties": {"a": {"type": "array", "items": MANY}, "b": NUMBER}})
    options = dict(max_tokens=30, grammar=schema, temperature=3.0, presence_penalty=0.5)
    beside = [engine.stream("a", **options, seed=seed) for seed in range(8)]
    answers = [stream.result() for stream in beside]
    assert all(isinstance(json.loads(answer.text), dict) for answer in answers)
    assert {answer.finish_reason for answer in answers} == {"stop"}
    for seed in (0, 5):
        assert engine.stream("a", **options, seed=seed).result().ids == answers[seed].ids


def test_numbers_have_an_end(engine):
    """No more digits than any number needs."""
    for seed in range(3):
        said = draw(engine.lm, Grammar.json({"type": "array", "items": NUMBER}), 90, seed)[0]
        digits = max(len(part) for part in said.translate(bytes.maketrans(b"[],.eE+-", b" " * 8)).split())
        assert digits <= 20 and all(abs(x) < 1e125 for x in json.loads(said))


def test_places_in_json():
    assert Place().after(b'{"a\\"1') == Place(string=True)
    assert Place().after(b'{"a\\').after(b'\\"') == Place()
    assert Place().after(b'{"1":12').digits == 2 and Place().after(b"[true,1.5e-1").exponent
    assert not Place().after(b"[1e5,12").exponent and not Place().after(b"1" * 19).enough
    assert Place().after(b"1" * 20).enough and Place().after(b"1E+12").enough
