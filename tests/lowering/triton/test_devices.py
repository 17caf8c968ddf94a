"""Kernels that talk to other devices, on GPUs: the text of all devices' programs evaluated together, beside the
interpreter; what is reported where something goes wrong; and the instructions that a compiled kernel has."""

import re

import device_programs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from device_kernels import corner, cycle, gather, numbers, own_programs, pushed, shift
from ttir import Site, run_on_mesh

import jtile as jt
from jtile import ir
from jtile.errors import UnsupportedError
from jtile.lowering import targets
from jtile.lowering.triton import heuristics, stages
from jtile.lowering.triton.block import emit_block_kernel
from jtile.lowering.triton.compile import emit_kernel
from jtile.lowering.triton.features import features
from jtile.ops import collective_parts as parts

FLAT = dict(axis="x", bn=32, programs=2)


def lowered(kernel, x, mesh, **meta):
    """The kernel in Tile IR, after the passes."""
    return kernel.lower(jax.ShapeDtypeStruct(x.shape[len(mesh) :], x.dtype), mesh=mesh, **meta).kernel


@pytest.mark.parametrize(
    ("kernel", "shape", "mesh", "meta"),
    [
        (shift, (4, 3, 5), {"x": 4}, dict(axis="x")),
        (gather, (3, 2, 5), {"x": 3}, dict(axis="x")),
        (corner, (2, 3, 4, 6), {"x": 2, "y": 3}, dict(rows="x", columns="y")),
        (own_programs, (2, 4, 6), {"x": 2}, dict(axis="x")),
        (parts.gather_parts, (4, 70), {"x": 4}, FLAT),
        (parts.exchange_parts, (2, 2, 70), {"x": 2}, FLAT),
        (parts.sum_parts, (4, 4, 70), {"x": 4}, FLAT),
        (parts.sum_all, (4, 70), {"x": 4}, FLAT),
        (parts.sum_all_in_two, (3, 3, 70), {"x": 3}, FLAT),
    ],
    ids=lambda v: getattr(v, "name", None),
)
def test_the_meaning(kernel, shape, mesh, meta):
    """Three calls of one site, so that both sets of memory and signals are used again."""
    x = numbers(*shape)
    want = kernel.interpret(x, mesh=mesh, **meta)
    (got,) = run_on_mesh(lowered(kernel, x, mesh, **meta), [x])
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("dtype", ["int8", "bfloat16", "bool", "float8_e4m3fn", "int4"])
def test_dtypes(dtype):
    x = (numbers(2, 3, 5) % 2).astype(jnp.dtype(dtype))
    (got,) = run_on_mesh(lowered(shift, x, {"x": 2}, axis="x"), [x], calls=2)
    np.testing.assert_array_equal(got, x[::-1])


@pytest.mark.parametrize("seed", range(4))
def test_random_programs(seed):
    devices, programs = ((2, 1), (3, 2), (4, 1))[seed % 3]
    steps, x = device_programs.script(seed), device_programs.inputs(devices, programs, seed)
    kernel = lowered(device_programs.follow, x, {"x": devices}, axis="x", steps=steps)
    (got,) = run_on_mesh(kernel, [x], seed=seed)
    np.testing.assert_array_equal(got, device_programs.expected(x, steps), err_msg=str(steps))


@pytest.mark.slow
@pytest.mark.parametrize("start", range(4, 204, 50))
def test_two_hundred_random_programs(start):
    for seed in range(start, start + 50):
        test_random_programs(seed)


@pytest.mark.parametrize("fault", ["no signal", "a wait for one more", "a cycle"])
def test_planted_faults(fault):
    """All programs end, and one says which signal did not come; the next calls end at once."""
    steps, x = device_programs.with_fault(0, fault), device_programs.inputs(3, 1, 0)
    site = Site(lowered(device_programs.follow, x, {"x": 3}, axis="x", steps=steps))
    for _ in range(2):
        site.call([[part] for part in x])
    found = site.faults()
    assert {f.kind for f in found.values()} == {"wait"}
    assert all("device_programs.py:" in f.where for f in found.values())
    assert all(site.numbers(k)["fault"] == 1 for k in range(3))


def test_reports():
    x = numbers(2, 3, 5)
    site = Site(lowered(shift, x, {"x": 2}, axis="x", at_least=3))
    site.call([[part] for part in x])
    assert {f.numbers for f in site.faults().values()} <= {(0, 3, 1), (0, 3, 0)}  # signal, wanted, stands at
    site = Site(lowered(cycle, x, {"x": 2}, axis="x"))
    site.call([[part] for part in x])
    assert site.facts["signals"] == [["came", [2]]]
    assert all(f.numbers == (0, 1, 0) for f in site.faults().values())
    site = Site(lowered(alone, x, {"x": 2}, axis="x"))
    site.call([[part] for part in x])
    assert [f.kind for f in site.faults().values()] == ["barrier"]
    assert site.faults()[0].numbers == (0, 2, 1)  # axis, devices, how many have come


@pytest.mark.parametrize(
    ("k", "value", "kind", "want"),
    [(7, 1, "signal", None), (2, 0, "value", (2, 0)), (-1, 1, "signal", None)],
)
def test_numbers_that_are_computed(k, value, kind, want):
    x, of = numbers(2, 4), np.array([k, value], np.int32)
    kernel = raises.lower(*(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (x[0], of)), mesh={"x": 2}).kernel
    site = Site(kernel)
    site.call([[part, of] for part in x])
    assert {f.kind for f in site.faults().values()} == {kind}
    assert want is None or all(f.numbers[:2] == want for f in site.faults().values())


def test_devices_that_there_are_not():
    x = numbers(2, 4)
    site = Site(lowered(astray, x, {"x": 2}))
    site.call([[part + 9] for part in x])
    assert {f.kind for f in site.faults().values()} == {"device"}
    assert all(f.numbers[0] == 0 and f.numbers[1] >= 9 for f in site.faults().values())


def compiled(kernel):
    f = features("sm_90")
    text, record = emit_kernel(kernel, f)
    return record, stages.build(text, f, heuristics.choose(kernel, f, {}), where=kernel, texts=True)


def test_instructions():
    """System scope for what other devices see; whole vectors into the memory of others; one block for each program."""
    x = numbers(2, 1 << 14)
    kernel = lowered(parts.sum_all, x, {"x": 2}, axis="x", bn=1024, programs=4)
    record, built = compiled(kernel)
    ptx = built.texts["ptx"]
    assert "ld.acquire.sys.global.b32" in ptx
    assert len(re.findall(r"fence\.acq_rel\.sys; @%jp red\.relaxed\.sys\.global\.add\.u32", ptx)) == 1
    assert ptx.count("st.global.v4") >= 2 and "%globaltimer" in ptx and "exit;" in ptx
    assert not re.search(r"st(matrix|\.shared\.v)", ptx)  # a tile goes from memory to memory through registers only
    assert "acq_rel.add" not in ptx  # a call begins and ends without atomics
    assert record.grid == 4 and record.devices["waits"] and record.devices["memory"] % 256 == 0
    assert record.devices["bytes"] == record.devices["memory"] + 2 * 2 * x[0].nbytes


def test_a_start_beside_the_kernel_in_front():
    """What is the host's is read before the kernels in front have ended; all else behind them, the number of the call
    first of all: the call before this one of the same site may be one of them."""
    kernel = lowered(parts.sum_all, numbers(2, 1 << 14), {"x": 2}, axis="x", bn=1024, programs=4)
    _, built = compiled(kernel)
    ptx = built.texts["ptx"]
    assert ptx.count("griddepcontrol.") == 2 and built.waits
    start, (before, behind) = ptx.index("griddepcontrol.launch_dependents"), ptx.split("griddepcontrol.wait")
    loads = lambda text: len(re.findall(r"ld\.global", text))
    assert start < len(before) and loads(before) == 4  # the place, how long a program waits, where both devices are
    assert loads(behind) >= 6 and not re.search(r"(st|red|atom)\.global", before)
    older, _ = emit_kernel(kernel, features("sm_80"))
    assert "griddepcontrol" not in older


def test_loads_stay_behind_waits():
    x = numbers(2, 70)
    text, _ = emit_kernel(lowered(parts.gather_parts, x, {"x": 2}, **FLAT), features("sm_90"))
    loops = text.split("scf.for")
    (waiting,) = [k for k, part in enumerate(loops) if "ld.acquire" in part]
    assert "tt.num_stages = 1" in "".join(loops[waiting:])


def test_atomics_of_other_devices():
    x = numbers(2, 3, 2, 6)
    text, _ = emit_kernel(lowered(corner, x, {"x": 2, "y": 3}, rows="x", columns="y"), features("sm_90"))
    assert "red.relaxed.sys.global.max.s32" in text  # a signal that is set to higher numbers
    assert text.count("tt.atomic_rmw add, relaxed, sys") > text.count("tt.atomic_rmw add, relaxed, gpu")


def test_the_option():
    """The option forbids such kernels on GPUs; other platforms have none."""
    x = numbers(2, 4)
    lower = lambda target: shift.lower(jax.ShapeDtypeStruct((4,), x.dtype), mesh={"x": 2}, axis="x", target=target)
    off = pytest.raises(UnsupportedError, match=r"while the option gpu_peers \(JTILE_GPU_PEERS\) is off")
    with jt.config(gpu_peers=False), off:
        lower("cuda:sm_90").texts
    with jt.config():
        kernel = lower("cuda:sm_90").kernel
        targets.check_capabilities(kernel, targets.resolve("cuda:sm_90"))
        for other in ("rocm:gfx942", "ascend:910b1"):
            with pytest.raises(UnsupportedError, match=r"cannot run op 'axis_index'; run it in the interpreter"):
                targets.check_capabilities(kernel, targets.resolve(other))
        many = lowered(gather, numbers(2, 200, 4), {"x": 2}, axis="x")
        with pytest.raises(UnsupportedError, match="200 programs that wait for each other; at most 132 run at once"):
            targets.check_capabilities(many, targets.resolve("cuda:sm_90"))


def test_grids_that_do_not_wait():
    x = numbers(2, 3000)
    kernel = lowered(own_memory, x, {"x": 2}, axis="x")
    assert not ir.waits(kernel)
    (got,) = run_on_mesh(lowered(own_memory, x[:, :9], {"x": 2}, axis="x"), [x[:, :9]], calls=2)
    np.testing.assert_array_equal(got, x[:, :9] + np.arange(2)[:, None])


@jt.kernel(out_type=lambda x, **_: jt.like(x))
def alone(x, o, *, axis):
    @jt.when(jt.axis_index(axis) == 0)
    def _():
        jt.axis_barrier(axis)

    o[...] = x[...]


@jt.kernel(out_type=lambda x, of: jt.like(x), scratch=lambda x, of: [jt.signals(3)])
def raises(x, of, o, came):
    jt.signal(came.on("x", jt.axis_index("x"))[of[0]], of[1])
    o[...] = x[...]


@jt.kernel(out_type=lambda x: jt.like(x), scratch=lambda x: [jt.symmetric((1,), x.dtype)])
def astray(x, o, box):
    box.on("x", x[0].astype(np.int32))[0] = x[0]
    o[...] = x[...]


@jt.kernel(
    out_type=lambda x, **_: jt.like(x),
    grid=lambda x, **_: x.shape,
    scratch=lambda x, **_: [jt.symmetric(x.shape, x.dtype)],
)
def own_memory(x, o, box, *, axis):
    i = jt.program_id(0)
    box[i] = x[i] + jt.axis_index(axis).astype(x.dtype)
    o[i] = box[i]


def test_roles_copy_to_other_devices():
    """A tensor map for each device, of both sets of memory; signals wait for copies; no role ends before its time."""
    x = numbers(2, 64, 64)
    kernel = lowered(pushed, x, {"x": 2})
    f = features("sm_90")
    text, record, _ = emit_block_kernel(kernel, f)
    maps = [p for p in record.params if p["kind"] == "tensormap"]
    size = x[0].nbytes
    assert [(p["device"], p["offset"]) for p in maps] == [(k, record.devices["memory"]) for k in (0, 1)]
    assert all(p["dims"] == [64, 64, 2] and p["strides"] == [256, size] for p in maps)
    assert record.devices["bytes"] == record.devices["memory"] + 2 * size
    _, copied = text.split("async_tma_copy_local_to_global", 1)
    assert "cp.async.bulk.wait_group 0;" in copied.split("tt.atomic_rmw add, release, sys")[0]
    assert "exit;" not in text and "tt.atomic_rmw add, acquire, sys" in text
    built = stages.build(text, f, heuristics.Choice(4, 1, 1, ("num_stages",)), where=kernel, texts=True, level="ttgir")
    assert "cp.async.bulk.tensor.3d.global.shared" in built.texts["ptx"]
