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
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy
from jax.core import Tracer

from jtile._errors import KernelTypeError, KernelValueError
from jtile._memo import Recent
from jtile.fusion import fuse
from jtile.numpy._graph import Constant, Node, Op
from jtile.numpy._mode import MODE
from jtile.numpy._now import SMALL

NANOSECONDS_A_NODE = 1000  # that NumPy takes for a call of any size
COMPILE, COMPILE_A_NODE = 20e6, 3e6  # nanoseconds, roughly
DEVICE_DTYPES = frozenset(
    numpy.dtype(name)
    for name in (
        "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32",
        "float64", "complex64", "complex128", jax.dtypes.bfloat16,
    )
)  # fmt: skip


class Program:
    """All graphs of one structure.

    Attributes:
      spent: nanoseconds that it has taken in NumPy.
      numbers: the numbers of the script in its last run; varying: the places of those that have changed.
      compiled: what was compiled for the present `varying`, by the operands that are given away.
    """

    def __init__(self) -> None:
        self.spent = 0.0
        self.numbers: list[Any] | None = None
        self.varying: frozenset[int] = frozenset()
        self.compiled: dict[tuple[int, ...], Callable] = {}

    def see(self, numbers: list[Any]) -> None:
        """Note which numbers change between runs; those become operands."""
        if self.numbers is not None:
            changed = {k for k, (new, old) in enumerate(zip(numbers, self.numbers)) if new != old} - self.varying
            if changed:
                self.varying |= changed
                self.compiled, self.spent = {}, 0.0
        self.numbers = numbers


_PROGRAMS: Recent[tuple, Program] = Recent(512)
_LOCK = threading.RLock()


@contextlib.contextmanager
def as_numpy_counts() -> Iterator[None]:
    """JAX with 64 bits, the usual promotions and exact products, inside of the block and in this thread alone."""
    promotions = jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow")
    with jax.enable_x64(True), promotions[0], promotions[1], jax.default_matmul_precision("highest"):
        yield


class Graph:
    """Pending nodes in an order in which they can run, with the operands in front of their users."""

    def __init__(self, roots: list[Node]):
        self.order: list[Node] = []
        self.index: dict[int, int] = {}
        stack = roots[::-1]
        while stack:
            node = stack[-1]
            missing = [i for i in node.inputs if id(i) not in self.index]
            if missing and id(node) not in self.index:
                stack.extend(reversed(missing))
                continue
            stack.pop()
            if id(node) not in self.index:
                self.index[id(node)] = len(self.order)
                self.order.append(node)
        del node, missing
        self.inputs = [tuple([self.index[id(i)] for i in node.inputs]) for node in self.order]
        self.uses = [0] * len(self.order)
        for inputs in self.inputs:
            for i in inputs:
                self.uses[i] += 1

    def held(self, listed: set[int]) -> list[bool]:
        """Whether somebody besides this graph holds each node: an array of the script, or a pending node that is not in
        the graph. `listed`: of the nodes that the caller has in a list; nobody else in between has a variable."""
        order, uses = self.order, self.uses
        # the list of the graph and the argument of getrefcount
        return [sys.getrefcount(order[k]) > 2 + uses[k] + (id(order[k]) in listed) for k in range(len(order))]

    def key(self, outputs: tuple[int, ...]) -> tuple:
        parts: list[Any] = [outputs]
        for node, inputs in zip(self.order, self.inputs):
            if node.op is not None:
                parts.append((node.op, inputs))
            elif isinstance(node, Constant):
                parts.append(node.dtype)
            else:
                parts.append((node.shape, node.dtype))
        return tuple(parts)

    def nanoseconds(self) -> float:
        """What NumPy takes, by the costs of the ops."""
        total = 0.0
        for node, inputs in zip(self.order, self.inputs):
            if node.op is None:
                continue
            sizes = [self.order[i].size for i in inputs] if not node.op.writes else [self.order[inputs[1]].size]
            if node.dtype is not None and not node.op.writes:
                sizes.append(node.size)
            total += NANOSECONDS_A_NODE + node.op.cost * max(sizes, default=0)
        return total

    def on_device(self) -> bool:
        """Whether JAX can run all of it."""
        return all(
            (node.op is None or node.op.device is not None) and (node.dtype is None or node.dtype in DEVICE_DTYPES)
            for node in self.order
        )


def evaluate(roots: list[Node], wanted: Node | None = None) -> None:
    """Give values to pending nodes.

    Args:
      roots: the nodes. Those that somebody holds besides this list get values, and what else of their graph somebody
        holds, all by one program; the others are forgotten.
      wanted: the one of them that gets its value in any case.
    """
    with _LOCK:
        graph = Graph(roots)
        held = graph.held(set(map(id, roots)))
        if wanted is not None:
            held[graph.index[id(wanted)]] = True
        outputs = tuple(k for k, node in enumerate(graph.order) if node.op is not None and held[k])
        if not outputs:
            return
        values = _run(graph, held, outputs)
        for k, value in zip(outputs, values):
            node = graph.order[k]
            node.value, node.op, node.inputs = value, None, ()


def _run(graph: Graph, held: list[bool], outputs: tuple[int, ...]) -> list[Any]:
    mode = MODE.get()
    if mode == "numpy" or not graph.on_device():
        return _on_host(graph, held, outputs)
    key = graph.key(outputs)
    program = _PROGRAMS.get(key) or _PROGRAMS.put(key, Program())
    constants = [k for k, node in enumerate(graph.order) if isinstance(node, Constant)]
    program.see([graph.order[k].value for k in constants])
    pending = sum(node.op is not None for node in graph.order)
    if mode == "auto" and not program.compiled:
        program.spent += graph.nanoseconds()
        if program.spent < COMPILE + COMPILE_A_NODE * pending:
            return _on_host(graph, held, outputs)
    return _compiled(program, graph, held, outputs, constants)


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
    # the list and the argument of getrefcount, and no variable; a leaf's node has one more
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
    """What an op gave, with the dtype that was said when it was recorded."""
    if node.dtype is None:
        return tuple(value)
    array = numpy.asarray(value)
    if array.shape != node.shape:
        raise AssertionError(f"{node.op}: recorded as {node.shape}, is {array.shape}; a defect of jtile.numpy")
    return array if array.dtype == node.dtype else array.astype(node.dtype)


def _settled(value: Any) -> Any:
    """A value that stays: no view, which would keep all of its base."""
    if isinstance(value, tuple):
        return value
    return value if value.base is None and value.flags.writeable else value.copy()


def _compiled(program: Program, graph: Graph, held: list[bool], outputs: tuple[int, ...], constants: list[int]):
    leaves = [k for k, node in enumerate(graph.order) if node.op is None and not isinstance(node, Constant)]
    with as_numpy_counts():
        for k in leaves:
            node = graph.order[k]
            if isinstance(node.value, numpy.ndarray):  # once: the next program finds it on the device
                node.value = jax.device_put(node.value)
        given = _given_away(graph, held, outputs, leaves)
        given = next((g for g in program.compiled if set(g) <= set(given)), () if program.compiled else given)
        operands = [graph.order[k].value for k in leaves]
        varying = [k for place, k in enumerate(constants) if place in program.varying]
        operands += [graph.order[k].value for k in varying]
        run = program.compiled.get(given)
        if run is None:
            run = program.compiled[given] = compiled(_Walk(graph, outputs, leaves + varying), given)
        return [_near(value) for value in run(*operands)]


def _near(value: Any) -> Any:
    """A result of a program; small ones lie in NumPy's memory from then on, which does the calls of small arrays."""
    if isinstance(value, tuple) or value.size > SMALL or value.device.platform != "cpu":
        return value
    return numpy.array(value)


def compiled(function: Callable, given: tuple[int, ...]) -> Callable:
    """What runs a function of JAX as one program; `given` are the operands whose memory it may take."""
    return jax.jit(fuse(function), donate_argnums=given)


class _Walk:
    """A graph as a function of JAX of its operands. It keeps the structure, and no value but numbers of the script."""

    def __init__(self, graph: Graph, outputs: tuple[int, ...], operands: list[int]):
        self.steps: list[tuple[Any, tuple[int, ...], Any]] = [
            (node.op, inputs, node.dtype) for node, inputs in zip(graph.order, graph.inputs)
        ]
        self.numbers = {k: n.value for k, n in enumerate(graph.order) if isinstance(n, Constant) and k not in operands}
        self.outputs, self.operands = outputs, operands

    def __call__(self, *operands: Any) -> list[Any]:
        values: dict[int, Any] = self.numbers | dict(zip(self.operands, operands))
        for k, (op, inputs, dtype) in enumerate(self.steps):
            if op is None:
                continue
            value = op.device(*[values[i] for i in inputs])
            if dtype is not None:
                value = jax.numpy.asarray(value)
                value = value if value.dtype == dtype else jax.lax.convert_element_type(value, dtype)
            values[k] = jax.lax.optimization_barrier(value) if k in self.kept else value
        return [values[k] for k in self.outputs]

    @functools.cached_property
    def kept(self) -> set[int]:
        """What is computed once and kept in memory: what is read at several places beside each other. XLA would compute
        it anew for each of them, and so what that is computed from, in a time that grows exponentially."""
        parts = [0] * len(self.steps)
        for op, inputs, _ in self.steps:
            if op is not None and op.name in _PARTS:
                parts[inputs[0]] += 1
        return {k for k, (op, _, _) in enumerate(self.steps) if op is not None and parts[k] > 1}


_PARTS = frozenset(("index", "roll", "pad", "take by", "diff", "gradient"))


def _given_away(graph: Graph, held: list[bool], outputs: tuple[int, ...], leaves: list[int]) -> tuple[int, ...]:
    """The operands that nobody else holds and that have the type of a result, which then takes their memory."""
    types = [(graph.order[k].shape, graph.order[k].dtype) for k in outputs]
    given = []
    for position, k in enumerate(leaves):
        node = graph.order[k]
        kind = (node.shape, node.dtype)
        # the node's, and the argument of getrefcount: an array that was handed to JAX or NumPy has more
        if not held[k] and node.size >= 1024 and kind in types and sys.getrefcount(node.value) == 2:
            types.remove(kind)
            given.append(position)
    return tuple(given)


def refuse_traced(value: Any) -> None:
    """A typed error for what JAX is tracing."""
    if isinstance(value, Tracer):
        raise KernelTypeError(
            "jtile.numpy was given an array that JAX is tracing, and its arrays are values that change; use jax.numpy "
            "in functions that jax.jit, jax.grad or jax.vmap transform"
        )
