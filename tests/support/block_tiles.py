"""Small kernels at the block level: a role that has a product in its registers, and does something with it."""

from __future__ import annotations

import dataclasses
import zlib

import numpy as np

from jtile import ir
from jtile.ir.types import BY_SHORT

_KERNEL = """\
kernel @case(%a: ref<64x{k}x{dt}>, %b: ref<{b}x{dt}>, %v: ref<{n}xf32>, %t: ref<64xi32>, %o: {out}) grid(1) {{
  %c0 = full 0 : i32
  %c1 = full 1 : i32
  %A = alloc_shared : shared<64x{k}x{dt}>
  %B = alloc_shared : shared<{b}x{dt}>
  %V = alloc_shared : shared<{n}xf32>
  %full = alloc_barriers : barrier<1, arrivals 1>
{allocs}  roles {{
    role worker warps={warps} {{
      wait %full[%c0], %c0
      {turned}%d = dot_async {left}, %B{t} : tile<64x{n}xf32>
      %x = dot_wait %d : tile<64x{n}xf32>
{body}
    }}
    role loader warps=1 registers=24 {{
      expect %full[%c0] bytes={bytes}
      async_load %a[tile(%c0, 64), tile(%c0, {k})] -> %A, %full[%c0]
      async_load %b[tile(%c0, {k0}), tile(%c0, {n0})] -> %B, %full[%c0]
      async_load %v[tile(%c0, {n})] -> %V, %full[%c0]
    }}
  }}
}}
"""


@dataclasses.dataclass(frozen=True)
class Case:
    """What the worker does with `%x`, its 64 x n product, and with `%V`, a vector of n numbers in shared memory; what
    it stores has shape and dtype `out`. `exact`: all numbers are whole, so that the interpreter gives the same.
    `registers`: the left operand of the product comes from there."""

    body: str
    out: str
    n: int = 64
    k: int = 64
    dt: str = "bf16"
    warps: int = 4
    allocs: str = ""
    exact: bool = True
    registers: bool = False

    @property
    def kernel(self) -> ir.Kernel:
        lines = "\n".join("      " + line.strip() for line in self.body.strip().split("\n"))
        width = BY_SHORT[self.dt].bits // 8
        values = dataclasses.asdict(self) | {"body": lines, "out": f"ref<{self.out}, out>"}
        values["allocs"] = "".join(f"  {line.strip()}\n" for line in self.allocs.strip().split("\n") if line.strip())
        sides = (self.n, self.k) if width != 2 else (self.k, self.n)  # only 16-bit types multiply in any order
        values |= {"b": "x".join(map(str, sides)), "k0": sides[0], "n0": sides[1], "t": "t" * (width != 2)}
        view = f"%Bt = transpose_shared %B : shared<{self.k}x{self.n}x{self.dt}>\n      "
        load = f"%l = load_shared %A : tile<64x{self.k}x{self.dt}>\n      " if self.registers else ""
        values |= {"turned": (view if width != 2 else "") + load, "left": "%l" if self.registers else "%A"}
        values["bytes"] = (64 + self.n) * self.k * width + self.n * 4
        kernel = ir.parse_kernel(_KERNEL.format(**values))
        ir.verify(kernel, "block")
        return kernel

    def inputs(self) -> list[np.ndarray]:
        rng = np.random.default_rng(zlib.crc32(self.body.encode()))
        numpy = BY_SHORT[self.dt].numpy
        ir_shape = (self.n, self.k) if BY_SHORT[self.dt].bits != 16 else (self.k, self.n)
        a, b = (rng.integers(-2, 3, s).astype(np.float32).astype(numpy) for s in ((64, self.k), ir_shape))
        v = rng.integers(-8, 9, self.n).astype(np.float32)
        return [a, b, v, rng.permutation(64).astype(np.int32)]


STORE = "store %o[tile(%c0, {m}), tile(%c0, {n})], %y"
_64 = STORE.format(m=64, n=64)
CASES: dict[str, Case] = {
    "product": Case("store %o[tile(%c0, 64), tile(%c0, 64)], %x", "64x64xf32"),
    "product of 8 warps": Case("store %o[tile(%c0, 64), tile(%c0, 256)], %x", "64x256xf32", n=256, warps=8),
    "vector along columns": Case(
        f"""%v_r = load_shared %V : tile<64xf32>
        %w = broadcast %v_r dims=(1) : tile<64x64xf32>
        %y = add %x, %w : tile<64x64xf32>
        {_64}""",
        "64x64xf32",
    ),
    "vectors by pointers": Case(
        f"""%i = load %t[tile(%c0, 64)] : tile<64xi32>
        %v_r = load %v[take(%i)] : tile<64xf32>
        %w = broadcast %v_r dims=(0) : tile<64x64xf32>
        %y = mul %x, %w : tile<64x64xf32>
        {_64}""",
        "64x64xf32",
    ),
    "rows by pointers": Case(
        """%i = load %t[tile(%c0, 64)] : tile<64xi32>
        store %o[take(%i), tile(%c0, 64)], %x""",
        "64x64xf32",
    ),
    "sums of rows and columns": Case(
        f"""%r = reduce sum %x axes=(1) : tile<64xf32>
        %c = reduce max %x axes=(0) : tile<64xf32>
        %s = reduce sum %x axes=(0, 1) : f32
        %rb = broadcast %r dims=(0) : tile<64x64xf32>
        %cb = broadcast %c dims=(1) : tile<64x64xf32>
        %sb = broadcast %s dims=() : tile<64x64xf32>
        %p = add %rb, %cb : tile<64x64xf32>
        %y = add %p, %sb : tile<64x64xf32>
        {_64}""",
        "64x64xf32",
    ),
    "only elements": Case(
        f"""%i = load %t[tile(%c0, 1)] : tile<1xi32>
        %j = add %i, %i : tile<1xi32>
        %p = reshape %j : i32
        %f = cast %p : f32
        %a1 = load %a[tile(%c0, 1), tile(%c0, 1)] : tile<1x1xbf16>
        %a2 = cast %a1 : tile<1x1xf32>
        %q = reshape %a2 : f32
        %r = add %f, %q : f32
        %rb = broadcast %r dims=() : tile<64x64xf32>
        %y = add %x, %rb : tile<64x64xf32>
        {_64}""",
        "64x64xf32",
    ),
    "place of the largest": Case(
        """%r = arg_reduce max %x axis=1 : tile<64xi32>
        store %o[tile(%c0, 64)], %r""",
        "64xi32",
    ),
    "softmax": Case(
        f"""%m = reduce max %x axes=(1) : tile<64xf32>
        %mb = broadcast %m dims=(0) : tile<64x64xf32>
        %e = sub %x, %mb : tile<64x64xf32>
        %p = exp2 %e : tile<64x64xf32>
        %l = reduce sum %p axes=(1) : tile<64xf32>
        %lb = broadcast %l dims=(0) : tile<64x64xf32>
        %y = div %p, %lb : tile<64x64xf32>
        {_64}""",
        "64x64xf32",
        exact=False,
    ),
    "a triangle": Case(
        f"""%i = iota 0 : tile<64x64xi32>
        %j = iota 1 : tile<64x64xi32>
        %m = ge %i, %j : tile<64x64xbool>
        %f = full -inf : tile<64x64xf32>
        %y = select %m, %x, %f : tile<64x64xf32>
        {_64}""",
        "64x64xf32",
    ),
    "narrow floats and back": Case(
        f"""%h = cast %x : tile<64x64xf16>
        %f = cast %h : tile<64x64xf8e5m2>
        %g = cast %f : tile<64x64xbf16>
        %y = cast %g : tile<64x64xi32>
        {_64}""",
        "64x64xi32",
    ),
    "transposed": Case(f"%y = transpose %x perm=(1, 0) : tile<64x64xf32>\n{_64}", "64x64xf32"),
    "columns": Case(
        """%p = slice %x starts=(0, 64) stops=(64, 128) strides=(1, 1) : tile<64x64xf32>
        %q = slice %x starts=(0, 96) stops=(64, 128) strides=(1, 1) : tile<64x32xf32>
        %s = reduce sum %q axes=(1) : tile<64xf32>
        %sb = broadcast %s dims=(0) : tile<64x64xf32>
        %y = add %p, %sb : tile<64x64xf32>
        """
        + _64,
        "64x64xf32",
        n=128,
    ),
    "halves exchanged": Case(
        """%p = slice %x starts=(0, 0) stops=(64, 32) strides=(1, 1) : tile<64x32xf32>
        %q = slice %x starts=(0, 32) stops=(64, 64) strides=(1, 1) : tile<64x32xf32>
        %m = neg %q : tile<64x32xf32>
        %r = concat %m, %p axis=1 : tile<64x64xf32>
        %y = add %r, %x : tile<64x64xf32>
        """
        + _64,
        "64x64xf32",
    ),
    "four rows of tiles": Case(
        """%p = slice %x starts=(0, 0) stops=(64, 16) strides=(1, 1) : tile<64x16xf32>
        %q = slice %x starts=(0, 16) stops=(64, 32) strides=(1, 1) : tile<64x16xf32>
        %y = concat %p, %q, %q, %p axis=0 : tile<256x16xf32>
        """
        + STORE.format(m=256, n=16),
        "256x16xf32",
    ),
    "rows": Case(
        "%y = slice %x starts=(32, 0) stops=(64, 64) strides=(1, 1) : tile<32x64xf32>\n" + STORE.format(m=32, n=64),
        "32x64xf32",
    ),
    "another shape": Case(
        """%r = reshape %x : tile<64x2x32xf32>
        %s = reduce sum %r axes=(1) : tile<64x32xf32>
        %y = reshape %s : tile<32x64xf32>
        """
        + STORE.format(m=32, n=64),
        "32x64xf32",
    ),
    "groups of columns": Case(
        f"""%s = reshape %x : tile<64x2x32xf32>
        %u = reduce max %s axes=(2) : tile<64x2xf32>
        %k = reshape %u : tile<64x2x1x1xf32>
        %two = full 2.0 : tile<64x2x1x1xf32>
        %kk = mul %k, %two : tile<64x2x1x1xf32>
        %w = broadcast %kk dims=(0, 1, 2, 3) : tile<64x2x4x8xf32>
        %xr = reshape %x : tile<64x2x4x8xf32>
        %d_1 = sub %xr, %w : tile<64x2x4x8xf32>
        %y = reshape %d_1 : tile<64x64xf32>
        {_64}""",
        "64x64xf32",
    ),
    "axes of length 1": Case(
        f"""%m = reduce max %x axes=(1) : tile<64xf32>
        %mk = reshape %m : tile<64x1xf32>
        %two = full 2.0 : tile<64x1xf32>
        %mm = mul %mk, %two : tile<64x1xf32>
        %mb = broadcast %mm dims=(0, 1) : tile<64x64xf32>
        %y = sub %x, %mb : tile<64x64xf32>
        {_64}""",
        "64x64xf32",
    ),
    "running sums": Case(
        """%r = reduce sum %x axes=(1) : tile<64xf32>
        %s = cumulative sum %r axis=0 : tile<64xf32>
        store %o[tile(%c0, 64)], %s""",
        "64xf32",
    ),
    "a loop": Case(
        f"""%c5 = full 5 : i32
        %z = full 0.0 : tile<64xf32>
        %y, %l = for %i in %c0..%c5 step %c1 carry (%acc = %x, %s = %z) {{
          %r = reduce max %acc axes=(1) : tile<64xf32>
          %t_1 = add %s, %r : tile<64xf32>
          %rb = broadcast %t_1 dims=(0) : tile<64x64xf32>
          %n = sub %acc, %rb : tile<64x64xf32>
          yield %n, %t_1
        }}
        {_64}""",
        "64x64xf32",
    ),
    "a loop that ends by itself": Case(
        f"""%c9 = full 9 : i32
        %i_1, %y = while (%i = %c0, %acc = %x) {{
          %more = lt %i, %c9 : bool
          yield %more
        }} do (%j, %old) {{
          %c3 = full 3 : i32
          %next = add %j, %c3 : i32
          %one = full 1.0 : tile<64x64xf32>
          %new = add %old, %one : tile<64x64xf32>
          yield %next, %new
        }}
        {_64}""",
        "64x64xf32",
    ),
    "a branch": Case(
        f"""%q = load %t[%c0] : i32
        %go = ge %q, %c0 : bool
        %y = if %go {{
          %v_r = load_shared %V : tile<64xf32>
          %w = broadcast %v_r dims=(1) : tile<64x64xf32>
          %p = add %x, %w : tile<64x64xf32>
          yield %p
        }} else {{
          yield %x
        }}
        {_64}""",
        "64x64xf32",
    ),
    "a product of a product": Case(
        f"""%h = cast %x : tile<64x64xbf16>
        %e = dot_async %h, %B acc=%x : tile<64x64xf32>
        %y = dot_wait %e : tile<64x64xf32>
        {_64}""",
        "64x64xf32",
    ),
    "through shared memory": Case(
        f"""%h = cast %x : tile<64x64xbf16>
        store_shared %C, %h
        fence_shared
        role_barrier
        %Ct = transpose_shared %C : shared<64x64xbf16>
        %e = dot_async %Ct, %B : tile<64x64xf32>
        %f = dot_wait %e : tile<64x64xf32>
        %l = load_shared %Ct : tile<64x64xbf16>
        %m = cast %l : tile<64x64xf32>
        %y = sub %f, %m : tile<64x64xf32>
        {_64}""",
        "64x64xf32",
        allocs="%C = alloc_shared : shared<64x64xbf16>",
    ),
    "part of a buffer": Case(
        """store_shared %C, %x
        fence_shared
        role_barrier
        %P = slice_shared %C starts=(32, 64) sizes=(32, 64) : shared<32x64xf32>
        %y = load_shared %P : tile<32x64xf32>
        store %o[tile(%c0, 32), tile(%c0, 64)], %y
        %c2 = full 2 : i32
        async_store %o[tile(%c1, 32), tile(%c0, 64)] <- %P
        store_wait 0""",
        "64x64xf32",
        n=128,
        allocs="%C = alloc_shared : shared<64x128xf32>",
    ),
    "the time": Case(
        f"""%t0 = clock : i64
        %zero = full 0 : i64
        %late = ge %t0, %zero : bool
        %z = full 0.0 : tile<64x64xf32>
        %y = if %late {{
          yield %x
        }} else {{
          yield %z
        }}
        {_64}""",
        "64x64xf32",
    ),
}
for short, k in (("f16", 64), ("f8e4m3fn", 256), ("f8e5m2", 128), ("f32", 32)):
    _plain = Case("store %o[tile(%c0, 64), tile(%c0, 64)], %x", "64x64xf32", k=k, dt=short)
    CASES[f"product of {short}"] = _plain
    CASES[f"product of {short} from registers"] = dataclasses.replace(_plain, k=min(k, 128), registers=True)
