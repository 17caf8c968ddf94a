"""Text to token ids and back: `tokenizers` built from a GGUF's vocabulary or a `tokenizer.json`, and chat templates."""

from __future__ import annotations

import datetime
import functools
import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal, overload

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from jtile._errors import ModelError, PromptError

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4  # values of tokenizer.ggml.token_type
LONG = 2000  # characters of texts that are encoded without Python's lock; it takes milliseconds
_MARK = "\udfff"  # stands between characters that are encoded separately; no text has it
_HALF = "the text has half of a character, U+{:04X}"

_TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|DIGITS| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_TAIL}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASES = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+SHORT|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*SHORT|DIGITS"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_TAIL}"
)
_LLAMA3 = (_WORDS.replace("DIGITS", r"\p{N}{1,3}"),)
# value of `tokenizer.ggml.pre` -> the patterns that cut text, applied one after the other
PATTERNS = {
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": (_WORDS.replace("DIGITS", r"\p{N}"),),
    "tekken": (_CASES.replace("SHORT", "").replace("DIGITS", r"\p{N}"),),
    "gpt-4o": (_CASES.replace("SHORT", f"{_SHORT}?").replace("DIGITS", r"\p{N}{1,3}"),),
    "deepseek-v3": (
        r"\p{N}{1,3}",
        "[一-龥぀-ゟ゠-ヿ]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_TAIL}",
    ),
}
WHOLE_WORDS = (*(name for name in PATTERNS if PATTERNS[name] is _LLAMA3), "tekken")  # whole words go before merges


def _pre_tokenizer(name: str) -> pre_tokenizers.PreTokenizer:
    """How a byte-level vocabulary splits text before merging; `name` is `tokenizer.ggml.pre`."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if name == "smollm":  # every digit alone
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    if name in ("gpt-2", "default"):
        return byte_level
    if name in list(PATTERNS):  # a list, since the name comes from a file
        splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in PATTERNS[name]]
        return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    raise ModelError(
        f"unknown pre-tokenizer {name!r}; jtile knows smollm, gpt-2, {', '.join(PATTERNS)}, or give a folder with "
        "tokenizer.json"
    )


class Tokenizer:
    """Encodes and decodes text for one model.

    bos, eos: the texts of the begin and end tokens ("" when the model has none); add_bos: whether `encode` puts the
    begin token first; chat_template: the model's Jinja template, or None.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos: str = "",
        eos: str = "",
        add_bos: bool = False,
        chat_template: str | None = None,
    ):
        self._backend, self.bos, self.eos, self.chat_template = backend, bos, eos, chat_template
        self._bos_id = backend.token_to_id(bos) if add_bos and bos else None

    @classmethod
    def from_gguf(cls, meta: Mapping) -> Tokenizer:
        """Makes the tokenizer from the `tokenizer.*` metadata of a GGUF file.

        Args:
          meta: the metadata by name.
        Returns:
          A `Tokenizer`.
        Raises:
          ModelError: jtile does not know the tokenizer model or the pre-tokenizer.
        """
        tokens, kind = meta["tokenizer.ggml.tokens"], meta.get("tokenizer.ggml.model")
        types = meta.get("tokenizer.ggml.token_type") or [NORMAL] * len(tokens)
        if kind == "gpt2":
            backend, add_bos = _byte_level(tokens, meta), False
        elif kind == "llama":
            backend, add_bos = _sentencepiece(tokens, types, meta), True
        else:
            raise ModelError(
                f"unknown tokenizer {kind!r}; jtile reads GGUF vocabularies of the kinds 'gpt2' and 'llama'"
            )
        added = [
            AddedToken(text, special=kind == CONTROL, normalized=False)
            for text, kind in zip(tokens, types, strict=True)
            if kind in (CONTROL, USER_DEFINED)
        ]
        backend.add_special_tokens([token for token in added if token.special])
        backend.add_tokens([token for token in added if not token.special])

        def text(key: str) -> str:
            index = meta.get(f"tokenizer.ggml.{key}_token_id")
            return tokens[index] if index is not None and index < len(tokens) else ""

        return cls(
            backend,
            bos=text("bos"),
            eos=text("eos"),
            chat_template=meta.get("tokenizer.chat_template"),
            add_bos=bool(meta.get("tokenizer.ggml.add_bos_token", add_bos)),
        )

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer:
        """Makes the tokenizer from `tokenizer.json`, and from `tokenizer_config.json` and `chat_template.jinja` if they
        are there.

        Args:
          folder: where the files are.
        Returns:
          A `Tokenizer`.
        """
        try:
            backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
            path = folder / "tokenizer_config.json"
            config = dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}
        except Exception as error:  # the tokenizers package raises bare Exception
            raise ModelError(f"cannot read the tokenizer in {folder} ({error}); download it again") from error
        template = config.get("chat_template")
        if isinstance(template, list):  # several named templates
            template = next((t["template"] for t in template if t.get("name") == "default"), None)
        jinja = folder / "chat_template.jinja"
        template = jinja.read_text(encoding="utf-8") if jinja.exists() else template
        bos, eos = (_text(config.get(key)) for key in ("bos_token", "eos_token"))
        return cls(backend, bos=bos, eos=eos, chat_template=template)

    @property
    def vocab_size(self) -> int:
        return self._backend.get_vocab_size()

    def same_vocabulary(self, other: Tokenizer) -> bool:
        """Whether another tokenizer has the same tokens with the same ids.

        Args:
          other: the other one.
        Returns:
          True if each can read the ids of the other.
        """
        return self is other or self._vocabulary == other._vocabulary

    @functools.cached_property
    def _vocabulary(self) -> str:
        """A digest of the tokens with their ids, since there may be 150,000 of them."""
        return hashlib.sha256(repr(sorted(self._backend.get_vocab().items())).encode()).hexdigest()

    def to_json(self) -> str:
        """The tokenizer without its chat template.

        Returns:
          The text of a `tokenizer.json`.
        """
        return self._backend.to_str()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The token ids of a text.

        Args:
          text: the text; control tokens that are written in it are recognised.
          add_special_tokens: add the begin token, if the model has one.

        Returns:
          A list of ints.

        Raises:
          PromptError: the text contains lone surrogates (halves of characters), as JSON may contain them.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise PromptError(_HALF.format(ord(text[error.start]))) from error
        if len(text) < LONG:  # `encode` holds Python's lock, `encode_batch` does not, and begins later
            ids = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        else:
            ids = self._backend.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids
        if add_special_tokens and self._bos_id is not None and ids[:1] != [self._bos_id]:
            ids = [self._bos_id, *ids]
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of token ids.

        Args:
          ids: token ids.
          skip_special_tokens: leave control tokens out.

        Returns:
          The text; bytes that form no character become U+FFFD.
        """
        return self._backend.decode([int(i) for i in ids], skip_special_tokens=skip_special_tokens)

    def stream(self, *, skip_special_tokens: bool = True) -> TextStream:
        """A decoder for ids that arrive one by one.

        Args:
          skip_special_tokens: leave control tokens out of the text.
        Returns:
          A `TextStream`.
        """
        return TextStream(self._backend, skip_special_tokens)

    @overload
    def apply_chat_template(
        self,
        messages: Sequence[Mapping],
        *,
        add_generation_prompt: bool = True,
        tokenize: Literal[True] = True,
        tools: Sequence[Mapping] | None = None,
    ) -> list[int]: ...

    @overload
    def apply_chat_template(
        self,
        messages: Sequence[Mapping],
        *,
        add_generation_prompt: bool = True,
        tokenize: Literal[False],
        tools: Sequence[Mapping] | None = None,
    ) -> str: ...

    def apply_chat_template(
        self,
        messages: Sequence[Mapping],
        *,
        add_generation_prompt: bool = True,
        tokenize: bool = True,
        tools: Sequence[Mapping] | None = None,
    ) -> list[int] | str:
        """The prompt for a conversation. Control tokens of the model that stand in the messages or tools become
        ordinary text: only the template writes them.

        Args:
          messages: mappings with "role" ("system", "user", "assistant") and "content". The template adds the model's
            own system prompt when there is none, if it has one.
          add_generation_prompt: whether to end with the opening of the assistant's turn.
          tokenize: token ids if true, else the text.
          tools: functions that the model may call, {"type": "function", "function": {"name", "description",
            "parameters"}}, for a template that knows tools.
        Returns:
          The ids, or the text.
        Raises:
          PromptError: the model has no chat template, its template knows no tools, or it refuses the conversation.
        """
        if self.chat_template is None:
            raise PromptError("this model has no chat template; pass plain text or token ids")
        if tools and "tools" not in self.chat_template:
            raise PromptError("the model's chat template knows no tools; leave them out, or take another model")
        given = {"messages": [dict(m) for m in messages], "tools": [dict(tool) for tool in tools] if tools else None}
        text = _render(
            self.chat_template,
            **(_mapped(given, self._disarmed) if tokenize else given),
            bos_token=self.bos,
            eos_token=self.eos,
            add_generation_prompt=add_generation_prompt,
        )
        if not tokenize:
            return text
        return [i for piece in text.split(_MARK) for i in self.encode(piece, add_special_tokens=False)]

    @functools.cached_property
    def _control(self) -> re.Pattern[str] | None:
        """Any control token of the model; None if there is none."""
        added = self._backend.get_added_tokens_decoder().values()
        texts = sorted((token.content for token in added if token.special and len(token.content) > 1), key=len)
        return re.compile("|".join(map(re.escape, reversed(texts)))) if texts else None

    def _disarmed(self, text: str) -> str:
        """The text with a mark behind the first character of each control token in it, which breaks the token."""
        if _MARK in text:
            raise PromptError(_HALF.format(ord(_MARK)))
        while self._control is not None and self._control.search(text):  # again, since control tokens may overlap
            text = self._control.sub(lambda found: found[0][0] + _MARK + found[0][1:], text)
        return text


def _mapped(value, change: Callable[[str], str]):
    """A tree of mappings and lists with all its texts changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(name) if isinstance(name, str) else name: _mapped(item, change) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_mapped(item, change) for item in value]
    return value


class TextStream:
    """Turns a stream of token ids into text: only whole characters come out. The pieces join to the decoded text,
    except that where bytes behind a character form none, decoding everything at once turns that character into U+FFFD,
    too."""

    def __init__(self, backend: tokenizers.Tokenizer, skip_special_tokens: bool):
        self._backend, self._skip = backend, skip_special_tokens
        self._decoder = decoders.DecodeStream(skip_special_tokens=skip_special_tokens)
        self._open: list[int] = []  # the ids that have not become text yet

    def push(self, token: int) -> str:
        """The text that `token` completes; "" while a character is still open."""
        self._open.append(int(token))
        try:
            text = self._decoder.step(self._backend, int(token)) or ""
        except Exception:  # it raises where the new ids change the text before them
            text = self._backend.decode(self._open, skip_special_tokens=self._skip)
            self._decoder = decoders.DecodeStream(skip_special_tokens=self._skip)
            self._decoder.step(self._backend, int(token))  # the context of the next token
        if text:
            self._open.clear()
        return text


def _text(token) -> str:
    return "" if token is None else token["content"] if isinstance(token, Mapping) else token


def _byte_level(tokens: Sequence[str], meta: Mapping) -> tokenizers.Tokenizer:
    pre = meta.get("tokenizer.ggml.pre", "default")
    merges = [tuple(merge.split(" ", 1)) for merge in meta.get("tokenizer.ggml.merges") or ()]
    whole_words = pre in WHOLE_WORDS  # a piece that is a token is taken before any merge
    backend = tokenizers.Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, merges, ignore_merges=whole_words))
    backend.pre_tokenizer, backend.decoder = _pre_tokenizer(pre), decoders.ByteLevel()
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    return backend


def _sentencepiece(tokens: Sequence[str], types: Sequence[int], meta: Mapping) -> tokenizers.Tokenizer:
    """SentencePiece's BPE: the pair whose union has the best score merges first; unknown characters become bytes."""
    vocabulary = {token: index for index, token in enumerate(tokens)}
    scores = meta.get("tokenizer.ggml.scores") or [0.0] * len(tokens)
    merges = []
    for token, score, kind in zip(tokens, scores, types, strict=True):
        if kind in (NORMAL, USER_DEFINED):
            cuts = [(token[:i], token[i:]) for i in range(1, len(token))]
            merges += [
                (-score, vocabulary[a], vocabulary[b], a, b) for a, b in cuts if a in vocabulary and b in vocabulary
            ]
    unknown = tokens[meta.get("tokenizer.ggml.unknown_token_id", 0)]
    model = models.BPE(
        vocabulary, [m[3:] for m in sorted(merges)], unk_token=unknown, fuse_unk=True, byte_fallback=True
    )
    backend = tokenizers.Tokenizer(model)
    prefix = meta.get("tokenizer.ggml.add_space_prefix", True)
    steps = [normalizers.Prepend("▁")] if prefix else []
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    tail = [decoders.Strip(" ", 1, 0)] if prefix else []
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *tail])
    return backend


def _render(template: str, **variables) -> str:
    """Renders a model's Jinja template in a sandbox: the template comes from a downloaded file."""
    try:
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as error:
        raise ModelError("chat templates need jinja2; run: pip install jinja2") from error

    def refuse(message: str):
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    try:
        return environment.from_string(template).render(**variables)
    except TemplateError as error:
        raise PromptError(f"the model's chat template refuses this conversation: {error}") from error
    except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError) as error:
        raise PromptError(  # the parts of messages are not what the template takes
            f"the model's chat template fails at this conversation: {type(error).__name__}: {error}"
        ) from error
