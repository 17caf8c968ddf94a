"""Pointers, loads and stores, atomics, tensor descriptors, barriers."""

from __future__ import annotations

import numpy as np

from .ops_arith import signed, unsigned
from .parse import Stmt
from .table import Types, arity, arrow, demand, listed, nothing, one, op, result
from .types import TtirError, Type, block_of, garbage, numpy_of, width


def _pointers(stmt: Stmt, t: Type) -> str:
    """The element type behind pointers."""
    try:
        elem = t.pointee
    except TtirError as e:
        raise stmt.error(str(e)) from e
    demand(stmt, elem != "i1" and elem != "index", f"pointers to {elem}")
    return elem


def _addptr_rule(stmt: Stmt, args: list[Type]) -> Types:
    arity(stmt, args, 2)
    _pointers(stmt, args[0])
    demand(
        stmt, args[1].elem in ("i32", "i64") and args[1].shape == args[0].shape, f"addptr of {args[0]} and {args[1]}"
    )
    return args[:1]


@op("tt.addptr", rule=_addptr_rule, form=listed)
def _addptr(m, s: Stmt, p, i):
    return p + i.astype(np.int64) * (width(s.arg_types[0].pointee) // 8)


def _convert_rule(stmt: Stmt, args: list[Type]) -> Types:
    arity(stmt, args, 1)
    a, r = args[0], stmt.outs[0]
    pointer, number = (r, a) if stmt.name == "tt.int_to_ptr" else (a, r)
    _pointers(stmt, pointer)
    demand(stmt, number.elem == "i64" and a.shape == r.shape, f"{stmt.name} from {a} to {r}")
    return [r]


@op("tt.int_to_ptr", "tt.ptr_to_int", rule=_convert_rule, form=arrow)
def _convert(m, s: Stmt, a):
    return a


def _load_rule(stmt: Stmt, args: list[Type]) -> Types:
    arity(stmt, args, 1, 3)
    t = args[0].of(_pointers(stmt, args[0]))
    demand(stmt, len(args) < 2 or args[1] == t.of("i1"), f"the mask of a load of {t} is {args[1:2]}")
    demand(stmt, len(args) < 3 or args[2] == t, f"the other of a load of {t} is {args[2:]}")
    return [t]


@op("tt.load", rule=_load_rule, form=one)
def _load(m, s: Stmt, p, mask=None, other=None):
    t = s.types[0]
    out = garbage(t) if other is None else np.array(other)
    flat, at = out.reshape(-1), p.reshape(-1)
    on = np.arange(at.size) if mask is None else np.nonzero(mask.reshape(-1))[0]
    flat[on] = m.memory.load(s, at[on], t.numpy, on)
    return out


def _store_rule(stmt: Stmt, args: list[Type]) -> Types:
    arity(stmt, args, 2, 3)
    t = args[0].of(_pointers(stmt, args[0]))
    demand(stmt, args[1] == t, f"a store of {args[1]} through {args[0]}")
    demand(stmt, len(args) < 3 or args[2] == t.of("i1"), f"the mask of a store of {t} is {args[2:]}")
    return ()


@op("tt.store", rule=_store_rule, form=one)
def _store(m, s: Stmt, p, x, mask=None):
    at = p.reshape(-1)
    on = np.arange(at.size) if mask is None else np.nonzero(mask.reshape(-1))[0]
    m.memory.store(s, at[on], x.reshape(-1)[on], on)


# -- atomics -----------------------------------------------------------------------------------------------------------

_SEMANTICS = ("relaxed", "acquire", "release", "acq_rel")
_SCOPES = ("cta", "gpu", "sys")
_FLOATING = {"f16", "bf16", "f32", "f64"}
_UPDATES = {
    "add": lambda a, b: a + b, "fadd": lambda a, b: (a + b).astype(a.dtype), "and": np.bitwise_and,
    "or": np.bitwise_or, "xor": np.bitwise_xor, "max": np.maximum, "min": np.minimum, "exch": lambda a, b: b,
    "umax": lambda a, b: signed(np.maximum(unsigned(a), unsigned(b))),
    "umin": lambda a, b: signed(np.minimum(unsigned(a), unsigned(b))),
}  # fmt: skip


def _rmw_rule(stmt: Stmt, args: list[Type]) -> Types:
    arity(stmt, args, 2, 3)
    elem = _pointers(stmt, args[0])
    t = args[0].of(elem)
    fn, semantics, scope = stmt.words[:3]
    demand(stmt, semantics in _SEMANTICS and scope in _SCOPES and fn in _UPDATES, f"{fn}, {semantics}, {scope}")
    demand(
        stmt, args[1] == t and (len(args) < 3 or args[2] == t.of("i1")), f"atomic {fn} of {', '.join(map(str, args))}"
    )
    demand(stmt, (elem in _FLOATING) == (fn == "fadd") or (fn == "exch"), f"atomic {fn} of {elem}")
    demand(stmt, elem in _FLOATING or width(elem) >= 32, f"atomic {fn} of {elem}")
    demand(stmt, fn != "exch" or width(elem) >= 32, f"atomic {fn} of {elem}")
    return [t]


@op("tt.atomic_rmw", rule=_rmw_rule, form=arrow)
def _rmw(m, s: Stmt, p, x, mask=None):
    update, values = _UPDATES[s.words[0]], x.reshape(-1)
    if s.words[2] == "sys":
        m.signalled()
    # Half a byte changed alone: who reads the other half of it need not wait.
    changed = {"and": lambda: ~values, "or": lambda: values}.get(s.words[0])
    alone = changed is not None and bool((np.bitwise_count(unsigned(changed())) <= 4).all())
    return _in_rounds(m, s, p, mask, lambda old, k: update(old, values[k]), watched=not alone)


def _cas_rule(stmt: Stmt, args: list[Type]) -> Types:
    arity(stmt, args, 3)
    elem = _pointers(stmt, args[0])
    t = args[0].of(elem)
    demand(stmt, stmt.words[0] in _SEMANTICS and stmt.words[1] in _SCOPES, f"{stmt.words}")
    demand(stmt, args[1] == t == args[2], f"atomic cas of {', '.join(map(str, args))}")
    demand(stmt, width(elem) >= 16, f"atomic cas of {elem}")
    return [t]


@op("tt.atomic_cas", rule=_cas_rule, form=arrow)
def _cas(m, s: Stmt, p, expected, x):
    wanted, values = expected.reshape(-1), x.reshape(-1)
    bits = np.dtype(f"u{values.dtype.itemsize}")

    def update(old, k):
        same = old.view(bits) == np.ascontiguousarray(wanted[k]).view(bits)
        return np.where(same, values[k], old)

    return _in_rounds(m, s, p, None, update)


def _in_rounds(m, s: Stmt, p, mask, update, watched: bool = True) -> np.ndarray:
    """Lanes in a random order, those of different addresses at once; what masked lanes give is garbage."""
    t = s.types[0]
    out, at = garbage(t), p.reshape(-1)
    flat = out.reshape(-1)
    on = np.arange(at.size) if mask is None else np.nonzero(mask.reshape(-1))[0]
    if watched:
        m.memory.touch(s, at[on], t.numpy.itemsize, on)
    left = m.random.permutation(on)
    while left.size:
        first = np.unique(at[left], return_index=True)[1]
        now, left = left[first], np.delete(left, first)
        flat[now] = m.memory.load(s, at[now], t.numpy, now, atomic=True)
        m.memory.store(s, at[now], np.ascontiguousarray(update(flat[now], now)), now, atomic=True)
    return out


# -- descriptors -------------------------------------------------------------------------------------------------------


def _descriptor(stmt: Stmt, t: Type) -> Type:
    demand(stmt, t.elem.startswith("!tt.tensordesc<"), f"{t} is no descriptor")
    return block_of(t)


def _descriptor_load_rule(stmt: Stmt, args: list[Type]) -> Types:
    box, r = _descriptor(stmt, args[0]), stmt.outs[0]
    demand(stmt, all(a == Type((), "i32") for a in args[1:]) and len(args) == 1 + len(box.shape), "the place of a tile")
    kept = lambda t: [n for n in t.shape if n != 1]
    demand(stmt, r.elem == box.elem and (r.shape == box.shape or kept(r) == kept(box)), f"a tile {box} as {r}")
    return [r]


def _places(m, stmt: Stmt, handle, box: Type, origin) -> tuple[np.ndarray, np.ndarray]:
    """The addresses of a box's elements, and which of them lie inside the array."""
    base, dims, strides, _ = m.descriptors[int(handle)]
    demand(stmt, len(dims) == len(box.shape), f"a descriptor of {len(dims)} axes for tiles {box}")
    at, inside = np.zeros(box.shape, np.int64), np.ones(box.shape, np.bool_)
    size = width(box.elem) // 8
    axes = range(len(dims))
    for axis, (n, stride, start) in enumerate(zip(dims, [*strides, size], origin, strict=True)):
        shape = [-1 if a == axis else 1 for a in axes]
        index = (int(start) + np.arange(box.shape[axis], dtype=np.int64)).reshape(shape)
        at, inside = at + index * stride, inside & (index >= 0) & (index < n)
    return base + at, inside


@op("tt.descriptor_load", rule=_descriptor_load_rule, form=lambda a, r: (a[:1], r))
def _descriptor_load(m, s: Stmt, handle, *origin):
    box = block_of(s.arg_types[0])
    at, inside = _places(m, s, handle, box, origin)
    fill = m.descriptors[int(handle)][3]
    out = np.full(box.shape, np.nan if fill == "nan" else 0, np.float32).astype(numpy_of(box.elem))
    on = np.nonzero(inside.reshape(-1))[0]
    out.reshape(-1)[on] = m.memory.load(s, at.reshape(-1)[on], box.numpy, on)
    return out.reshape(s.types[0].shape)


def _descriptor_store_rule(stmt: Stmt, args: list[Type]) -> Types:
    box = _descriptor(stmt, args[0])
    *origin, x = args[1:]
    demand(stmt, all(a == Type((), "i32") for a in origin) and len(origin) == len(box.shape), "the place of a tile")
    kept = lambda t: [n for n in t.shape if n != 1]
    demand(stmt, x.elem == box.elem and kept(x) == kept(box), f"a store of {x} through {args[0]}")
    return ()


@op("tt.descriptor_store", rule=_descriptor_store_rule, form=lambda a, r: ([a[0], a[-1]], ()))
def _descriptor_store(m, s: Stmt, handle, *rest):
    *origin, x = rest
    box = block_of(s.arg_types[0])
    at, inside = _places(m, s, handle, box, origin)
    on = np.nonzero(inside.reshape(-1))[0]
    m.memory.store(s, at.reshape(-1)[on], x.reshape(-1)[on], on)


# -- the block ---------------------------------------------------------------------------------------------------------


@op("gpu.barrier", "ttg.barrier", rule=nothing, form=lambda a, r: ((), ()))
def _barrier(m, s: Stmt):
    m.memory.barrier()


def _scalar(stmt: Stmt, args: list[Type]) -> Types:
    demand(stmt, stmt.ins == [Type((), "i32")], "an i32")
    return stmt.ins


@op("tt.get_program_id", "tt.get_num_programs", rule=_scalar, form=result)
def _program(m, s: Stmt):
    axis = "xyz".index(s.words[0])
    here = m.block if s.name == "tt.get_program_id" else m.grid
    return np.asarray((here, 0 if s.name == "tt.get_program_id" else 1)[axis > 0], np.int32)


@op("tt.assert", rule=nothing, form=listed)
def _assert(m, s: Stmt, c):
    if not np.all(c):
        raise s.error(f"assertion failed: {s.words[0]}")


@op("tt.print", rule=nothing, form=listed)
def _print(m, s: Stmt, *args):
    m.printed.append((s.words[0], *args))
