"""The terminal side of generation, for `jtile generate`: text to standard output, the rest to standard error."""

from __future__ import annotations

import json as json_module
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax

from jtile._errors import JtileError, ModelError, PromptError

from .generate import Generation, LanguageModel, Stats
from .load import load, load_over
from .speculation import NGram

SUCCESS, FAILURE, INTERRUPTED = 0, 1, 130


def run_generate(
    prompt: str | None = None,
    model: str | None = None,
    prompt_ids: str | Sequence[int] | None = None,
    json: bool = False,
    stats: bool = False,
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
    presence_penalty: float | None = None,
    frequency_penalty: float | None = None,
    logit_bias: str | Mapping[int, float] | None = None,
    seed: int = 0,
    draft: str | None = None,
    draft_tokens: int = 4,
    chat: bool = True,
    system: str | None = None,
    ignore_eos: bool = False,
    cache_dir: str = "",
    dtype: str | None = None,
    cache_dtype: str | None = None,
    adapter: str | None = None,
    devices: str | int | None = None,
) -> int:
    """Generates text in the terminal and returns the exit code: 0, 1 after an error (one sentence), 130 after Ctrl-C.

    Args:
      prompt: the user's message (or plain text with `chat=False`). prompt_ids: token ids instead ("1,2,3" or ints).
      model: a GGUF file or a folder; None for the installed SmolLM2.
      json: print one JSON object (ids, text, tokens a second, ...) instead of streaming the text.
      stats: print prefill and decode tokens a second to standard error.
      chat: wrap the prompt in the model's chat template, if it has one; `system` is its system prompt.
      temperature, ..., seed: see `sampling.Sampling`; a logit_bias may be text, "id=number,id=number".
      draft: "ngram", or a file or folder as `model`, of a smaller model with the same vocabulary, for speculative
        decoding with `draft_tokens` at a time.
      cache_dir: folder where XLA keeps compiled programs, so that a second start takes no compilation; "" for none.
      ignore_eos: go on to `max_new_tokens` past the model's end tokens.
      dtype, cache_dtype: of activations, and of the key-value cache, see `load`.
      adapter: a folder with a low-rank adapter of the model, see `load`.
      devices: how many share the model, see `mesh.devices_at_hand`.
    """
    keep_programs(cache_dir)
    try:
        lm = load_over(devices, model, dtype=dtype, cache_dtype=cache_dtype, adapter=adapter)
        ids = _ids(lm, prompt, prompt_ids, chat, system)
        generation = lm.stream(
            ids,
            max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            logit_bias=_parse_biases(logit_bias) if isinstance(logit_bias, str) else logit_bias,
            seed=seed,
            draft=NGram() if draft == "ngram" else draft and load(draft),
            draft_tokens=draft_tokens,
            eos=None if ignore_eos else "model",
        )
        return _emit(lm, generation, ids, json, stats)
    except JtileError as error:
        print(f"jtile: {error}", file=sys.stderr)
        return FAILURE
    except BrokenPipeError:  # the reader of our output went away, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILURE
    except KeyboardInterrupt:  # before the first token
        print(file=sys.stderr)
        return INTERRUPTED


def keep_programs(cache_dir: str) -> None:
    """Lets XLA keep compiled programs below `cache_dir`, unless it keeps them elsewhere already; "" for no folder."""
    if cache_dir and jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", os.path.join(cache_dir, "xla"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def run_serve(
    model: str | None = None,
    host: str = "127.0.0.1",
    port: int = 8000,
    name: str | None = None,
    api_keys: Sequence[str] = (),
    origins: Sequence[str] = (),
    requests_per_minute: int | None = None,
    cache_dir: str = "",
    dtype: str | None = None,
    cache_dtype: str | None = None,
    page_size: int | None = None,
    adapters: Sequence[str] = (),
    devices: str | int | None = None,
    **engine,
) -> int:
    """Answers OpenAI's HTTP requests until SIGTERM or Ctrl-C; returns the exit code, 0, or 1 after an error.

    Args:
      model, dtype, cache_dtype, page_size: as in `load`. name: what requests call the model; by default the name of its
        file. host, port: where to listen. api_keys, origins, requests_per_minute: as in `serving.http.make_app`.
        adapters: "name=folder" of each low-rank adapter that requests may name as their model.
      devices: how many share the model, see `mesh.devices_at_hand`.
      cache_dir: as for `run_generate`. engine: options of `Engine`.
    """
    try:
        from .serving.http.serve import serve
    except ModuleNotFoundError as error:
        if (error.name or "jtile").startswith("jtile"):
            raise
        print(f"jtile: serving needs {error.name}: pip install 'jtile[serve]'", file=sys.stderr)
        return FAILURE
    folders = dict(text.split("=", 1) if "=" in text else (Path(text).name, text) for text in adapters)
    if len(folders) < len(adapters):
        print(f"jtile: two adapters have one name: {', '.join(adapters)}", file=sys.stderr)
        return FAILURE
    engine = {**engine, "adapters": folders}
    load_options = {"devices": devices, "dtype": dtype, "cache_dtype": cache_dtype, "page_size": page_size}
    return serve(model, host, port, name, api_keys, origins, requests_per_minute, cache_dir, load_options, engine)


def _ids(lm: LanguageModel, prompt: str | None, prompt_ids, chat: bool, system: str | None) -> list[int]:
    template = lm.tokenizer.chat_template if lm.tokenizer and chat and prompt is not None else None
    if system is not None and template is None:
        raise PromptError("a system prompt is part of a chat: --system takes a prompt, a chat template, and no --raw")
    if prompt_ids is not None and prompt is None:
        return _parse_ids(prompt_ids) if isinstance(prompt_ids, str) else [int(i) for i in prompt_ids]
    if prompt is None or prompt_ids is not None:
        raise PromptError("give either a prompt or --prompt-ids")
    if lm.tokenizer is None:
        raise ModelError(f"{lm.source} has no tokenizer; pass --prompt-ids")
    if template is None:
        return lm.tokenizer.encode(prompt)
    messages = [{"role": "system", "content": system}] if system else []
    return lm.tokenizer.apply_chat_template([*messages, {"role": "user", "content": prompt}])


def _parse_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")] if text.strip() else []
    except ValueError as error:
        raise PromptError(f"--prompt-ids takes integers with commas between them, as 1,2,3; got {text!r}") from error


def _parse_biases(text: str) -> dict[int, float]:
    try:
        pairs = [part.split("=") for part in text.split(",")] if text.strip() else []
        return {int(token): float(bias) for token, bias in pairs}
    except ValueError as error:
        raise PromptError(f"--logit-bias takes token ids with numbers, as 12=-5,7=2.5; got {text!r}") from error


def _emit(lm: LanguageModel, generation: Generation, prompt_ids: list[int], json: bool, stats: bool) -> int:
    """Streams the tokens; when Ctrl-C comes, what has been made so far is kept."""
    text = lm.tokenizer.stream() if lm.tokenizer else None
    ids, pieces, code = [], [], SUCCESS
    try:
        for token in generation:
            ids.append(token)
            piece = text.push(token) if text else f"{token} "
            pieces.append(piece)
            if not json and piece:
                write(piece)
    except KeyboardInterrupt:
        code = INTERRUPTED
    if json:
        finish = "interrupted" if code else "eos" if ids and ids[-1] in lm.eos_ids else "length"
        write(json_module.dumps(_record(lm, generation.stats, prompt_ids, ids, "".join(pieces), finish)))
    write("\n")
    if stats:
        print(_summary(generation.stats), file=sys.stderr)
    return code


def write(text: str) -> None:
    """Prints at once, also to a terminal that lacks some of the characters."""
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, errors="replace").decode(encoding))
    sys.stdout.flush()


def _record(lm: LanguageModel, stats: Stats, prompt_ids: list[int], ids: list[int], text: str, finish: str) -> dict:
    return {
        "model": lm.source,
        "prompt_ids": prompt_ids,
        "ids": ids,
        "text": text,
        "finish": finish,
        "prompt_tokens": stats.prompt_tokens,
        "new_tokens": stats.new_tokens,
        "drafted_tokens": stats.drafted_tokens,
        "accepted_tokens": stats.accepted_tokens,
        "tokens_per_second": round(stats.decode_rate, 2),
        "prefill_tokens_per_second": round(stats.prefill_rate, 2),
        "compile_seconds": round(stats.compile_seconds, 3),
    }


def _summary(stats: Stats) -> str:
    drafts = f", {stats.accepted_tokens} of {stats.drafted_tokens} drafts kept" if stats.drafted_tokens else ""
    return (
        f"prefill {stats.prompt_tokens} tokens, {stats.prefill_rate:.1f} tokens/s; "
        f"decode {stats.new_tokens} tokens, {stats.decode_rate:.1f} tokens/s{drafts}; "
        f"compile {stats.compile_seconds:.2f} s"
    )
