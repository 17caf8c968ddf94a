"""Kernels at the block level, written out as IR text: a persistent GEMM and an attention forward, both with a producer
role and one or more consumers, in the schedules of hand-written Hopper kernels."""

from __future__ import annotations

import math
from string import Template

import numpy as np

from jtile.ir import Kernel
from jtile.ir.types import BY_SHORT


def operands(kernel: Kernel, rounds: int) -> list[np.ndarray]:
    """Normal floats; every int32 input is the number of rounds that loops make."""
    rng = np.random.default_rng(0)
    return [
        np.full(v.shape, rounds, np.int32)
        if v.dtype == "int32"
        else rng.standard_normal(v.shape).astype(v.type.info.numpy)
        for v in kernel.inputs
    ]


def _bytes(dtype: str, *shape: int) -> int:
    return math.prod(shape) * BY_SHORT[dtype].bits // 8


_GEMM = Template("""\
kernel @gemm(
    %a: ref<${m}x${k}x$dtype>,
    %b: ref<${k}x${n}x$dtype>,
    %o: ref<${m}x${n}x$out, out>) grid($blocks) {
  %pid = program_id 0 : i32
  %blocks = num_programs 0 : i32
  %c0 = full 0 : i32
  %c1 = full 1 : i32
  %tiles = full $tiles : i32
  %columns = full $columns : i32
  %rounds = full $rounds : i32
  %slots = full $slots : i32
  %consumers = full $consumers : i32
$allocs
  %B = alloc_shared : shared<${bk}x${bn}x$dtype, slots $slots>
  %full = alloc_barriers : barrier<$slots, arrivals 1>
  %empty = alloc_barriers : barrier<$slots, arrivals $consumers>
  roles {
$bodies
    role producer warps=1 registers=24 {
      %end = for %t in %pid..%tiles step %blocks carry (%first = %c0) {
        %i = div %t, %columns : i32
        %j = rem %t, %columns : i32
        %row = mul %i, %consumers : i32
        %last = for %k in %c0..%rounds step %c1 carry (%it = %first) {
          %s = rem %it, %slots : i32
          %turn = div %it, %slots : i32
          %odd = and %turn, %c1 : i32
          %before = xor %odd, %c1 : i32
          wait %empty[%s], %before
          expect %full[%s] bytes=$bytes
$copies
          %b_s = slot %B[%s] : shared<${bk}x${bn}x$dtype>
          async_load %b[tile(%k, $bk), tile(%j, $bn)] -> %b_s, %full[%s]
          %next = add %it, %c1 : i32
          yield %next
        }
        yield %last
      }
    }
  }
}
""")

_GEMM_COPY = Template("""\
          %w_$w = full $w : i32
          %row_$w = add %row, %w_$w : i32
          %a_$w = slot %A$w[%s] : shared<${rows}x${bk}x$dtype>
          async_load %a[tile(%row_$w, $rows), tile(%k, $bk)] -> %a_$w, %full[%s]
""")

_GEMM_ROLE = Template("""\
    role consumer$w warps=$warps registers=$registers {
      %end = for %t in %pid..%tiles step %blocks carry (%first = %c0) {
        %i = div %t, %columns : i32
        %j = rem %t, %columns : i32
        %zero = full 0.0 : tile<${rows}x${bn}xf32>
        %last, %sum = for %k in %c0..%rounds step %c1 carry (%it = %first, %acc = %zero) {
          %s = rem %it, %slots : i32
          %turn = div %it, %slots : i32
          %odd = and %turn, %c1 : i32
          wait %full[%s], %odd
          %a_s = slot %A$w[%s] : shared<${rows}x${bk}x$dtype>
          %b_s = slot %B[%s] : shared<${bk}x${bn}x$dtype>
          %later = gt %k, %c0 : bool
          %running = dot_async %a_s, %b_s acc=%acc keep=%later : tile<${rows}x${bn}xf32>
          %product = dot_wait %running pending=1 : tile<${rows}x${bn}xf32>
          %before = sub %it, %c1 : i32
          %done = rem %before, %slots : i32
          arrive %empty[%done] when=%later
          %next = add %it, %c1 : i32
          yield %next, %product
        }
        %total = dot_wait %sum : tile<${rows}x${bn}xf32>
        %it_1 = sub %last, %c1 : i32
        %s_1 = rem %it_1, %slots : i32
        arrive %empty[%s_1]
        %result = cast %total : tile<${rows}x${bn}x$out>
        store_wait 0
        role_barrier
        store_shared %C$w, %result
        fence_shared
        role_barrier
        %consumers_1 = full $consumers : i32
        %w = full $w : i32
        %row_0 = mul %i, %consumers_1 : i32
        %row = add %row_0, %w : i32
        async_store %o[tile(%row, $rows), tile(%j, $bn)] <- %C$w
        yield %last
      }
      store_wait 0
    }
""")


def gemm(
    m: int = 256,
    n: int = 512,
    k: int = 256,
    bm: int = 128,
    bn: int = 128,
    bk: int = 64,
    *,
    slots: int = 3,
    consumers: int = 2,
    blocks: int = 3,
    dtype: str = "bf16",
    out: str = "bf16",
) -> str:
    """`o = a @ b` ([m, k] @ [k, n]), tiles of bm x bn in rounds of bk; sizes may overhang. bm / consumers rows a
    consumer. One product is in flight while the next is started; the result leaves by an asynchronous copy."""
    rows = bm // consumers
    v = dict(m=m, n=n, k=k, bn=bn, bk=bk, rows=rows, slots=slots, consumers=consumers, blocks=blocks, dtype=dtype)
    v |= dict(out=out, columns=-(-n // bn), tiles=-(-m // bm) * -(-n // bn), rounds=-(-k // bk))
    v |= dict(bytes=_bytes(dtype, bm, bk) + _bytes(dtype, bk, bn))
    v |= dict(warps=8 if consumers == 1 else 4, registers={1: 0, 2: 240, 3: 160}[consumers])
    each = lambda part: "".join(part.substitute(v, w=w) for w in range(consumers)).rstrip("\n")
    allocs = Template(
        "  %A$w = alloc_shared : shared<${rows}x${bk}x$dtype, slots $slots>\n"
        "  %C$w = alloc_shared : shared<${rows}x${bn}x$out>\n"
    )
    return _GEMM.substitute(v, allocs=each(allocs), bodies=each(_GEMM_ROLE), copies=each(_GEMM_COPY))


_ATTENTION = Template("""\
kernel @attention(
    %q: ref<${heads}x${sq}x${d}x$dtype>,
    %k: ref<${heads}x${skv}x${d}x$dtype>,
    %v: ref<${heads}x${skv}x${d}x$dtype>,
    %o: ref<${heads}x${sq}x${d}x$dtype, out>) grid($blocks, $heads) {
  %i = program_id 0 : i32
  %h = program_id 1 : i32
  %c0 = full 0 : i32
  %c1 = full 1 : i32
  %rounds = full $rounds : i32
  %slots = full $slots : i32
  %consumers = full $consumers : i32
  %Q = alloc_shared : shared<64x${d}x$dtype, slots $consumers>
  %K = alloc_shared : shared<${bn}x${d}x$dtype, slots $slots>
  %V = alloc_shared : shared<${bn}x${d}x$dtype, slots $slots>
  %qfull = alloc_barriers : barrier<1, arrivals 1>
  %kfull = alloc_barriers : barrier<$slots, arrivals 1>
  %kempty = alloc_barriers : barrier<$slots, arrivals $consumers>
  %vfull = alloc_barriers : barrier<$slots, arrivals 1>
  %vempty = alloc_barriers : barrier<$slots, arrivals $consumers>
  %turn = alloc_barriers : barrier<$consumers, arrivals 1>
  roles {
$bodies
    role producer warps=1 registers=24 {
      expect %qfull[%c0] bytes=$qbytes
      %row = mul %i, %consumers : i32
$copies
      for %j in %c0..%rounds step %c1 {
        %s = rem %j, %slots : i32
        %round = div %j, %slots : i32
        %odd = and %round, %c1 : i32
        %before = xor %odd, %c1 : i32
        %k_s = slot %K[%s] : shared<${bn}x${d}x$dtype>
        %v_s = slot %V[%s] : shared<${bn}x${d}x$dtype>
        wait %kempty[%s], %before
        expect %kfull[%s] bytes=$bytes
        async_load %k[%h, tile(%j, $bn), tile(%c0, $d)] -> %k_s, %kfull[%s]
        wait %vempty[%s], %before
        expect %vfull[%s] bytes=$bytes
        async_load %v[%h, tile(%j, $bn), tile(%c0, $d)] -> %v_s, %vfull[%s]
      }
    }
  }
}
""")

_ATTENTION_COPY = Template("""\
      %w_$w = full $w : i32
      %q_$w = slot %Q[%w_$w] : shared<64x${d}x$dtype>
      %row_$w = add %row, %w_$w : i32
      async_load %q[%h, tile(%row_$w, 64), tile(%c0, $d)] -> %q_$w, %qfull[%c0]
""")

# The first consumer may start at once: it waits for the parity before, the others for their turn.
_ATTENTION_ROLE = Template("""\
    role consumer$w warps=4 registers=$registers {
      %w = full $w : i32
      %other = full $other : i32
      %flip = full $flip : i32
      %scale = full $scale : tile<64x${bn}xf32>
      %q_s = slot %Q[%w] : shared<64x${d}x$dtype>
      wait %qfull[%c0], %c0
      wait %kfull[%c0], %c0
      wait %turn[%w], %flip
      %k_0 = slot %K[%c0] : shared<${bn}x${d}x$dtype>
      %kt_0 = transpose_shared %k_0 : shared<${d}x${bn}x$dtype>
      %s_0 = dot_async %q_s, %kt_0 : tile<64x${bn}xf32>
      arrive %turn[%other]
      %s_1 = dot_wait %s_0 : tile<64x${bn}xf32>
      arrive %kempty[%c0]
      %x_0 = mul %s_1, %scale : tile<64x${bn}xf32>
      %m_0 = reduce max %x_0 axes=(1) : tile<64xf32>
      %mb_0 = broadcast %m_0 dims=(0) : tile<64x${bn}xf32>
      %e_0 = sub %x_0, %mb_0 : tile<64x${bn}xf32>
      %p_0 = exp2 %e_0 : tile<64x${bn}xf32>
      %l_0 = reduce sum %p_0 axes=(1) : tile<64xf32>
      %h_0 = cast %p_0 : tile<64x${bn}x$dtype>
      %z = full 0.0 : tile<64x${d}xf32>
      %ml, %ll, %hl, %ol = for %j in %c1..%rounds step %c1 carry (%m = %m_0, %l = %l_0, %p = %h_0, %acc = %z) {
        %s = rem %j, %slots : i32
        %round = div %j, %slots : i32
        %odd = and %round, %c1 : i32
        wait %kfull[%s], %odd
        %mine = and %j, %c1 : i32
        %my_turn = xor %mine, %flip : i32
        wait %turn[%w], %my_turn
        %k_s = slot %K[%s] : shared<${bn}x${d}x$dtype>
        %kt = transpose_shared %k_s : shared<${d}x${bn}x$dtype>
        %sr = dot_async %q_s, %kt : tile<64x${bn}xf32>
        %jb = sub %j, %c1 : i32
        %b = rem %jb, %slots : i32
        %round_b = div %jb, %slots : i32
        %odd_b = and %round_b, %c1 : i32
        wait %vfull[%b], %odd_b
        %v_s = slot %V[%b] : shared<${bn}x${d}x$dtype>
        %or = dot_async %p, %v_s acc=%acc : tile<64x${d}xf32>
        arrive %turn[%other]
        %sj = dot_wait %sr pending=1 : tile<64x${bn}xf32>
        arrive %kempty[%s]
        %x = mul %sj, %scale : tile<64x${bn}xf32>
        %mx = reduce max %x axes=(1) : tile<64xf32>
        %mn = max %m, %mx : tile<64xf32>
        %dm = sub %m, %mn : tile<64xf32>
        %alpha = exp2 %dm : tile<64xf32>
        %mb = broadcast %mn dims=(0) : tile<64x${bn}xf32>
        %e = sub %x, %mb : tile<64x${bn}xf32>
        %pj = exp2 %e : tile<64x${bn}xf32>
        %lx = reduce sum %pj axes=(1) : tile<64xf32>
        %la = mul %l, %alpha : tile<64xf32>
        %ln = add %la, %lx : tile<64xf32>
        %oj = dot_wait %or : tile<64x${d}xf32>
        arrive %vempty[%b]
        %ab = broadcast %alpha dims=(0) : tile<64x${d}xf32>
        %on = mul %oj, %ab : tile<64x${d}xf32>
        %hn = cast %pj : tile<64x${bn}x$dtype>
        yield %mn, %ln, %hn, %on
      }
      %last = sub %rounds, %c1 : i32
      %sl = rem %last, %slots : i32
      %round_l = div %last, %slots : i32
      %odd_l = and %round_l, %c1 : i32
      wait %vfull[%sl], %odd_l
      %v_l = slot %V[%sl] : shared<${bn}x${d}x$dtype>
      %or_l = dot_async %hl, %v_l acc=%ol : tile<64x${d}xf32>
      %o_l = dot_wait %or_l : tile<64x${d}xf32>
      arrive %vempty[%sl]
      %lb = broadcast %ll dims=(0) : tile<64x${d}xf32>
      %of = div %o_l, %lb : tile<64x${d}xf32>
      %oh = cast %of : tile<64x${d}x$dtype>
      store_shared %q_s, %oh
      fence_shared
      role_barrier
      %row_0 = mul %i, %consumers : i32
      %row = add %row_0, %w : i32
      async_store %o[%h, tile(%row, 64), tile(%c0, $d)] <- %q_s
      store_wait 0
    }
""")


def attention(
    sq: int = 256,
    skv: int = 512,
    d: int = 64,
    *,
    heads: int = 2,
    bn: int = 128,
    slots: int = 2,
    consumers: int = 2,
    dtype: str = "bf16",
) -> str:
    """`o = softmax(q k^T / sqrt(d)) v` for q [heads, sq, d], k and v [heads, skv, d]; 64 rows a consumer, rounds of bn
    keys (skv is a multiple of bn). The product with V runs one round behind; the consumers start products in turns
    (ping-pong); the result goes out through the memory of q."""
    v = dict(sq=sq, skv=skv, d=d, heads=heads, bn=bn, slots=slots, consumers=consumers, dtype=dtype)
    v |= dict(blocks=-(-sq // (64 * consumers)), rounds=skv // bn, bytes=_bytes(dtype, bn, d))
    v |= dict(qbytes=consumers * _bytes(dtype, 64, d), scale=math.log2(math.e) / math.sqrt(d))
    v |= dict(registers={1: 240, 2: 240, 3: 160}[consumers])
    role = lambda w: _ATTENTION_ROLE.substitute(v, w=w, other=(w + 1) % consumers, flip=int(w == 0))
    bodies = "".join(map(role, range(consumers))).rstrip("\n")
    copies = "".join(_ATTENTION_COPY.substitute(v, w=w) for w in range(consumers)).rstrip("\n")
    return _ATTENTION.substitute(v, bodies=bodies, copies=copies)


def block(params: str, allocs: str, *roles: str, grid: str = "") -> str:
    """A kernel of roles r0, r1, ... with constants %c0 to %c3 and `%yes`, `%no`."""
    head = "".join(f"%c{k} = full {k} : i32\n" for k in range(4))
    head += "%yes = full true : bool\n%no = full false : bool\n"
    bodies = "".join(f"role r{k} warps={4 if k == 0 else 1} registers=0 {{\n{r}\n}}\n" for k, r in enumerate(roles))
    return f"kernel @k({params}) {grid} {{\n{head}{allocs}\nroles {{\n{bodies}}}\n}}"
