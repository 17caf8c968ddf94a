"""Block level: where memory, barriers and roles may stand; what the verifier says otherwise."""

from __future__ import annotations

import pytest

from jtile._errors import ParseError, VerificationError
from jtile.ir import parse_kernel, roles_of, shared_bytes, verify
from tests.support.block_kernels import attention, gemm

HEAD = """kernel @k(%x: ref<64x64xbf16>, %n: ref<64xi32>, %o: ref<64x64xbf16, out>) grid(2) {
  %c0 = full 0 : i32
  %c1 = full 1 : i32
  %true = full true : bool
  %rows = iota 0 : tile<64xi32>
  %A = alloc_shared : shared<64x64xbf16, slots 2>
  %C = alloc_shared : shared<64x64xbf16>
  %I = alloc_shared : shared<64xi32>
  %full = alloc_barriers : barrier<2, arrivals 1>
"""


def kernel(body: str, before: str = "", roles: str = "warps=4"):
    return parse_kernel(f"{HEAD}  {before}\n  roles {{ role main {roles} {{\n{body}\n}} }}\n}}")


def refused(text: str, before: str = "", roles: str = "warps=4") -> str:
    with pytest.raises((VerificationError, ParseError)) as e:
        verify(kernel(text, before, roles), "block")
    return str(e.value)


@pytest.mark.parametrize("text", [gemm(), gemm(consumers=1), gemm(consumers=3, bm=192), attention(), attention(d=128)])
def test_good_kernels_pass(text):
    verify(parse_kernel(text), "block")


def test_block_ops_have_no_place_at_tile_level():
    with pytest.raises(VerificationError, match="alloc_shared stands at block level, this kernel is at tile level"):
        verify(parse_kernel(gemm()), "tile")


MEMORY = [
    ("%y = neg %C : tile<64x64xbf16>", "expected a tile, got shared<64x64xbf16>"),
    ("%y = neg %full : tile<2xi32>", "expected a tile, got barrier<2, arrivals 1>"),
    ("for %k in %c0..%c1 step %c1 carry (%s = %C) { yield %s }", "for has 1 results"),
    ("%r = for %k in %c0..%c1 step %c1 carry (%s = %C) { yield %s }", "a buffer is memory, not a value: %C"),
    ("%r = for %k in %c0..%c1 step %c1 carry (%s = %full) { yield %s }", "a barrier is memory, not a value: %full"),
    ("%r = if %true { yield %C } else { yield %C }", "a region yields tiles, got %C"),
    ("%y = load_shared %A : tile<64x64xbf16>", "expected one buffer, got a ring of 2: take a slot of it"),
    ("%y = slot %C[%c0] : shared<64x64xbf16>", "expected a ring of buffers, got shared<64x64xbf16>"),
    ("%y = slot %A[%rows] : shared<64x64xbf16>", "the number of a slot is an i32, got tile<64xi32>"),
    ("wait %C[%c0], %c0", "expected barriers, got shared<64x64xbf16>"),
    ("wait %full[%c0], %true", "a parity is an i32, got b"),
    ("arrive %full[%c0] count=2", "takes 1 to 1 arrivals at once, got 2"),
    ("arrive %full[%c0] when=%c1", "a predicate is a bool scalar, got i32"),
    ("expect %full[%c0] bytes=-1", "not negative"),
    ("store_shared %C, %rows", "this buffer holds tile<64x64xbf16>, got tile<64xi32>"),
    ("%y = slice_shared %C starts=(32, 0) sizes=(64, 64) : shared<64x64xbf16>", "leaves shared<64x64xbf16>"),
    ("async_load %x[tile(%c0, 32), tile(%c0, 64)] -> %C, %full[%c0]", "this copy brings tile<32x64xbf16>, the"),
    ("async_store %o[tile(%c0, 64), tile(%c0, 32)] <- %C", "this copy writes tile<64x32xbf16>, the buffer is"),
    ('async_store %o[tile(%c0, 64), tile(%c0, 64)] <- %C fn="xor"', "sets, adds, or takes min or max; got 'xor'"),
    ("%a = slot %A[%c0] : shared<64x64xbf16> %d = dot_async %a, %C keep=%true : tile<64x64xf32>", "nothing to keep"),
    ("%p = slice_shared %C starts=(0, 0) sizes=(32, 64) : shared<32x64xbf16>\n"
     "%d = dot_async %C, %p : tile<64x64xf32>", "cannot contract"),
    ("async_store %x[tile(%c0, 64), tile(%c0, 64)] <- %C", "x is an input, which cannot be written: alias it"),
    ("async_load %x[take(%rows), tile(%c0, 64)] -> %C, %full[%c0]", "takes rectangles, not gathered rows"),
    ("async_load %x[tile(%c0, 64), tile(%c0, 64)] -> %C, %full[%c0] pad=1.0", "pads with 0 or nan, got 1.0"),
    ("async_load %n[tile(%c0, 64)] -> %I, %full[%c0] pad=nan", "the pad nan is no int32"),
    ("async_load %x[%c0:+64:0, tile(%c0, 64)] -> %C, %full[%c0]", "a span needs size >= 0 and stride >= 1"),
    ('async_load %x[tile(%c0, 64), tile(%c0, 64)] -> %C, %full[%c0] evict="never"', "is forgotten 'first' or 'last'"),
    ("%m = alloc_shared : shared<64xi32>", "role main: memory of the block is allocated before the roles"),
    ("for %k in %c0..%c1 step %c1 { %m = alloc_barriers : barrier<2> }", "role main: memory of the block is allocated"),
    ("roles { role a warps=4 { } }", "a kernel has its roles once, here are 2"),
    ("%y = alloc : ref<4xf32, scratch>", "alloc stands at tile level, this kernel is at block level"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "message"), MEMORY)
def test_memory_stands_where_it_belongs(text, message):
    assert message in refused(text)


BEFORE = [
    ("fence_shared", "fence_shared stands in a role"),
    ("%t = load_shared %C : tile<64x64xbf16>", "load_shared stands in a role"),
    ("if %true { wait %full[%c0], %c0 }", "wait stands in a role"),
    (
        "if %true { %m = alloc_shared : shared<4xi32> }",
        "memory of the block is allocated once, not in a loop or a branch",
    ),
    ("for %k in %c0..%c1 step %c1 { roles { role a warps=4 { } } }", "a kernel has its roles once, here are 2"),
    ("roles { role a warps=4 { } }", "a kernel has its roles once, here are 2"),
]


@pytest.mark.parametrize(("text", "message"), BEFORE)
def test_what_may_come_before_the_roles(text, message):
    assert message in refused("", before=text)


@pytest.mark.parametrize(
    "text", ["%t = clock : i64", "%s = slot %A[%c1] : shared<64x64xbf16>", "%v = load %n[%c0] : i32"]
)
def test_arithmetic_and_views_may_come_before_the_roles(text):
    verify(kernel("", before=text), "block")


ENDS = [
    ("}", "ends in its roles, and nothing comes after them or around them: there are none"),
    ("roles { role a warps=4 { } } %t = clock : i64 }", "move this to the end"),
    ("if %true { roles { role a warps=4 { } } } }", "move this to the end"),
]


@pytest.mark.parametrize(("text", "message"), ENDS)
def test_roles_come_last(text, message):
    with pytest.raises(VerificationError, match=message):
        verify(parse_kernel(HEAD + text), "block")


ROLES = [
    ("warps=3", "a role has 1, 2, 4 or 8 warps"),
    ("warps=2", "the first 4 or 8"),
    ("warps=4 registers=20", "a multiple of 8 between 24 and 240"),
    ("warps=4 registers=100", "a multiple of 8 between 24 and 240"),
    (
        "warps=8 registers=232 { } role b warps=1 registers=56",
        "256 x 232 + 128 x 56 = 66560 registers (threads of whole warpgroups), a multiprocessor has 65536",
    ),
    ("warps=8 registers=248", "between 24 and 240, or 0; got 248"),
    ("warps=4 { } role b warps=3", "the first 4 or 8; got 3"),
    (
        "warps=8 { } " + " } ".join(f"role r{k} warps=8 {{" for k in range(3)) + " } role z warps=1",
        "the roles have 8 + 8 + 8 + 8 + 1 = 33 warps, a block has 32",
    ),
    (
        "warps=8 registers=240 { } role b warps=4 registers=24 { } role c warps=2",
        "256 x 240 + 128 x 24 + 128 x 24 = 67584 registers (threads of whole warpgroups, with 24 at least",
    ),
]


@pytest.mark.parametrize(("roles", "message"), ROLES)
def test_warps_and_registers(roles, message):
    assert message in refused("", roles=roles)


def test_barriers_and_slots_are_bounded():
    """The interpreter keeps a clock for each barrier that is used, with a line for each that there is."""
    assert "4098 barriers, at most 4096" in refused("", before="%b = alloc_barriers : barrier<4096, arrivals 1>")
    assert "a ring of 4097 slots" in refused("", before="%r = alloc_shared : shared<8xf32, slots 4097>")
    verify(kernel("", before="%b = alloc_barriers : barrier<4094, arrivals 1>"), "block")


def test_a_role_sees_nothing_of_another():
    with pytest.raises(ParseError, match="%t is not defined here"):
        kernel("%t = clock : i64 } role b warps=1 { %u = add %t, %t : i64")
    k = kernel("%t = clock : i64 %u = neg %t : i64 } role b warps=1 { %v = clock : i64")
    bodies = roles_of(k).bodies
    bodies[1].ops.append(bodies[0].ops.pop())
    with pytest.raises(VerificationError, match="not defined before its use, or not in scope here"):
        verify(k, "block")


def test_a_combiner_has_no_block_level_ops():
    body = "(%a: f32, %b: f32) { role_barrier %s = add %a, %b : f32 yield %s }"
    text = "%t = full 0.0 : tile<8xf32> %f = full 0.0 : f32 %r = user_reduce [%t], [%f] axes=(0) : f32 body"
    assert "a combiner computes on scalars" in refused(text + body)


def test_shared_bytes():
    assert shared_bytes(kernel("")) == 3 * 64 * 64 * 2 + 64 * 4 + 2 * 8
    n = 3 * (2 * 64 * 64 + 64 * 128) * 2 + 2 * 64 * 128 * 2 + 6 * 8
    assert shared_bytes(parse_kernel(gemm())) == n
    assert shared_bytes(parse_kernel(attention(d=128))) == (2 * 64 + 2 * 2 * 128) * 128 * 2 + 8 * (1 + 4 * 2 + 2)


def test_loads_in_front_of_early_roles():
    body = "wait %full[%c0], %c0"
    assert "a load before the roles" in refused(f"{body}\n}} role other warps=1 early {{\n", "%l = load %n[%c0] : i32")
    verify(kernel(f"{body}\n}} role other warps=1 early {{\narrive %full[%c0]"), "block")


def test_early_roles_that_wait():
    """They may write behind that; a kernel has one role that waits, or more."""
    body, store = "%z0 = full 0 : i32", "store %o[tile(%c0, 64), tile(%c0, 64)], %z"
    other = f"{body}\n}} role other warps=1 early {{\n%z = full 0.0 : tile<64x64xbf16>\n"
    assert "store in an early role" in refused(f"{other}{store}\nkernels_wait")
    verify(kernel(f"{other}kernels_wait\n{store}"), "block")
    assert "kernels_wait stands in a role" in refused("", before="kernels_wait")
