"""How pending nodes get values: small or rare programs by NumPy, node by node; what comes often is compiled as a whole.

To compile takes longer than most small programs run. So each structure of a graph first runs in NumPy, until that has
taken as long as to compile it would (the rule of the ski rental: never more than twice the best choice). A structure
does not know the numbers of the script, unless they never change, nor which arrays it is run with.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy
from jax.core import Tracer

import jtile as jt
from jtile._errors import KernelTypeError, KernelValueError
from jtile._memo import Recent
from jtile.fusion import fuse
from jtile.numpy._graph import Constant, Graph, Node, Op
from jtile.numpy._mode import MODE
from jtile.numpy._now import SMALL
from jtile.numpy._uses import uses_of
from jtile.numpy._walk import Walk

TRIALS = 4  # runs of what was compiled, of which the quickest is compared with NumPy
COMPILE, COMPILE_A_NODE = 20e6, 3e6  # nanoseconds that a compilation takes, and that each node adds, roughly


class Program:
    """All graphs of one structure.

    Attributes:
      spent: nanoseconds that it has taken in NumPy.
      numbers: the bytes of the script's numbers in its last run; varying: the places of those that have changed.
      on_device: whether JAX can run all of its calls.
      compiled: what was compiled for the present `varying`, by the operands that are given away.
      numpys, seconds: how long NumPy takes at least, and how long the first runs of what was compiled took.
    """

    def __init__(self, on_device: bool) -> None:
        self.spent = 0.0
        self.numbers: list[bytes] | None = None
        self.on_device = on_device
        self.varying: frozenset[int] = frozenset()
        self.compiled: dict[tuple[int, ...], Callable] = {}
        self.numpys = float("inf")
        self.seconds: list[float] = []

    @property
    def slower(self) -> bool:
        """Whether what was compiled is slower than NumPy. Its first run, which compiles, does not count."""
        return len(self.seconds) == TRIALS and min(self.seconds[1:]) > self.numpys

    def see(self, numbers: list[bytes]) -> None:
        """Note which numbers change between runs; those become operands."""
        if self.numbers is not None and self.numbers != numbers:
            changed = {k for k, (new, old) in enumerate(zip(numbers, self.numbers)) if new != old} - self.varying
            if changed:
                self.varying |= changed
                self.compiled, self.spent, self.seconds = {}, 0.0, []
        self.numbers = numbers


_PROGRAMS: Recent[tuple, Program] = Recent(512)
_LOCK = threading.RLock()


@contextlib.contextmanager
def as_numpy_counts() -> Iterator[None]:
    """JAX with 64 bits, the usual promotions and exact products, inside of the block and in this thread alone."""
    promotions = jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow")
    with jax.enable_x64(True), promotions[0], promotions[1], jax.default_matmul_precision("highest"):
        yield


def evaluate(roots: list[Node], wanted: Node | None = None) -> None:
    """Give values to pending nodes.

    Args:
      roots: the nodes. Those that somebody holds besides this list get values, and what else of their graph somebody
        holds, all by one program; the others are forgotten.
      wanted: the one of them that gets its value in any case.
    """
    with _LOCK:
        graph = Graph(roots)
        held = graph.held(roots)
        if wanted is not None:
            held[wanted.place] = True
        outputs = tuple(k for k, node in enumerate(graph.order) if node.op is not None and held[k])
        if not outputs:
            return
        outputs = _needed(graph, held, outputs, None if wanted is None else wanted.place)
        values = _run(graph, held, outputs)
        for k, value in zip(outputs, values):
            node = graph.order[k]
            node.value, node.op, node.inputs = value, None, ()


def _needed(graph: Graph, held: list[bool], outputs: tuple[int, ...], wanted: int | None) -> tuple[int, ...]:
    """The outputs without those that the script will not use, by what it did the last times. They stay pending, and
    what they are made of is marked as held."""
    uses = uses_of((graph.key(outputs), wanted))
    uses.start()
    large = [(k, graph.order[k]) for k in outputs if k != wanted and graph.order[k].size > SMALL]
    uses.follow(large)
    spare = uses.spare
    if not spare or len(spare) == len(outputs):
        return outputs
    stack = list(spare)
    while stack:
        k = stack.pop()
        for i in graph.inputs[k]:
            if not held[i]:
                held[i] = True
                stack.append(i)
    return tuple(k for k in outputs if k not in spare)


def _run(graph: Graph, held: list[bool], outputs: tuple[int, ...]) -> list[Any]:
    mode = MODE.get()
    if mode == "numpy":
        return _on_host(graph, held, outputs)
    key = graph.key(outputs)
    program = _PROGRAMS.get(key) or _PROGRAMS.put(key, Program(graph.on_device()))
    if not program.on_device:
        return _on_host(graph, held, outputs)
    constants = [k for k, node in enumerate(graph.order) if node.__class__ is Constant]
    program.see([graph.order[k].value.tobytes() for k in constants])
    if mode == "auto" and not program.compiled:
        pending = sum(node.op is not None for node in graph.order)
        program.spent += graph.nanoseconds()
        if program.spent < COMPILE + COMPILE_A_NODE * pending:
            start = time.perf_counter()
            values = _on_host(graph, held, outputs)
            program.numpys = min(program.numpys, time.perf_counter() - start)
            return values
    if mode == "auto" and program.slower:
        return _on_host(graph, held, outputs)
    start = time.perf_counter()
    values = _compiled(program, graph, held, outputs, constants)
    if len(program.seconds) < TRIALS:
        jax.block_until_ready(values)
        program.seconds.append(time.perf_counter() - start)
    return values


def host_value(node: Node) -> Any:
    """The value of a node as NumPy's array; what JAX holds on the CPU is not copied."""
    value = node.value
    return value if isinstance(value, numpy.ndarray | numpy.generic | tuple) else numpy.asarray(value)


def _on_host(graph: Graph, held: list[bool], outputs: tuple[int, ...]) -> list[Any]:
    values: list[Any] = [None] * len(graph.order)
    left = list(graph.uses)
    for k in outputs:
        left[k] += 1
    taken: list[tuple[Node, Node, Any]] = []  # what was written into, by which node, and what it has become
    try:
        with numpy.errstate(all="ignore"):
            for k, node in enumerate(graph.order):
                if node.op is None:
                    values[k] = host_value(node)
                    continue
                inputs = graph.inputs[k]
                args = [values[i] for i in inputs]
                for i in inputs:
                    left[i] -= 1
                    if left[i] == 0:
                        values[i] = None
                if not node.op.writes:
                    values[k] = _typed(node, node.op.host(*args))
                    del args
                    continue
                base = graph.order[inputs[0]]
                owned = left[inputs[0]] == 0 and not held[inputs[0]]
                old = id(args[0])
                args[0] = _own(args, base.op is None, owned)
                if id(args[0]) == old:
                    taken.append((base, node, None))
                values[k] = _typed(node, node.op.host(*args))
                if id(args[0]) == old:
                    taken[-1] = (base, node, values[k])
                del args
    except BaseException as error:
        _rescue(taken, repr(error))
        raise
    return [_settled(values[k]) for k in outputs]


def _rescue(taken: list[tuple[Node, Node, Any]], error: str) -> None:
    """After an operation has failed: what was written over is no more, and the last that was written has its value."""
    for base, node, value in taken:
        for gone in (base, node):
            gone.op, gone.value, gone.inputs = Op("lost", functools.partial(_lost, error), None), None, ()
        if value is not None:
            node.op, node.value = None, value


def _own(args: list[Any], leaf: bool, mine: bool) -> Any:
    """The first argument, to be written into: itself where nobody else can see it, or else a copy."""
    # Two references are the list and the argument of getrefcount; no variable holds one, but a leaf's node does.
    alone = mine and sys.getrefcount(args[0]) == 2 + leaf
    value = args[0]
    if alone and isinstance(value, numpy.ndarray) and value.flags.owndata and value.flags.writeable:
        return value
    return numpy.array(value)


def _lost(error: str, *_: Any) -> Any:
    raise KernelValueError(
        f"this array is lost: its memory was written into, and an operation after that failed with {error}; "
        "make it anew"
    )


def _typed(node: Node, value: Any) -> Any:
    """The result of an op, with the dtype that was said when it was recorded."""
    if node.dtype is None:
        return tuple(value)
    array = numpy.asarray(value)
    if array.shape != node.shape:
        raise AssertionError(f"{node.op}: recorded as {node.shape}, is {array.shape}; a defect of jtile.numpy")
    return array if array.dtype == node.dtype else array.astype(node.dtype)


def _settled(value: Any) -> Any:
    """A value in a form that may be kept: views are copied, since a view would keep all of its base in memory."""
    if isinstance(value, tuple):
        return value
    return value if value.base is None and value.flags.writeable else value.copy()


def _compiled(program: Program, graph: Graph, held: list[bool], outputs: tuple[int, ...], constants: list[int]):
    leaves = [k for k, node in enumerate(graph.order) if node.op is None and not isinstance(node, Constant)]
    with as_numpy_counts():
        near = "warps" not in jt.target().features
        for k in leaves:
            node = graph.order[k]
            if node.value.__class__ is numpy.ndarray and not (near and node.size <= SMALL):
                node.value = jax.device_put(node.value)  # transferred once: the next program finds it on the device
        given = _given_away(graph, held, outputs, leaves)
        given = next((g for g in program.compiled if set(g) <= set(given)), () if program.compiled else given)
        operands = [graph.order[k].value for k in leaves]
        varying = [k for place, k in enumerate(constants) if place in program.varying]
        operands += [graph.order[k].value for k in varying]
        run = program.compiled.get(given)
        if run is None:
            run = program.compiled[given] = compiled(Walk(graph, outputs, leaves + varying), given)
        return [_near(value) for value in run(*operands)]


def _near(value: Any) -> Any:
    """A result of a program; small ones lie in NumPy's memory from then on, which does the calls of small arrays."""
    if isinstance(value, tuple) or value.size > SMALL or value.device.platform != "cpu":
        return value
    return numpy.array(value)


def compiled(walk: Walk, given: tuple[int, ...]) -> Callable:
    """A function that runs a graph as one program; `given` are the operands whose memory it may take."""
    return jax.jit(walk if walk.by_xla else fuse(walk), donate_argnums=given)


def _given_away(graph: Graph, held: list[bool], outputs: tuple[int, ...], leaves: list[int]) -> tuple[int, ...]:
    """The operands that nobody else holds and that have the type of a result, which then takes their memory."""
    types = [(graph.order[k].shape, graph.order[k].dtype) for k in outputs]
    given = []
    for position, k in enumerate(leaves):
        node = graph.order[k]
        kind = (node.shape, node.dtype)
        # Two references are the node's and the argument of getrefcount: an array that JAX or NumPy was given has more.
        if not held[k] and node.size >= 1024 and kind in types and sys.getrefcount(node.value) == 2:
            types.remove(kind)
            given.append(position)
    return tuple(given)


def refuse_traced(value: Any) -> None:
    """Raise a typed error if JAX is tracing a value."""
    if isinstance(value, Tracer):
        raise KernelTypeError(
            "jtile.numpy was given an array that JAX is tracing, and its arrays are values that change; use jax.numpy "
            "in functions that jax.jit, jax.grad or jax.vmap transform"
        )
