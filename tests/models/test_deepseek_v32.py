"""What DeepSeek-V3.2 has beside DeepSeek-V3: keys of an indexer in the cache, and attention to the keys it chooses. Its
values are in test_golden.py; in that model a token attends to 8 of up to 40."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.flax import save_file
from safetensors.numpy import load_file

import jtile as jt
import jtile.models
from jtile._errors import ModelError
from jtile.models import Decoder, latent, selection
from jtile.models import cache as kv
from jtile.models.deepseek import DeepseekConfig
from jtile.models.mesh import Devices
from jtile.ops import QuantizedTensor
from jtile.testing.evaluate import evaluated

pytestmark = pytest.mark.usefixtures("by_numpy")


@pytest.fixture(scope="module")
def golden(outputs):
    return outputs("deepseek_v32")


@pytest.fixture(scope="module")
def lm(model):
    return model("deepseek_v32")


@pytest.fixture(scope="module")
def first_layer(short):
    return short("deepseek_v32", 1).model


@pytest.fixture
def config(data):
    return json.loads((data / "deepseek_v32" / "config_hub.json").read_text())


def test_the_cache_holds_latent_vectors_and_keys_of_the_indexer(lm, golden):
    _, entries = jax.eval_shape(lm.model.prefill, golden["input_ids"].astype(np.int32))
    assert [[x.shape for x in entry] for entry in entries] == 2 * [[(2, 24, 24 + 8), (2, 24, 16)]]
    lay = lambda entries: kv.from_prefill(entries, jnp.zeros(2, jnp.int32), kv.Layout(32, "int8", page=8))
    made = jax.eval_shape(lay, entries)
    assert [x.shape for x in made.entries[0].arrays] == [(8, 8, 32), (8, 8, 16)]
    assert [x.shape for x in made.entries[0].scales] == [(8, 8), (8, 8)]


@pytest.mark.parametrize(
    ("layout", "near"),
    [(kv.Layout(32, page=8), 1e-5), (kv.Layout(32, "int8", page=8), 0.02), (kv.Layout(32, "float8_e4m3fn"), 0.2)],
    ids=["pages", "int8 in pages", "float8"],
)
def test_steps_go_on_behind_rows_of_any_length(first_layer, golden, layout, near):
    """Several tokens in a step and one, behind rows of which one is shorter than what is chosen. A cache of 8 bits now
    and then changes which keys are chosen, and with them the logits of a token."""
    ids, lengths = golden["input_ids"].astype(np.int32), np.array([17, 6], np.int32)

    @jax.jit
    def run(ids, new):
        hidden, entries = first_layer.prefill(ids)
        cache = kv.from_prefill([[x[:, :20] for x in e] for e in entries], jnp.asarray(lengths), layout)
        first, cache = first_layer.step(new[:, :3], cache)
        return first, first_layer.step(new[:, 3], cache)[0], first_layer.head(hidden)

    tokens_of = lambda x: np.stack([row[n : n + 4] for row, n in zip(x, lengths, strict=True)])
    first, last, logits = run(ids, tokens_of(ids))
    off = np.abs(np.concatenate([first, last[:, None]], axis=1) - tokens_of(logits))
    assert (off.max() if layout.dtype is None else np.median(off)) < near


def test_prompts_and_steps_in_parts(lm, golden, monkeypatch):
    """With room for the scores of seven queries, and of one row."""
    for module in (latent, selection):
        monkeypatch.setattr(module, "LARGEST", 7 * 2 * 128)
    monkeypatch.setattr(selection, "LARGEST", 24)
    ids = golden["input_ids"].astype(np.int32)

    def run(ids):
        hidden, entries = lm.model.prefill(ids)
        cache = kv.from_prefill([[x[:, :20] for x in e] for e in entries], jnp.full(2, 20, jnp.int32), kv.Layout(24))
        return lm.model.head(hidden), lm.model.step(ids[:, 20], cache)[0]

    logits, after = jax.jit(run)(ids)
    assert np.abs(logits - golden["logits"]).max() < 1e-4
    assert np.abs(after - golden["logits"][:, 20]).max() < 1e-4


def test_up_to_as_many_tokens_as_are_chosen_all_are(first_layer):
    """No scores are computed then, neither in a prompt nor in a step."""
    ids = jax.ShapeDtypeStruct((1, 8), jnp.int32)
    prefill = jax.make_jaxpr(lambda ids: first_layer.prefill(ids))
    assert "index_tiles" not in str(prefill(ids))
    assert "index_tiles" in str(prefill(jax.ShapeDtypeStruct((1, 9), jnp.int32)))
    cache = lambda slots: jax.eval_shape(
        lambda ids: kv.from_prefill(first_layer.prefill(ids)[1], jnp.array([7]), kv.Layout(slots)), ids
    )
    step = jax.make_jaxpr(lambda tokens, cache: first_layer.step(tokens, cache))
    assert "index_tiles" not in str(step(np.zeros(1, np.int32), cache(8)))
    assert "index_tiles" in str(step(np.zeros(1, np.int32), cache(9)))


def test_matrices_of_8_bits_with_a_scale_a_block(tmp_path, data, config, golden):
    """The indexer's as the others: its keys are projected with what goes into queries and latent vectors."""
    stored, rounded = {}, {}
    for name, x in load_file(data / "deepseek_v32" / "model.safetensors").items():
        if x.ndim == 1 or not any(part in name for part in ("_proj", "wq_b", "wk")) or "weights_proj" in name:
            stored[name] = rounded[name] = jnp.asarray(x)
            continue
        scale = np.full([-(-n // 128) for n in x.shape], np.abs(x).max() / 448, np.float32)
        small = jnp.asarray(x / scale[0, 0]).astype(jnp.float8_e4m3fn)
        stored |= {name: small, f"{name}_scale_inv": jnp.asarray(scale)}
        rounded[name] = small.astype(jnp.float32) * scale[0, 0]
    quantised = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"}
    quantised["activation_scheme"] = "dynamic"
    logits, config = [], config | {"num_hidden_layers": 1}
    for name, tensors, more in (("8", stored, {"quantization_config": quantised}), ("32", rounded, {})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config | more))
        save_file(tensors, tmp_path / name / "model.safetensors")
        lm = jtile.models.load(tmp_path / name, dtype="float32")
        held = [lm.model.blocks[0].attention.down, lm.model.blocks[0].attention.indexer.query]
        assert all(isinstance(w.get_value(), QuantizedTensor) == (name == "8") for w in held)
        logits.append(np.asarray(lm.logits(golden["input_ids"][0])))
    assert (logits[0].argmax(-1) == logits[1].argmax(-1)).mean() > 0.9


def test_gradients_do_not_go_through_the_choice(first_layer, golden):
    ids = golden["input_ids"][:, :12].astype(np.int32)
    graph, state = nnx.split(first_layer)
    gradient = evaluated(jax.grad(lambda state: nnx.merge(graph, state).loss(ids)))(state)
    sizes = {"/".join(map(str, path)): float(np.abs(leaf[...]).max()) for path, leaf in nnx.to_flat_state(gradient)}
    assert all((size == 0) == ("indexer" in name) for name, size in sizes.items() if "attention" in name)
    assert max(sizes.values()) < 20


@pytest.mark.slow
def test_the_published_sizes_compile_for_hopper(config):
    """Two layers of DeepSeek-V3.2, without its weights: a prompt of 8192 tokens and a step behind it."""
    sizes = {
        "vocab_size": 129280, "hidden_size": 7168, "num_hidden_layers": 2, "num_attention_heads": 128,
        "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "kv_lora_rank": 512, "q_lora_rank": 1536,
        "n_routed_experts": 256, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "intermediate_size": 18432,
        "moe_intermediate_size": 2048, "index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048,
    }  # fmt: skip
    parsed = DeepseekConfig.from_hf(config | sizes)
    blank = lambda name, shape: jnp.zeros(shape, jnp.bfloat16)
    graph, state = nnx.split(nnx.eval_shape(lambda: Decoder(parsed, blank, tied=False, dtype="bfloat16")))
    prefill = jax.jit(lambda s, ids: nnx.merge(graph, s).prefill(ids))
    step = jax.jit(lambda s, tokens, cache: nnx.merge(graph, s).step(tokens, cache))
    ids, tokens = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((1, 8192), (1,)))
    cache = jax.eval_shape(
        lambda s, ids, lengths: kv.from_prefill(prefill(s, ids)[1], lengths, kv.Layout(8448)), state, ids, tokens
    )
    with jt.config(arch="sm_90"):
        for text in (
            prefill.trace(state, ids).lower(lowering_platforms=("cuda",)).as_text(),
            step.trace(state, tokens, cache).lower(lowering_platforms=("cuda",)).as_text(),
        ):
            assert all(f"jtile_{name}" in text for name in ("index_tiles", "selected_latents"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q_lora_rank": None}, "lacks 'q_lora_rank'"),
        ({"index_head_dim": 8}, "rotates 8 features of a head"),
        ({"index_topk": 0}, "'index_topk' = 0"),
        ({"mlp_layer_types": ["sparse", "sparse"]}, "mlp_layer_types are not 1 times 'dense'"),
    ],
)
def test_configurations_that_it_cannot_run(config, change, message):
    with pytest.raises(ModelError, match=message):
        DeepseekConfig.from_hf(config | change)


def test_tokens_of_a_row_stay_on_one_device(config):
    mesh = jax.make_mesh((1,), ("x",))
    with pytest.raises(ModelError, match="an indexer chooses the tokens"):
        Devices.of(mesh, {"context": "x"}, DeepseekConfig.from_hf(config))
