"""Loads, stores, atomics, scratch, program ids, print and assert; JAX's own Ref primitives."""

from __future__ import annotations

import jax

from jtile import ir
from jtile._errors import KernelValueError
from jtile.language import _index
from jtile.trace.lower import Lowering, rule
from jtile.trace.rules.shapes import transpose


def to_index(dims, values) -> ir.Index:
    """The language's static index structure with its values, as IR."""
    out = []
    for d, v in zip(dims, values, strict=True):
        match d:
            case _index.At():
                out.append(ir.At(v))
            case _index.Span():
                out.append(ir.Span(v, d.size, d.stride))
            case _index.Tile():
                out.append(ir.Tile(v, d.size, d.step))
            case _index.Take():
                out.append(ir.Take(v))
    return tuple(out)


@rule("jtile_load")
def _(c: Lowering, ref, *rest, dims, pad, masked):
    mask = rest[len(dims)] if masked else None
    return c.add(ir.Load(ref, to_index(dims, rest[: len(dims)]), mask, pad))


@rule("jtile_store")
def _(c: Lowering, ref, *rest, dims, masked):
    n = len(dims)
    c.b.add(ir.Store(ref, to_index(dims, rest[:n]), rest[n], rest[n + 1] if masked else None))
    return []


@rule("jtile_atomic")
def _(c: Lowering, ref, *rest, fn, dims, masked):
    n = len(dims)
    value, *more = rest[n:]
    compare = more.pop(0) if fn == "cas" else None
    return c.add(ir.Atomic(fn, ref, to_index(dims, rest[:n]), value, compare, more[0] if masked else None))


@rule("jtile_last_arrival")
def _(c: Lowering, index, count, *, counters, size):
    if (other := c.counters.setdefault(counters, size)) != size:
        why = f"counters {counters!r} are {other} in one place and {size} in another: those of one name are one memory"
        raise KernelValueError(f"{why}; give them names of their own", c.place)
    return c.add(ir.LastArrival(counters, size, index, count))


@rule("jtile_program_id")
def _(c: Lowering, *, axis):
    return c.add(ir.ProgramId(axis))


@rule("jtile_num_programs")
def _(c: Lowering, *, axis):
    return c.add(ir.NumPrograms(axis))


@rule("dim_as_value")
def _(c: Lowering, *, dim):
    """A dynamic size (JAX's symbolic dimension) as a scalar."""
    return c.add(ir.SizeOf(ir.parse_size(str(dim)), c.out.dtype))


@rule("jtile_loop_hint")
def _(c: Lowering, k, **_):
    return k  # the rule of the loop around reads the hint


@rule("jtile_print")
def _(c: Lowering, *args, format):
    c.b.add(ir.Print(format, tuple(args)))
    return []


@rule("jtile_assert_")
def _(c: Lowering, cond, *, message):
    c.b.add(ir.Assert(cond, message))
    return []


# -- JAX's own Refs: what its differentiation rules, jax.new_ref and jax.ref.* produce ---------------------------------


def whole(c: Lowering, ref: ir.Value) -> ir.Index:
    return tuple(ir.Span(c.b.index(0), n) for n in ref.type.shape)


def _decode(c: Lowering, ref: ir.Value, leaves, tree):
    """The access of JAX's indexer: `(index, after, before)`, the last two map between IR's tile and JAX's."""
    transforms = jax.tree.unflatten(tree, list(leaves))
    same = lambda x: x
    if not transforms:
        return whole(c, ref), same, same
    if len(transforms) > 1 or not hasattr(transforms[0], "indices"):
        kinds = ", ".join(type(t).__name__ for t in transforms)
        raise c.unsupported(f"a Ref view made of {kinds}; index the Ref once, and reshape the loaded tile")
    dims, takes_at, plain = [], [], []
    for k, e in enumerate(transforms[0].indices):
        if hasattr(e, "size") and hasattr(e, "stride") and hasattr(e, "start"):
            start = c.b.index(e.start) if isinstance(e.start, int) else e.start
            dims.append(ir.Span(start, e.size, e.stride))
        elif isinstance(e, ir.Value) and e.type.rank:
            dims.append(ir.Take(e))
            takes_at.append(k)
        else:
            dims.append(ir.At(e if isinstance(e, ir.Value) else c.b.index(int(e))))
        plain.append(dims[-1])
    # JAX puts gathered axes in front if integers or gathers stand apart; IR leaves them at the first gather.
    advanced = [k for k, d in enumerate(dims) if isinstance(d, ir.At | ir.Take)]
    if not takes_at or advanced[-1] - advanced[0] == len(advanced) - 1:
        return tuple(dims), same, same
    lead = sum(isinstance(d, ir.Span) for d in dims[: takes_at[0]])
    rank = len(ir.index_shape(tuple(dims)))
    wide = dims[takes_at[0]].indices.type.rank
    perm = [*range(lead, lead + wide), *range(lead), *range(lead + wide, rank)]
    back = sorted(range(rank), key=perm.__getitem__)
    return tuple(dims), lambda x: transpose(c, x, perm), lambda x: transpose(c, x, back)


@rule("get")
def _(c: Lowering, ref, *leaves, tree, **_):
    index, after, _before = _decode(c, ref, leaves, tree)
    return after(c.add(ir.Load(ref, index)))


@rule("swap")
def _(c: Lowering, ref, value, *leaves, tree, **_):
    index, after, before = _decode(c, ref, leaves, tree)
    old = after(c.add(ir.Load(ref, index))) if c.is_used(0) else None
    c.b.add(ir.Store(ref, index, before(value)))
    return value if old is None else old


@rule("addupdate")
def _(c: Lowering, ref, value, *leaves, tree, **_):
    index, _after, before = _decode(c, ref, leaves, tree)
    old = c.add(ir.Load(ref, index))
    c.b.add(ir.Store(ref, index, c.map("add", old, before(value))))
    return []


@rule("new_ref", "ref", "mutable_array")
def _(c: Lowering, x, **_):
    ref = c.add(ir.Alloc(x.type.shape, x.type.dtype))
    c.b.add(ir.Store(ref, whole(c, ref), x))
    return ref


@rule("empty_ref")
def _(c: Lowering, *, ty, **_):
    return c.add(ir.Alloc(tuple(ty.shape), c.dtype(ty.dtype)))


@rule("freeze")
def _(c: Lowering, ref, **_):
    return c.add(ir.Load(ref, whole(c, ref)))


@rule("free_ref")
def _(c: Lowering, ref, **_):
    return []
