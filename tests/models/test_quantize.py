"""`jtile quantize`: what it writes is read again, by the published form; what it refuses; the memory that both take."""

import fcntl
import json
import platform
import shutil
import subprocess
import sys
import textwrap

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jtile as jt
import jtile.models
from jtile._errors import ModelError
from jtile.models import quantize_folder
from jtile.models.folder import INDEX, stored_tensors
from jtile.models.serving.settings import default_shapes
from jtile.models.whole import MARK
from jtile.ops import QuantizedTensor

NAME = "model.layers.1.mlp.down_proj"


@pytest.fixture
def floats(tiny_folder, tmp_path):
    """The tiny folder in two files."""
    folder = tmp_path / "floats"
    folder.mkdir()
    shutil.copy(tiny_folder / "config.json", folder)
    (folder / "tokenizer_config.json").write_text("{}")
    tensors = load_file(tiny_folder / "model.safetensors")
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, held in parts.items():
        save_file({name: tensors[name] for name in held}, folder / file)
    index = {"weight_map": {name: file for file, held in parts.items() for name in held}}
    (folder / INDEX).write_text(json.dumps(index))
    return folder


# kind that is held, group, and the largest error in parts of the largest weight of a group
WAYS = {
    "fp8": ("fp8", None, 2**-4), "int8": ("int8", None, 0.51 / 127), "int4": ("q4_0", 32, 0.51 / 7.5),
    "q4_0": ("q4_0", 32, 1.02 / 8), "q8_0": ("q8_0", 32, 0.51 / 127),
}  # fmt: skip


@pytest.mark.parametrize("to", WAYS)
def test_what_is_written_is_read(floats, to):
    kind, group, error = WAYS[to]
    out = quantize_folder(floats, to, group=32)
    assert out == floats.with_name(f"floats-{to}") and (out / "tokenizer_config.json").exists()
    assert sorted(p.name for p in out.glob("*.safetensors")) == ["a.safetensors", "b.safetensors"]
    held = jtile.models.load(out, dtype="float32").model.blocks[1].mlp.down.get_value()
    x = np.asarray(stored_tensors(floats)[f"{NAME}.weight"].host(), np.float32)
    assert held.kind == kind and held.activations is None
    off = np.abs(np.asarray(held.dequantize()) - x).reshape(x.shape[0], -1, group or x.shape[1])
    assert (off.max(-1) < error * np.abs(x).reshape(off.shape).max(-1) + 1e-4).all()
    if to in ("q4_0", "q8_0", "int8", "fp8"):  # as the library quantises
        want = QuantizedTensor.quantize(x, to)
        np.testing.assert_allclose(held.dequantize(), want.dequantize(), rtol=0.07 if to == "fp8" else 1e-6, atol=1e-6)
    kept = stored_tensors(out)
    for name in ("model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"):
        np.testing.assert_array_equal(kept[name].host(), stored_tensors(floats)[name].host())


def test_the_configuration_is_that_of_compressed_tensors(floats, tmp_path):
    out = quantize_folder(floats, "fp8", out=tmp_path / "new" / "model", dynamic=True)
    entries = json.loads((out / "config.json").read_text())["quantization_config"]
    group = entries["config_groups"]["group_0"]
    assert (entries["quant_method"], entries["format"], group["targets"]) == (
        "compressed-tensors", "float-quantized", ["Linear"],
    )  # fmt: skip
    assert (group["weights"]["strategy"], group["input_activations"]["strategy"]) == ("channel", "token")
    assert entries["ignore"] == ["lm_head"]
    stored = stored_tensors(out)
    assert stored[f"{NAME}.weight"].dtype == jnp.float8_e4m3fn and stored[f"{NAME}.weight_scale"].shape == (64, 1)
    index = json.loads((out / INDEX).read_text())
    assert set(index["weight_map"]) == set(stored)
    lm = jtile.models.load(out)
    assert lm.model.blocks[0].mlp.down.get_value().activations == "rows"
    with jt.config(arch="sm_90"):  # a server's steps all have as many rows as are rounded
        assert default_shapes(lm, 16, False, True) == (128, 640, 2176, 33 * 128)
        assert default_shapes(lm, 16, False, False)[0] == 1
    with pytest.raises(ModelError, match="quantised already"):
        quantize_folder(out, "int8")


MIXTURES = {  # names that a layer of it has, and whether they are quantised
    "mixtral": {"block_sparse_moe.experts.7.w2": True, "block_sparse_moe.gate": False, "self_attn.q_proj": True},
    "deepseek_v3": {
        "mlp.experts.7.up_proj": True, "mlp.shared_experts.up_proj": True, "mlp.gate": False,
        "self_attn.q_a_proj": True, "self_attn.q_b_proj": True, "self_attn.kv_a_proj_with_mqa": True,
        "self_attn.kv_b_proj": False, "self_attn.q_a_layernorm": False,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", MIXTURES)
def test_experts_are_quantised(data, tmp_path, name):
    out = quantize_folder(data / name, "fp8", out=tmp_path / "new")
    stored = stored_tensors(out)
    assert {n: f"model.layers.1.{n}.weight_scale" in stored for n in MIXTURES[name]} == MIXTURES[name]
    held = jtile.models.load(out).model.blocks[1].mlp.experts.gate_up.get_value()
    assert (held.kind, held.shape[0], held.codes.dtype) == ("fp8", 8, jnp.float8_e4m3fn)


REFUSED = {
    "--to is one of fp8, int4, q4_0, q8_0, int8; got 'int2'": ("int2", {}),
    "32 weights times a power of two, got 48": ("int4", {"group": 48}),
    "has no layer that --to int4 quantises": ("int4", {"group": 4096}),
    "activations in 8 bits belong to weights in fp8, not in int4": ("int4", {"group": 32, "dynamic": True}),
    "exists; give another --out": ("int8", {"out": "."}),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_it_refuses(floats, message):
    to, options = REFUSED[message]
    with pytest.raises(ModelError, match=message):
        quantize_folder(floats, to, **options)
    assert [p.name for p in floats.parent.iterdir()] == ["floats"]  # nothing is left behind


def test_a_damaged_source_leaves_nothing(floats):
    content = (floats / "b.safetensors").read_bytes()
    (floats / "b.safetensors").write_bytes(content[: len(content) // 2])
    with pytest.raises(ModelError, match="truncated or damaged"):
        quantize_folder(floats, "int8")
    with pytest.raises(ModelError, match="there is no folder"):
        quantize_folder(floats / "absent", "int8")
    assert [p.name for p in floats.parent.iterdir()] == ["floats"]


def _as(folder, file="a.safetensors", config=None, **changed):
    """Tensors of a file, and entries of the configuration, replaced."""
    save_file(load_file(folder / file) | changed, folder / file)
    index = json.loads((folder / INDEX).read_text())
    (folder / INDEX).write_text(json.dumps({"weight_map": index["weight_map"] | dict.fromkeys(changed, file)}))
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | (config or {})))


MATRIX = "model.layers.0.mlp.down_proj.weight"
SOURCES = {  # what the source has; of the sentence
    "the older key": ({"config": {"compression_config": {"quant_method": "fp8"}}}, "quantised already"),
    "scales": ({f"{MATRIX}_scale_inv": np.ones((1, 1), np.float32)}, f"already .the tensor {MATRIX}_scale_inv."),
    "codes": ({MATRIX: np.ones((64, 128), jnp.float8_e4m3fn)}, "is float8_e4m3fn .64, 128.; jtile quantises matrices"),
    "nothing": ({MATRIX: np.ones((0, 128), np.float32)}, "is float32 .0, 128."),
    "no number": ({MATRIX: np.full((64, 128), np.nan, np.float32)}, f"{MATRIX} of .* that are not finite"),
    "too large": ({MATRIX: np.full((64, 128), 1e9, np.float32)}, f"{MATRIX} of .* too large for a scale"),
}  # fmt: skip


@pytest.mark.parametrize("name", SOURCES)
def test_sources_that_are_no_floats(floats, name):
    more, message = SOURCES[name]
    file = next(f for f in ("a.safetensors", "b.safetensors") if MATRIX in load_file(floats / f))
    _as(floats, file, **more)
    with pytest.raises(ModelError, match=message):
        quantize_folder(floats, "int4", group=32)
    assert [p.name for p in floats.parent.iterdir()] == ["floats"]


@pytest.mark.parametrize("places", [("x/w.safetensors", "y/w.safetensors"), ("a.st", "b"), ("../out.st", "w.st")])
def test_files_of_any_place_and_name(floats, places):
    """Files of one name in two folders are two files; one without the usual suffix is not copied as something else."""
    index = json.loads((floats / INDEX).read_text())
    where = dict(zip(("a.safetensors", "b.safetensors"), places, strict=True))
    for old, new in where.items():
        (floats / new).parent.mkdir(exist_ok=True)
        (floats / old).rename(floats / new)
    index["weight_map"] = {name: where[file] for name, file in index["weight_map"].items()}
    (floats / INDEX).write_text(json.dumps(index))
    made = quantize_folder(floats, "q8_0")
    stored, before = stored_tensors(made), stored_tensors(floats)
    assert {t.file.path.resolve().is_relative_to(made) for t in stored.values()} == {True}
    for name in before:
        if name in stored:
            np.testing.assert_array_equal(stored[name].host(), before[name].host())
        else:
            assert name.removesuffix("weight") + "weight_packed" in stored and name.endswith("_proj.weight")


def test_what_a_killed_run_left_is_removed(floats):
    """Of the same new folder, and only if nobody holds its lock."""
    left = {name: floats.parent / f".floats-q8_0-{name}" for name in ("dead", "alive", "elsewhere", "backup", "early")}
    for name, path in left.items():
        path.mkdir()
        if name != "backup":
            (path / MARK).write_text({"elsewhere": "another", "early": ""}.get(name, platform.node()))
    with (left["alive"] / MARK).open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        out = quantize_folder(floats, "q8_0")
    assert [name for name, path in left.items() if not path.exists()] == ["dead"]
    assert {p.name for p in out.iterdir()} == {p.name for p in floats.iterdir()}


def test_a_place_that_cannot_be_written(floats):
    with pytest.raises(ModelError, match=r"cannot quantise .*floats: .*give an --out that can be written"):
        quantize_folder(floats, "q8_0", out=floats / "config.json" / "below")


def test_the_command(floats, capsys):
    from jtile.tools import cli

    for code, more in ((0, []), (1, ["--out", str(floats)])):
        with pytest.raises(SystemExit) as status:
            cli.main(["quantize", str(floats), "--to", "q8_0", *more])
        assert status.value.code == code
    done = capsys.readouterr()
    assert done.out == f"{floats}-q8_0\n" and done.err == f"jtile: {floats} exists; give another --out, or remove it\n"


MEMORY = """
    import sys, pathlib, json
    import numpy as np
    from safetensors.numpy import save_file
    import jax
    from jtile.models import folder, mapped

    def peak():
        return int(next(l for l in open("/proc/self/status") if l.startswith("VmHWM")).split()[1]) << 10

    path, (rows, columns) = pathlib.Path(sys.argv[1]), (512, 4096)
    tensors = {f"w{k}": np.full((rows, columns), k, np.float32) for k in range(12)}
    save_file(tensors, path / "model.safetensors")
    del tensors
    stored = folder.stored_tensors(path)
    jax.block_until_ready(stored.pop("w0")())  # brings 30 to 50 MB of JAX's code to memory
    open("/proc/self/clear_refs", "w").write("5")  # the peak starts anew
    before = peak()
    sums = [float(np.asarray(t())[:2, 0].sum()) for t in stored.values()]  # each is on the device once, and gone
    print(json.dumps({"peak": peak() - before, "one": rows * columns * 4, "sums": sums}))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_reading_takes_the_memory_of_a_tensor_and_not_of_a_file(tmp_path, subprocess_env):
    """The host's copy on the way to the device, and here the device's, which is in the same memory."""
    script = textwrap.dedent(MEMORY)
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, env=subprocess_env, check=True
    )
    found = json.loads(done.stdout)
    assert sorted(found["sums"]) == [2.0 * k for k in range(1, 12)]
    assert found["peak"] < 3 * found["one"]  # of eleven: two of the largest tensor, and a page here and there
