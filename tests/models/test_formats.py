"""Quantised safetensors as they are published: written here after the formats' rules, and read as those rules say."""

import functools
import json

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.flax import save_file

import jtile as jt
import jtile.models
from jtile._errors import ModelError
from jtile.models import folder
from jtile.ops import QuantizedTensor

pytestmark = pytest.mark.usefixtures("by_numpy")

GROUP = 32


@functools.cache
def tensors(path):
    return {name: np.asarray(stored.host(), np.float32) for name, stored in folder.stored_tensors(path).items()}


def words(codes, order=range(8)):
    """int32 of eight codes along the last axis each: the k-th four bits hold code order[k]."""
    eights = codes.astype(np.uint32).reshape(*codes.shape[:-1], -1, 8)
    return sum(eights[..., j] << np.uint32(4 * k) for k, j in enumerate(order)).astype(np.uint32).view(np.int32)


def in_groups(x, group, zeros):
    """Codes [out, in], scales and zero points [out, groups] of a matrix, float16 scales, and what they say."""
    parts = x.reshape(x.shape[0], -1, group)
    low, high = parts.min(-1), parts.max(-1)
    scale = ((high - low) / 15 if zeros else np.abs(parts).max(-1) / 7).astype(np.float16)
    zero = np.clip(np.round(-low / scale), 1, 15) if zeros else np.full(scale.shape, 8)
    codes = np.clip(np.round(parts / scale[..., None]) + zero[..., None], 0, 15)
    says = (codes - zero[..., None]) * scale[..., None].astype(np.float32)
    codes, zero = codes.reshape(x.shape).astype(np.uint8), zero.astype(np.uint8)
    return codes, scale, zero, says.reshape(x.shape).astype(np.float32)


def awq(base, x):
    codes, scale, zero, says = in_groups(x, GROUP, True)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    stored = {"qweight": words(codes.T, order), "qzeros": words(zero.T, order), "scales": scale.T}
    return {f"{base}.{name}": a for name, a in stored.items()}, says


def gptq(base, x, less=1, zeros=True):
    codes, scale, zero, says = in_groups(x, GROUP, zeros)
    stored = {"qweight": words(codes).T, "qzeros": words((zero - less).T), "scales": scale.T}
    index = np.arange(x.shape[1], dtype=np.int32) // GROUP
    return {f"{base}.{name}": a for name, a in (stored | {"g_idx": index}).items()}, says


def packed(base, x, zeros=False, group=GROUP):
    codes, scale, zero, says = in_groups(x, group or x.shape[1], zeros)
    stored = {"weight_packed": words(codes), "weight_scale": scale, "weight_shape": np.array(x.shape, np.int64)}
    stored |= {"weight_zero_point": words(zero.T).T} if zeros else {}
    return {f"{base}.{name}": a for name, a in stored.items()}, says


def bytes_of(base, x):
    """compressed-tensors' int-quantized: int8 and one scale a row."""
    scale = np.abs(x).max(1, keepdims=True) / 127
    codes = np.round(x / scale).astype(np.int8)
    return {f"{base}.weight": codes, f"{base}.weight_scale": scale}, codes * scale


def float8(base, x, sides=(32, 32), name="weight_scale_inv"):
    """e4m3 and a scale for each block of these sides."""
    rows, columns = (n // side for n, side in zip(x.shape, sides, strict=True))
    parts = x.reshape(rows, sides[0], columns, sides[1])
    scale = np.abs(parts).max((1, 3), keepdims=True) / np.float32(448)
    codes = (parts / scale).astype(jnp.float8_e4m3fn)
    says = (codes.astype(np.float32) * scale).reshape(x.shape)
    return {f"{base}.weight": codes.reshape(x.shape), f"{base}.{name}": scale[:, 0, :, 0]}, says


def one_scale(base, x, row: bool):
    """float-quantized and naive-quantized of compressed-tensors."""
    return float8(base, x, (1 if row else x.shape[0], x.shape[1]), "weight_scale")


def scheme(format, **weights):
    weights = {"type": "int", "num_bits": 4, "symmetric": True, "strategy": "group", "group_size": GROUP} | weights
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {"quant_method": "compressed-tensors", "format": format, "config_groups": {"group_0": group}}


AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": None}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False}
FORMATS = {  # name -> (what stores a layer, quantization_config, the kind that is held)
    "awq": (awq, AWQ, "q4_1"),
    "gptq": (gptq, GPTQ, "q4_1"),
    "gptq, symmetric, second version": (
        functools.partial(gptq, less=0, zeros=False), GPTQ | {"checkpoint_format": "gptq_v2"}, "q4_0",
    ),
    "compressed-tensors": (packed, scheme("pack-quantized"), "q4_0"),
    "compressed-tensors with zero points, a group a row": (
        functools.partial(packed, zeros=True, group=None),
        scheme("pack-quantized", symmetric=False, strategy="channel", group_size=None), "q4_1",
    ),
    "compressed-tensors of 8 bits": (
        bytes_of, scheme("int-quantized", num_bits=8, strategy="channel", group_size=None), "int8",
    ),
    "fp8 without blocks": (
        functools.partial(one_scale, row=False), {"quant_method": "fp8", "weight_block_size": None}, "fp8",
    ),
    "fp8 in one block of any size": (
        lambda base, x: float8(base, x, x.shape), {"quant_method": "fp8", "weight_block_size": [10**30, 10**30]}, "fp8",
    ),
    "fp8 in blocks": (float8, {"quant_method": "fp8", "weight_block_size": [32, 32]}, "fp8"),
    "compressed-tensors, fp8, a scale a row": (
        functools.partial(one_scale, row=True), scheme("float-quantized", type="float", num_bits=8, strategy="channel"),
        "fp8",
    ),
    "compressed-tensors, fp8, one scale": (
        functools.partial(one_scale, row=False), scheme("naive-quantized", type="float", num_bits=8, strategy="tensor"),
        "fp8",
    ),
}  # fmt: skip


def write(path, source, store, entries, layers="_proj", **more):
    """A copy of a plain folder with the layers of that name stored by `store`; returns what the tensors say."""
    says, stored = {}, {}
    for name, x in tensors(source).items():
        says[name] = x
        if layers in name:
            found, says[name] = store(name.removesuffix(".weight"), x)
            stored |= found
        else:
            stored[name] = x
    config = json.loads((source / "config.json").read_text())
    save_file({n: np.ascontiguousarray(a) for n, a in (stored | more).items()}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": entries}))
    return says


def dense(weight):
    return np.asarray(weight.dequantize() if isinstance(weight, QuantizedTensor) else weight, np.float32)


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_read_is_what_was_written(tmp_path, tiny_folder, name):
    store, entries, kind = FORMATS[name]
    says = write(tmp_path, tiny_folder, store, entries)
    net = jtile.models.load(tmp_path, dtype="float32").model
    for k, block in enumerate(net.blocks):
        of = lambda part, k=k: says[f"model.layers.{k}.{part}_proj.weight"]
        held = block.attention.qkv.get_value()
        assert held.kind == kind and held.codes.nbytes * (2 if held.is_4bit else 1) == np.prod(held.shape)
        want = np.concatenate([of(f"self_attn.{n}") for n in "qkv"])
        np.testing.assert_allclose(dense(held), want, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(dense(block.mlp.down.get_value()), of("mlp.down"), rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(np.asarray(net.embedding.get_value()), says["model.embed_tokens.weight"])


def test_logits_are_those_of_the_dequantised_weights(tmp_path, tiny_folder, golden):
    (tmp_path / "plain").mkdir()
    store, entries, _ = FORMATS["awq"]
    says = write(tmp_path, tiny_folder, store, entries)
    save_file({n: jnp.asarray(x) for n, x in says.items()}, tmp_path / "plain" / "model.safetensors")
    (tmp_path / "plain" / "config.json").write_text((tiny_folder / "config.json").read_text())
    logits = lambda path: np.asarray(jtile.models.load(path, dtype="float32").logits(golden["input_ids"]))
    a, b = logits(tmp_path), logits(tmp_path / "plain")
    assert np.abs(a - b).max() < 1e-4 < 0.1 < np.abs(a - golden["logits"]).max()


@pytest.mark.parametrize("name", ["awq", "fp8 in blocks"])
def test_experts_are_held_as_they_are_stored(tmp_path, data, name):
    store, entries, kind = FORMATS[name]
    says = write(tmp_path, data / "mixtral", store, entries, layers=".experts.")
    with jt.config(arch="sm_90"):  # where others are packed
        held = jtile.models.load(tmp_path, dtype="bfloat16").model.blocks[1].mlp.experts
    gate_up, down = held.gate_up.get_value(), held.down.get_value()
    of = lambda *parts: np.stack(
        [
            np.concatenate([says[f"model.layers.1.block_sparse_moe.experts.{e}.{p}.weight"] for p in parts])
            for e in range(8)
        ]
    )
    assert gate_up.kind == down.kind == kind and not gate_up.is_packed
    np.testing.assert_allclose(dense(gate_up), of("w1", "w3"), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(dense(down), of("w2"), rtol=1e-6, atol=1e-6)
    weights = gate_up.codes.nbytes + down.codes.nbytes
    assert weights == (of("w1", "w3").size + of("w2").size) // (2 if kind == "q4_1" else 1)


def test_weights_are_packed_once_where_tensor_cores_take_words(tmp_path, tiny_folder):
    store, entries, _ = FORMATS["compressed-tensors of 8 bits"]
    write(tmp_path, tiny_folder, store, entries)
    with jt.config(arch="sm_90"):
        block = jtile.models.load(tmp_path, dtype="bfloat16").model.blocks[0]
    with jt.config(arch="sm_80"):
        plain = jtile.models.load(tmp_path).model.blocks[0]
    for part in (lambda b: b.attention.qkv, lambda b: b.mlp.down):
        held, other = part(block).get_value(), part(plain).get_value()
        assert held.is_packed and not other.is_packed
        np.testing.assert_array_equal(dense(held), dense(other))


WRONG = {  # what is stored; what quantization_config says besides; of the sentence
    "method": (awq, {"quant_method": "bitsandbytes"}, "by 'bitsandbytes'; jtile reads awq, compressed-tensors"),
    "bits": (awq, AWQ | {"bits": 3}, "AWQ with bits 3; jtile reads 4"),
    "version of a number": (awq, AWQ | {"version": 3}, "version 3; jtile reads 'gemm'"),
    "version": (awq, AWQ | {"version": "gemv"}, "version 'gemv'; jtile reads 'gemm'"),
    "group": (awq, AWQ | {"group_size": 48}, "rows of 64 weights in groups of 48"),
    "other group": (awq, AWQ | {"group_size": 64}, r"qzeros has the shape \(2, 8\); beside .*qweight it must be"),
    "no group": (awq, AWQ | {"group_size": "all"}, "'group_size' = 'all'"),
    "format of GPTQ": (gptq, GPTQ | {"checkpoint_format": "marlin"}, "jtile reads 'gptq or gptq_v2'"),
    "bits of a scheme": (packed, scheme("pack-quantized", num_bits=3), "'int' of 3 bits"),
    "list of groups": (packed, scheme("pack-quantized", group_size=[32]), r"'group_size' = \[32\]; expected a pos"),
    "activations": (
        packed, {**scheme("pack-quantized"), "config_groups": {"g": {
            "weights": {"type": "int", "num_bits": 4, "strategy": "group", "group_size": 32}, "input_activations": "x",
        }}}, "'input_activations' = 'x'; expected an object",
    ),
    "symmetry": (packed, scheme("pack-quantized", symmetric="no"), "'symmetric' = 'no'; expected true or false"),
    "zero points that are missing": (packed, scheme("pack-quantized", symmetric=False), "has no .*weight_zero_point"),
    "8 bits without symmetry": (
        bytes_of, scheme("int-quantized", num_bits=8, symmetric=False), "has 8 bits and zero points",
    ),
    "no scheme": (packed, {"quant_method": "compressed-tensors"}, "no scheme of integers"),
    "blocks of other sides": (float8, {"quant_method": "fp8"}, r"scales \(2, 2\); expected a matrix"),
    "no scales": (
        lambda base, x: ({f"{base}.weight": float8(base, x)[0][f"{base}.weight"]}, x),
        {"quant_method": "fp8"}, "nothing gives its scales",
    ),
    "zero points of bytes": (
        lambda base, x: (bytes_of(base, x)[0] | {f"{base}.weight_zero_point": np.zeros((1,), np.int8)}, x),
        scheme("int-quantized", num_bits=8), "has 8 bits and zero points",
    ),
}  # fmt: skip


def test_activations_are_rounded_where_the_configuration_says_so(tmp_path, tiny_folder):
    plain = scheme("float-quantized", type="float", num_bits=8, strategy="channel")
    for dynamic in (True, False):
        inputs = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": dynamic}
        entries = plain | {
            "config_groups": {"group_0": plain["config_groups"]["group_0"] | {"input_activations": inputs}}
        }
        write(tmp_path, tiny_folder, functools.partial(one_scale, row=True), entries)
        held = jtile.models.load(tmp_path, dtype="float32").model.blocks[0].attention.qkv.get_value()
        assert held.activations == ("rows" if dynamic else None)


@pytest.mark.parametrize("name", WRONG)
def test_configurations_that_it_does_not_read(tmp_path, tiny_folder, name):
    store, entries, message = WRONG[name]
    write(tmp_path, tiny_folder, store, entries)
    with pytest.raises(ModelError, match=message):
        jtile.models.load(tmp_path)


LAYER = "model.layers.0.self_attn.q_proj"
BLOCKS = {"quant_method": "fp8", "weight_block_size": [32, 32]}
LACKING = {  # what stores a layer, its configuration, the tensor that is changed, to what (None: it is left out)
    "scales": (awq, AWQ, "scales", None, "has no model.layers.0.self_attn.q_proj.scales"),
    "shape of scales": (packed, scheme("pack-quantized"), "weight_scale", np.ones((64, 3)), r"it must be \(64, 2\)"),
    "shape": (packed, scheme("pack-quantized"), "weight_shape", np.array([9, 9]), r"hold a matrix of \(9, 9\)"),
    "dtype": (awq, AWQ, "qweight", np.ones((64, 8), np.float16), "is float16 .64, 8.; expected a matrix of int32"),
    "order": (gptq, GPTQ, "g_idx", np.arange(64, dtype=np.int32) % 2, "sorted into groups by activations"),
    "dtype of scales": (
        awq, AWQ, "scales", np.ones((2, 64), np.int32), "scales is int32; beside .*qweight it must be float32 or",
    ),
    "dtype of zero points": (gptq, GPTQ, "qzeros", np.ones((2, 8), np.float32), "is float32; beside .* must be int32"),
    "bytes of zero points": (awq, AWQ, "qzeros", np.ones((2, 8), np.int8), "is int8; beside .* it must be int32"),
    "floats of zero points": (
        packed, scheme("pack-quantized"), "weight_zero_point", np.ones((8, 2), np.float32), "is float32; beside",
    ),
    "dtype of a shape": (
        packed, scheme("pack-quantized"), "weight_shape", np.array([64, 64], np.float32), "must be int32 or int64",
    ),
    "dtype of scales of bytes": (
        bytes_of, scheme("int-quantized", num_bits=8), "weight_scale", np.ones((64, 1), np.uint8), "is uint8; beside",
    ),
    "dtype of scales of floats": (float8, BLOCKS, "weight_scale_inv", np.ones((2, 2), np.uint8), "is uint8; beside"),
    "nothing": (float8, BLOCKS, "weight", np.ones((0, 64), jnp.float8_e4m3fn), r"\(0, 64\) has scales .2, 2"),
    "no words": (awq, AWQ, "qweight", np.ones((0, 8), np.int32), r"is int32 \(0, 8\); expected a matrix"),
    "scales of bytes": (bytes_of, scheme("int-quantized", num_bits=8), "weight_scale", np.ones((3, 1)), "scales .3, 1"),
}  # fmt: skip


@pytest.mark.parametrize("name", LACKING)
def test_tensors_that_do_not_fit(tmp_path, tiny_folder, name):
    store, entries, tensor, value, message = LACKING[name]

    def changed(base, x):
        found, says = store(base, x)
        if base == LAYER:
            found = {n: a for n, a in found.items() if n != f"{base}.{tensor}"}
            found |= {} if value is None else {f"{base}.{tensor}": value}
        return found, says

    write(tmp_path, tiny_folder, changed, entries)
    with pytest.raises(ModelError, match=message):
        jtile.models.load(tmp_path)
