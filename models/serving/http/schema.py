"""The bodies of requests, in the form of OpenAI's interface. Unknown fields are ignored, as clients send many; fields
that ask for what this server cannot do are refused."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from jtile._errors import PromptError

from ...sampling import SamplingOptions
from ..grammar import Grammar
from ..programs import LOGPROBS
from .tools import call_schema

CHOICES = 128  # answers to one request: prompts times n
INPUTS = 1024  # texts of one request for embeddings
# Items of other lists. A body of 8 MiB may have millions, and wrong ones: pydantic, which holds Python's lock, would
# take minutes for the places of all that is wrong. One is told.
MANY = 1 << 14
Ids = Annotated[list[int], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True, max_length=MANY)]
Lists = Annotated[list[Ids], Field(fail_fast=True, max_length=MANY)]


def or_else(default: Any) -> BeforeValidator:
    """null means the default, as OpenAI's interface has it: many clients send all fields that they know."""
    return BeforeValidator(lambda given: default if given is None else given)


Switch = Annotated[bool, or_else(False)]


def several(given: str | Ids | Texts | Lists) -> list[str | Ids]:
    """One prompt or several, as a list."""
    if isinstance(given, str) or not given or isinstance(given[0], int):
        return [given]  # type: ignore[list-item]
    return list(given)  # type: ignore[arg-type]


def _all_numbers(given: Any) -> Any:
    """Checks the values of a mapping at once, where pydantic would note every wrong one."""
    wrong = [key for key, x in given.items() if type(x) not in (int, float)] if isinstance(given, dict) else []
    if wrong:
        raise ValueError(f"should have numbers as values; that of {wrong[0][:80]!r} is none")
    return given


class Body(BaseModel):
    """The body of any request: numbers are numbers, not texts of them."""

    model_config = ConfigDict(strict=True, extra="ignore")

    model: str | None = None


class StreamOptions(Body):
    include_usage: Switch = False


class JsonSchema(Body):
    name: str | None = None
    form: dict[str, Any] = Field(alias="schema")


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> ResponseFormat:
        if self.type == "json_schema" and self.json_schema is None:
            raise ValueError('the type "json_schema" takes a json_schema')
        return self

    def grammar(self) -> Grammar | None:
        if self.type == "text":
            return None
        return Grammar.json(self.json_schema.form if self.json_schema and self.type == "json_schema" else None)


class Generated(Body):
    """The fields that chats and completions share; those from top_k to ignore_eos are not OpenAI's."""

    n: Annotated[int, or_else(1), Field(ge=1, le=CHOICES)] = 1
    stream: Switch = False
    stream_options: StreamOptions | None = None
    stop: str | Texts | None = None
    seed: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[dict[str, float], BeforeValidator(_all_numbers)] | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: Switch = False
    response_format: ResponseFormat | None = None

    def grammar(self) -> Grammar | None:
        """The form that the answer must have; None for any text."""
        return self.response_format.grammar() if self.response_format else None

    def formed(self) -> bool:
        """Whether the answer must have a form."""
        return self.response_format is not None and self.response_format.type != "text"

    def sampling(self) -> SamplingOptions:
        """The options of sampling. The temperature is 1 by default, and the seed a random one."""
        names = ("top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
        seed = secrets.randbits(32) if self.seed is None else self.seed & 0xFFFFFFFF
        return SamplingOptions(
            temperature=1.0 if self.temperature is None else self.temperature,
            seed=seed,
            logit_bias=self._biases(),
            **{name: getattr(self, name) for name in names},
        )

    def _biases(self) -> Mapping[int, float] | None:
        try:
            return None if self.logit_bias is None else {int(key): bias for key, bias in self.logit_bias.items()}
        except ValueError as error:
            raise PromptError(
                f"the keys of logit_bias are token ids; got {str(list(self.logit_bias or ())[:3])[:80]}"
            ) from error


class CompletionBody(Generated):
    """The body of `/v1/completions`."""

    prompt: str | Ids | Texts | Lists
    max_tokens: int | None = 16
    logprobs: Annotated[int, Field(ge=0, le=LOGPROBS)] | None = None
    echo: Switch = False
    best_of: int | None = None
    suffix: str | None = None

    @model_validator(mode="after")
    def _can(self) -> CompletionBody:
        if self.best_of not in (None, self.n):
            raise ValueError("best_of is not supported: leave it out, or take n of the same number")
        if self.suffix:
            raise ValueError("suffix is not supported: put what stands behind the answer into the prompt")
        if self.echo and self.logprobs is not None:
            raise ValueError("echo with logprobs is not supported: prompts have no log-probabilities here")
        return self

    def prompts(self) -> list[str | Ids]:
        """The prompts, each text or token ids."""
        return several(self.prompt)


class Part(Body):
    """A part of a message; this server takes texts only."""

    type: str
    text: str = ""


class Function(Body):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(Body):
    """A function that the model may call."""

    type: Literal["function"]
    function: Function


class Named(Body):
    name: str


class Choice(Body):
    """The function that an answer has to call."""

    type: Literal["function"] = "function"
    function: Named


class CalledFunction(Body):
    name: str
    arguments: str = "{}"


class Call(Body):
    """A call that an earlier answer has made."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction

    def plain(self) -> dict[str, Any]:
        """The call for a chat template, which takes arguments as a mapping, not as text. No text is no arguments: some
        servers write calls of functions without parameters so."""
        try:
            arguments = json.loads(self.function.arguments or "{}")
        except (ValueError, RecursionError) as error:
            raise PromptError(f"the arguments of a tool call are JSON; got {self.function.arguments[:80]!r}") from error
        return {"id": self.id, "type": self.type, "function": {"name": self.function.name, "arguments": arguments}}


class Message(Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[Part], Field(fail_fast=True, max_length=MANY)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[Call], Field(fail_fast=True, max_length=MANY)] | None = None
    tool_call_id: str | None = None

    def plain(self) -> dict[str, Any]:
        """The message for a chat template: its content is one text."""
        content = self.content
        parts = [Part(type="text", text=content)] if isinstance(content, str) else content or []
        for part in parts:
            if part.type != "text":
                raise PromptError(f"the model takes text only; a message has a part {part.type!r}")
        text = "".join(part.text for part in parts)
        role = "system" if self.role == "developer" else self.role
        more = {"name": self.name, "tool_call_id": self.tool_call_id}
        more["tool_calls"] = [call.plain() for call in self.tool_calls] if self.tool_calls else None
        return {"role": role, "content": text} | {key: value for key, value in more.items() if value}


Messages = Annotated[list[Message], Field(fail_fast=True, max_length=MANY)]


class ChatBody(Generated):
    """The body of `/v1/chat/completions`."""

    messages: Annotated[Messages, Field(min_length=1)]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: Switch = False
    top_logprobs: Annotated[int, Field(ge=0, le=LOGPROBS)] | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True, max_length=MANY)] | None = None
    tool_choice: Literal["none", "auto", "required"] | Choice | None = None

    @model_validator(mode="after")
    def _can(self) -> ChatBody:
        names = [tool.function.name for tool in self.tools or ()]
        if self.tool_choice == "required" and not names:
            raise ValueError("tool_choice 'required' takes tools")
        if isinstance(self.tool_choice, Choice) and self.tool_choice.function.name not in names:
            raise ValueError(f"tool_choice names {self.tool_choice.function.name!r}, which is none of the tools")
        if self.forced() and self.response_format is not None and self.response_format.type != "text":
            raise ValueError("a call that tool_choice forces has its own form: leave response_format out")
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs takes logprobs to be true")
        return self

    def forced(self) -> list[Function]:
        """The tools of which the answer must call one; empty if it need not call any."""
        functions = [tool.function for tool in self.tools or ()]
        if isinstance(self.tool_choice, Choice):
            return [function for function in functions if function.name == self.tool_choice.function.name]
        return functions if self.tool_choice == "required" else []

    def formed(self) -> bool:
        return bool(self.forced()) or super().formed()

    def grammar(self) -> Grammar | None:
        calls = {function.name: function.parameters for function in self.forced()}
        return Grammar.json(call_schema(calls)) if calls else super().grammar()

    def functions(self) -> list[dict[str, Any]]:
        """The tools that the model may call."""
        tools = [] if self.tool_choice == "none" else self.tools or []
        return [tool.model_dump(exclude_none=True) for tool in tools]


class EmbeddingBody(Body):
    """The body of `/v1/embeddings`."""

    input: str | Ids | Texts | Lists
    encoding_format: Annotated[Literal["float", "base64"], or_else("float")] = "float"
    dimensions: int | None = None

    def inputs(self) -> list[str | Ids]:
        """The texts to embed, each text or token ids.

        Raises:
          PromptError: there are too many texts.
        """
        inputs = several(self.input)
        if len(inputs) > INPUTS:
            raise PromptError(f"one request has at most {INPUTS} inputs, this one {len(inputs)}")
        return inputs


class TokenizeBody(Body):
    """The body of `/tokenize`: a text, or the messages of a chat."""

    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: Annotated[bool, or_else(True)] = True

    @model_validator(mode="after")
    def _one(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either a prompt or messages")
        return self


class DetokenizeBody(Body):
    """The body of `/detokenize`."""

    tokens: Ids
