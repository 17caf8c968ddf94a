"""DeepSeek-V3: routing as transformers does it, variants against NumPy, 8-bit checkpoints, gradients, refusals.

Logits, hidden states and greedy tokens of the golden model are in test_golden.py.
"""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from deepseek_reference import forward
from flax import nnx
from safetensors.flax import save_file as save_flax
from safetensors.numpy import load_file, save_file
from stateless import run

import jtile as jt
import jtile.models
from jtile._errors import ModelError
from jtile.models import cache as kv
from jtile.models import lora
from jtile.models.decoder import Decoder
from jtile.models.deepseek import DeepseekConfig
from jtile.models.rope import Rope, RopeScaling
from jtile.testing.evaluate import evaluated

pytestmark = pytest.mark.usefixtures("by_numpy")

TOLERANCE = 1e-4
YARN = {
    "type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "beta_fast": 4, "beta_slow": 1,
    "mscale": 0.7, "mscale_all_dim": 1.0,
}  # fmt: skip


@pytest.fixture(scope="module")
def golden(outputs):
    return outputs("deepseek_v3")


@pytest.fixture(scope="module")
def lm(model):
    return model("deepseek_v3")


@pytest.fixture(scope="module")
def folder(data):
    return data / "deepseek_v3"


@pytest.fixture
def config(folder):
    return json.loads((folder / "config_hub.json").read_text())


@pytest.fixture
def tensors(folder):
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v32"])
def test_the_router_chooses_the_experts_of_transformers(model, outputs, chosen_experts, name):
    golden = outputs(name)
    assert np.array_equal(chosen_experts(model(name), golden["input_ids"]), golden["router_topk"])


def test_the_reference_gives_the_golden_logits(config, tensors, golden):
    logits = forward(config, tensors, golden["input_ids"][1])
    assert np.abs(logits - golden["logits"][1]).max() < TOLERANCE


def test_the_cache_holds_latent_vectors(lm, golden):
    _, entries = jax.eval_shape(lm.model.prefill, golden["input_ids"].astype(np.int32))
    assert [[x.shape for x in entry] for entry in entries] == 3 * [[(2, 24, 24 + 8)]]


def without_query_rank(config, tensors):
    """The same with one projection of the queries, of full rank."""
    for i in range(3):
        p = f"model.layers.{i}.self_attn.q"
        a, norm, b = (tensors.pop(f"{p}_{name}.weight") for name in ("a_proj", "a_layernorm", "b_proj"))
        tensors[f"{p}_proj.weight"] = b @ (norm[:, None] * a)
    return config | {"q_lora_rank": None}


def without_shared_experts(config, tensors):
    for name in [name for name in tensors if "shared_experts" in name]:
        del tensors[name]
    return config | {"n_shared_experts": None}


VARIANTS = {
    "yarn": lambda c, _: c | {"rope_scaling": YARN},
    "yarn in transformers 5": lambda c, _: (
        c | {"rope_parameters": YARN | {"rope_theta": 10000.0}, "rope_scaling": YARN}
    ),
    "halves": lambda c, _: c | {"rope_interleave": False},
    "no query rank": without_query_rank,
    "no shared experts": without_shared_experts,
    "weights not normalised": lambda c, _: c | {"norm_topk_prob": False},
    "one group": lambda c, _: c | {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 2},
    "extra layers": lambda c, _: c | {"num_nextn_predict_layers": 1},
}
OF_ATTENTION = ("yarn", "halves", "no query rank")  # a step is other code than a prompt in these


@pytest.mark.parametrize("name", VARIANTS)
def test_variants(tmp_path, config, tensors, golden, name):
    config = VARIANTS[name](config, tensors)
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({name: np.ascontiguousarray(x) for name, x in tensors.items()}, tmp_path / "model.safetensors")
    lm, ids = jtile.models.load(tmp_path), golden["input_ids"][0]
    expected = forward(config, tensors, ids)
    assert np.abs(run(lambda m, x: m(x), lm.model, ids[None])[0] - expected).max() < TOLERANCE
    assert name == "extra layers" or np.abs(expected - golden["logits"][0]).max() > 1e-2
    if name not in OF_ATTENTION:
        return
    made = lm.generate(ids, 6, eos=None).tolist()  # through the cache, with the expansion absorbed
    whole = forward(config, tensors, np.array(ids.tolist() + made))[len(ids) - 1 : -1]
    top, second = np.sort(whole, axis=1)[:, [-1, -2]].T
    assert (top - second).min() > 1e-3
    assert whole.argmax(1).tolist() == made


def test_sampling_and_ragged_rows(lm, golden):
    rows = [golden["input_ids"][0, :7].tolist(), golden["input_ids"][1].tolist()]
    run = lambda *t: lm.generate(rows, 5, temperature=[*t], top_k=20, top_p=0.9, seed=3, eos=None).tolist()
    found, turned = run(0.8, 0.0), run(0.0, 0.8)  # one program for both
    assert found == run(0.8, 0.0)
    assert found[1] == golden["greedy"][1, :5].tolist()
    assert (found[0], turned[1]) != (turned[0], found[1])


def test_bfloat16(tmp_path, folder, golden):
    tensors = {n: jnp.asarray(x).astype(jnp.bfloat16) for n, x in load_file(folder / "model.safetensors").items()}
    save_flax(tensors, tmp_path / "model.safetensors")
    shutil.copy(folder / "config_hub.json", tmp_path / "config.json")
    lm, ids = jtile.models.load(tmp_path), golden["input_ids"]
    _, entries = jax.eval_shape(lm.model.prefill, ids.astype(np.int32))
    assert entries[0][0].dtype == jnp.bfloat16
    logits = np.asarray(lm.logits(ids))
    assert (
        logits.argmax(-1) == golden["argmax"]
    ).mean() > 0.9  # transformers in bfloat16: 0.958; a flipped expert costs 4
    begin = len(ids[0]) - 6
    made = lm.generate(ids[0, :begin], 6, eos=None).tolist()
    same = np.concatenate([[[*ids[0, :begin], *made]], ids[1:]])  # of the same shape
    again = np.asarray(lm.logits(same))[0, begin - 1 : -1]
    taken = np.take_along_axis(again, np.array(made)[:, None], axis=1)[:, 0]
    assert (again.max(-1) - taken).max() < 0.3  # the two forms of attention round differently


def in_blocks(tensors, side: int):
    """float8_e4m3fn with a scale a block for the matrices that DeepSeek publishes so, and what that rounds them to."""
    stored, rounded = {}, dict(tensors)
    for name, x in tensors.items():
        if "_proj" not in name:
            stored[name] = jnp.asarray(x)
            continue
        rows, columns = (-(-n // side) for n in x.shape)
        scales = np.empty((rows, columns), np.float32)
        small = np.empty(x.shape, jnp.float8_e4m3fn)
        rounded[name] = np.empty_like(x)
        for i, j in np.ndindex(rows, columns):
            at = np.s_[i * side : (i + 1) * side, j * side : (j + 1) * side]
            scales[i, j] = np.abs(x[at]).max() / 448
            small[at] = (x[at] / scales[i, j]).astype(jnp.float8_e4m3fn)
            rounded[name][at] = small[at].astype(np.float32) * scales[i, j]
        stored |= {name: jnp.asarray(small), f"{name}_scale_inv": jnp.asarray(scales)}
    return stored, rounded


def test_8_bit_checkpoints_with_a_scale_a_block(tmp_path, config, tensors, golden):
    stored, rounded = in_blocks(tensors, 48)
    quantised = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [48, 48], "activation_scheme": "dynamic"}
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": quantised}))
    save_flax(stored, tmp_path / "model.safetensors")
    lm = jtile.models.load(tmp_path)
    name = "model.layers.1.self_attn.o_proj.weight"
    held = lm.model.blocks[1].attention.output.get_value()
    assert held.dtype == jnp.bfloat16
    assert np.array_equal(np.asarray(held), rounded[name].astype(jnp.bfloat16))
    half = {n: np.asarray(x, jnp.bfloat16).astype(np.float32) if "_proj" in n else x for n, x in rounded.items()}
    expected = forward(config, half, golden["input_ids"][0])
    assert (np.asarray(lm.logits(golden["input_ids"][0])).argmax(-1) == expected.argmax(-1)).mean() > 0.9


def refused(tmp_path, config, stored):
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_flax(stored, tmp_path / "model.safetensors")
    with pytest.raises(ModelError) as error:
        jtile.models.load(tmp_path)
    return str(error.value)


def test_8_bit_checkpoints_that_do_not_fit(tmp_path, config, tensors):
    stored, _ = in_blocks(tensors, 48)
    name = "model.layers.0.mlp.down_proj.weight"
    fp8 = {"quant_method": "fp8", "weight_block_size": [48, 48]}
    scaled = config | {"quantization_config": fp8}
    assert "scales (1, 2); expected a matrix and (2, 4)" in refused(
        tmp_path, scaled, stored | {f"{name}_scale_inv": jnp.ones((1, 2))}
    )
    assert f"{name} is float8_e4m3fn" in refused(
        tmp_path, scaled, {n: x for n, x in stored.items() if n != f"{name}_scale_inv"}
    )
    assert "F8_E5M2" in refused(tmp_path, scaled, stored | {name: stored[name].astype(jnp.float8_e5m2)})
    for entries in ({"quant_method": "bitsandbytes"}, fp8 | {"fmt": "e5m2"}, fp8 | {"weight_block_size": 3}):
        message = refused(tmp_path, config | {"quantization_config": entries}, stored)
        assert "a checkpoint in bfloat16" in message


@pytest.mark.slow
def test_the_published_sizes_compile_for_hopper(config):
    """Two layers of DeepSeek-V3, without its weights: a prompt and a step, which attends at the block level."""
    sizes = {
        "vocab_size": 129280, "hidden_size": 7168, "num_hidden_layers": 2, "num_attention_heads": 128,
        "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "kv_lora_rank": 512, "q_lora_rank": 1536,
        "n_routed_experts": 256, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
    }  # fmt: skip
    parsed = DeepseekConfig.from_hf(config | sizes)
    blank = lambda name, shape: jnp.zeros(shape, jnp.bfloat16)
    graph, state = nnx.split(nnx.eval_shape(lambda: Decoder(parsed, blank, tied=False, dtype="bfloat16")))
    prefill = jax.jit(lambda s, ids: nnx.merge(graph, s).prefill(ids))
    step = jax.jit(lambda s, tokens, cache: nnx.merge(graph, s).step(tokens, cache))
    ids, tokens = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((4, 1024), (4,)))
    cache = jax.eval_shape(
        lambda s, ids, lengths: kv.from_prefill(prefill(s, ids)[1], lengths, kv.Layout(1152)), state, ids, tokens
    )
    with jt.config(arch="sm_90"):
        text = prefill.trace(state, ids).lower(lowering_platforms=("cuda",)).as_text()
        assert "jtile_latent_prefill" in text
        assert "jtile_grouped_rows" in text
        assert "jtile_hopper_mla" in step.trace(state, tokens, cache).lower(lowering_platforms=("cuda",)).as_text()


def test_loss_and_gradients(lm, golden):
    """Directional derivatives of the loss against differences, with the experts that each token had."""
    ids = golden["input_ids"].astype(np.int32)
    graph, state = nnx.split(lm.model)
    loss = evaluated(lambda s: nnx.merge(graph, s).loss(ids))
    leaves = evaluated(jax.grad(lambda s: nnx.merge(graph, s).loss(ids)))(state)
    named = {"/".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(leaves)}
    seen = ("attention/key", "attention/value", "attention/down", "attention/query", "experts/down", "shared/up")
    for part in seen:
        assert any(part in name and float(jnp.abs(leaf[...]).max()) > 0 for name, leaf in named.items()), part
    norm = jnp.sqrt(sum((x * x).sum() for x in jax.tree.leaves(leaves)))
    step = 2e-4
    moved = lambda sign: jax.tree.map(lambda x, g: x + sign * step / norm * g, state, leaves)
    slope = (loss(moved(1)) - loss(moved(-1))) / (2 * step)
    assert abs(float(slope / norm) - 1) < 2e-2


def test_lora_updates_the_output_projection_and_names_what_is_missing(model, golden):
    lm = model("deepseek_v3")
    changed = lora.add_lora(lm.model, rank=2, targets=("output",))
    ids = golden["input_ids"].astype(np.int32)
    assert np.abs(run(lambda m, x: m(x), changed, ids) - golden["logits"]).max() < TOLERANCE
    with pytest.raises(ModelError, match="gate"):
        lora.add_lora(lm.model, targets=("gate",))


def test_frequencies_of_yarn():
    """DeepSeek-V3's: pairs 0 to 10 of 32 stay, those from 23 on are 40 times slower."""
    scaling = RopeScaling("yarn", 40.0, original_max_length=4096)
    ratio = Rope(64, 10000.0).frequencies() / Rope(64, 10000.0, scaling).frequencies()
    assert np.all(ratio[:11] == 1)
    assert np.allclose(ratio[23:], 40)
    assert np.all(np.diff(ratio[10:24]) > 0)
    assert Rope(64, 10000.0, scaling).attention_factor == 1


def test_scales_of_yarn(config):
    read = lambda **changed: DeepseekConfig.from_hf(config | {"rope_scaling": YARN | changed}).attention
    m = lambda x: 0.1 * x * np.log(8.0) + 1
    assert np.isclose(read().rope.attention_factor, m(0.7) / m(1.0))
    assert np.isclose(read().scale, 24**-0.5 * m(1.0) ** 2)
    assert np.isclose(read(mscale_all_dim=0).rope.attention_factor, m(1.0))
    assert np.isclose(read(mscale_all_dim=0).scale, 24**-0.5)
    assert read(attention_factor=1.5).rope.attention_factor == 1.5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scoring_func": "softmax"}, "scoring_func = 'softmax'; jtile.models.deepseek implements 'sigmoid'"),
        ({"topk_method": "greedy"}, "topk_method = 'greedy'"),
        ({"moe_layer_freq": 2}, "moe_layer_freq = 2"),
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"kv_lora_rank": None}, "lacks 'kv_lora_rank'"),
        ({"q_lora_rank": 0}, "'q_lora_rank' = 0; expected a positive int"),
        ({"qk_rope_head_dim": 7}, "even"),
        ({"n_group": 3}, "8 experts do not make 3 groups"),
        ({"n_group": 8}, "of two or more"),
        ({"topk_group": 5}, "topk_group = 5 of n_group = 4"),
        ({"num_experts_per_tok": 5}, "chooses 5 experts, but its 2 groups hold 4"),
        ({"first_k_dense_replace": -1}, "'first_k_dense_replace' = -1"),
        ({"rope_scaling": YARN | {"factor": None}}, "lacks 'factor'"),
    ],
)
def test_configurations_that_it_cannot_run(config, change, message):
    with pytest.raises(ModelError, match=message):
        DeepseekConfig.from_hf(config | change)


def test_an_incomplete_checkpoint_names_the_tensor(tmp_path, config, tensors):
    del tensors["model.layers.1.mlp.experts.5.up_proj.weight"]
    message = refused(tmp_path, config, {n: jnp.asarray(x) for n, x in tensors.items()})
    assert "lacks the tensor model.layers.1.mlp.experts.5.up_proj.weight" in message
