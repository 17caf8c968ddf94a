"""What many requests leave in the host's memory, and what loading takes of it."""

import gc
import json
import math
import tracemalloc
import weakref
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from draws import thorough
from safetensors.numpy import save_file

import jtile.models
from jtile.models import mapped


def resident() -> int:
    """Bytes of this process that are in memory."""
    gc.collect()  # it is off while tests run
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


@pytest.mark.early
@pytest.mark.cpu
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="/proc is Linux's")
def test_memory_does_not_grow_with_requests(short):
    """Requests of several lengths, a thousand under --runslow: what they take grows by less than 2 KB a
    request, where their logits alone are 3 KB."""
    lm, rng = short("llama", 1), np.random.default_rng(0)
    count = 1000 if thorough() else 150

    def ask(n: int) -> None:
        for _ in range(n):
            ids = rng.integers(3, 256, int(rng.integers(2, 15)))
            for _token in lm.stream(ids, 3, eos=None, temperature=0.8, logprobs=True):
                pass

    ask(60)
    before = resident()
    ask(count)
    assert resident() - before < max(2048 * count, 4 << 20)


@pytest.mark.early
@pytest.mark.cpu
def test_loading_holds_no_more_than_the_largest_tensor_twice(tmp_path):
    """Beside the weights themselves, which on a CPU lie in the host's memory: read one by one from float32 files, and
    rounded. All of them together are six times the largest."""
    hidden, features, layers, largest = 128, 1280, 3, 4 * 2048 * 128
    config = dict(
        model_type="llama", num_hidden_layers=layers, hidden_size=hidden, intermediate_size=features, vocab_size=2048,
        num_attention_heads=4, tie_word_embeddings=True,
    )  # fmt: skip
    shapes = {"model.embed_tokens": (2048, hidden), "model.norm": (hidden,)}
    block = {f"self_attn.{name}_proj": (hidden, hidden) for name in "qkvo"}
    block |= {f"mlp.{name}_proj": (features, hidden) for name in ("gate", "up")}
    block |= {"mlp.down_proj": (hidden, features)}
    block |= dict.fromkeys(("input_layernorm", "post_attention_layernorm"), (hidden,))
    shapes |= {f"model.layers.{i}.{name}": shape for i in range(layers) for name, shape in block.items()}
    tensors = {f"{name}.weight": np.zeros(shape, np.float32) for name, shape in shapes.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    del tensors
    assert 4 * sum(map(math.prod, shapes.values())) > 6 * largest
    for dtype in ("bfloat16", "float32"):
        jtile.models.load(tmp_path, dtype=dtype)  # compiles
        gc.collect()
        tracemalloc.start()
        lm = jtile.models.load(tmp_path, dtype=dtype)
        held, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert lm.dtype == dtype and peak - held < 2 * largest


def test_few_copies_to_a_device_travel_at_a_time(monkeypatch):
    """The oldest of them are waited for, and their pages given back; what nobody holds any more is not kept alive."""
    file, released = mapped.TensorFile(Path("model.safetensors")), []
    monkeypatch.setattr(file, "release", lambda begin, size: released.append((begin, size)), raising=False)
    arrays = [jnp.full((4,), i) for i in range(6)]
    copies = mapped.Travelling()
    for i in range(len(arrays)):
        copies.add(arrays[i], file, 100 * i, 10)
        copies.wait(25)
        assert copies.bytes == 10 * min(i + 1, 2)
    assert released == [(0, 10), (100, 10), (200, 10), (300, 10)]
    arrays[4].delete()
    gone = weakref.ref(arrays.pop())
    assert gone() is None
    copies.wait(0)
    assert copies.bytes == 0 and released[4:] == [(400, 10), (500, 10)]
    copies.add(arrays[0], mapped.TensorFile(Path("other.safetensors")), 0, 10)  # nobody else has this file
    copies.wait(0)
