"""Models for the tests: the tiny ones of tests/data, the Llama as a GGUF too, and SmolLM2 if it is installed."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import stateless
from safetensors.numpy import load_file

import jtile.models
from jtile._errors import ModelError
from jtile.models import Decoder, LanguageModel, experts, gguf_names
from jtile.models.folder import open_folder
from jtile.models.gguf_file import open_gguf
from jtile.models.load import default_model

DATA = Path(__file__).resolve().parent.parent / "data"
TINY = DATA / "llama"
HEADS, KV_HEADS, LAYERS, VOCAB = 4, 2, 3, 256


@pytest.fixture(scope="session")
def data() -> Path:
    return DATA


@pytest.fixture(scope="session")
def tiny_folder() -> Path:
    return TINY


@pytest.fixture(scope="session")
def outputs() -> Callable[[str], dict[str, np.ndarray]]:
    """Inputs and outputs of the tiny model of a name, by transformers in float32."""
    return functools.cache(lambda name: dict(np.load(DATA / name / "io.npz")))


@pytest.fixture(scope="session")
def golden(outputs) -> dict[str, np.ndarray]:
    return outputs("llama")


@pytest.fixture(scope="session")
def model() -> Callable[[str], LanguageModel]:
    """The tiny model of a name."""
    return functools.cache(lambda name: jtile.models.load(DATA / name))


@pytest.fixture(scope="session")
def tiny(model):
    return model("llama")


@pytest.fixture(scope="session")
def short():
    """short(name, layers, page_size=None, cache_dtype=None, noise=0, vocab=None): the first layers of a tiny model,
    which compile in less time than all; the matrices disturbed by `noise` of their size, the tables of the vocabulary
    cut to `vocab` rows, or padded."""

    def make(name: str, layers: int, noise: float = 0.0, vocab: int | None = None, **options) -> LanguageModel:
        checkpoint, rng = open_folder(DATA / name), np.random.default_rng(0)
        whole = checkpoint.config.vocab_size
        config = dataclasses.replace(checkpoint.config, num_layers=layers, vocab_size=vocab or whole)

        def weight(tensor, shape):
            if vocab and shape[0] == vocab:
                x = np.asarray(checkpoint.weight(tensor, (whole, *shape[1:])))
                return np.resize(x, shape)  # padding of any numbers
            x = checkpoint.weight(tensor, shape)
            return x if len(shape) < 2 or not noise else (x * (1 + noise * rng.normal(size=shape))).astype(x.dtype)

        return LanguageModel(Decoder(config, weight, checkpoint.tied), source=f"short {name}", **options)

    return make


@pytest.fixture
def chosen_experts(monkeypatch):
    """chosen_experts(lm, ids): the experts of every token, ascending, int [mixtures, batch, length, k]."""

    def run(lm, ids):
        found, mixture = [], experts.mixture

        def recorded(x, chosen, *rest):
            found.append(chosen)
            return mixture(x, chosen, *rest)

        def experts_of(model, ids):
            model.hidden_states(ids)
            return list(found)

        monkeypatch.setattr(experts, "mixture", recorded)
        return np.sort(np.stack([x.reshape(*ids.shape, -1) for x in stateless.run(experts_of, lm.model, ids)]))

    return run


@pytest.fixture(scope="session")
def smollm2_path() -> str:
    try:
        return str(default_model())
    except ModelError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def smollm2(smollm2_path):
    return jtile.models.load(smollm2_path, dtype="float32")  # everywhere: its tokens are those of float32


@pytest.fixture(scope="session", params=["float32", "rows in integers"])
def either_smollm2(request, smollm2_path):
    """With float32 activations, and with what CPUs do by default."""
    if request.param == "float32":
        return request.getfixturevalue("smollm2")
    if "int16 products" not in jtile.target().features:
        pytest.skip("this machine does not multiply integers of 16 bits")
    return jtile.models.load(smollm2_path)


@pytest.fixture(scope="session")
def smollm2_tokenizer(smollm2_path):
    return open_gguf(smollm2_path).tokenizer


@pytest.fixture(scope="session")
def smollm2_cases():
    return json.loads((DATA / "smollm2.json").read_text(encoding="utf-8"))["prompts"]


@pytest.fixture(scope="session")
def smollm2_strings():
    return json.loads((DATA / "smollm2_tok.json").read_text(encoding="utf-8"))


def _permuted(rows: np.ndarray, heads: int) -> np.ndarray:
    """Query and key rows in the order of GGUF: the two halves of each head interleaved."""
    return rows.reshape(heads, 2, -1, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


@pytest.fixture(scope="session")
def write_gguf():
    """write_gguf(path, kind="F32", rounded=(), architecture="llama", drop=(), **metadata): the tiny Llama as GGUF.

    `kind` is the GGUF type of the matrices, `rounded` the types through which their values went before; `drop` names
    tensors to leave out."""

    def write(path: Path, kind: str = "F32", rounded=(), architecture: str = "llama", drop=(), **metadata) -> Path:
        writer = gguf.GGUFWriter(str(path), architecture)
        _metadata(writer)
        for key, value in metadata.items():
            writer.add_string(key.replace("__", "."), value)
        quant = gguf.GGMLQuantizationType[kind]
        for name, tensor in _tensors().items():
            if name in drop:
                continue
            if tensor.ndim == 2:
                for step in (gguf.GGMLQuantizationType[kind] for kind in rounded):
                    tensor = gguf.dequantize(gguf.quantize(tensor, step), step)
                writer.add_tensor(name, gguf.quantize(tensor, quant), raw_dtype=quant)
            else:
                writer.add_tensor(name, tensor.astype(np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


def _metadata(writer) -> None:
    writer.add_block_count(LAYERS)
    writer.add_context_length(512)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(160)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(500000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(VOCAB)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    letters = sorted(_byte_alphabet())
    writer.add_token_list(["<|endoftext|>", *letters[: VOCAB - 1]])
    writer.add_token_types([3] + [1] * (VOCAB - 1))
    writer.add_token_merges([])
    writer.add_eos_token_id(2)


def _byte_alphabet() -> list[str]:
    from tokenizers.pre_tokenizers import ByteLevel

    return ByteLevel.alphabet()


def _tensors() -> dict[str, np.ndarray]:
    names = {hf: name for name, hf in gguf_names.TOP_NAMES.items()}
    names |= {
        f"model.layers.{i}.{hf}.weight": f"blk.{i}.{name}.weight"
        for i in range(LAYERS)
        for name, hf in gguf_names.BLOCK_NAMES.items()
    }
    tensors = {names[hf]: tensor for hf, tensor in load_file(TINY / "model.safetensors").items()}
    for i in range(LAYERS):
        for name, heads in ((f"blk.{i}.attn_q.weight", HEADS), (f"blk.{i}.attn_k.weight", KV_HEADS)):
            tensors[name] = _permuted(tensors[name], heads)
    return tensors | {"rope_freqs.weight": _llama3_factors()}


def _llama3_factors() -> np.ndarray:
    """What a converter stores for rope type llama3: factor 8, low 1, high 4, original length 64, theta 500000."""
    wavelengths = 2 * np.pi * 500000.0 ** (np.arange(0, 16, 2) / 16)
    smooth = (64 / wavelengths - 1) / (4 - 1)
    middle = 1 / ((1 - smooth) / 8 + smooth)
    return np.where(wavelengths > 64, 8.0, np.where(wavelengths < 16, 1.0, middle)).astype(np.float32)


@pytest.fixture(autouse=True)
def optimized_if_large(request):
    """A model of real size runs longer than it compiles."""
    if {"smollm2", "smollm2_path"} & set(request.fixturenames):
        request.getfixturevalue("optimized")


@pytest.fixture(autouse=True)
def eager_calls_by_numpy(by_numpy):
    """What loading and references call outside of jit: see `tests/support/eager_calls.py`."""
