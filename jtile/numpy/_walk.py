"""A graph as a function of JAX, and which of its values lie in memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax

from jtile.numpy._graph import Constant, Graph
from jtile.numpy._now import SMALL

_DIVISIONS = frozenset(("floor_divide", "remainder", "fmod", "divmod"))
_PARTS = frozenset(("index", "roll", "pad", "take by", "diff", "gradient"))
STENCILS = 4  # values whose neighbours are read: with as many, little else is computed
SHARE = 5  # if more than one call in so many reads neighbours, little else is computed either
LONG = 16.0  # nanoseconds for an element in NumPy: to compute it anew takes longer than to write and to read it
MANY = 4  # arrays that it is computed from: to read them again takes as long
DENSE = 4  # a part with one of so many elements is summed where the whole is computed, with zeros for the others


class Walk:
    """A graph as a function of JAX of its operands. It keeps the structure, and no value but numbers of the script.

    Attributes:
      by_xla: kernels would only part what XLA does in one pass: complex numbers, and stencils of 64-bit numbers, which
        memory bounds, and which it writes over arrays that are needed no more; and it divides integers quicker.
      summed: parts of arrays of which nothing but the sum is needed.
      kept: the values that are computed once and kept in memory. XLA computes what is read at several places anew for
        each of them, and so what that is computed from, in a time that grows exponentially.
    """

    def __init__(self, graph: Graph, outputs: tuple[int, ...], operands: list[int]):
        self.steps: list[tuple[Any, tuple[int, ...], Any]] = [
            (node.op, inputs, node.dtype) for node, inputs in zip(graph.order, graph.inputs)
        ]
        self.numbers = {k: n.value for k, n in enumerate(graph.order) if isinstance(n, Constant) and k not in operands}
        self.outputs, self.operands = outputs, operands
        self.sizes = [node.size for node in graph.order]
        self.summed = self._sums_of_parts(graph)
        self.kept = self._neighbours()
        kinds = {node.dtype.kind for node in graph.order if node.dtype is not None}
        divides = any(
            op is not None and op.name in _DIVISIONS and (dtype is None or dtype.kind in "iu")
            for op, _, dtype in self.steps
        )
        parts = sum(op is not None and op.name in _PARTS for op, _, _ in self.steps)
        wide = any(n.size > SMALL and n.dtype is not None and n.dtype.itemsize > 4 for n in graph.order)
        stencils = wide and (len(self.kept) >= STENCILS or (bool(self.kept) and SHARE * parts > len(self.steps)))
        self.by_xla = stencils or "c" in kinds or divides
        if stencils:
            self.kept |= self._long([node.size > SMALL for node in graph.order], graph.uses)

    def __call__(self, *operands: Any) -> list[Any]:
        values: dict[int, Any] = self.numbers | dict(zip(self.operands, operands))
        for k, (op, inputs, dtype) in enumerate(self.steps):
            if op is None or k in self.summed:
                continue
            value = op.device(*[self._part(values, i) if i in self.summed else values[i] for i in inputs])
            if dtype is not None:
                value = jax.numpy.asarray(value)
                value = value if value.dtype == dtype else jax.lax.convert_element_type(value, dtype)
            values[k] = jax.lax.optimization_barrier(value) if k in self.kept else value
        return [values[k] for k in self.outputs]

    def _sums_of_parts(self, graph: Graph) -> set[int]:
        """The parts of computed arrays that are read by a sum of all of their elements alone. Where they are computed,
        zeros for the other elements give the same sum, and the whole array need not be in memory."""
        found = set()
        for k, (op, inputs, _) in enumerate(self.steps):
            if op is None or op.name != "sum" or graph.order[k].shape or len(inputs) != 1:
                continue
            (part,) = inputs
            index, operands, _ = self.steps[part]
            if index is None or index.name != "index" or graph.uses[part] > 1 or part in self.outputs:
                continue
            whole, *numbers = operands
            few = graph.order[part].size * DENSE < graph.order[whole].size
            same = len(graph.order[part].shape) == len(graph.order[whole].shape)  # so axes of the one are the other's
            if self.steps[whole][0] is not None and same and not few and all(n in self.numbers for n in numbers):
                found.add(part)
        return found

    def _part(self, values: dict[int, Any], k: int) -> Any:
        """An array whose sum is that of a part."""
        op, (whole, *numbers), _ = self.steps[k]
        return op.device.__self__.zeros_outside(values[whole], *[values[n] for n in numbers])

    def _neighbours(self) -> set[int]:
        """The nodes of which several parts are read, which lie beside each other."""
        parts = [0] * len(self.steps)
        for k, (op, inputs, _) in enumerate(self.steps):
            if op is not None and op.name in _PARTS and k not in self.summed:
                parts[inputs[0]] += self.sizes[k] > 1
        return {k for k, (op, _, _) in enumerate(self.steps) if op is not None and parts[k] > 1}

    def _long(self, large: list[bool], uses: Iterable[int]) -> set[int]:
        """The nodes that are used several times, and that take longer to compute anew than to keep."""
        kept: set[int] = set()
        costs: list[float] = []
        reads: list[frozenset[int]] = []
        for k, ((op, inputs, _), count) in enumerate(zip(self.steps, uses)):
            if op is None:
                costs.append(0.0)
                reads.append(frozenset((k,)) if large[k] else frozenset())
                continue
            cost = op.cost + sum(costs[i] for i in inputs)
            read = frozenset().union(*[reads[i] for i in inputs])
            if k in self.kept or (count > 1 and large[k] and (cost > LONG or len(read) > MANY)):
                kept.add(k)
                cost, read = 0.0, frozenset((k,))
            costs.append(cost)
            reads.append(read)
        return kept
