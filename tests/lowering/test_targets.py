"""Targets as data, the capability check, and the host found without LLVM."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jtile as jt
from jtile import ir
from jtile.errors import KernelTypeError, KernelValueError, UnsupportedError
from jtile.lowering import targets
from jtile.lowering.cpu import targets as cpu_targets
from jtile.lowering.cpu.isa import ISAS, host_isa
from jtile.lowering.cpu.targets import parse_isa, spell_isa
from jtile.lowering.targets import Gap, Memory, Scale, Target, check_capabilities, host_target
from jtile.ops import rounded_rows


@jt.kernel(out_type=lambda x, **_: jt.like(x), grid=4, scratch=jax.ShapeDtypeStruct((32,), jnp.float32))
def body(x, o, s):
    s[...] = jnp.exp(x[0, :])
    t = x[jt.program_id(0), :].astype(jnp.bfloat16)
    o[jt.program_id(0), :] = t.astype(jnp.float32) + s[...]


def kernel():
    return body.lower(jax.ShapeDtypeStruct((4, 32), jnp.float32)).program.kernel


def small(**changes):
    return Target("small", "cpu", "x86_64:generic:128:sse2", **changes)


def line_of(text):
    with open(__file__) as f:
        return next(n for n, line in enumerate(f, 1) if text in line)


def test_the_host():
    host = host_target()
    assert (host.name, host.platform) == ("cpu", "cpu")
    assert parse_isa(host.arch) == host_isa()
    assert host.memory("device").size > 1 << 28
    assert [s.name for s in host.scales] == ["thread", "block", "device", "node"]
    assert set(host.dtypes) == set(ir.DTYPES)
    assert host_target() is host
    assert hash(host) == hash(dataclasses.replace(host))


def test_the_cores_are_those_of_now(monkeypatch):
    """A process may change which cores it runs on, and products are cut up for those."""
    of = lambda: rounded_rows.tiles(1, 4096, 64, 1)["rows"]
    found = {}
    for cores in (2, 16, 2):
        monkeypatch.setattr("os.sched_getaffinity", lambda _, cores=cores: set(range(cores)))
        assert targets.resolve("cpu:avx2").programs_at_once == host_target().programs_at_once == cores
        assert found.setdefault(cores, of()) == of()
    assert found[2] == 8 * found[16]
    assert Target("plain", "cuda", "sm_90").programs_at_once == 1


@pytest.mark.parametrize("name", sorted(ISAS))
def test_named_instruction_sets(name):
    target = targets.resolve(f"cpu:{name}")
    assert target.name == f"cpu:{name}"
    assert parse_isa(target.arch) == ISAS[name]
    assert target in [cpu_targets.cpu_target(name)]


def test_what_ops_ask_of_a_cpu():
    integers = lambda isa: {"int16 products", "int16 tiles", "byte tiles"} & set(cpu_targets._features(isa))
    narrow = dataclasses.replace(ISAS["avx512bf16"], vector_bits=256)
    assert integers(ISAS["avx512bf16"]) == {"int16 products"} and not integers(narrow) | integers(ISAS["avx512"])
    assert integers(ISAS["amx"]) == {"int16 products", "int16 tiles", "byte tiles"}


def test_spelling_an_instruction_set_is_reversible():
    for isa in ISAS.values():
        assert parse_isa(spell_isa(isa)) == isa
    for bad in ("", "x86_64", "x86_64:generic:wide:sse2", "a:b:c:d:e"):
        with pytest.raises(KernelValueError, match="arch"):
            parse_isa(bad)


def test_resolve():
    assert targets.resolve(None) is host_target()
    assert targets.resolve("cpu") is host_target()
    assert targets.resolve(small()) == small()
    assert "cpu:avx2" in targets.names()
    with pytest.raises(UnsupportedError, match="no target 'sm_90': write 'cuda:sm_90'; this release compiles for cpu"):
        targets.resolve("sm_90")
    with pytest.raises(KernelTypeError):
        targets.resolve(7)


def test_a_target_of_ones_own():
    t = small(
        scales=(Scale("block", memory="l1"), Scale("device", units=8, memory="dram", link=2e10)),
        memories=(Memory("l1", 32768, 1e12), Memory("dram")),
        limits=(("programs", 100),),
    )
    assert t.memory("block") == Memory("l1", 32768, 1e12)
    assert t.memory("warp") is None
    assert t.limit("programs") == 100
    assert t.limit("rank") is None
    for bad in (
        {"scales": (Scale("core"),)},
        {"scales": (Scale("block", memory="l7"),)},
        {"dtypes": ("float32", "float31")},
    ):
        with pytest.raises(KernelValueError, match="target 'small' names"):
            small(**bad)


def refusal(target):
    with pytest.raises(UnsupportedError) as e:
        check_capabilities(kernel(), target)
    return str(e.value)


def test_the_host_runs_it():
    check_capabilities(kernel(), host_target())


def test_a_missing_dtype_names_op_line_and_the_nearest():
    text = refusal(small(dtypes=("float32", "int32", "float16", "bool")))
    assert "kernel body: target 'small' cannot run op 'cast' with dtype bfloat16; use float32" in text
    assert f"test_targets.py:{line_of('t = x[jt.program_id(0), :].astype')}" in text
    text = refusal(small(dtypes=("int32", "bfloat16", "bool")))
    assert "Ref 'x' with dtype float32; there is no near dtype" in text


def test_a_missing_op():
    text = refusal(small(gaps=(Gap("map.exp", "*", "use exp2 of x * log2(e)"),)))
    assert "cannot run op 'map.exp'; use exp2 of x * log2(e)" in text
    assert f"test_targets.py:{line_of('s[...] = jnp.exp')}" in text
    text = refusal(small(gaps=(Gap("map.add", "float32", "add in float64"),)))
    assert "cannot run op 'map.add' on float32; add in float64" in text
    check_capabilities(
        kernel(), small(gaps=(Gap("map.exp", "float64", ""), Gap("atomic", "*", ""), Gap("map.e", "*", "")))
    )


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"programs": 3}, "a grid of 4 programs; at most 3"),
        ({"scratch": 127}, "scratch of 128 bytes a program; at most 127"),
        ({"rank": 1}, "Ref 'x' of rank 2; reshape it to rank 1"),
    ],
)
def test_limits(limits, message):
    assert message in refusal(small(limits=tuple(limits.items())))
    check_capabilities(kernel(), small(limits=tuple((k, v + 1) for k, v in limits.items())))


def test_the_host_is_remembered_on_disk(tmp_path, monkeypatch):
    import jtile.lowering.cpu.isa as isa

    with jt.config(cache_dir=str(tmp_path)):
        found = cpu_targets._host_arch()
        monkeypatch.setattr(isa, "processor_isa", lambda: pytest.fail("LLVM is asked again"))
        assert cpu_targets._host_arch() == found == spell_isa(host_isa())
        monkeypatch.setattr(cpu_targets, "_processor", lambda: "another processor")
        monkeypatch.setattr(isa, "processor_isa", lambda: ISAS["avx2"])
        assert cpu_targets._host_arch() == spell_isa(ISAS["avx2"])


def test_tile_registers_are_used_where_the_system_grants_them(tmp_path, monkeypatch):
    """The processor is remembered on disk, and the permission is asked for in each process: one that is refused, and
    has found the processor first, takes nothing from those after it."""
    import jtile.lowering.cpu.isa as isa

    monkeypatch.setattr(isa, "processor_isa", lambda: ISAS["amx"])
    without = dataclasses.replace(ISAS["amx"], features=ISAS["avx512bf16"].features)
    with jt.config(cache_dir=str(tmp_path)):
        for granted in (False, True, True, False):
            monkeypatch.setattr(isa, "_tiles_are_permitted", lambda granted=granted: granted)
            assert cpu_targets._host_arch() == spell_isa(ISAS["amx"] if granted else without)


def test_lowering_follows_the_isa_option():
    k = jt.call(lambda x, o: o.__setitem__(..., x[...] * 2), out_type=lambda x: jt.like(x), grid=1)
    x = jnp.arange(16, dtype=jnp.float32)
    texts = {}
    for isa in ("sse2", "avx2"):
        with jt.config(isa=isa), jax.default_device(jax.devices("cpu")[0]):
            np.testing.assert_array_equal(jax.jit(k)(x), x * 2)
            texts[isa] = jax.jit(k).lower(x).as_text()
    assert texts["sse2"] != texts["avx2"]


def test_every_gpu_target_has_its_numbers():
    names = [n for n in targets.names() if n.startswith(("cuda:", "rocm:"))]
    assert {"cuda:sm_80", "cuda:sm_90", "rocm:gfx942"} <= set(names)
    for name in names:
        t = targets.resolve(name)
        assert (t.name, t.platform) == (name, name.partition(":")[0])
        assert t.memory("block").size >= 65536
        assert dict(t.rates)["bfloat16"] > dict(t.rates)["float64"]
        assert t.memory("node").bandwidth > 1e11


@pytest.mark.parametrize("bad", ["cuda", "rocm:sm_90", "cuda:gfx942", "cuda:sm_1"])
def test_resolve_refuses_gpus_that_it_does_not_know(bad):
    with pytest.raises((UnsupportedError, KernelValueError), match="architecture"):
        targets.resolve(bad)


def test_the_target_of_calls_and_what_it_has():
    assert jt.target() is targets.resolve(None) or jt.platform() != "cpu"
    for arch, name, has in (
        ("sm_90", "cuda:sm_90", {"warps", "measured warps", "peers", "warpgroup products"}),
        ("sm_90a", "cuda:sm_90", {"warps", "measured warps", "peers", "warpgroup products"}),
        ("sm_100", "cuda:sm_100", {"warps", "measured warps", "peers"}),
        ("gfx942,sm_90", "rocm:gfx942", {"warps"}),
    ):
        with jt.config(arch=arch):
            assert jt.target().name == name and set(jt.target().features) == has
    assert targets.resolve("cpu:avx2").features == ("host", "peers")
    assert targets.resolve("cpu:avx512bf16").features == ("host", "peers", "int16 products")
    if jt.platform() == "cpu":
        with jt.config(isa="sse2"):
            assert jt.target().name == "cpu:sse2"


def test_kernels_at_the_block_level_need_a_feature():
    """Not an architecture: a target that lacks it is refused, whatever its name."""

    @jt.kernel(out_type=lambda x: x)
    def roles(x, o):
        with jt.role("one", warps=4):
            o[...] = x[...]

    (hopper, x) = targets.resolve("cuda:sm_90"), jax.ShapeDtypeStruct((64,), jnp.float32)
    kernel = roles.lower(x).program.kernel
    targets.check_capabilities(kernel, hopper)
    with pytest.raises(jt.errors.UnsupportedError, match="cannot run a kernel at block level"):
        targets.check_capabilities(kernel, dataclasses.replace(hopper, features=("warps",)))


def test_the_platform_of_a_host():
    """Kernels of a program for the CPU go to an NPU where the option names one; in exports the CPU keeps its own."""
    from jtile.lowering import platforms

    assert platforms.on("cpu").name == "cpu"
    with jt.config(arch="910b1"):
        assert [platforms.on("cpu").name, platforms.on("cpu", own=True).name] == ["ascend", "cpu"]
        assert platforms.on("ascend", own=True).here().name == "ascend:910b1"
    with pytest.raises(UnsupportedError, match="set JTILE_ARCH=910b1"):
        platforms.on("ascend").here()
