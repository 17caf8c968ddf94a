"""The way to an artifact: memory, disk, back end; failures; and outputs that start from something."""

import dataclasses
import errno
import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from native import unpacked

import jtile as jt
from jtile import ir
from jtile.errors import CompileError, UnsupportedError
from jtile.interpret import poison
from jtile.lowering import platforms, registry, starts
from jtile.lowering.artifact import Artifact, Texts
from jtile.lowering.targets import Scale, Target, host_target
from jtile.lowering.targets import resolve as target_of
from jtile.primitive.lowering import filled

TOY = Target("toy-1", "toy", "")


def kernel(scale=2.0, **spec):
    k = jt.call(
        lambda x, o: o.__setitem__(..., x[...] * scale), out_type=lambda x: jt.like(x), grid=1, name="k", **spec
    )
    return k.lower(jax.ShapeDtypeStruct((4,), jnp.float32)).program.kernel


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """A back end that counts its calls and returns the kernel's text as its image."""
    module = types.SimpleNamespace(calls=[])

    def compile_toy(kernel, target, options, texts):
        module.calls.append((kernel.name, target.name, texts))
        image = ir.print_kernel(kernel).encode()
        return Artifact(target.name, image, {"toy": "text"} if texts else {}, {"workspace": 8, "name": kernel.name})

    module.compile_toy = compile_toy
    record = platforms.Platform(
        name="toy",
        hosts=(),
        call="toy",
        compile=lambda *given: module.compile_toy(*given),
        attributes=lambda artifact, kernel, values: {},
        resolve=lambda name: TOY,
        names=lambda: ["toy"],
        here=lambda: TOY,
    )
    monkeypatch.setitem(platforms._added, "toy", record)
    monkeypatch.setattr(registry, "_memory", registry._Memory())
    with jt.config(cache_dir=str(tmp_path)):
        yield module


def with_cores(target, count):
    return dataclasses.replace(target, scales=(Scale("device", units=count),))


@pytest.mark.parametrize("by_units", [False, True])
def test_images_that_do_not_count_cores_are_shared(toy, monkeypatch, by_units):
    record = dataclasses.replace(platforms.named("toy"), by_units=by_units)
    monkeypatch.setitem(platforms._added, "toy", record)
    for count in (2, 8):
        registry.compile(kernel(), with_cores(TOY, count))
    assert len(toy.calls) == 1 + by_units


def test_a_cpu_image_serves_any_number_of_cores(toy):
    two, eight = (registry.compile(kernel(7.0), with_cores(host_target(), count)) for count in (2, 8))
    assert two is eight


def test_a_compiler_without_room(toy, monkeypatch):
    """No defect of anybody's: neither where it says so, nor where an assembler just fails."""

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    def silent(*_):
        raise RuntimeError("ptxas failed with error code -25")

    monkeypatch.setattr(toy, "compile_toy", full)
    with pytest.raises(CompileError, match=r"No space left on device.*make room, or set TMPDIR") as e:
        registry.compile(kernel(), TOY)
    assert "defect" not in str(e.value)
    monkeypatch.setattr(toy, "compile_toy", silent)
    with pytest.raises(CompileError, match="defect of jtile"):
        registry.compile(kernel(), TOY)
    monkeypatch.setattr(registry.shutil, "disk_usage", lambda _: types.SimpleNamespace(free=100))
    with pytest.raises(CompileError, match="where 100 bytes are free: make room, or set TMPDIR"):
        registry.compile(kernel(), TOY)

    def nowhere():
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")

    monkeypatch.setattr(registry.tempfile, "gettempdir", nowhere)
    with pytest.raises(CompileError, match=r"no folder for temporary files can be written .* or set TMPDIR"):
        registry.compile(kernel(), TOY)
    with jt.config(cache_dir=""), pytest.raises(CompileError, match="set TMPDIR"):
        registry.compile(kernel(), TOY)


def test_memory_then_disk_then_back_end(toy):
    first = registry.compile(kernel(), TOY)
    assert registry.compile(kernel(), TOY) is first
    assert len(toy.calls) == 1
    registry.forget()
    again = registry.compile(kernel(), TOY)
    assert again == first
    assert again is not first
    assert len(toy.calls) == 1
    registry.compile(kernel(3.0), TOY)
    assert len(toy.calls) == 2


def test_texts_compile_anew_and_are_not_served_from_the_disk(toy):
    registry.compile(kernel(), TOY)
    assert registry.compile(kernel(), TOY, texts=True).texts == {"toy": "text"}
    assert [c[2] for c in toy.calls] == [False, True]


@pytest.mark.parametrize("target", [TOY, host_target()], ids=lambda t: t.platform)
def test_memory_holds_no_texts(toy, target):
    assert registry.compile(kernel(), target, texts=True).texts
    assert registry.compile(kernel(), target).texts == {}
    assert registry.compile(kernel(3.0), target).texts == {}


def test_a_text_that_takes_long_is_made_when_it_is_read():
    made = []
    texts = {"plan": "p"} | Texts({"ptx": "a"}, {"sass": lambda: made.append(1) or "b"})
    texts = {"jaxpr": "j"} | texts
    assert list(texts) == ["jaxpr", "plan", "ptx", "sass"] and len(texts) == 4
    assert "sass" in texts and "llvm" not in texts and texts["ptx"] == "a" and texts.get("llvm") is None
    assert not made
    assert texts["sass"] == texts["sass"] == "b" and made == [1]
    assert {"first": ""} | texts == {"first": "", "jaxpr": "j", "plan": "p", "ptx": "a", "sass": "b"}
    with pytest.raises(KeyError, match="llvm"):
        texts["llvm"]


def test_machine_code_of_a_gpu_is_disassembled_when_it_is_read(monkeypatch):
    """The disassembler starts for half a second, longer than a small kernel takes to compile."""
    pytest.importorskip("triton")
    from jtile.lowering.triton import resources

    asked, sass = [], resources.sass
    monkeypatch.setattr(resources, "sass", lambda image: asked.append(image) or sass(image))
    texts = registry.compile(kernel(), target_of("cuda:sm_80"), texts=True).texts
    assert "ld.global" in texts["ptx"] and not asked
    assert "LDG" in texts["sass"] and len(asked) == 1


def test_targets_share_nothing(toy):
    registry.compile(kernel(), TOY)
    registry.compile(kernel(), Target("toy-2", "toy", ""))
    assert len(toy.calls) == 2


def test_a_key_stands_for_the_kernel(toy):
    a = registry.compile(kernel(), TOY, key="one")
    assert registry.compile(kernel(5.0), TOY, key="one") is a
    assert registry.compile(kernel(), TOY, key="two") == a
    assert len(toy.calls) == 2


def test_the_launch_record_survives_the_disk(toy):
    registry.compile(kernel(), TOY)
    registry.forget()
    assert registry.compile(kernel(), TOY).launch == {"workspace": 8, "name": "k"}


def test_platforms_without_a_back_end():
    with pytest.raises(UnsupportedError, match=r"kernel k: there is no platform 'npu'; there are cpu, .*target is 'n'"):
        registry.compile(kernel(), Target("n", "npu", ""))


def test_a_user_can_register_a_back_end(toy):
    platforms.register(dataclasses.replace(platforms.named("toy"), name="toy2"))
    try:
        assert registry.compile(kernel(), Target("t", "toy2", "")).target == "t"
    finally:
        platforms.unregister("toy2")
    assert "toy2" not in [p.name for p in platforms.every()]


def test_errors_of_a_back_end(toy, tmp_path):
    def refuse(kernel, target, options, texts):
        raise UnsupportedError("no such op")

    toy.compile_toy = refuse
    with pytest.raises(UnsupportedError, match="no such op"):
        registry.compile(kernel(), TOY)

    def break_down(kernel, target, options, texts):
        raise KeyError("gone")

    toy.compile_toy = break_down
    with pytest.raises(CompileError, match=r"python -m jtile\.lowering\.registry .*k-\w+\.tile_ir toy-1") as e:
        registry.compile(kernel(), TOY)
    assert isinstance(e.value.__cause__, KeyError)
    (kept,) = (tmp_path / "failures").iterdir()
    assert ir.print_kernel(ir.parse_kernel(kept.read_text())) == ir.print_kernel(kernel())


def test_the_memory_forgets_what_was_used_longest_ago(monkeypatch):
    memory = registry._Memory()
    monkeypatch.setattr(registry, "_limit", lambda on_disk: 250 + 2 * registry._ENTRY)
    for k in "abc":
        memory.put(k, Artifact("t", bytes(100), {}, {}), on_disk=True)
        memory.get("a")
    assert [memory.get(k) is not None for k in "abc"] == [True, False, True]
    memory.put("d", Artifact("t", bytes(1000), {}, {}), on_disk=True)
    assert memory.get("d") is not None
    assert memory.get("a") is None


@pytest.mark.parametrize(
    ("options", "calls"),
    [({}, 3), ({"cache_dir": ""}, 3), ({"cache_dir": "/dev/null/x"}, 3), ({"cache_size": 4096}, 3)],
    ids=["on disk", "off", "not writable", "too small"],
)
@pytest.mark.filterwarnings("ignore:the kernel cache cannot be")
def test_what_the_memory_drops_is_not_compiled_again(toy, monkeypatch, options, calls):
    """It holds little only where the disk holds the rest."""
    monkeypatch.setattr(registry, "_FEW", 1)
    with jt.config(**options):
        for scale in (2.0, 3.0, 4.0, 2.0, 3.0, 4.0):
            registry.compile(kernel(scale), TOY)
    assert len(toy.calls) == calls
    assert len(registry._memory._entries) == (3 if options else 1)


def test_the_memory_holds_little_of_what_was_read_from_the_disk(toy, monkeypatch):
    monkeypatch.setattr(registry, "_FEW", 1)
    for _ in range(2):
        for scale in (2.0, 3.0):
            registry.compile(kernel(scale), TOY)
        assert len(registry._memory._entries) == 1
        registry.forget()
    with jt.config(cache_dir=""):
        registry.compile(kernel(5.0), TOY)
    registry.compile(kernel(2.0), TOY)
    assert len(registry._memory._entries) == 2, "the one that is nowhere else has to stay"


def test_main_says_how_to_be_called(capsys, tmp_path):
    assert registry.main([]) == 2
    assert "usage" in capsys.readouterr().err
    path = tmp_path / "k.tile_ir"
    path.write_text("// a note\n" + ir.print_kernel(kernel()))
    assert registry.main([str(path), "cpu:sse2"]) == 0
    assert "compiled for cpu:sse2" in capsys.readouterr().out


def test_artifacts_of_the_cpu():
    artifact = registry.compile(kernel(7.0), host_target(), texts=True)
    assert artifact.image[:4] == b"\x7fELF"
    assert json.loads(artifact.launch["sites"]) == []
    assert artifact.launch["isa"].split(":")[0] in ("x86_64", "aarch64")
    assert "jtile_entry" in artifact.texts["asm"]
    json.dumps(artifact.launch)


# -- outputs that start from something --------------------------------------------------------------------------------


def test_starts_become_operands_that_share_the_buffer():
    k = kernel(init=5)
    new, extra = starts.with_starts(k, poison=False)
    assert extra == (starts.Start((4,), np.dtype(np.float32), np.float32(5)),)
    assert new.aliases == ((1, 0),)
    assert [p.type.role for p in new.params] == ["in", "in", "out"]
    assert new.inits == k.inits == (5.0,)
    assert ir.parse_kernel(ir.print_kernel(new)).aliases == new.aliases


def test_aliases_that_matter_are_those_of_inputs_in_use():
    new, _ = starts.with_starts(kernel(init=5), poison=False)
    plain = starts.without_idle_aliases(new)
    assert plain.aliases == ()
    assert plain.params == new.params
    used = kernel(alias={"x": "o"})
    assert starts.without_idle_aliases(used) is used


def test_a_kernel_without_starts_is_left_alone():
    k = kernel()
    assert starts.with_starts(k, poison=False) == (k, ())
    aliased = kernel(alias={"x": "o"})
    assert starts.with_starts(aliased, poison=True) == (aliased, ())


def test_poison_goes_only_where_nothing_else_stands():
    s = jax.ShapeDtypeStruct((3,), jnp.int8)
    k = jt.call(
        lambda x, *outs: None,
        out_type=lambda x: (x, s, s, jt.like(s, shape=0)),
        grid=1,
        alias={0: 0},
        init=(None, 4, None, None),
    )
    tile_ir = k.lower(jax.ShapeDtypeStruct((2,), jnp.float32)).program.kernel
    new, extra = starts.with_starts(tile_ir, poison=True)
    assert [int(e.value) for e in extra] == [4, np.uint8(0xAA).view(np.int8)]
    assert new.aliases == ((0, 0), (1, 1), (2, 2))
    assert starts.poison_bytes(tile_ir) == [-1, -1, 0xAA, 0xAA]
    assert starts.poison_bytes(kernel(init=5)) is None


@pytest.mark.parametrize("dtype", ir.DTYPES)
def test_poison_is_the_interpreters(dtype):
    ours = np.full(3, starts.poison_value(ir.DTYPES[dtype].numpy))
    theirs = poison((3,), dtype)
    assert ours.dtype == theirs.dtype
    np.testing.assert_array_equal(ours.astype(np.float64), theirs.astype(np.float64))


@pytest.mark.parametrize("dtype", ir.DTYPES)
def test_bytes_of_poison_are_poison(dtype):
    info = ir.DTYPES[dtype]
    byte = starts.poison_byte(info.numpy)
    like = np.full(8, starts.poison_value(info.numpy))
    packed = np.full(max(1, 8 * info.bits // 8), byte, np.uint8)
    ours = unpacked(packed.view(info.numpy) if info.bits >= 8 else packed, like)
    np.testing.assert_array_equal(ours.astype(np.float64), like.astype(np.float64))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "uint8"])
def test_only_poison_is_a_constant_of_a_program(dtype):
    """Its elements are not all equal, which XLA would make a loop of; where something may read a start, they are."""
    value = starts.poison_value(ir.DTYPES[dtype].numpy)
    poisoned, given = filled([starts.Start((3,), value.dtype, value, poison) for poison in (True, False)])
    assert isinstance(poisoned, np.ndarray) and len({x.tobytes() for x in poisoned}) == 2
    assert isinstance(given, jax.Array) and len({x.tobytes() for x in np.asarray(given)}) == 1
    assert np.isnan(poisoned.astype(np.float32)).all() == (ir.DTYPES[dtype].kind == "f")


def test_the_dump_option_writes_every_level_though_the_kernel_is_cached(tmp_path):
    registry.compile(kernel(11.0), host_target())
    with jt.config(dump=str(tmp_path)):
        registry.compile(kernel(11.0), host_target())
    (folder,) = tmp_path.iterdir()
    names = sorted(p.name for p in folder.iterdir())
    assert names[0] == "00_traced.tile"
    assert [n.partition("_")[2] for n in names[-3:]] == ["llvm", "llvm_opt", "asm"]
    assert "jtile_entry" in (folder / names[-1]).read_text()
