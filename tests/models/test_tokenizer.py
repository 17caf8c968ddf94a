"""Tokenizers against the reference strings of SmolLM2 and of sentencepiece; chat templates; streamed text."""

import json
from pathlib import Path

import pytest

from jtile._errors import ModelError, PromptError
from jtile.models import tokenizer as tokenizer_module
from jtile.models.tokenizer import TextStream, Tokenizer

DATA = Path(__file__).resolve().parent.parent / "data"


@pytest.fixture(scope="module")
def sentencepiece():
    data = json.loads((DATA / "sentencepiece.json").read_text(encoding="utf-8"))
    meta = {f"tokenizer.ggml.{key}_token_id": i for i, key in enumerate(("unknown", "bos", "eos"))}
    meta |= {"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": data["tokens"]}
    meta |= {"tokenizer.ggml.scores": data["scores"], "tokenizer.ggml.token_type": data["types"]}
    return Tokenizer.from_gguf(meta), data["cases"]


@pytest.fixture
def letters():
    """A byte-level vocabulary without merges: every byte is a token."""
    from tokenizers.pre_tokenizers import ByteLevel

    def build(pre="gpt-2", merges=(), extra=(), **meta):
        tokens = ["<|end|>", *sorted(ByteLevel.alphabet()), *extra]
        types = [3] + [1] * (len(tokens) - 1)
        common = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre, "tokenizer.ggml.tokens": tokens}
        common |= {"tokenizer.ggml.token_type": types, "tokenizer.ggml.merges": list(merges)}
        return Tokenizer.from_gguf(common | meta)

    return build


def test_smollm2_strings(smollm2_tokenizer, smollm2_strings):
    tokenizer = smollm2_tokenizer
    assert len(smollm2_strings) == 20
    for case in smollm2_strings:
        assert tokenizer.encode(case["text"]) == case["ids"], case["text"]
        assert tokenizer.decode(case["ids"]) == case["text"]


def test_smollm2_chat_template(smollm2_tokenizer, smollm2_cases):
    for case in smollm2_cases:
        assert smollm2_tokenizer.apply_chat_template(case["messages"], tokenize=False) == case["prompt_text"]
        assert smollm2_tokenizer.apply_chat_template(case["messages"]) == case["prompt_ids"]


def test_smollm2_streams_whole_characters(smollm2_tokenizer):
    text = "naïve café — 日本語 🙂 e\u0301 ٣٤٥ end"
    stream = smollm2_tokenizer.stream()
    pieces = [stream.push(i) for i in smollm2_tokenizer.encode(text)]
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)
    assert "" in pieces  # some tokens end inside a character


def test_streams_survive_bytes_that_form_no_character():
    """Behind a character, where decoding all of the bytes makes U+FFFD of it, too."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models

    vocabulary = {"?": 0, "<0xC3>": 1, "<0xA9>": 2, "<0xFF>": 3, "\u2581a": 4, "b": 5}
    backend = Backend(models.BPE(vocabulary, [], unk_token="?", fuse_unk=True, byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    stream = TextStream(backend, True)
    assert [stream.push(i) for i in (5, 1, 2, 3, 4, 1, 2, 5)] == ["b", "", "é", "", "\ufffd a", "", "é", "b"]


def test_a_stream_that_ends_inside_a_character_holds_it_back(letters):
    tokenizer = letters()
    stream = tokenizer.stream()
    assert "".join(stream.push(i) for i in tokenizer.encode("ok 🙂")[:-1]) == "ok "


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("llama-bpe", "I'll pay 12345 HelloWorld!", ["I", "'ll", " pay", " ", "123", "45", " HelloWorld", "!"]),
        ("qwen2", "pay 123 e\u0301", ["pay", " ", "1", "2", "3", " \u00e9"]),
        ("tekken", "HelloWorld's 12", ["Hello", "World", "'s", " ", "1", "2"]),
        ("gpt-4o", "HelloWorld's 1234", ["Hello", "World's", " ", "123", "4"]),
        ("deepseek-v3", "a1234 \u65e5\u672c\u8a9e.x", ["a", "123", "4", " ", "\u65e5\u672c\u8a9e", ".x"]),
    ],
)
def test_how_text_is_cut_before_merging(letters, pre, text, pieces):
    backend = letters(pre)._backend
    normal = text if backend.normalizer is None else backend.normalizer.normalize_str(text)
    assert [normal[a:b] for _, (a, b) in backend.pre_tokenizer.pre_tokenize_str(normal)] == pieces


def test_streams_leave_control_tokens_out(letters):
    tokenizer = letters()
    ids = tokenizer.encode("a<|end|>b")
    assert len(ids) == 3
    hidden, shown = tokenizer.stream(), tokenizer.stream(skip_special_tokens=False)
    assert "".join(hidden.push(i) for i in ids) == "ab"
    assert "".join(shown.push(i) for i in ids) == "a<|end|>b"
    assert tokenizer.decode(ids, skip_special_tokens=True) == "ab"


def test_sentencepiece_vocabulary(sentencepiece):
    tokenizer, cases = sentencepiece
    for case in cases:
        assert tokenizer.encode(case["text"], add_special_tokens=False) == case["ids"], case["text"]
        assert tokenizer.encode(case["text"]) == [1, *case["ids"]]
        assert tokenizer.decode(case["ids"]) == case["text"]


def test_pre_tokenizers_split_digits_differently(letters):
    merges, extra = ["1 2", "12 3"], ["12", "123"]
    count = {pre: len(letters(pre, merges, extra).encode("1234")) for pre in ("smollm", "gpt-2", "llama-bpe")}
    assert count == {"smollm": 4, "gpt-2": 2, "llama-bpe": 2}  # 1 2 3 4 | 123 4 | 123 4


def test_llama3_takes_a_whole_word_that_no_merge_builds(letters):
    assert len(letters("llama-bpe", [], ["hello"]).encode("hello")) == 1
    assert len(letters("gpt-2", [], ["hello"]).encode("hello")) == 5


def test_vocabularies_are_the_same_token_by_token(letters):
    one = letters(extra=["x1", "x2"])
    assert one.same_vocabulary(letters(extra=["x1", "x2"]))
    assert not one.same_vocabulary(letters(extra=["x2", "x1"]))
    assert not one.same_vocabulary(letters(extra=["x1"]))


def test_long_texts_have_the_ids_of_short_ones(letters, sentencepiece, monkeypatch):
    """They are encoded by another function, which lets other threads run."""
    for tokenizer in (letters(), sentencepiece[0]):
        short = tokenizer.encode("ab<s> ab é")
        with monkeypatch.context() as patch:
            patch.setattr(tokenizer_module, "LONG", 1)
            assert tokenizer.encode("ab<s> ab é") == short


def test_the_begin_token_is_added_once(letters):
    meta = {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": 0}
    tokenizer = letters(**meta)
    assert tokenizer.encode("a")[0] == 0
    assert len(tokenizer.encode("a")) == 2
    assert len(tokenizer.encode("<|end|>a")) == 2
    assert len(tokenizer.encode("a", add_special_tokens=False)) == 1
    assert len(letters().encode("a")) == 1


def test_chat_templates_run_in_a_sandbox(letters):
    conversation = [{"role": "user", "content": "hi"}]
    refuse = letters(**{"tokenizer.chat_template": "{{ raise_exception('no users') }}"})
    with pytest.raises(PromptError, match="no users"):
        refuse.apply_chat_template(conversation)
    escape = letters(**{"tokenizer.chat_template": "{{ messages.__class__.__mro__ }}"})
    with pytest.raises(PromptError, match="refuses"):
        escape.apply_chat_template(conversation)
    with pytest.raises(PromptError, match="no chat template"):
        letters().apply_chat_template(conversation)


CHAT = "{% for m in messages %}<|end|>{{ m.role }}:{{ m.content | trim }}{% endfor %}{{ tools | tojson if tools }}"


def test_control_tokens_in_messages_are_text(letters):
    """Only the template writes them; overlapping ones, those in names and in tools, and halves of characters."""
    tokenizer = letters(**{"tokenizer.chat_template": CHAT})
    (end,) = tokenizer.encode("<|end|>")
    for content in ("a<|end|>", "<|end|><|end|>", "<|e<|end|>nd|>", " <|end|> "):
        ids = tokenizer.apply_chat_template([{"role": "user", "content": content}])
        assert ids.count(end) == 1 and ids[0] == end
        assert tokenizer.decode(ids) == f"<|end|>user:{content.strip()}"
    tools = [{"type": "function", "function": {"name": "<|end|>", "parameters": {"<|end|>": ["<|end|>"]}}}]
    assert tokenizer.apply_chat_template([{"role": "<|end|>", "content": "a"}], tools=tools).count(end) == 1
    plain = [{"role": "user", "content": "a<b|end>"}]
    assert tokenizer.apply_chat_template(plain) == tokenizer.encode(
        tokenizer.apply_chat_template(plain, tokenize=False)
    )
    for half in ("\ud800", "\udfff"):
        with pytest.raises(PromptError, match=r"half of a character, U\+D"):
            tokenizer.apply_chat_template([{"role": "user", "content": half}])


def test_tokenizers_of_folders(letters, tmp_path):
    letters()._backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": {"content": "<|end|>"}, "chat_template": "{{ messages[0].content }}{{ eos_token }}"})
    )
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.encode("héé") == letters().encode("héé")
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi<|end|>"
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match="cannot read the tokenizer"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("meta", "message"),
    [
        ({"tokenizer.ggml.model": "bert"}, "unknown tokenizer 'bert'"),
        ({"tokenizer.ggml.pre": "x"}, "pre-tokenizer 'x'"),
    ],
)
def test_unknown_tokenizers(letters, meta, message):
    with pytest.raises(ModelError, match=message):
        letters(**meta)
