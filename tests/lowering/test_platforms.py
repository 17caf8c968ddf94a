"""Platforms as records: one from outside of jtile, and the facts of machines that reach plans, tiles and times."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import platform as machine
import shutil
import sys
import types
from pathlib import Path

import forked
import jax.numpy as jnp
import pytest
from tile_kernels import matmul

import jtile as jt
from jtile.errors import KernelValueError, UnsupportedError
from jtile.lowering import here, platforms, registry, targets
from jtile.lowering.artifact import Artifact
from jtile.lowering.cuda.platform import CARDS
from jtile.lowering.cuda.targets import device_target
from jtile.lowering.triton.block.passes import steps
from jtile.lowering.triton.block.passes.plan import Machine
from jtile.lowering.triton.compile import compile_kernel
from jtile.lowering.triton.platform import Gpus
from jtile.tune import warpgroups

PLUGIN = Path(importlib.util.find_spec("machines").origin).parent / "toy_plugin"
SCRIPT = """
import sys, warnings
warnings.simplefilter("error")
import jax, jax.numpy as jnp, numpy as np
import jtile as jt
from jtile.lowering import targets
assert "toy_plugin" not in sys.modules

@jt.kernel(out_type=lambda x, y: jt.like(x), grid=lambda x, y: jt.cdiv(x.shape[0], 8))
def axpy(x, y, o):
    i = jt.program_id(0)
    o.tiles(8)[i] = 2.0 * x.tiles(8)[i] + y.tiles(8)[i]

@jt.kernel(out_type=lambda x: jt.like(x), grid=1)
def root(x, o):
    o.tiles(8)[0] = jnp.sqrt(x.tiles(8)[0])

x, y = jnp.arange(20.0), jnp.ones(20)
assert jt.platform() == "cpu" and "toy:one" in targets.names()
q = jax.ShapeDtypeStruct((1, 64, 2, 64), jnp.float32)
jax.eval_shape(jt.ops.attention, q, q, q)  # for a CPU, without what chooses and compiles for GPUs
assert not [name for name in sys.modules if name.startswith("jtile.lowering.triton.block")]
with jt.config(arch="toy1"):
    assert jt.platform() == "toy" and jt.target().name == "toy:one" and jt.architecture() == "toy1"
    run = jax.jit(axpy)
    np.testing.assert_array_equal(run(x, y), 2 * x + y)
    np.testing.assert_array_equal(axpy(x, y), 2 * x + y)
    try:
        root(x)
    except jt.errors.UnsupportedError as e:
        assert "kernel root: the toy has no map" in str(e), e
    else:
        raise SystemExit("no error")
assert "long p = begin" in axpy.lower(x, y, target="toy:one").texts["c"]
np.testing.assert_array_equal(axpy(x, y), 2 * x + y)
with jt.config(arch="toy1"):
    np.testing.assert_array_equal(sys.modules["toy_plugin"].double(x[:8]), 2 * x[:8])
print("the toy ran")
"""


@pytest.mark.skipif(machine.machine() != "x86_64", reason="the toy makes code for x86-64")
@pytest.mark.skipif(shutil.which("gcc") is None, reason="the toy compiles by gcc, which is not installed")
def test_a_platform_from_outside_runs_a_kernel(subprocess_env):
    """A package with a record and an entry point: found, chosen by the option `arch`, compiled for, run, refused."""
    env = subprocess_env | {"PYTHONPATH": str(PLUGIN)}
    done = forked.run([sys.executable, "-c", SCRIPT], env=env)
    assert (done.returncode, done.stdout) == (0, "the toy ran\n"), done.stderr


def test_a_new_version_of_a_package_compiles_anew(monkeypatch, tmp_path):
    """The keys of artifacts hold the version of the package that brings the platform, without its doing."""
    made = []

    def compile(kernel, target, options, texts):
        made.append(kernel.name)
        return Artifact(target.name, b"image", {}, {"name": kernel.name})

    record = dataclasses.replace(platforms.named("cpu"), name="odd", compile=compile, tools=tuple)
    installed = lambda version: monkeypatch.setattr(platforms, "_installed", lambda: ((record, ("odd", version)),))
    with jt.config(cache_dir=tmp_path):
        for version in ("1", "1", "2"):
            installed(version)
            registry.forget()
            registry.compile(matmul(8, 8, 8, tile=(8, 8, 8)), targets.Target("odd:1", "odd", ""))
    assert len(made) == 2


def test_the_version_of_an_entry_points_package(monkeypatch):
    record = platforms.named("cpu")
    point = types.SimpleNamespace(
        name="odd", value="m:x", load=lambda: record, dist=types.SimpleNamespace(name="odd", version="1.2")
    )
    monkeypatch.setattr(platforms.importlib.metadata, "entry_points", lambda group: [point])
    assert platforms._installed.__wrapped__() == ((record, ("odd", "1.2")),)
    assert platforms.package("cpu") == ()


def test_nothing_of_this_name_was_registered():
    with pytest.raises(KernelValueError, match=r"no platform 'cpu' was registered in this .*\(none\)"):
        platforms.unregister("cpu")


def test_an_entry_point_that_is_no_record(monkeypatch):
    point = types.SimpleNamespace(name="bad", value="m:x", load=lambda: 3)
    monkeypatch.setattr(platforms.importlib.metadata, "entry_points", lambda group: [point])
    with pytest.raises(
        KernelValueError, match=r"the entry point bad = m:x of the group jtile.platforms gives 3; expect"
    ):
        platforms._installed.__wrapped__()


def test_a_package_that_cannot_be_loaded(monkeypatch):
    """Its platform is left out, with a warning; kernels of others run."""

    def load():
        raise ModuleNotFoundError("no module named 'sdk'")

    point = types.SimpleNamespace(name="bad", value="m:x", load=load)
    monkeypatch.setattr(platforms.importlib.metadata, "entry_points", lambda group: [point])
    with pytest.warns(
        UserWarning, match=r"platform bad = m:x .* is left out \(ModuleNotFoundError: no module named 'sdk'"
    ):
        assert platforms._installed.__wrapped__() == ()


def test_the_platform_of_a_program():
    assert [platforms.on(host).name for host in ("cpu", "cuda", "rocm")] == ["cpu", "cuda", "rocm"]
    with jt.config(arch="gfx942,sm_90"):  # kernels that are lowered for a CPU are still for a CPU
        assert [platforms.on(host).name for host in ("cpu", "cuda")] == ["cpu", "cuda"]
        assert here.platform() == "rocm"
        assert platforms.named("cuda").here().name == "cuda:sm_90"
    with pytest.raises(UnsupportedError, match="there is no platform 'tpu'; there are cpu, cuda, rocm"):
        platforms.named("tpu")
    if jt.platform() == "cpu":
        with pytest.raises(
            UnsupportedError, match=r"no GPU of platform 'cuda', and the option arch is not set: set JTILE_"
        ):
            platforms.named("cuda").here()


H200 = targets.resolve("cuda:sm_90")


def changed(*, units: int = 132, memory: dict[str, int] | None = None) -> targets.Target:
    """An H200 with so many multiprocessors, and other sizes of memories."""
    scales = tuple(dataclasses.replace(s, units=units) if s.name == "device" else s for s in H200.scales)
    memories = tuple(dataclasses.replace(m, size=(memory or {}).get(m.name, m.size)) for m in H200.memories)
    rates = tuple((dtype, rate * units / 132) for dtype, rate in H200.rates)
    return dataclasses.replace(H200, scales=scales, memories=memories, rates=rates)


def plan(target: targets.Target) -> str:
    found = steps(matmul(4096, 4096, 1024, tile=(128, 256, 64)), Machine.of(target), {})
    return str(found.plan)


def test_a_changed_target_changes_the_plan():
    """Blocks of a persistent grid by the multiprocessors, slots of rings by the shared memory."""
    assert "128 blocks for 512 tiles" in plan(H200)  # four rounds of 132 at most
    assert "103 blocks for 512 tiles" in plan(changed(units=114))  # five
    assert Machine.of(changed(memory={"l2": 25 << 20})).cache == Machine.of(H200).cache // 2 == 16 << 20
    assert "rings of 4 slots" in plan(H200)
    assert "rings of 3 slots" in plan(changed(memory={"shared": 180 << 10}))


def test_a_target_without_machine_facts_has_no_plan():
    bare = dataclasses.replace(H200, scales=(), memories=())
    with pytest.raises(KernelValueError, match="'cuda:sm_90' does not say what memory its scale 'block' has"):
        Machine.of(bare)


def test_a_changed_target_reaches_code_tiles_and_times():
    """The launch record of a compiled kernel, the tiles that `jt.auto` takes, and the model of time."""
    x = jnp.zeros((4096, 512), jnp.bfloat16)
    half = changed(units=66)

    @jt.kernel(
        out_type=lambda a, b, **_: jt.like(a, shape=(a.shape[0], b.shape[1])),
        grid=lambda a, b, *, bm, bn, **_: (jt.cdiv(a.shape[0], bm), jt.cdiv(b.shape[1], bn)),
    )
    def product(a, b, o, *, bm=128, bn=256, bk=64):
        i, j = jt.program_id(0), jt.program_id(1)
        acc = jt.zeros((bm, bn), jnp.float32)
        for k in jt.range(jt.cdiv(a.shape[1], bk)):
            acc = jt.dot(a.tiles(bm, bk)[i, k], b.tiles(bk, bn)[k, j], acc)
        o.tiles(bm, bn)[i, j] = acc.astype(o.dtype)

    kernel = product.lower(x, x.T, target=H200).kernel
    records = [json.loads(compile_kernel(kernel, t).launch["record"]) for t in (H200, half)]
    assert [r["grid"] for r in records] == [128, 64]
    few = warpgroups.Product(1024, 1024, 4096)
    chosen = [next(iter(warpgroups.forms(few, warpgroups.gpu(t)).items())) for t in (H200, half)]
    times = [warpgroups.predicted_us(few, chosen[0][0], warpgroups.gpu(t)) for t in (H200, half)]
    assert times[0] < times[1]


class Device:
    """What JAX tells of a device."""

    def __init__(self, kind: str, **facts: int):
        self.device_kind = kind
        vars(self).update(facts)


def test_a_device_tells_its_facts():
    processors = lambda t: next(s.units for s in t.scales if s.name == "device")
    assert device_target("sm_90", Device("NVIDIA H200", core_count=132)) == H200
    pcie = device_target("sm_90", Device("NVIDIA H100 PCIe", core_count=114))
    assert (processors(pcie), pcie.memory("node").bandwidth, dict(pcie.rates)["bfloat16"]) == (114, 2039e9, 756e12)
    other = device_target("sm_90", Device("NVIDIA H20", core_count=78))
    assert processors(other) == 78
    assert dict(other.rates)["bfloat16"] == pytest.approx(989e12 * 78 / 132)
    assert device_target("sm_90", Device("NVIDIA H200")) == H200  # a plug-in that tells no number


def test_a_gpu_without_code_of_jtiles_may_still_export(monkeypatch):
    """On a machine with an old GPU, programs for others are compiled where the option `arch` names one."""
    old = Device("Tesla V100-SXM2-32GB", compute_capability="7.0", core_count=80)
    record = dataclasses.replace(CARDS).platform()  # one that has not looked for devices
    monkeypatch.setattr(Gpus, "_device", lambda self: old)
    with jt.config(arch="sm_90"):
        assert record.here() == H200
        assert not record.is_here()
        assert record.kind() == "sm_90"
    with pytest.raises(KernelValueError, match="unknown GPU architecture 'sm_70'"):
        record.here()
