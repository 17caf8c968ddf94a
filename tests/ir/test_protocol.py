"""Protocols of roles: kernels that would hang, or use what is not there, are refused with role, barrier, a way out."""

from __future__ import annotations

import pytest

from jtile._errors import VerificationError
from jtile.ir import parse_kernel, verify
from tests.support.block_kernels import attention, gemm

HEAD = """kernel @k(%x: ref<64x64xbf16>, %lens: ref<4xi32>, %o: ref<64x64xbf16, out>) grid(2) {
  %c0 = full 0 : i32
  %c1 = full 1 : i32
  %c2 = full 2 : i32
  %c9 = full 9 : i32
  %n = load %lens[%c0] : i32
  %some = gt %n, %c1 : bool
  %A = alloc_shared : shared<64x64xbf16, slots 2>
  %B = alloc_shared : shared<64x64xbf16>
  %full = alloc_barriers : barrier<2, arrivals 1>
  %empty = alloc_barriers : barrier<2, arrivals 2>
  roles {
"""
FILL = "async_load %x[tile(%c0, 64), tile(%c0, 64)] ->"


def kernel(**roles: str) -> str:
    bodies = (f"role {name} warps={4 if k == 0 else 1} {{\n{body}\n}}" for k, (name, body) in enumerate(roles.items()))
    return HEAD + "\n".join(bodies) + "\n}\n}"


def refused(text: str) -> str:
    with pytest.raises(VerificationError) as e:
        verify(parse_kernel(text), "block")
    return str(e.value)


def accepted(text: str) -> None:
    verify(parse_kernel(text), "block")


@pytest.mark.parametrize(
    "text",
    [
        gemm(),
        gemm(128, 128, 64),
        gemm(300, 200, 100, slots=2, consumers=1),
        gemm(4096, 4096, 4096, 128, 256, 64, slots=4, blocks=132),
        gemm(consumers=3, bm=192, slots=2),
        gemm(dtype="f8e4m3fn", bk=128),
        attention(),
        attention(consumers=1, slots=1),
        attention(consumers=3, d=128, slots=3),
        attention(skv=128),
    ],
)
def test_right_protocols_pass(text):
    accepted(text)


def changed(text: str, old: str, new: str, count: int = -1) -> str:
    assert old in text
    return text.replace(old, new, count)


BROKEN = [
    # announced bytes
    (gemm(), "bytes=32768", "bytes=32760", "announces 32760 bytes, the copies onto %full that follow bring"
     " 32768: the phase would end too early"),
    (gemm(), "bytes=32768", "bytes=32776", "role producer: announces 32776 bytes, the copies onto %full"
     " that follow bring 32768: the phase would never end"),
    # arrivals
    (gemm(), "%empty = alloc_barriers : barrier<3, arrivals 2>", "%empty = alloc_barriers : barrier<3, arrivals 3>",
     "role consumer0: waits for ever at %full[0] for a phase of parity 1: phase 1 has 0 of 1 arrivals; role consumer1 "
     "waits at %full[0]; role producer waits at %empty[0]"),
    (gemm(), "arrive %empty[%done] when=%later", "", "role producer waits at %empty[0]"),
    (gemm(), "%full[%s]", "%full[%c0]", "waits for ever at %full[0]"),
    (gemm(slots=1), "roles {", "roles {", "role producer waits at %empty[0]"),  # the slot is in use
    (gemm(), "wait %full[%s], %odd", "", "role consumer0: reads %A0[0] where nothing makes sure that"),
    (attention(), "wait %qfull[%c0], %c0", "", "role consumer0: reads %Q[0] where"),
    # parities
    (gemm(), "wait %empty[%s], %before", "wait %empty[%s], %odd", "role producer waits at %empty[0]"),
    (gemm(), "wait %full[%s], %odd", "wait %full[%s], %turn", "a parity is 0 or 1, got 2: (round // slots) & 1"),
    (gemm(slots=2), "arrive %empty[%done] when=%later", "arrive %empty[%slots] when=%later",
     "%empty has no slot 2: it is barrier<2, arrivals 2>"),
    (attention(), "wait %turn[%w], %flip", "wait %turn[%w], %c0", "waits for ever at %turn["),
    (attention(), "arrive %vempty[%b]", "", "role producer waits at %vempty[0]"),
    # what runs
    (gemm(), "%result = cast %total", "%result = cast %sum", "role consumer0: %sum: tile<64x128xf32> is the result"
     " of a product that may still run: take what dot_wait gives for it"),
    (gemm(), "%total = dot_wait %sum", "%total = dot_wait %sum pending=1", "%total: tile<64x128xf32> is the result"
     " of a product that may still run after dot_wait pending=1: wait for it with a lower number"),
    (gemm(), "        fence_shared\n", "", "async_store may not see what this role stored to its buffer before: "
     "put fence_shared between them"),
    (gemm(), "        store_wait 0\n", "", "this store writes a buffer that an asynchronous store of this role still "
     "reads: store_wait for it first"),
    (gemm(), "      store_wait 0\n    }", "    }", "put store_wait 0 at the end of the role"),
    (attention(), "%sj = dot_wait %sr pending=1", "%sj = dot_wait %sr pending=2", "%sj: tile<64x128xf32> is the"),
    (attention(), "%on = mul %oj, %ab", "%on = mul %or, %ab", "%or: tile<64x64xf32> is the result of a product"),
    (attention(), "%o_l = dot_wait %or_l : tile<64x64xf32>\n      arrive %vempty[%sl]\n", "%u = full 0.0 : "
     "tile<128x64xbf16>\nstore_shared %v_l, %u\n%o_l = dot_wait %or_l : tile<64x64xf32>\n",
     "a product of this role still reads: dot_wait for it first"),
    (attention(), "      fence_shared\n", "", "async_store may not see what this role stored"),
    # fills
    (gemm(), "async_load %b[tile(%k, 64), tile(%j, 128)] -> %b_s", "async_load %a[tile(%k, 64), tile(%j, 64)] -> %a_1",
     "role consumer0: reads %B, which no role ever fills"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "old", "new", "message"), BROKEN)
def test_broken_protocols(text, old, new, message):
    text = changed(text, old, new)
    got = refused(text)
    assert message in got
    assert "kernel gemm, role " in got or "kernel attention, role " in got


SMALL = [
    (dict(a="wait %full[%c0], %c0"), "role a: waits for %full, but nobody ever arrives at it"),
    (dict(a="wait %empty[%c0], %c0", b="arrive %empty[%c0]"), "a phase takes 2 arrivals, and all roles together "
     "arrive 1 times: allocate it with arrivals=1"),
    (dict(a="wait %full[%c0], %c0\narrive %full[%c0]"), "only this role arrives there, and only later"),
    (dict(a="for %k in %c0..%n step %c1 {\nwait %full[%c0], %k\narrive %full[%c0] }"), "only this role arrives there"),
    (dict(a=f"wait %full[%c0], %c0\nexpect %full[%c0] bytes=8192\n{FILL} %B, %full[%c0]"), "only this role arrives "
     "there, and only later: it would wait for itself; arrive or expect first"),
    # each waits for the other
    (dict(a="wait %full[%c0], %c0 arrive %full[%c1]", b="wait %full[%c1], %c0 arrive %full[%c0]"),
     "role a: waits for ever at %full[0] for a phase of parity 0: phase 0 has 0 of 1 arrivals; role b waits at %full["),
    # ... also where a third role does what nobody knows, elsewhere
    (dict(a="wait %full[%c0], %c0 arrive %full[%c1]", b="wait %full[%c1], %c0 arrive %full[%c0]",
          c="if %some { arrive %empty[%c0] }"), "role c does not arrive there"),
    (dict(a="arrive %empty[%c0] count=2 arrive %empty[%c0] arrive %empty[%c0] count=2"), "arrives 2 times at %empty, "
     "but its phase 1 takes 2 arrivals and has had 1"),
    (dict(a="wait %full[%c9], %c0", b="arrive %full[%c0]"), "%full has no slot 9"),
    (dict(a=f"if %some {{ expect %full[%c0] bytes=8 }} else {{ expect %full[%c0] bytes=8192 {FILL} %B, %full[%c0] }}"),
     "announces 8 bytes, the copies onto %full that follow bring 0"),
    (dict(a=f"if %some {{ {FILL} %B, %full[%c0] }} expect %full[%c0] bytes=0 %w = full 0 : i32 {FILL} %B, %full[%w]"),
     None),
    (dict(a=f"for %k in %c0..%c1 step %c1 {{ {FILL} %B, %full[%c0] }} expect %full[%c0] bytes=16"),
     "copies brought 8176 bytes more to %full than were announced"),
    # fills
    (dict(a="%t = load_shared %B : tile<64x64xbf16>"), "role a: reads %B, which no role ever fills"),
    (dict(a="%t = load_shared %B : tile<64x64xbf16>\nstore_shared %B, %t"), "reads %B before this role, the only one "
     "that fills it, has done so"),
    (dict(a="for %k in %c0..%n step %c1 { %t = load_shared %B : tile<64x64xbf16>\nstore_shared %B, %t }"), "move the"),
    (dict(a="for %k in %c0..%n step %c1 { if %some { %t = load_shared %B : tile<64x64xbf16> }\n"
            "%z = full 0.0 : tile<64x64xbf16>\nstore_shared %B, %z }"), None),
    (dict(a="%t = load_shared %B : tile<64x64xbf16>", b="%z = full 0.0 : tile<64x64xbf16> store_shared %B, %z"),
     "role a: reads %B where nothing makes sure that it has been filled: wait for its copies, or for who stores to it"),
    (dict(a="wait %full[%c0], %c0\n%t = load_shared %B : tile<64x64xbf16>",
          b="%z = full 0.0 : tile<64x64xbf16> store_shared %B, %z\narrive %full[%c0]"), None),
    (dict(a="wait %full[%c0], %c0\n%t = load_shared %B : tile<64x64xbf16>",
          b="arrive %full[%c0]\n%z = full 0.0 : tile<64x64xbf16> store_shared %B, %z"), "reads %B where"),
    (dict(a="wait %full[%c0], %c0\n%t = load_shared %B : tile<64x64xbf16>",
          b="if %some { %z = full 0.0 : tile<64x64xbf16> store_shared %B, %z }\narrive %full[%c0]"), None),
    (dict(a="wait %full[%c0], %c0\n%s = slot %A[%c1] : shared<64x64xbf16>\n%t = load_shared %s : tile<64x64xbf16>",
          b="%s = slot %A[%c0] : shared<64x64xbf16>\n%z = full 0.0 : tile<64x64xbf16> store_shared %s, %z\n"
            "arrive %full[%c0]"), "reads %A[1] where"),
    (dict(a="wait %full[%c0], %c0\n%s = slot %A[%c1] : shared<64x64xbf16>\n%t = load_shared %s : tile<64x64xbf16>",
          b="%s = slot %A[%n] : shared<64x64xbf16>\n%z = full 0.0 : tile<64x64xbf16> store_shared %s, %z\n"
            "arrive %full[%c0]"), None),
    # what is not known is nobody's error
    (dict(a="wait %full[%c0], %c0", b="if %some { arrive %full[%c0] }"), None),
    (dict(a="wait %full[%c0], %c0 arrive %full[%c1]", b="wait %full[%c1], %c0 arrive %full[%c0]",
          c="if %some { arrive %full[%c0] }"), None),
    (dict(a="for %k in %c0..%n step %c1 { wait %empty[%c0], %k }",
          b="for %k in %c0..%n step %c1 { arrive %empty[%c0] }"), None),
    (dict(a="wait %full[%c0], %c1 arrive %full[%c0]"), None),
    (dict(a="wait %full[%c0], %c1"), None),
    # a loop without barriers counts for a parity
    (dict(a="%p = for %k in %c0..%c2 step %c1 carry (%q = %c0) { %r = xor %q, %c1 : i32 yield %r }\n"
            "wait %full[%c0], %p",
          b="%z = load %lens[%c1] : i32 if %some { arrive %full[%c1] }"), "waits for ever at %full[0]"),
]  # fmt: skip


@pytest.mark.parametrize(("roles", "message"), SMALL)
def test_small_protocols(roles, message):
    if message is None:
        accepted(kernel(**roles))
    else:
        assert message in refused(kernel(**roles))


DOT = "%d = dot_async %a, %B : tile<64x64xf32>\n"
START = (
    "%z = full 0.0 : tile<64x64xbf16>\n%a = slot %A[%c0] : shared<64x64xbf16>\n%b = slot %A[%c1] : shared<64x64xbf16>\n"
)
FILLED = START + "store_shared %a, %z\nstore_shared %b, %z\nstore_shared %B, %z\nfence_shared\n"
SEND = "async_store %o[tile(%c0, 64), tile(%c0, 64)] <-"

RUNNING = [
    (DOT + "%e = exp %d : tile<64x64xf32>", "%d: tile<64x64xf32> is the result of a product that may still run"),
    (DOT + "%w = dot_wait %d : tile<64x64xf32> %e = exp %w : tile<64x64xf32>", None),
    # in order: one pending leaves the second
    (DOT + "%f = dot_async %b, %B : tile<64x64xf32> %w = dot_wait %d pending=1 : tile<64x64xf32>\n"
     "%e = exp %w : tile<64x64xf32>", None),
    (DOT + "%f = dot_async %b, %B : tile<64x64xf32> %w, %v = dot_wait %d, %f pending=1 : "
     "tile<64x64xf32>, tile<64x64xf32>\n%e = exp %v : tile<64x64xf32>", "after dot_wait pending=1"),
    (DOT + "dot_wait\n%e = exp %d : tile<64x64xf32>", "take what dot_wait gives for it"),
    (DOT + "%f = dot_async %a, %B acc=%d : tile<64x64xf32>\n%w = dot_wait %d : tile<64x64xf32>",
     "was still running when a further product took it as accumulator"),
    (DOT + "%f = dot_async %a, %B acc=%d : tile<64x64xf32>\n%w = dot_wait %f : tile<64x64xf32>", None),
    # the operand of a product is no accumulator
    ("%d = dot_async %a, %B : tile<64x64xf32> %h = cast %d : tile<64x64xbf16>", "may still run: take what dot_wait"),
    # carries
    ("%s = full 0.0 : tile<64x64xf32>\n%r = for %k in %c0..%n step %c1 carry (%c = %s) {\n"
     "%e = dot_async %a, %B acc=%c : tile<64x64xf32> yield %e }\n%y = exp %r : tile<64x64xf32>", "%r: tile<64x64xf"),
    ("%s = full 0.0 : tile<64x64xf32>\n%r = for %k in %c0..%n step %c1 carry (%c = %s) {\n"
     "%y = exp %c : tile<64x64xf32>\n%e = dot_async %a, %B acc=%c : tile<64x64xf32> yield %e }\n", "%c: tile<64x64"),
    ("%s = full 0.0 : tile<64x64xf32>\n%r = for %k in %c0..%c1 step %c1 carry (%c = %s) {\n"
     "%y = exp %c : tile<64x64xf32>\n%e = dot_async %a, %B acc=%c : tile<64x64xf32> yield %e }\n", None),
    ("%r = if %some { %e = dot_async %a, %B : tile<64x64xf32> yield %e } else { "
     "%g = full 0.0 : tile<64x64xf32> yield %g }\n%y = exp %r : tile<64x64xf32>", None),  # as far as we know
    ("%r = if %some { " + DOT + "yield %d } else { " + DOT.replace("%d", "%g") + "yield %g }\ndot_wait", None),
    # memory of products
    (DOT + "store_shared %a, %z", "this store writes a buffer that a product of this role still reads"),
    (DOT + "store_shared %b, %z", None),
    (DOT + "dot_wait\nstore_shared %a, %z", None),
    (DOT + f"expect %full[%c0] bytes=8192 {FILL} %B, %full[%c0]", "this copy writes a buffer that a product"),
    (DOT + "%t = transpose_shared %B : shared<64x64xbf16>\n%s = slice_shared %t starts=(0, 32) sizes=(64, 32) : "
     "shared<64x32xbf16>\n%y = full 0.0 : tile<64x32xbf16>\nstore_shared %s, %y", "still reads"),
    # halves of one buffer
    ("%h = slice_shared %B starts=(0, 0) sizes=(64, 32) : shared<64x32xbf16>\n"
     "%g = slice_shared %B starts=(0, 32) sizes=(64, 32) : shared<64x32xbf16>\n%y = full 0.0 : tile<64x32xbf16>\n"
     "%d = dot_async %a, %h : tile<64x32xf32>\nstore_shared %g, %y", None),
    ("%h = slice_shared %B starts=(32, 0) sizes=(32, 64) : shared<32x64xbf16>\n"
     "%t = transpose_shared %B : shared<64x64xbf16>\n"
     "%g = slice_shared %t starts=(0, 32) sizes=(64, 32) : shared<64x32xbf16>\n%y = full 0.0 : tile<64x32xbf16>\n"
     "%w = slice_shared %a starts=(0, 0) sizes=(64, 32) : shared<64x32xbf16>\n"
     "%d = dot_async %w, %h : tile<64x64xf32>\nstore_shared %g, %y", "still reads"),
    # fences
    (f"store_shared %a, %z\n{DOT}", "dot_async may not see what this role stored to its buffer before"),
    (f"store_shared %a, %z\nfence_shared\n{DOT}", None),
    (f"store_shared %a, %z\n{SEND} %b\nstore_wait 0", None),
    (f"store_shared %a, %z\nif %some {{ fence_shared }}\n{SEND} %a\nstore_wait 0", None),
    (f"for %k in %c0..%n step %c1 {{ store_shared %a, %z\nfence_shared\n{SEND} %a\nstore_wait 0 }}", None),
    (f"for %k in %c0..%n step %c1 {{ {SEND} %a\nstore_wait 0\nstore_shared %a, %z }}", "put fence_shared between them"),
    (f"for %k in %c0..%c1 step %c1 {{ {SEND} %a\nstore_wait 0\nstore_shared %a, %z }}", None),
    # stores
    (f"{SEND} %a\nstore_shared %a, %z", "an asynchronous store of this role still reads"),
    (f"{SEND} %a\n{SEND} %b\nstore_wait 1\nstore_shared %a, %z\nfence_shared\nstore_wait 0", None),
    (f"{SEND} %a\n{SEND} %b\nstore_wait 1\nstore_shared %b, %z\nstore_wait 0", "an asynchronous store of this role"),
    (f"{SEND} %a", "nobody waits until this store has read its buffer"),
    (f"{SEND} %a\nstore_wait 1", "put store_wait 0 at the end of the role"),
    (f"if %some {{ {SEND} %a }}", "nobody waits until this store has read its buffer"),
    (f"if %some {{ {SEND} %a }}\nif %some {{ store_wait 0 }}", None),
    # rings: slots that are known, and slots that are not
    (f"for %k in %c0..%n step %c1 {{ %s = rem %k, %c2 : i32\n%t = slot %A[%s] : shared<64x64xbf16>\nstore_wait 1\n"
     f"store_shared %t, %z\nfence_shared\n{SEND} %t }}\nstore_wait 0", None),
    (f"for %k in %c0..%n step %c1 {{ %t = slot %A[%c1] : shared<64x64xbf16>\nstore_wait 1\n"
     f"store_shared %t, %z\nfence_shared\n{SEND} %t }}\nstore_wait 0", "an asynchronous store of this role"),
    (f"%t = slot %A[%n] : shared<64x64xbf16>\n{SEND} %t\nstore_shared %a, %z\nstore_wait 0", None),
    (f"%t = slot %A[%n] : shared<64x64xbf16>\n{SEND} %t\nstore_shared %t, %z\nstore_wait 0", "an asynchronous store"),
    (f"%m = add %n, %c1 : i32 %p = add %n, %c1 : i32 %t = slot %A[%m] : shared<64x64xbf16>\n"
     f"%u = slot %A[%p] : shared<64x64xbf16>\n{SEND} %t\nstore_shared %u, %z\nstore_wait 0", "an asynchronous store"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "message"), RUNNING)
def test_what_still_runs(body, message):
    text = kernel(a=FILLED + body)
    if message is None:
        accepted(text)
    else:
        assert message in refused(text)


def test_errors_have_the_place():
    text = kernel(
        a='wait %full[%c0], %c0 @"mine.py":7\narrive %full[%c1]',
        b='wait %full[%c1], %c0 @"mine.py":9\narrive %full[%c0]',
    )
    with pytest.raises(VerificationError) as e:
        verify(parse_kernel(text), "block")
    assert e.value.where == ("mine.py", 7)
    assert "role b waits at %full[1] (mine.py:9)" in str(e.value)
    assert "in wait %full[%c0], %c0" in str(e.value)


def test_programs_differ():
    """The last program of the grid is played through as well."""
    body = "%i = program_id 0 : i32\n%p = eq %i, %c1 : bool\n"
    accepted(kernel(a=body + "wait %full[%c0], %c0 when=%p", b=body + "arrive %full[%c0] when=%p"))
    got = refused(
        kernel(
            a=body + "wait %full[%c0], %c0 when=%p",
            b="%i = program_id 0 : i32 %p = lt %i, %c1 : bool arrive %full[%c0] when=%p",
        )
    )
    assert "waits for ever at %full[0]" in got


def test_sizes_that_are_known_when_the_kernel_runs():
    text = changed(gemm(), "%a: ref<256x", "%a: ref<{128*n}x")
    text = changed(text, "%tiles = full 8 : i32", "%tiles = size {4*n} : i32")
    accepted(text)
    assert "waits for ever" in refused(changed(text, "arrive %empty[%s_1]", ""))


EXCHANGE = """
%me = full {me} : i32
%other = full {other} : i32
%zero = full 0.0 : tile<64x64xf32>
%mine = slot %A[%me] : shared<64x64xbf16>
%theirs = slot %A[%other] : shared<64x64xbf16>
%b0 = full 0 : i32
%sum = for %k in %c0..%n step %c1 carry (%acc = %zero) {{
  %p = and %k, %c1 : i32
  %before = xor %p, %c1 : i32
  wait %read[%me], %before
  %t = cast %acc : tile<64x64xbf16>
  store_shared %mine, %t
  fence_shared
  arrive %ready[%me]
  %d = dot_async %mine, %B : tile<64x64xf32>
  wait %ready[%other], %p
  %e = dot_async %theirs, %B acc=%d : tile<64x64xf32>
  %w = dot_wait %e : tile<64x64xf32>
  arrive %read[%other]
  yield %w
}}
"""


def test_roles_that_exchange_tiles():
    """Each computes with what it and the other one have stored: known rounds, loaded rounds, and with a fault."""
    fill = f"expect %full[%c0] bytes=8192\n{FILL} %B, %full[%c0]"
    bodies = [("wait %full[%c0], %c0" + EXCHANGE.format(me=w, other=1 - w)) for w in (0, 1)]
    barriers = "%ready = alloc_barriers : barrier<2>\n  %read = alloc_barriers : barrier<2>\n  roles {"
    text = kernel(a=bodies[0], b=bodies[1], c=fill).replace("roles {", barriers).replace("warps=1", "warps=4", 1)
    accepted(text)
    known = changed(text, "%n = load %lens[%c0]", "%n = full 5")
    accepted(known)
    assert "waits for ever at %re" in refused(changed(known, "wait %read[%me], %before", "wait %read[%me], %p"))
    assert "put fence_shared between" in refused(changed(text, "  fence_shared\n", "", 1))
    early = changed(text, "  arrive %ready[%me]\n", "", 1)
    early = changed(early, "wait %ready[%other], %p", "wait %ready[%other], %p\n  arrive %ready[%me]", 1)
    accepted(early)  # one of them may wait first
    both = changed(known, "  arrive %ready[%me]\n", "")
    both = changed(both, "wait %ready[%other], %p", "wait %ready[%other], %p\n  arrive %ready[%me]")
    assert "role a: waits for ever at %ready[1]" in refused(both)
    assert "role b waits at %ready[0]" in refused(both)


def test_a_result_in_pieces():
    """Two buffers that take turns, one store under way: the store before the last must have read its buffer."""
    piece = """
%z{k} = full {k}.0 : tile<64x64xbf16>
%s{k} = full {slot} : i32
%b{k} = slot %A[%s{k}] : shared<64x64xbf16>
store_wait {pending}
store_shared %b{k}, %z{k}
fence_shared
async_store %o[tile(%c0, 64), tile(%c0, 64)] <- %b{k}
"""
    body = lambda pending, slots: "".join(piece.format(k=k, slot=k % slots, pending=pending) for k in range(4))
    loop = "for %t in %c0..%n step %c1 {{\n{}}}\nstore_wait 0"
    accepted(kernel(a=loop.format(body(1, 2))))
    accepted(kernel(a=loop.format(body(0, 1))))
    assert "store_wait for it first" in refused(kernel(a=loop.format(body(2, 2))))
    assert "store_wait for it first" in refused(kernel(a=loop.format(body(1, 1))))


def test_counting_is_bounded():
    """A loop without barriers that counts far ends nothing but what is known."""
    count = "%big = full 2000000000 : i32\n%r = for %k in %c0..%big step %c1 carry (%q = %c0) {\n"
    count += "%q1 = add %q, %c1 : i32 yield %q1 }\n%p = and %r, %c1 : i32\nwait %full[%c0], %p"
    accepted(kernel(a=count, b="arrive %full[%c0]"))


RACES = [
    # given back before the product that reads it has ended
    (gemm(), "dot_wait %running pending=1", "dot_wait %running pending=2", "] while a product of role consumer0 may "
     "still read it: that role arrives before it has waited, or this one does not wait for it"),
    (attention(), "%s_1 = dot_wait %s_0 : tile<64x128xf32>\n      arrive %kempty[%c0]",
     "arrive %kempty[%c0]\n      %s_1 = dot_wait %s_0 : tile<64x128xf32>", "role producer: writes %K[0] while a"),
    (attention(), "wait %kempty[%s], %before", "", "role consumer0: waits for ever at %kfull[0]"),
    (attention(), "wait %kempty[%s], %before\n        expect %kfull[%s] bytes=16384",
     "expect %kfull[%s] bytes=16384\n        wait %kempty[%s], %before", "role producer: arrives 1 times at %kfull,"),
    (gemm(), "wait %full[%s], %odd\n", "", "role consumer0: reads %A0[0] where nothing makes sure"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "old", "new", "message"), RACES)
def test_races_that_an_order_of_the_roles_shows(text, old, new, message):
    assert message in refused(changed(text, old, new))


def test_a_store_of_another_role_is_a_reader():
    send = "%z = full 0.0 : tile<64x64xbf16>\nstore_shared %B, %z\nfence_shared\n" + f"{SEND} %B\n"
    late = send + "store_wait 0\narrive %full[%c0]"
    early = send + "arrive %full[%c0]\nstore_wait 0"
    other = "wait %full[%c0], %c0\n%z = full 1.0 : tile<64x64xbf16>\nstore_shared %B, %z"
    accepted(kernel(a=late, b=other))
    assert "role b: writes %B while an asynchronous store of role a may still read it" in refused(
        kernel(a=early, b=other)
    )


def test_halves_of_a_buffer_are_apart():
    """One role computes from the left half while another fills the right one."""
    half = "%h = slice_shared %B starts=(0, {}) sizes=(64, 32) : shared<64x32xbf16>\n%y = full 0.0 : tile<64x32xbf16>\n"
    a = START + "store_shared %a, %z\n" + half.format(0) + "store_shared %h, %y\nfence_shared\n"
    a += "%d = dot_async %a, %h : tile<64x32xf32>\narrive %full[%c0]\ndot_wait"
    b = "wait %full[%c0], %c0\n" + half + "store_shared %h, %y"
    accepted(kernel(a=a, b=b.format(32)))
    assert "role b: writes %B while a product of role a may" in refused(kernel(a=a, b=b.format(0)))
