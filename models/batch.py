"""`jtile generate --batch`: a file of requests, a file of answers."""

from __future__ import annotations

import collections
import contextlib
import fcntl
import hashlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from jtile._errors import JtileError, ModelError, PromptError

from .console import FAILURE, INTERRUPTED, SUCCESS, keep_programs
from .generate import LanguageModel
from .load import load_over
from .sampling import SamplingOptions
from .serving import Engine, Grammar
from .serving.engine import Stream
from .serving.request import Request, read_request

SOURCES = ("prompt", "messages", "prompt_ids")
OTHERS = ("id", "max_tokens", "stop", "ignore_eos", "logprobs", "json_schema")
FIELDS = (*SOURCES, *OTHERS, *SamplingOptions.__annotations__)


def run_batch(
    path: str,
    model: str | None = None,
    out: str | None = None,
    cache_dir: str = "",
    dtype: str | None = None,
    cache_dtype: str | None = None,
    rows: int | None = None,
    adapter: str | None = None,
    devices: str | int | None = None,
    **defaults,
) -> int:
    """Answers the requests of a file, one a line; returns the exit code: 0, 1 after an error, 130 after Ctrl-C.

    Each line is a JSON object: one of `prompt` (a text to be continued), `messages` (a chat) and `prompt_ids`; `id`, a
    text or an int, by default the number of the line; `max_tokens`, `stop`, `ignore_eos`, `logprobs`, `json_schema`,
    and the options of `sampling.Sampling`. Each line of the answers, in the same order, has the `id`, and text, ids,
    finish_reason and numbers of tokens, or an `error` {"type", "message"} where a request failed, which does not stop
    the others.

    Args:
      path: the file, "-" for standard input. model, dtype, cache_dtype, adapter: as in `load`. rows: requests at a
        time.
      devices: how many share the model, see `mesh.devices_at_hand`.
      out: the file of the answers, standard output by default. It appears when all of them are there; until then they
        are in a file beside it, with which the same command goes on after an interruption.
        A file that is there is refused.
      defaults: fields that lines without them have.
    """
    keep_programs(cache_dir)
    try:
        defaults = {name: value for name, value in defaults.items() if value is not None}
        lines = _lines(path)
        if out is not None and os.path.lexists(out):
            raise PromptError(f"{out} is there already: remove it, or give another --out")
        with _results(out, _digest(lines, [model, dtype, cache_dtype, adapter, defaults])) as (file, done):
            failed = 0
            if done:
                print(f"jtile: {done} of {len(lines)} answers are there from an earlier run", file=sys.stderr)
            if done < len(lines):
                lm = load_over(devices, model, dtype=dtype, cache_dtype=cache_dtype, adapter=adapter)
                with Engine(lm, rows=rows) as engine:
                    for number, result in _answers(engine, lines[done:], defaults):
                        failed += "error" in result
                        file.write(json.dumps({"id": done + number, **result}) + "\n")
                        file.flush()
        if failed:
            print(f"jtile: {failed} of {len(lines) - done} requests failed; their lines say why", file=sys.stderr)
        return FAILURE if failed else SUCCESS
    except JtileError as error:
        print(f"jtile: {error}", file=sys.stderr)
        return FAILURE
    except BrokenPipeError:  # the reader of standard output went away
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILURE
    except OSError as error:  # a full disk
        if out is None:  # Python would try at its end to write what is left in the buffer
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        print(f"jtile: cannot write the answers: {error.strerror or error}", file=sys.stderr)
        return FAILURE
    except KeyboardInterrupt:
        hint = "; the same command goes on from here" if out else ""
        print(f"\njtile: interrupted{hint}", file=sys.stderr)
        return INTERRUPTED


# -- files ------------------------------------------------------------------------------------------------------------


def _lines(path: str) -> list[bytes]:
    """The lines of the file that are not empty."""
    try:
        data = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    except OSError as error:
        raise PromptError(f"cannot read the requests: {error.strerror}: {path}") from error
    return [line for line in data.split(b"\n") if line.strip()]


def _digest(lines: list[bytes], options: list) -> str:
    """A digest of all that the answers depend on: runs that differ in it do not go on with each other's answers."""
    digest = hashlib.sha256(json.dumps(options, sort_keys=True, default=str).encode())
    for line in lines:
        digest.update(line + b"\n")
    return digest.hexdigest()[:12]


@contextlib.contextmanager
def _results(out: str | None, digest: str) -> Iterator[tuple[IO[str], int]]:
    """Gives (a file to add answers to, how many answers are in it). The file becomes `out` when all went well."""
    if out is None:
        yield sys.stdout, 0
        return
    part = f"{out}.{digest}.part"
    try:
        file = open(part, "a+", encoding="utf-8", newline="\n")  # noqa: SIM115
    except OSError as error:
        raise PromptError(f"cannot write the answers: {error.strerror}: {part}") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise PromptError(f"another process writes {part}; wait for it") from error
        yield file, _whole_lines(file)
        file.flush()
        os.fsync(file.fileno())
        os.replace(part, out)


def _whole_lines(file: IO[str]) -> int:
    """How many whole answers the file begins with. What follows them is cut off: part of an answer after an
    interruption, or parts of several after a loss of power."""
    file.seek(0)
    done = whole = 0
    for line in file.buffer.read().splitlines(keepends=True):  # type: ignore[attr-defined]
        try:
            answer = json.loads(line) if line.endswith(b"\n") else None
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict) or "id" not in answer:
            break
        done, whole = done + 1, whole + len(line)
    file.truncate(whole)
    file.seek(0, os.SEEK_END)
    return done


# -- requests ---------------------------------------------------------------------------------------------------------


def _answers(engine: Engine, lines: list[bytes], defaults: dict[str, Any]) -> Iterator[tuple[int, dict]]:
    """Yields (number from 1, answer) of each line, in order; as many requests are under way as the engine lets wait."""
    pending: collections.deque[tuple[int, dict, Stream | JtileError]] = collections.deque()
    room = engine.settings.rows + engine.settings.waiting
    try:
        for number, line in enumerate(lines, 1):
            while len(pending) >= room:
                yield _answer(*pending.popleft())
            head: dict[str, Any] = {}
            try:
                asked = _object(line)
                head = {"id": asked["id"]} if "id" in asked else {}
                pending.append((number, head, engine.submit(_request(engine, defaults | asked))))
            except JtileError as error:
                pending.append((number, head, error))
        while pending:
            yield _answer(*pending.popleft())
    finally:
        for _, _, stream in pending:
            if isinstance(stream, Stream):
                stream.cancel()


def _answer(number: int, head: dict, stream: Stream | JtileError) -> tuple[int, dict]:
    try:
        if isinstance(stream, JtileError):
            raise stream
        done = stream.result()
    except JtileError as error:
        return number, head | {"error": {"type": type(error).__name__, "message": error.message}}
    rates = [token.logprob for token in done.tokens]
    more = {"logprobs": rates} if rates and rates[0] is not None else {}
    counts = {"prompt_tokens": done.prompt_tokens, "new_tokens": len(done.tokens)}
    return number, head | {"text": done.text, "ids": done.ids, "finish_reason": done.finish_reason, **counts, **more}


def _object(line: bytes) -> dict[str, Any]:
    try:
        asked = json.loads(line)
    except ValueError as error:  # also where a line is not UTF-8
        raise PromptError(f"the line is not JSON: {error}") from error
    except RecursionError as error:
        raise PromptError("the line is not JSON: brackets lie too deep in each other") from error
    if not isinstance(asked, dict):
        raise PromptError(f'a line is a JSON object, as {{"prompt": ...}}; got {str(asked)[:80]}')
    name = asked.get("id", 0)
    if isinstance(name, bool) or not isinstance(name, str | int):
        raise PromptError(f"the id of a line is a text or an int, got {str(asked.pop('id'))[:80]}")
    return asked


def _request(engine: Engine, asked: dict[str, Any]) -> Request:
    if unknown := [name for name in asked if name not in FIELDS]:
        raise PromptError(f"a line has no field {unknown[0]!r}; there are {', '.join(FIELDS)}")
    options: dict[str, Any] = {name: asked[name] for name in SamplingOptions.__annotations__ if name in asked}
    if isinstance(options.get("logit_bias"), dict):
        options["logit_bias"] = {_token(name): bias for name, bias in options["logit_bias"].items()}
    schema, ignore_eos = asked.get("json_schema"), asked.get("ignore_eos")
    if not isinstance(ignore_eos, bool | None):
        raise PromptError(f"ignore_eos is true or false, got {str(ignore_eos)[:80]}")
    return read_request(
        engine.lm,
        engine.settings.length,
        _prompt(engine.lm, asked),
        asked.get("max_tokens"),
        asked.get("stop"),
        None if ignore_eos else "model",
        asked.get("logprobs", False),
        SamplingOptions(**options),
        None if schema is None else Grammar.json(schema),
    )


def _token(name: str) -> int:
    try:
        return int(name)
    except ValueError as error:
        raise PromptError(f"logit_bias maps token ids to numbers; got {name!r}") from error


def _prompt(lm: LanguageModel, asked: dict[str, Any]) -> str | list[int]:
    given = [name for name in SOURCES if asked.get(name) is not None]
    if len(given) != 1:
        raise PromptError(f"a line has one of {', '.join(SOURCES)}; this one has {' and '.join(given) or 'none'}")
    (name,) = given
    value = asked[name]
    if name == "prompt":
        if not isinstance(value, str):
            raise PromptError(f"prompt is a text, got {str(value)[:80]}; token ids are prompt_ids")
        return value
    if name == "prompt_ids":
        if not isinstance(value, list):
            raise PromptError(f"prompt_ids is a list of token ids, got {str(value)[:80]}")
        return value
    if not isinstance(value, list) or not all(isinstance(message, dict) for message in value):
        raise PromptError(f"messages is a list of objects, got {str(value)[:80]}")
    if lm.tokenizer is None:
        raise ModelError(f"{lm.source} has no tokenizer; give prompt_ids")
    return lm.tokenizer.apply_chat_template(value)
