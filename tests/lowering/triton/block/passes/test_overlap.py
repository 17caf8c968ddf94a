"""Products that run while the next round is prepared: text in, expected text out, the same results, and every wait that
is left is needed."""

import textwrap

import numpy as np
import pytest
import tile_kernels as tk
from block_kernels import operands
from machines import machine

from jtile.errors import JtileError
from jtile.interpret import interpret
from jtile.ir import (
    AllocBarriers,
    Arrive,
    Block,
    DotAsync,
    DotWait,
    For,
    Kernel,
    Op,
    Wait,
    parse_kernel,
    print_kernel,
    verify,
)
from jtile.lowering.triton.block.passes import NoPlan, steps
from jtile.lowering.triton.block.passes.overlap import overlap
from jtile.lowering.triton.block.passes.overlap import run as overlapped

PRODUCT = """kernel @product(%a: ref<64x128xf32>, %b: ref<128x32xf32>, %n: ref<i32>, %o: ref<64x32xf32, out>) {
  %c0 = full 0 : i32
  %c1 = full 1 : i32
  %c3 = full 3 : i32
  %A = alloc_shared : shared<64x32xf32, slots 3>
  %B = alloc_shared : shared<32x32xf32, slots 3>
  %full = alloc_barriers : barrier<3, arrivals 1>
  %empty = alloc_barriers : barrier<3, arrivals 1>
  roles {
    role consumer warps=4 registers=240 {
      %rounds = load %n[]
      %zero = full 0.0 : tile<64x32xf32>
      %sum, %end = for %k in %c0..%rounds step %c1 carry (%acc = %zero, %it = %c0) {
        %s = rem %it, %c3
        %t = div %it, %c3
        %p = and %t, %c1
        wait %full[%s], %p
        %As = slot %A[%s]
        %Bs = slot %B[%s]
        %run = dot_async %As, %Bs acc=%acc
        %done = dot_wait %run
        arrive %empty[%s]
        %next = add %it, %c1
        yield %done, %next
      }
      store %o[%c0:+64, %c0:+32], %sum
    }
    role producer warps=1 registers=24 {
      %rounds = load %n[]
      for %k in %c0..%rounds step %c1 {
        %s = rem %k, %c3
        %t = div %k, %c3
        %p = and %t, %c1
        %q = xor %p, %c1
        wait %empty[%s], %q
        expect %full[%s] bytes=12288
        %As = slot %A[%s]
        %Bs = slot %B[%s]
        async_load %a[%c0:+64, tile(%k, 32)] -> %As, %full[%s]
        async_load %b[tile(%k, 32), %c0:+32] -> %Bs, %full[%s]
      }
    }
  }
}"""

ATTENTION = """kernel @attention(
    %q: ref<64x16xbf16>, %k: ref<64x16xbf16>, %v: ref<64x16xbf16>, %n: ref<i32>, %o: ref<64x16xf32, out>) {
  %c0 = full 0 : i32
  %c1 = full 1 : i32
  %c2 = full 2 : i32
  %Q = alloc_shared : shared<64x16xbf16>
  %K = alloc_shared : shared<16x16xbf16, slots 2>
  %V = alloc_shared : shared<16x16xbf16, slots 2>
  %qfull = alloc_barriers : barrier<1, arrivals 1>
  %kfull = alloc_barriers : barrier<2, arrivals 1>
  %kempty = alloc_barriers : barrier<2, arrivals 1>
  %vfull = alloc_barriers : barrier<2, arrivals 1>
  %vempty = alloc_barriers : barrier<2, arrivals 1>
  roles {
    role consumer warps=4 registers=240 {
      %rounds = ROUNDS
      wait %qfull[%c0], %c0
      %zero = full 0.0 : tile<64x16xf32>
      %none = full -1e30 : tile<64xf32>
      %sum, %top, %end = for %j in %c0..%rounds step %c1 carry (%acc = %zero, %m = %none, %it = %c0) {
        %s = rem %it, %c2
        %t = div %it, %c2
        %p = and %t, %c1
        wait %kfull[%s], %p
        %Ks = slot %K[%s]
        %KT = transpose_shared %Ks
        %srun = dot_async %Q, %KT
        %S = dot_wait %srun
        arrive %kempty[%s]
        %most = reduce max %S axes=(1)
        %m1 = max %m, %most
        %mb = broadcast %m1 dims=(0) : tile<64x16xf32>
        %e = sub %S, %mb
        %x = exp2 %e
        %P = cast %x : tile<64x16xbf16>
        %f = sub %m, %m1
        %fade = exp2 %f
        %fb = broadcast %fade dims=(0) : tile<64x16xf32>
        %acc1 = mul %acc, %fb
        wait %vfull[%s], %p
        %Vs = slot %V[%s]
        %orun = dot_async %P, %Vs acc=%acc1
        %O = dot_wait %orun
        arrive %vempty[%s]
        %next = add %it, %c1
        yield %O, %m1, %next
      }
      store %o[%c0:+64, %c0:+16], %sum
    }
    role producer warps=1 registers=24 {
      %rounds = ROUNDS
      expect %qfull[%c0] bytes=2048
      async_load %q[%c0:+64, %c0:+16] -> %Q, %qfull[%c0]
      for %j in %c0..%rounds step %c1 {
        %s = rem %j, %c2
        %t = div %j, %c2
        %p = and %t, %c1
        %r = xor %p, %c1
        wait %kempty[%s], %r
        expect %kfull[%s] bytes=512
        %Ks = slot %K[%s]
        async_load %k[tile(%j, 16), %c0:+16] -> %Ks, %kfull[%s]
        wait %vempty[%s], %r
        expect %vfull[%s] bytes=512
        %Vs = slot %V[%s]
        async_load %v[tile(%j, 16), %c0:+16] -> %Vs, %vfull[%s]
      }
    }
  }
}"""
SURE = ATTENTION.replace("ROUNDS", "full 4 : i32")
MAYBE = ATTENTION.replace("ROUNDS", "load %n[]")


def consumer(kernel: Kernel, after: str, until: str) -> list[str]:
    """Lines of the consumer from the one behind `after` to the one before `until`."""
    lines = textwrap.dedent(print_kernel(kernel).split("role consumer")[1].split("role producer")[0]).splitlines()
    first = next(n for n, line in enumerate(lines) if after in line)
    last = next(n for n, line in enumerate(lines) if until in line)
    return textwrap.dedent("\n".join(lines[first + 1 : last])).splitlines()


def test_a_product_is_waited_for_a_round_later():
    kernel = overlap(parse_kernel(PRODUCT))
    expected = """\
        %c0_1 = full 0 : i32
        %sum, %end, %last = for %k in %c0..%rounds step %c1 carry (%acc = %zero, %it = %c0, %before = %c0_1) {
          %0 = ne %k, %c0 : bool
          %s = rem %it, %c3 : i32
          %t = div %it, %c3 : i32
          %p = and %t, %c1 : i32
          wait %full[%s], %p
          %As = slot %A[%s] : shared<64x32xf32>
          %Bs = slot %B[%s] : shared<32x32xf32>
          %run = dot_async %As, %Bs acc=%acc keep=%0 : tile<64x32xf32>
          %next = add %it, %c1 : i32
          %done = dot_wait %run pending=1 : tile<64x32xf32>
          arrive %empty[%before] when=%0
          yield %done, %next, %s
        }
        %sum_1 = dot_wait %sum : tile<64x32xf32>
        %1 = lt %c0, %rounds : bool
        arrive %empty[%last] when=%1"""
    assert consumer(kernel, "%zero", "store %o") == textwrap.dedent(expected).splitlines()


def test_scores_of_two_products_are_in_flight_together():
    """A key in two parts: the sums of the first go on in the second, and neither waits for the delayed product."""
    first = "%S = dot_wait %srun\n        arrive %kempty[%s]"
    two = first.replace("%S =", "%S0 =") + "\n        %more = dot_async %Q, %KT acc=%S0\n        %S = dot_wait %more"
    lines = consumer(overlap(parse_kernel(SURE.replace(first, two))), " = for ", "}")
    products = [x.strip().split(" :")[0] for x in lines if "dot_" in x or "arrive" in x]
    assert products == [
        "%srun_1 = dot_async %Q, %KT_1", "%more_1 = dot_async %Q, %KT_1 acc=%srun_1",
        "%orun = dot_async %P_before, %Vs acc=%acc", "%S_1 = dot_wait %more_1 pending=1", "arrive %kempty[%s_2]",
        "%O = dot_wait %orun", "arrive %vempty[%s_before]",
    ]  # fmt: skip


def test_dependent_products_are_rotated():
    kernel = overlap(parse_kernel(SURE))
    expected = """\
        %s_2 = rem %it, %c2 : i32
        %t_1 = div %it, %c2 : i32
        %p_2 = and %t_1, %c1 : i32
        wait %kfull[%s_2], %p_2
        %Ks_1 = slot %K[%s_2] : shared<16x16xbf16>
        %KT_1 = transpose_shared %Ks_1 : shared<16x16xbf16>
        %srun_1 = dot_async %Q, %KT_1 : tile<64x16xf32>
        wait %vfull[%s_before], %p_before
        %Vs = slot %V[%s_before] : shared<16x16xbf16>
        %orun = dot_async %P_before, %Vs acc=%acc : tile<64x16xf32>
        %S_1 = dot_wait %srun_1 pending=1 : tile<64x16xf32>
        arrive %kempty[%s_2]
        %most_1 = reduce max %S_1 axes=(1) : tile<64xf32>
        %m1_1 = max %m, %most_1 : tile<64xf32>
        %mb_1 = broadcast %m1_1 dims=(0) : tile<64x16xf32>
        %e_1 = sub %S_1, %mb_1 : tile<64x16xf32>
        %x_1 = exp2 %e_1 : tile<64x16xf32>
        %P_2 = cast %x_1 : tile<64x16xbf16>
        %f_1 = sub %m, %m1_1 : tile<64xf32>
        %fade_1 = exp2 %f_1 : tile<64xf32>
        %fb_1 = broadcast %fade_1 dims=(0) : tile<64x16xf32>
        %next_1 = add %it, %c1 : i32
        %O = dot_wait %orun : tile<64x16xf32>
        arrive %vempty[%s_before]
        %acc1_1 = mul %O, %fb_1 : tile<64x16xf32>
        yield %acc1_1, %m1_1, %next_1, %s_2, %p_2, %P_2"""
    lines = consumer(kernel, " = for ", "}")
    assert lines == textwrap.dedent(expected).splitlines()
    last = """\
        wait %vfull[%s_1], %p_1
        %Vs_1 = slot %V[%s_1] : shared<16x16xbf16>
        %orun_1 = dot_async %P_1, %Vs_1 acc=%sum : tile<64x16xf32>
        %O_1 = dot_wait %orun_1 : tile<64x16xf32>
        arrive %vempty[%s_1]"""
    assert consumer(kernel, "}", "store %o") == textwrap.dedent(last).splitlines()


@pytest.mark.parametrize("text", [PRODUCT, SURE, MAYBE], ids=["product", "rotated", "no round"])
@pytest.mark.parametrize("rounds", [0, 1, 2, 4])
def test_the_results_are_the_same(text, rounds):
    kernel = parse_kernel(text)
    after = overlap(kernel)
    verify(after, "block")
    inputs = operands(kernel, rounds)
    want = interpret(kernel, inputs)
    for seed in range(5):
        np.testing.assert_array_equal(interpret(after, inputs, seed=seed)[0], want[0])


def without(kernel: Kernel, gone: Op) -> Kernel:
    """A copy that lacks one op of the consumer; what it gives is what it took."""

    def block(b: Block, env) -> Block:
        out = Block(b.params, [], b.yields)
        for op in b.ops:
            if op is gone:
                env.update(zip(op.results, getattr(op, "values", ()), strict=True))
                continue
            new = op.clone(lambda v: env.get(v, v), lambda r: block(r, env))
            env.update(zip(op.results, new.results, strict=True))
            out.ops.append(new)
        out.yields = tuple(env.get(y, y) for y in b.yields)
        return out

    return kernel.with_body(block(kernel.body, {}))


def synchronised(kernel: Kernel) -> list[Op]:
    """Waits of the consumer, and the arrivals of its loops; those behind them give buffers to nobody."""
    ops = kernel.body.ops[-1].blocks()[0]
    loops = [op for op in ops.walk() if isinstance(op, For)]
    late = {op for loop in loops for op in loop.body.walk() if isinstance(op, Arrive)}
    return [op for op in ops.walk() if isinstance(op, Wait | DotWait) or op in late]


@pytest.mark.parametrize(("text", "count"), [(PRODUCT, 4), (SURE, 11)], ids=["product", "rotated"])
def test_every_wait_and_arrival_is_needed(text, count):
    kernel = overlap(parse_kernel(text))
    ops = synchronised(kernel)
    assert len(ops) == count
    inputs = operands(kernel, 4)
    for op in ops:
        faulty = without(kernel, op)
        found = 0
        for seed in range(12):
            try:
                interpret(faulty, inputs, seed=seed)
            except JtileError:
                found += 1
        assert found, f"nothing notices that this is gone: {op}"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("slots 3", "slots 1"),  # a ring of one: the next round would wait for itself
        ("arrive %empty[%s]", "%e = exp2 %done\n arrive %empty[%s]\n store %o[%c0:+64, %c0:+32], %e"),
        ("%next = add", "%zz = mul %acc, %acc\n store %o[%c0:+64, %c0:+32], %zz\n %next = add"),
        # the next round would write the registers that the product still reads
        ("%run = dot_async %As, %Bs", "%Ar = load_shared %As\n %run = dot_async %Ar, %Bs"),
    ],
    ids=["one slot", "result used", "accumulator used", "operand in registers"],
)
def test_what_keeps_its_waits(old, new):
    text = PRODUCT.replace(old, new)
    if "slots 1" in new:
        text = text.replace("barrier<3", "barrier<1").replace("%c3 = full 3", "%c3 = full 1")
    kernel = parse_kernel(text)
    assert print_kernel(overlap(kernel)) == print_kernel(kernel)


def test_two_accumulators_and_a_chain():
    """Four products a round, two of which add to what the one before gives: all four stay in flight."""
    text = PRODUCT.replace("%acc = %zero,", "%acc = %zero, %acc2 = %zero,").replace("%sum, %end", "%sum, %sum2, %end")
    text = text.replace(
        "%done = dot_wait %run",
        """%mid = dot_wait %run
        %run1 = dot_async %As, %Bs acc=%mid
        %done = dot_wait %run1
        %run2 = dot_async %As, %Bs acc=%acc2
        %done2 = dot_wait %run2""",
    ).replace("yield %done,", "yield %done, %done2,")
    text = text.replace("store %o", "%all = sub %sum, %sum2\n store %o").replace("+32], %sum", "+32], %all")
    kernel = parse_kernel(text)
    after = overlap(kernel)
    waits = [op for op in after.body.walk() if isinstance(op, DotWait)]
    assert [(w.pending, len(w.values)) for w in waits] == [(3, 2), (0, 2)]
    dots = [op for op in after.body.walk() if isinstance(op, DotAsync)]
    assert [d.keep is not None for d in dots] == [True, False, True]
    inputs = operands(kernel, 4)
    for seed in range(3):
        np.testing.assert_array_equal(interpret(after, inputs, seed=seed)[0], interpret(kernel, inputs)[0])


def test_delayed_operands_are_carried_in_the_order_of_their_products():
    """Equal kernels give equal text, in every process."""
    more = range(6)
    products = [
        f"%P{n} = mul %P, %P\n%run{n} = dot_async %P{n}, %Vs acc=%more{n}\n%O{n} = dot_wait %run{n}\n" for n in more
    ]
    text = SURE.replace("arrive %vempty", "".join(products) + "arrive %vempty")
    text = text.replace("%it = %c0)", ", ".join(["%it = %c0", *(f"%more{n} = %zero" for n in more)]) + ")")
    text = text.replace("%top, %end =", ", ".join(["%top, %end", *(f"%sum{n}" for n in more)]) + " =")
    text = text.replace("yield %O, %m1, %next", ", ".join(["yield %O, %m1, %next", *(f"%O{n}" for n in more)]))
    after = overlap(parse_kernel(text))
    loop = next(op for op in after.body.walk() if isinstance(op, For))
    assert [p.name for p in loop.body.params if p.name.startswith("P")] == [
        "P_before", *(f"P{n}_before" for n in more)
    ]  # fmt: skip


@pytest.mark.parametrize(
    "kernel",
    [
        lambda: tk.attention(128, 192, heads=1, lengths=True),
        lambda: tk.attention(192, 192, tile=(192, 64), heads=1, window=(70, 0), softcap=3.0),
    ],
    ids=["masked values", "three consumers"],
)
def test_attention_is_rotated(kernel):
    """V masked in a spare buffer goes with the delayed product; a sequence may have no keys."""
    kernel = kernel()
    planned = steps(kernel, machine(), {})
    assert not isinstance(planned, NoPlan), str(planned)
    waits = [op.pending for op in planned.kernel.body.walk() if isinstance(op, DotWait)]
    assert waits.count(1) == planned.plan.consumers
    inputs = operands(kernel, 0)
    for length in (0, 70, 192) if len(inputs) == 4 else (0,):
        inputs[3:] = [np.array([length], np.int32)] * len(inputs[3:])
        want = interpret(kernel, inputs)[0]
        for seed in range(3):
            np.testing.assert_array_equal(interpret(planned.kernel, inputs, seed=seed)[0], want)


def naive(kernel: Kernel, processors: int = 132, **options) -> Kernel:
    """The kernel in roles, each product waited for at once."""
    planned = steps(kernel, machine(processors=processors), options)
    assert not isinstance(planned, NoPlan), str(planned)
    return next(step for name, _, step in planned.steps if name == "specialise")


@pytest.mark.parametrize(
    ("shape", "options"),
    [((128, 128), {}), ((192, 192), {"persistent": True, "processors": 2})],
    ids=["two", "three, persistent"],
)
def test_consumers_take_turns(shape, options):
    """One barrier for each; the count of turns goes on over tiles."""
    kernel = tk.attention(*shape, tile=(shape[0], 64), heads=3 if options else 1, window=(None, 0))
    plain = naive(kernel, **options)
    after = overlapped(plain, turns=True)
    verify(after, "block")
    consumers = len(after.body.ops[-1].names) - 1
    (turns,) = [op for op in after.body.ops if isinstance(op, AllocBarriers) and op.result.name == "turns"]
    assert turns.count == consumers == shape[0] // 64
    inputs = operands(kernel, 0)
    want = interpret(kernel, inputs)[0]
    for seed in range(4):
        np.testing.assert_array_equal(interpret(after, inputs, seed=seed)[0], want)
    (first, *_) = [op for op in after.body.walk() if isinstance(op, Arrive) and op.barrier is turns.result]
    with pytest.raises(JtileError):
        interpret(without(after, first), inputs)


def test_no_turns_where_consumers_differ():
    """One loop of products is no dependent one: counting its rounds would not be enough."""
    for kernel in (parse_kernel(PRODUCT), parse_kernel(SURE), naive(tk.gated(128, 64, 64))):
        after = overlapped(kernel, turns=True)
        assert not any(v.result.name == "turns" for v in after.body.ops if isinstance(v, AllocBarriers))
