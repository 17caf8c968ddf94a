"""`jtile chat`: a conversation with a model in the terminal."""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from jtile._errors import ContextError, JtileError, ModelError, PromptError

from .console import FAILURE, INTERRUPTED, SUCCESS, keep_programs, write
from .load import load_over
from .sampling import Sampling, SamplingOptions
from .serving import Completion, Engine

HELP = """\
/reset          forgets the conversation
/retry          asks for another answer to the last message
/system TEXT    sets the system prompt, and forgets the conversation; without TEXT shows it
/set NAME X     sets an option: max_tokens, seed, temperature, top_k, top_p, ...; /set alone shows them
/help           this list
/quit           ends, as Ctrl-D does
A message of several lines begins and ends with \"\"\", or has a \\ at the end of each line but the last.
Ctrl-C stops an answer; what there is of it stays in the conversation.
"""
BLOCK = '"""'
HISTORY = 1000  # lines that are kept
OPTIONS = tuple(name for name in SamplingOptions.__annotations__ if name not in ("logit_bias", "seed"))


class Chat:
    """A conversation with the model of an engine. options: those of `Engine.stream`; `seed` is that of the
    first answer, and the next answers have the next seeds; by default each has a random one. read(prompt): a function
    that gives a line from the user, as `input` does."""

    def __init__(
        self,
        engine: Engine,
        system: str | None = None,
        options: dict[str, Any] | None = None,
        stats: bool = False,
        read: Callable[[str], str] = input,
    ):
        self._engine, self._stats, self._read = engine, stats, read
        self._options = dict(options or {})
        self._system = system
        self.messages: list[dict[str, str]] = []
        self._commands: dict[str, Callable[[str], None]] = {
            "help": lambda _: write(HELP), "reset": self._reset, "retry": self._retry, "system": self._set_system,
            "set": self._set,
        }  # fmt: skip

    def run(self) -> None:
        """Reads messages and commands, and answers, until the input ends."""
        while True:
            try:
                text = self._message()
            except EOFError:
                return
            except KeyboardInterrupt:  # the line is dropped
                write("\n")
                continue
            name, _, rest = text.strip().partition(" ")
            if name in ("/quit", "/exit"):
                return
            try:
                if name.startswith("/"):
                    self._command(name[1:], rest.strip())
                elif text.strip():
                    self._say(text)
            except JtileError as error:
                hint = "; /reset begins a new conversation" if isinstance(error, ContextError) else ""
                print(f"jtile: {error}{hint}", file=sys.stderr)

    # -- what the user writes ------------------------------------------------------------------------------------------

    def _message(self) -> str:
        """The next message of the user, of one line or, as `HELP` says, of several.

        Raises:
          EOFError: the input has ended.
        """
        line = self._read("> ")
        if line.lstrip().startswith(BLOCK):
            lines, rest = [], line.lstrip().removeprefix(BLOCK)
            while not rest.rstrip().endswith(BLOCK):
                lines.append(rest)
                rest = self._read("... ")
            return "\n".join([*lines, rest.rstrip().removesuffix(BLOCK)]).strip("\n")
        lines = []
        while line.endswith("\\"):
            lines.append(line[:-1])
            line = self._read("... ")
        return "\n".join([*lines, line])

    def _command(self, name: str, rest: str) -> None:
        if name not in self._commands:
            raise PromptError(f"there is no command /{name}; /help lists them")
        self._commands[name](rest)

    def _reset(self, _: str = "") -> None:
        self.messages = []

    def _retry(self, _: str) -> None:
        users = [i for i, message in enumerate(self.messages) if message["role"] == "user"]
        if not users:
            raise PromptError("there is no message to answer again")
        before, text = self.messages, self.messages[users[-1]]["content"]
        self.messages = before[: users[-1]]
        try:
            self._say(text)
        except JtileError:  # the conversation stays as it was before the command
            self.messages = before
            raise

    def _set_system(self, text: str) -> None:
        if not text:
            write(f"{self._system or '(the model has its own, or none)'}\n")
            return
        self._system = text
        self._reset()

    def _set(self, text: str) -> None:
        name, _, value = text.partition(" ")
        if not name:
            write("".join(f"{key} {value}\n" for key, value in self._options.items() if value is not None))
            return
        if name not in (*OPTIONS, "seed", "max_tokens"):
            raise PromptError(f"there is no option {name!r}; there are max_tokens, seed, {', '.join(OPTIONS)}")
        number = None if value.strip() in ("", "none") else _number(name, value)
        if name != "max_tokens" and number is not None:
            Sampling(**{name: number})
        elif name == "max_tokens" and number is not None and not (isinstance(number, int) and number > 0):
            raise PromptError(f"max_tokens is an int of at least 1, got {value.strip()!r}")
        self._options[name] = number

    # -- what the model answers ----------------------------------------------------------------------------------------

    def _say(self, text: str) -> None:
        """Sends a message and writes the answer as it comes."""
        options = {name: value for name, value in self._options.items() if value is not None}
        seed = options.pop("seed", None)
        options["seed"] = secrets.randbits(32) if seed is None else (seed + len(self.messages) // 2) & 0xFFFFFFFF
        begin = [{"role": "system", "content": self._system}] if self._system else []
        asked = [*self.messages, {"role": "user", "content": text}]
        tokenizer = self._engine.lm.tokenizer
        assert tokenizer is not None
        stream = self._engine.stream(tokenizer.apply_chat_template([*begin, *asked]), **options)
        pieces: list[str] = []
        start, first = time.perf_counter(), None
        try:
            for token in stream:
                first = first or time.perf_counter()
                pieces.append(token.text)
                write(token.text)
        except KeyboardInterrupt:
            stream.cancel()
        write("\n")
        self.messages = [*asked, {"role": "assistant", "content": "".join(pieces)}]
        if self._stats and first is not None:
            print(_summary(stream.completion, first - start, time.perf_counter() - first), file=sys.stderr)


def _number(name: str, text: str) -> int | float:
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    raise PromptError(f"{name} is a number, got {text.strip()!r}")


def _summary(completion: Completion, first: float, rest: float) -> str:
    count = len(completion.tokens)
    rate = (count - 1) / rest if count > 1 and rest > 0 else 0.0
    return (
        f"prompt {completion.prompt_tokens} tokens, {completion.cached_tokens} of them in the cache, first token after "
        f"{first:.2f} s; answer {count} tokens, {rate:.1f} tokens/s"
    )


def run_chat(
    model: str | None = None,
    system: str | None = None,
    stats: bool = False,
    max_length: int | None = None,
    cache_dir: str = "",
    dtype: str | None = None,
    cache_dtype: str | None = None,
    adapter: str | None = None,
    devices: str | int | None = None,
    **options,
) -> int:
    """A conversation in the terminal, until the input ends; returns the exit code, 0, or 1 after an error.

    Args:
      model, dtype, cache_dtype, adapter: as in `load`. system: the system prompt. stats: speeds behind each answer.
      devices: how many share the model, see `mesh.devices_at_hand`.
      max_length: tokens of the whole conversation, at most; by default the context of the model.
      cache_dir: where XLA keeps compiled programs, and what the user wrote is kept for the arrow keys; "" for nowhere.
      options: those of `Engine.stream` (max_tokens, seed, temperature, ...); None for its default.
    """
    keep_programs(cache_dir)
    try:
        lm = load_over(devices, model, dtype=dtype, cache_dtype=cache_dtype, adapter=adapter)
        if lm.tokenizer is None or lm.tokenizer.chat_template is None:
            raise ModelError(
                f"{lm.source} knows no chats: it has no tokenizer with a chat template; try jtile generate"
            )
        with Engine(lm, rows=1, max_length=max_length, invariant=False) as engine, _history(cache_dir):
            asks = sys.stdin.isatty()
            if asks:
                print(f"jtile: {lm.source}; /help lists commands, Ctrl-D ends", file=sys.stderr)
            Chat(engine, system, options, stats, input if asks else lambda prompt: input()).run()
        return SUCCESS
    except JtileError as error:
        print(f"jtile: {error}", file=sys.stderr)
        return FAILURE
    except KeyboardInterrupt:  # while the model is loaded
        return INTERRUPTED


@contextlib.contextmanager
def _history(cache_dir: str) -> Iterator[None]:
    """A block in which the arrow keys bring back earlier lines, if there is a terminal and the module readline."""
    try:
        import readline
    except ImportError:  # Python was built without readline
        readline = None
    if readline is None or not sys.stdin.isatty():
        yield
        return
    path = os.path.join(cache_dir, "chat-history") if cache_dir else ""
    if path:
        with contextlib.suppress(OSError):
            readline.read_history_file(path)
    try:
        yield
    finally:
        readline.set_history_length(HISTORY)
        with contextlib.suppress(OSError):
            if path:
                os.makedirs(cache_dir, exist_ok=True)
                os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))  # nobody else is to read it
                readline.write_history_file(path)
