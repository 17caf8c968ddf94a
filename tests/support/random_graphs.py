"""Random execution graphs of a few kernels over small arrays."""

from __future__ import annotations

import functools
import random

import numpy as np

from jtile import ir
from jtile.execution.devices import Sum, joint, of_one
from jtile.execution.tasks import Memory, Task, TaskGraph, make_graph
from jtile.interpret import interpret

N = 12  # elements of every array
DEVICES = 2
_HEAD = "kernel @{name}(%x: ref<12xf32>, {y}%o: ref<12xf32, out>) grid(4){alias} {{ %i = program_id 0 {body} }}"
_TEXTS = {
    # each program its own elements
    "rows": ("%y: ref<12xf32>, ", "", "%a = load %x[tile(%i, 3)] %b = load %y[tile(%i, 3)] %c = add %a, %b "
             "store %o[tile(%i, 3)], %c"),
    # those of the next program too
    "beside": ("", "", "%c3 = full 3 : i32 %s = mul %i, %c3 %a = load %x[%s:+5] %b = reduce sum %a axes=(0) "
               "%c = broadcast %b dims=() : tile<3xf32> store %o[tile(%i, 3)], %c"),
    # all of them
    "whole": ("", "", "%c0 = full 0 : i32 %a = load %x[%c0:+12] %b = reduce max %a axes=(0) "
              "%c = broadcast %b dims=() : tile<3xf32> store %o[tile(%i, 3)], %c"),
    # over its operand
    "update": ("", " alias(%x = %o)", "%a = load %x[tile(%i, 3)] %c = add %a, %a store %o[tile(%i, 3)], %c"),
    # programs from the other end
    "turned": ("", "", "%c3 = full 3 : i32 %j = sub %c3, %i %a = load %x[tile(%j, 3)] store %o[tile(%i, 3)], %a"),
}  # fmt: skip


@functools.cache
def kernel(name: str) -> ir.Kernel:
    y, alias, body = _TEXTS[name]
    return ir.parse_kernel(_HEAD.format(name=name, y=y, alias=alias, body=body))


def random_graph(seed: int) -> tuple[TaskGraph, list[np.ndarray], list[np.ndarray]]:
    """(a graph, its operands, its results by running its kernels one after another)."""
    rng = random.Random(seed)
    operands = [np.asarray(rng.choices(range(9), k=N), np.float32) for _ in range(2)]
    values = [*operands]
    tasks = []
    for _ in range(rng.randint(4, 8)):
        k = kernel(rng.choice(list(_TEXTS)))
        ins = [rng.randrange(len(values)) for _ in k.inputs]
        (made,) = interpret(k, [values[m] for m in ins])
        if k.aliases:
            out = ins[0]
            values[out] = made
        else:
            out = len(values)
            values.append(made)
        tasks.append(Task(k, (*ins, out), rng.choice([500.0, 1500.0])))
    memories = [Memory((N,), "float32", m if m < 2 else None, m, f"m{m}") for m in range(len(values))]
    split = lambda programs, cost, cores: [(k, k + 2) for k in range(0, programs, 2)] if cost > 999 else [(0, programs)]
    return make_graph(tasks, memories, 2, split=split), operands, values


def random_world(seed: int) -> tuple[TaskGraph, TaskGraph, list[np.ndarray], list[np.ndarray]]:
    """(the graph of two devices, that of one of them, the operands, the results) with sums over the devices."""
    rng = random.Random(seed)
    values = [[np.asarray(rng.choices(range(9), k=N), np.float32) for _ in range(2)] for _ in range(DEVICES)]
    operands = [x for own in values for x in own]
    tasks = []
    for _ in range(rng.randint(4, 7)):
        summed = rng.random() < 0.4
        k = Sum(N, "float32", DEVICES, None).kernel if summed else kernel(rng.choice(list(_TEXTS)))
        ins = [rng.randrange(len(values[0]))] * DEVICES if summed else [rng.randrange(len(values[0])) for _ in k.inputs]
        out = ins[0] if k.aliases else len(values[0])
        old = [[*own] for own in values]
        for d, own in enumerate(values):
            (made,) = interpret(k, [old[j if summed else d][m] for j, m in enumerate(ins)])
            own[out : out + 1] = [made]
        peers = (*range(DEVICES), -1) if summed else ()
        tasks.append(Task(k, (*ins, out), rng.choice([500.0, 1500.0]), peers=peers))
    memories = [Memory((N,), "float32", m if m < 2 else None, m, f"m{m}") for m in range(len(values[0]))]
    split = lambda programs, cost, cores: (
        [(k, k + 2) for k in range(0, programs, 2)] if programs > 2 else [(0, programs)]
    )
    whole = make_graph(*joint(tasks, memories, DEVICES), 2, split=split)
    return whole, of_one(whole, tasks, memories, DEVICES), operands, [x for own in values for x in own]
