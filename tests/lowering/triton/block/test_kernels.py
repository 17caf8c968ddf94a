"""Kernels at the block level as TTGIR: golden text, machine code, registers, and the way there from tile level."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path

import block_kernels
import block_language
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from device import run_artifact
from machines import card

import jtile as jt
from jtile import ir
from jtile._config import config
from jtile._errors import DefectWarning, UnsupportedError
from jtile.interpret import interpret
from jtile.lowering.triton import block
from jtile.lowering.triton.block import compile_block_kernel, emit_block_kernel
from jtile.lowering.triton.block.emit_roles import registers_at_start, roles_of, worker_registers
from jtile.lowering.triton.compile import compile_kernel
from jtile.lowering.triton.features import features

MACHINE = ("HGMMA", "UTMALDG", "UTMASTG", "SYNCS", "USETMAXREG")

PAIR = """kernel @pair(%x: ref<64x64xbf16>, %o: ref<64x64xf32, out>) grid(1) {
  %c0 = full 0 : i32
  %X = alloc_shared : shared<64x64xbf16>
  %full = alloc_barriers : barrier<1, arrivals 1>
  roles {
    role worker warps=4 {
      wait %full[%c0], %c0
      %Xt = transpose_shared %X : shared<64x64xbf16>
      %d = dot_async %X, %Xt : tile<64x64xf32>
      %y = dot_wait %d : tile<64x64xf32>
      %m = reduce max %y axes=(1) : tile<64xf32>
      %mb = broadcast %m dims=(0) : tile<64x64xf32>
      %z = sub %y, %mb : tile<64x64xf32>
      store %o[tile(%c0, 64), tile(%c0, 64)], %z
    }
    role loader warps=1 registers=24 {
      expect %full[%c0] bytes=8192
      async_load %x[tile(%c0, 64), tile(%c0, 64)] -> %X, %full[%c0]
    }
  }
}"""


GOLDEN = """\
%0 = ttg.local_alloc : () -> !ttg.memdesc<64x64xbf16, #shared, #ttg.shared_memory, mutable>
%1 = ttg.local_alloc : () -> !ttg.memdesc<1x1xi64, #plain, #ttg.shared_memory, mutable>
%2 = ttg.memdesc_index %1[%3]
ttng.init_barrier %2, 1
ttng.fence_async_shared {bCluster = false}
ttg.warp_specialize(%1, %0, %4) attributes {requestedRegisters = array<i32: 24>}
%5 = tt.make_range {end = 64 : i32, start = 0 : i32}
%6 = tt.make_range {end = 64 : i32, start = 0 : i32}
%7 = tt.get_program_id x
%8 = ttg.memdesc_index %1[%9]
ttng.wait_barrier %8, %9, %10
%11 = ttg.memdesc_trans %0 {order = array<i32: 1, 0>}
%12 = ttng.warp_group_dot %0, %11, %13, %14 {inputPrecision = 0 : i32, isAsync = true}
%15 = ttng.warp_group_dot_wait %12 {pendings = 0 : i32}
%16 = "tt.reduce"(%15) <{axis = 1 : i32}> ({
tt.reduce.return %17
%18 = tt.expand_dims %16 {axis = 1 : i32}
%19 = tt.broadcast %18
%20 = arith.subf %15, %19
%21 = arith.muli %5, %22
%23 = tt.splat %24
%25 = tt.expand_dims %21 {axis = 1 : i32}
%26 = tt.expand_dims %6 {axis = 0 : i32}
%27 = tt.broadcast %25
%28 = tt.broadcast %26
%29 = tt.addptr %23, %30
tt.store %29, %20
ttg.warp_yield
%31 = tt.get_program_id x
%32 = ttg.memdesc_index %33[%34]
ttng.barrier_expect %32, 8192, %35
%36 = ttg.memdesc_index %33[%34]
ttng.async_tma_copy_global_to_local %37[%34, %34] %38, %36, %35
ttg.warp_return
tt.return"""


def normal(text: str) -> list[str]:
    """The lines of the function by order of appearance of their names, without types and constants."""
    names: dict[str, str] = {}
    lines = [re.sub(r" : (![a-z]|tensor<|\(tensor|[if]\d+$).*", "", x).strip() for x in text.split("\n")]
    kept = [
        x for x in lines if re.match(r"(%\d+ = )?\"?(tt|ttg|ttng|arith\.(sub|mul))[.a-z]", x) and "tt.func" not in x
    ]
    return [re.sub(r"%[p\d]\d*", lambda n: names.setdefault(n[0], f"%{len(names)}"), x) for x in kept]


def test_golden_text():
    text, _, _ = emit_block_kernel(ir.parse_kernel(PAIR), features("sm_90"))
    assert "\n".join(normal(text)) == GOLDEN
    assert text.count("ttg.convert_layout") == 0


@pytest.mark.parametrize("consumers", [1, 2])
def test_a_product_of_matrices(consumers):
    kernel = ir.parse_kernel(block_kernels.gemm(consumers=consumers))
    artifact = compile_block_kernel(kernel, card("sm_90"), texts=True)
    for name in MACHINE[: 4 + (consumers == 2)]:
        assert name in artifact.texts["sass"], name
    assert artifact.launch["resources"]["spills"] == 0
    record = json.loads(artifact.launch["record"])
    assert (record["threads"], record["grid"]) == (384, 3)
    assert "#mma" in artifact.texts["block"]
    assert ir.print_kernel(ir.parse_kernel(artifact.texts["block"])) == ir.print_kernel(kernel)


@pytest.mark.parametrize("d", [pytest.param(64, marks=pytest.mark.slow), 128])
def test_attention(d):
    """Heads of 64 are in `test_library.py` as well."""
    artifact = compile_block_kernel(ir.parse_kernel(block_kernels.attention(d=d)), card("sm_90"), texts=True)
    assert all(name in artifact.texts["sass"] for name in MACHINE)
    assert artifact.launch["resources"]["spills"] == 0
    assert re.search(
        r"%hl?.*for .*// .*#ttg.dot_op<\{opIdx = 0", artifact.texts["block"]
    )  # the probabilities are carried as an operand
    moved = re.findall(r"ttg.convert_layout %\d+ : tensor<64x\d+x(\w+), ", artifact.texts["ttgir"])
    assert set(moved) == {"bf16"}  # and nothing else moves but vectors, in registers


@pytest.mark.gpu
@pytest.mark.parametrize("text", [block_kernels.gemm(), block_kernels.gemm(300, 392, 200, dtype="f16")])
def test_products_on_the_gpu(text):
    kernel, rng = ir.parse_kernel(text), np.random.default_rng(0)
    inputs = [rng.integers(-2, 3, r.shape).astype(np.float32).astype(r.type.info.numpy) for r in kernel.inputs]
    artifact = compile_block_kernel(kernel, card("sm_90"))
    for _ in range(3):
        (got,) = run_artifact(artifact, kernel, inputs).outputs()
        np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(interpret(kernel, inputs)[0], np.float32))


@pytest.mark.gpu
def test_attention_on_the_gpu():
    kernel, rng = ir.parse_kernel(block_kernels.attention()), np.random.default_rng(0)
    inputs = [rng.normal(size=r.shape).astype(np.float32).astype(r.type.info.numpy) for r in kernel.inputs]
    (got,) = run_artifact(compile_block_kernel(kernel, card("sm_90")), kernel, inputs).outputs()
    want = np.asarray(interpret(kernel, inputs)[0], np.float32)
    assert np.linalg.norm(np.asarray(got, np.float32) - want) <= 4e-3 * np.linalg.norm(want)


# -- from tile level --------------------------------------------------------------------------------------------------

PRODUCT = """kernel @mm(%a: ref<{m}x{k}xbf16>, %b: ref<{k}x{n}xbf16>, %o: ref<{m}x{n}xbf16, out>) grid({gm}, {gn}) {{
  %i = program_id 0
  %j = program_id 1
  %c0 = full 0 : i32
  %c1 = full 1 : i32
  %n = full {trips} : i32
  %z = full 0.0 : tile<128x128xf32>
  %r = for %k in %c0..%n step %c1 stages=3 carry (%acc = %z) {{
    %x = load %a[tile(%i, 128), tile(%k, 64)] : tile<128x64xbf16>
    %y = load %b[tile(%k, 64), tile(%j, 128)] : tile<64x128xbf16>
    %d = dot %x, %y acc=%acc : tile<128x128xf32>
    yield %d
  }}
  %h = cast %r : tile<128x128xbf16>
  store %o[tile(%i, 128), tile(%j, 128)], %h
}}"""


def product(m: int, n: int, k: int) -> ir.Kernel:
    return ir.parse_kernel(PRODUCT.format(m=m, n=n, k=k, gm=-(-m // 128), gn=-(-n // 128), trips=-(-k // 64)))


@pytest.mark.parametrize("early", [False, True])
def test_a_kernel_says_that_it_waits_for_those_in_front(early):
    """The attribute of the launch, if and only if the code waits; a kernel without early roles lets others start."""

    def body(x, o):
        X, full = jt.alloc((64, 64), x.dtype), jt.barrier(1)
        with jt.role("main"):
            full.at(0).wait()
            o[...] = X.load()
        with jt.role("copies", warps=1, early=early):
            full.at(0).expect(X.nbytes)
            jt.async_copy(x.tiles(64, 64).at[0, 0], X, full.at(0))

    x = jax.ShapeDtypeStruct((64, 64), jnp.bfloat16)
    found = jt.call(body, out_type=x, grid=(1,)).lower(x, target="cuda:sm_90")
    attributes = json.loads(found.launch["record"])["attributes"]
    assert attributes == ({"programmatic": True} if early else {})
    ptx = found.texts["ptx"]
    assert ptx.count("griddepcontrol.wait") == early and ptx.count("griddepcontrol.launch_dependents") == 1
    assert ("@%let_few griddepcontrol.launch_dependents;" in ptx) != early  # where the grid has few programs
    assert ("role copies warps=1 early" in found.texts["block"]) == early
    text = ir.print_kernel(found.kernel)
    assert ir.print_kernel(ir.parse_kernel(text)) == text and ("early" in text) == early
    assert not jt.call(body, out_type=x, grid=(1,)).interpret(np.ones((64, 64), jnp.bfloat16)).astype(float).min() < 1


def test_a_block_of_early_roles_beside_another():
    """A role that waits by itself lets the kernel behind start first; roles that name their registers take no more."""

    def body(x, o, *, hold=False):
        X, full = jt.alloc((64, 64), x.dtype), jt.barrier(1)
        with jt.role("main", registers=104, early=True):
            jt.wait_for_kernels(hold=hold)
            full.at(0).wait()
            o[...] = X.load()
        with jt.role("copies", warps=1, registers=24, early=True):
            full.at(0).expect(X.nbytes)
            jt.async_copy(x.tiles(64, 64).at[0, 0], X, full.at(0))

    x = jax.ShapeDtypeStruct((64, 64), jnp.bfloat16)
    found = jt.call(body, out_type=x, grid=(1,)).lower(x, target="cuda:sm_90")
    ptx, launch = found.texts["ptx"], found.launch
    assert ptx.index("griddepcontrol.launch_dependents") < ptx.index("griddepcontrol.wait")
    assert ptx.count("griddepcontrol.") == 2 and ".maxnreg 64" in ptx and launch["resources"]["blocks"] > 1
    held = jt.call(functools.partial(body, hold=True), out_type=x, grid=(1,)).lower(x, target="cuda:sm_90").texts["ptx"]
    assert held.index("griddepcontrol.launch_dependents") > held.index("griddepcontrol.wait")
    assert held.count("griddepcontrol.") == 2
    assert json.loads(launch["record"])["attributes"] == {"programmatic": True}
    with jt.config(overlap=True):
        overlapping = jt.call(body, out_type=x, grid=(1,)).lower(x, target="cuda:sm_90").launch
    assert json.loads(overlapping["record"])["attributes"] == {"programmatic": True, "node": True}
    assert jt.call(body, out_type=x, grid=(1,)).interpret(np.ones((64, 64), jnp.bfloat16)).astype(float).min() == 1
    large = ir.Roles(("a", "b"), (8, 4), (160, 160), (ir.Block(), ir.Block()))
    assert registers_at_start(large) == 0


@pytest.mark.parametrize(("columns", "registers"), [(128, 128), (256, 0)])
def test_a_product_that_needs_more_registers_than_its_roles_name(columns, registers):
    """It needs 154 when the kernel starts, where two warpgroups of 240 and 24 would have 128 each."""
    a, b = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((64, 64), (64, columns)))
    kernel = block_language.gemm.lower(a, b, bn=columns, bk=64, slots=2).kernel
    assert registers_at_start(roles_of(kernel)) == registers


def test_a_kernel_of_the_tile_level_compiles_at_the_block_level():
    texts = compile_kernel(product(512, 512, 512), card("sm_90"), texts=True).texts
    assert texts["schedule"].startswith("block level: ")
    assert "role producer" in texts["block"]
    assert "ttir" not in texts


@pytest.mark.parametrize(
    ("options", "why"),
    [({"specialize": False}, "specialize=False"), ({"num_ctas": 2}, "num_ctas shares")],
)
def test_a_kernel_that_stays_says_why(options, why):
    texts = compile_kernel(product(512, 512, 512), card("sm_90"), options, texts=True).texts
    assert texts["schedule"].startswith("tile level: ")
    assert why in texts["schedule"]
    assert "ttir" in texts


def test_other_architectures_have_no_schedule():
    assert "schedule" not in compile_kernel(product(256, 256, 256), card("sm_80"), texts=True).texts


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("%z = sub %y, %mb", "%z = reverse %y axes=(1)", "no code for 'reverse' inside a role"),
        (
            "%c0 = full 0 : i32",
            "%c0 = full 0 : i32\n  %A = alloc_shared : shared<64x48xbf16>",
            "sides of powers of two",
        ),
        ("%c0 = full 0 : i32", "%c0 = full 0 : i32\n  %A = alloc_shared : shared<64x64xi4>", "take buffers of uint8"),
        (
            "%c0 = full 0 : i32",
            "%c0 = full 0 : i32\n  %A = alloc_shared : shared<f32>",
            r"take a buffer of shape \(1,\)",
        ),
        (
            "%c0 = full 0 : i32",
            "%c0 = full 0 : i32\n  %b = alloc_barriers : barrier<1, arrivals 1048576>",
            "less than 1048576 arrivals",
        ),
        (
            "%c0 = full 0 : i32",
            "%c0 = full 0 : i32\n  %b = alloc_barriers : barrier<40000, arrivals 1>",
            "got 40000 of 1",
        ),
        ("-> %X, %full[%c0]", "-> %X, %full[%c0] pad=1.0", "with zeros or NaN"),
        ("tile(%c0, 64), tile(%c0, 64)] -> %X", "tile(%c0, 64), %c0:+64:2] -> %X", "it has steps over elements"),
    ],
)
def test_what_a_role_cannot_do(old, new, message):
    assert old in PAIR
    with pytest.raises(UnsupportedError, match=message):
        compile_block_kernel(ir.parse_kernel(PAIR.replace(old, new)), card("sm_90"))


def test_a_store_that_would_write_behind_its_array():
    """A tensor map writes whole words of 16 bytes."""
    text = """kernel @end(%o: ref<{n}xbf16, out>) grid(1) {{
      %c0 = full 0 : i32
      %X = alloc_shared : shared<256xbf16>
      roles {{
        role all warps=4 {{
          %z = full 0.0 : tile<256xbf16>
          store_shared %X, %z
          fence_shared
          async_store %o[tile(%c0, 256)] <- %X
          store_wait 0
        }}
      }}
    }}"""
    assert compile_block_kernel(ir.parse_kernel(text.format(n=304)), card("sm_90")).image
    with pytest.raises(UnsupportedError, match="ends within 16 bytes"):
        compile_block_kernel(ir.parse_kernel(text.format(n=300)), card("sm_90"))


def test_too_much_shared_memory():
    text = PAIR.replace("%c0 = full 0 : i32", "%c0 = full 0 : i32\n  %A = alloc_shared : shared<256x256xf32>")
    text = text.replace("wait %full", "%s = full 0.0 : tile<256x256xf32>\n      store_shared %A, %s\n      wait %full")
    with pytest.raises(UnsupportedError, match="bytes of shared memory, but sm_90 has 232448"):
        compile_block_kernel(ir.parse_kernel(text), card("sm_90"))


@pytest.mark.parametrize("option", ["num_warps", "num_stages", "num_ctas", "consumers", "persistent"])
def test_options_of_the_tile_level_mean_nothing_here(option):
    with pytest.raises(UnsupportedError, match=f"{option} means nothing at the block level"):
        compile_kernel(ir.parse_kernel(PAIR), card("sm_90"), {option: 4})


def test_other_architectures_have_no_block_level():
    with pytest.raises(UnsupportedError, match="those of sm_90, not of sm_80"):
        compile_block_kernel(ir.parse_kernel(PAIR), card("sm_80"))


def test_a_defect_of_a_plan_leaves_the_kernel_at_tile_level(monkeypatch, tmp_path):
    def stumble(*_):
        raise KeyError("x")

    monkeypatch.setattr(block, "steps", stumble)
    with pytest.raises(KeyError):
        compile_kernel(product(512, 512, 512), card("sm_90"))
    said = r"kernel .*: a defect of jtile, KeyError: 'x'; it stays at tile level.* report it .* kept in (\S+\.tile_ir);"
    with config(verify=False, cache_dir=str(tmp_path)), pytest.warns(DefectWarning, match=said) as found:
        artifact = compile_kernel(product(512, 512, 512), card("sm_90"), texts=True)
    assert "a defect of jtile at the block level: KeyError: 'x'" in artifact.texts["schedule"]
    assert artifact.launch["defect"]  # no cache on disk takes it
    kept = Path(re.search(said, str(found[0].message))[1])
    assert ir.parse_kernel(kept.read_text()).name == product(512, 512, 512).name
    assert "raise KeyError" in kept.read_text()


NEVER = """kernel @w(%a: ref<128xf32>, %o: ref<128xf32, out>) grid(1) {
  %c0 = full 0 : i32
  %c1 = full 1 : i32
  roles {
    role all warps=4 {
      %z = full 0.0 : tile<128xf32>
      %no = lt %c1, %c0 : bool
      %r = while (%x = %z) {
        yield %no
      } do (%y) {
        %t = load %a[tile(%c0, 128)] : tile<128xf32>
        %s = add %y, %t
        yield %s
      }
      store %o[tile(%c0, 128)], %r
    }
  }
}
"""


def test_a_loop_that_is_known_never_to_run():
    """Triton 3.6 fails on the loads of its body, where it knows."""
    assert compile_block_kernel(ir.parse_kernel(NEVER), card("sm_90")).image


@pytest.mark.parametrize(
    ("warps", "registers", "asked"),
    [
        ((4, 4, 1), (240, 240, 24), (240, 24)),
        ((4, 4, 1), (0, 0, 0), ()),
        ((8, 8, 1), (0, 0, 24), (112, 24)),  # a thread of 640 starts with 96; 72 of each producer's are left
        ((4, 4, 1), (0, 0, 24), (240, 24)),
        ((4, 8, 1), (128, 0, 40), (168, 40)),
    ],
)
def test_roles_that_name_no_registers_share_what_is_left(warps, registers, asked):
    names = tuple(f"r{k}" for k in range(len(warps)))
    assert worker_registers(ir.Roles(names, warps, registers, tuple(ir.Block() for _ in warps))) == asked


SCATTER = """
kernel @scatter(%x: ref<64x64xf32>, %t: ref<64xi32>, %o: ref<64x64xf32, out>) grid(1) {{
  %c0 = full 0 : i32
  roles {{
    role all warps=4 {{
      %v = load %x[tile(%c0, 64), tile(%c0, 64)] : tile<64x64xf32>
      %i = load %t[tile(%c0, 64)] : tile<64xi32>
      %r = broadcast %i dims=(0) : tile<64x64xi32>
      %c = iota 1 : tile<64x64xi32>
      store %o[{where}], %v
    }}
  }}
}}
"""


def test_scatters_whose_lanes_may_meet():
    """Numbers of rows are compared with each other; for more places than that there is no code in roles."""
    rows = compile_block_kernel(ir.parse_kernel(SCATTER.format(where="take(%i), tile(%c0, 64)")), card("sm_90"))
    assert rows.image
    with pytest.raises(UnsupportedError, match=r"no scatter in a role by 4096 places.*o\[rows, :\]"):
        compile_block_kernel(ir.parse_kernel(SCATTER.format(where="take(%r), take(%c)")), card("sm_90"))


@pytest.mark.parametrize("sizes", [(0, 64, 64), (64, 0, 64), (64, 64, 0)])
def test_products_without_elements(sizes):
    """An array of no columns has rows that are 0 elements apart."""
    m, n, k = sizes
    a, b = jnp.zeros((m, k), jnp.bfloat16), jnp.zeros((k, n), jnp.bfloat16)
    assert block_language.gemm.lower(a, b, target="cuda:sm_90").image


def test_a_copy_of_an_array_without_elements_is_refused():
    """No tensor map is empty: the driver would refuse it at the call."""
    with pytest.raises(UnsupportedError, match=r"no elements; use plain loads"):
        compile_block_kernel(ir.parse_kernel(PAIR.replace("%x: ref<64x64xbf16>", "%x: ref<0x64xbf16>")), card("sm_90"))


def many_roles(count: int) -> ir.Kernel:
    """Each role copies eight rows."""
    role = """    role r{k} warps={warps} {{
      %n{k} = full {k} : i32
      %v{k} = load %x[tile(%n{k}, 8), tile(%c0, 64)] : tile<8x64xf32>
      store %o[tile(%n{k}, 8), tile(%c0, 64)], %v{k}
    }}"""
    bodies = "\n".join(role.format(k=k, warps=1 if k else 4) for k in range(count))
    head = f"kernel @many(%x: ref<{8 * count}x64xf32>, %o: ref<{8 * count}x64xf32, out>) grid(1)"
    return ir.parse_kernel(f"{head} {{\n  %c0 = full 0 : i32\n  roles {{\n{bodies}\n  }}\n}}")


def test_as_many_roles_as_triton_has_barriers_for():
    assert compile_block_kernel(many_roles(13), card("sm_90")).image
    with pytest.raises(UnsupportedError, match="at most 13 roles, got 14: give one the work of several"):
        compile_block_kernel(many_roles(14), card("sm_90"))


@jt.kernel(out_type=lambda x: jt.like(x), grid=lambda x: x.shape[0])
def doubled(x, o):
    i = jt.program_id(0)
    o[i, :] = 2 * x[i, :]


@pytest.mark.parametrize("promised", [(False, True), (True, False)])
def test_a_promise_where_a_kernel_is_called_holds_where_it_is_compiled(promised, tmp_path):
    """Models promise for a part of a program, which is compiled when all of it has been traced; the same kernel
    without the promise is another one to the caches."""

    def run(x):
        for overlap in promised:
            with jt.config(overlap=overlap):
                x = doubled(x)
        return x

    with jt.config(arch="sm_90", cache_dir=str(tmp_path)):
        traced = jax.jit(run).trace(jax.ShapeDtypeStruct((8, 1024), jnp.float32))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    records = [part.split(" : ")[0] for part in text.split("custom_call @jtile_cuda")[1:]]
    assert ["node" in part for part in records] == list(promised)
