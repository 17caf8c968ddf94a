"""`@jt.kernel`, `jt.call` and `Kernel`: from a function over Refs to an ordinary JAX function."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.tree_util import tree_flatten, tree_map_with_path, tree_unflatten

from jtile import _mesh
from jtile._compat import is_symbolic
from jtile._config import current
from jtile._errors import KernelTypeError
from jtile._frames import leave_out, shows_users_frames
from jtile._memo import Recent
from jtile._parts import is_complex
from jtile._stack import roomy
from jtile.calls.arguments import ARRAY, as_operand, as_type, key_of
from jtile.calls.boundary import is_split, runner
from jtile.calls.layout import Layout, Spec, count_leaves, lay_out, shared_refs
from jtile.calls.lowered import Lowered
from jtile.calls.marks import declared, strip
from jtile.calls.options import CHOICES, checked_options, in_force
from jtile.calls.signature import Structure, autos, place_of, read_signature, source_lines
from jtile.primitive.options import Options
from jtile.primitive.sharding import Hand, check_ranks, parse

if TYPE_CHECKING:
    from jtile.calls.dynamic import Family
    from jtile.debug import Debugger
    from jtile.primitive.program import (
        Program,  # jax.extend costs 30 ms: it is loaded with the first call, not at import
    )
    from jtile.tune.space import Tuning

_TRACED = 128  # remembered (types, meta-parameters) per kernel: each keeps what was traced for it
_SIZES = 2048  # remembered sizes per kernel that share one traced program


def kernel(
    *positional: Any,
    out_type: Any = None,
    grid: Any = (),
    alias: Mapping[Any, Any] | None = None,
    init: Any = None,
    scratch: Any = None,
    name: str | None = None,
    dynamic: Mapping[Any, Any] | None = None,
    sharding: Any = None,
    **options: Any,
) -> Callable[[Callable[..., None]], Kernel]:
    """Decorate a function over Refs, the body of a kernel, so that it becomes a JAX function over arrays.

    The body describes one program, and runs once for each program of the grid. Its positional parameters are Refs:
    inputs, then outputs, then scratch memory. Its keyword-only parameters are meta-parameters: Python values that are
    fixed when the kernel is compiled, and that a call may override.

    Args:
      out_type: the types of the results: a `jax.ShapeDtypeStruct` (or `jt.like(...)`), or a pytree of them. Each
        element of a tuple or list is one output parameter of the body; any other pytree is one parameter. It may be a
        function of the abstract inputs (pytrees of `jax.ShapeDtypeStruct`) and of the meta-parameters that it names.
      grid: the number of programs: an int, a tuple of ints, or a dict that names its axes, `{"row": 4, "column": 8}`.
        It may be such a function, too. 0 programs are legal.
      alias: `{"x": "o"}` makes output `o` share the buffer of input `x`, and start with its values.
      init: the number that outputs start from; a tuple with one for each output (None: undefined), or a dict by name.
      scratch: the shapes and dtypes of memory that each program has for itself, given like `out_type`.
      dynamic: the dimensions of inputs whose sizes share one compiled image: an axis or axes for each input,
        `{"x": 0, "y": (0, 1)}`. `jt.dynamic` marks them at a call instead.
      name: the name that profilers show; by default that of the function.
      sharding: along what automatic partitioning may cut the kernel, if its indices do not show it:
        `"m k, k n -> m n"`, a name for each dimension of each input and output (leaves of pytrees in their order), `_`
        for one that is never cut. An axis that an output lacks is summed over. A shard runs the kernel as it is for
        arrays of the shard's shape, with the same meta-parameters.
      **options: see `Options`: `interpret`, `fallback`, `num_warps`, `num_stages`, `num_ctas`, `consumers`,
        `persistent`, `specialize`.

    Returns:
      A decorator that makes a `Kernel` of the body.
    Raises:
      KernelTypeError, KernelValueError: the signature of the body is wrong, or, at a call, arguments do not fit.
    """
    if positional or out_type is None:
        raise KernelTypeError(
            "jt.kernel takes keywords only, and needs out_type: write @jt.kernel(out_type=..., grid=...)",
            place_of(positional[0]) if positional and callable(positional[0]) else None,
        )
    spec = Spec(out_type, grid, alias, init, scratch, dynamic, sharding)
    return lambda fn: Kernel(
        fn, spec, name, checked_options(Options(), options, place_of(fn) if callable(fn) else None)
    )


def call(body: Callable[..., None], *, out_type: Any, **spec: Any) -> Kernel:
    """Make a kernel without the decorator: `jt.call(body, out_type=..., grid=...)(*arrays)`.

    Args:
      body: the function over Refs.
      out_type, spec: the arguments of `jt.kernel`.

    Returns:
      A `Kernel`.
    """
    return kernel(out_type=out_type, **spec)(body)


def tuned(kernel: Kernel, defaults: Mapping[str, Any], *args: Any, **meta: Any) -> Any:
    """Call `kernel(*args, **meta)` with other defaults, which are used if the tuner has no entry for the call.

    So a kernel can have a heuristic by shape and be tuned by `jt.tune`, too; see `jt.autotune`.

    Args:
      kernel, args: the kernel and its arrays.
      defaults: values by name, of meta-parameters and of options such as `num_warps`.
      meta: meta-parameters, which override `defaults` and the tuner's entry.

    Returns:
      The result of the call.
    """
    return kernel._call(args, meta, defaults)


@dataclasses.dataclass(frozen=True)
class _Bound:
    """A call with everything fixed but the arrays."""

    program: Program
    layout: Layout
    out_tree: Structure
    run: Callable[[Sequence[Any]], Sequence[Any]]


class Kernel:
    """A kernel as a JAX function: call it with arrays and meta-parameters, `k(*arrays, **meta)`. `jt.kernel` makes one.

    Arguments may be JAX and NumPy arrays, Python scalars (rank-0 Refs of JAX's default dtype), objects with
    `__dlpack__` (imported without a copy), and pytrees of those. Results follow the pytree of `out_type`.
    """

    def __init__(self, fn: Callable[..., None], spec: Spec, name: str | None, options: Options):
        if not callable(fn):
            raise KernelTypeError(f"jt.kernel decorates a function, got {fn!r}; write @jt.kernel(out_type=...)")
        self._fn, self._spec, self._options = fn, spec, options
        self._lines = source_lines(fn)  # an editor may change the file before the first call
        self._signature = read_signature(fn, name)
        rule = spec.sharding
        self._pattern = None if rule is None else parse(rule, self._signature.name, self._signature.where)
        self._bound: Recent[Any, _Bound] = Recent(_TRACED)
        self._sized: Recent[Any, _Bound] = Recent(_SIZES)  # bound calls with dynamic dimensions
        self._families: Recent[Any, Family] = Recent(_TRACED)  # the programs of such calls, by all but their sizes
        self._vjp: tuple[Callable[..., Any], Callable[..., Any]] | None = None
        self._written: Callable[..., Any] | None = None  # (types of the Refs, meta) to the body's jaxpr; None: trace it
        self._tuning: Tuning | None = None
        self._variants: dict[Any, Kernel] = {}  # this kernel untuned, by options
        self._on_mesh = False  # whether a call has asked for the mesh around it
        self._asks = bool(autos(self._signature.meta))
        if self._asks:
            from jtile.tune.space import around_choice

            self._tuning = around_choice
        functools.update_wrapper(self, fn)
        meta = [
            inspect.Parameter(k, inspect.Parameter.KEYWORD_ONLY, default=v) for k, v in self._signature.meta.items()
        ]
        self.__signature__ = inspect.Signature([inspect.Parameter("args", inspect.Parameter.VAR_POSITIONAL), *meta])

    @property
    def name(self) -> str:
        """The name that profilers show."""
        return self._signature.name

    def __repr__(self) -> str:
        return f"<jtile.Kernel {self.name}({', '.join(self._signature.refs)})>"

    def _repr_html_(self) -> str:
        from jtile.calls.notebook import kernel_html, source_of

        source = source_of(self._fn, self._lines)
        return kernel_html(self.name, self._signature.refs, self._signature.meta, source)

    def __reduce__(self) -> str:
        """A kernel is copied and pickled as functions are: by its name in its module."""
        return vars(self)["__qualname__"]  # set by functools.update_wrapper

    def __call__(self, *args: Any, **meta: Any) -> Any:
        try:
            return self._call(args, meta, {})
        except Exception as error:
            leave_out(error)
            raise

    def _call(self, args: tuple[Any, ...], meta: dict[str, Any], defaults: Mapping[str, Any]) -> Any:
        leaves, tree = tree_flatten(args)
        bound = self._seen(tree, leaves, meta, defaults)
        if bound is None:
            args = tree_map_with_path(functools.partial(as_operand, self._signature), args)
            leaves, tree = tree_flatten(args)
            bound = self._resolve(tree, leaves, meta, defaults)
        return tree_unflatten(bound.out_tree, bound.run(leaves))

    def with_options(self, **options: Any) -> Kernel:
        """The same kernel with other options.

        Args:
          options: fields of `Options`, such as `interpret=True` or `num_warps=8`; or another `dynamic`.
        """
        spec = dataclasses.replace(self._spec, dynamic=options.pop("dynamic", self._spec.dynamic))
        out = Kernel(
            self._fn, spec, self._signature.name, checked_options(self._options, options, self._signature.where)
        )
        out._vjp, out._tuning, out._written = self._vjp, self._tuning, self._written
        return out

    def autotune(
        self, *, space: Any, key: Any = None, data: Callable[..., Any] | None = None, override: bool = False
    ) -> Kernel:
        """The same kernel with a search space, from which calls take the meta-parameters that they leave out.

        Args:
          space: a dict from names of meta-parameters and options to lists of values; a list of dicts; or a function of
            the abstract inputs and meta-parameters that gives one of these.
          key: what the choice depends on: names of inputs and meta-parameters, or a function like `space` that gives
            something printable. Default: all inputs, and all meta-parameters that are not tuned.
          data: a function like `space` that gives the arrays to measure with. Default: random ones.
          override: the choice is also used in place of meta-parameters that a call gives.
        Returns:
          A `Kernel`; this one stays as it is.
        Raises:
          KernelTypeError, KernelValueError: a space or key that does not fit the kernel.
        """
        from jtile.tune.space import Tuning

        out = self.with_options()
        out._tuning = Tuning(space, key, data, override)
        out._tuning.check(out)
        return out

    def _variant(self, options: Mapping[str, Any]) -> Kernel:
        """The same kernel without a search space, with these options."""
        key = tuple(sorted(options.items()))
        if key not in self._variants:
            out = self.with_options(**options)
            out._tuning = None
            self._variants[key] = out
        return self._variants[key]

    @shows_users_frames
    def lower(self, *args: Any, target: Any = None, mesh: Any = None, **meta: Any) -> Lowered:
        """Compile for arguments of these types (arrays or `jax.ShapeDtypeStruct`), without running.

        Args:
          target: a `Target` or the name of one; default: this machine's CPU.
          mesh: of a kernel that talks to other devices: the number of devices along each axis, or a
            `jax.sharding.Mesh`; not inside of `shard_map`. The arguments are those of one device.
        Returns:
          A `Lowered`: `texts` has every level, `image` the machine code.
        """
        if mesh is not None:
            from jtile.calls.meshes import axes_of

            with _mesh.on_mesh(axes_of(self, mesh)):
                return self.lower(*args, target=target, **meta)
        types = tree_map_with_path(functools.partial(as_type, self._signature), args)
        leaves, tree = tree_flatten(types)
        return Lowered(self._resolve(tree, leaves, meta).program, target)

    @shows_users_frames
    def interpret(self, *args: Any, seed: int = 0, mesh: Any = None, **meta: Any) -> Any:
        """Run the kernel in the reference interpreter, with every check on.

        Args:
          seed: order in which the programs of the grid run, and in which roles, copies and products of a block-level
            kernel, and the devices of a mesh, take turns.
          mesh: of a kernel that talks to other devices: the number of devices along each axis, `{"x": 4, "y": 2}`, or
            a `jax.sharding.Mesh`. Each array has one more leading axis for each axis of the mesh, in their order: the
            part of device (i, j) is `x[i, j]`. Results likewise. Three calls run one after another on each device,
            so that what one call does to the next is seen too.
        Returns:
          The results of a call, as NumPy arrays.
        Raises:
          InterpreterError: an access out of bounds, a race, a read of what nobody wrote, a failed assert.
          DeadlockError, ProtocolError: of devices that wait for ever, and of signals for which nobody waits.
        """
        from jtile.calls.meshes import interpreted

        return interpreted(self, args, mesh, meta)(seed)

    def debug(self, *args: Any, seed: int = 0, mesh: Any = None, **meta: Any) -> Debugger:
        """Start the kernel in the reference interpreter, and stop before the first op of its first program.

        Args:
          args: arrays, numbers or pytrees of them, of the types and shapes that a call takes.
          seed, mesh, meta: as for `interpret`: the order of programs, the mesh of devices, the meta-parameters.
        Returns:
          A `jtile.debug.Debugger`, which goes on step by step, and shows what names stand for. Its `result` are the
          results of a call, as NumPy arrays; it raises what `interpret` would raise.
        Raises:
          KernelTypeError, KernelValueError: arguments, meta-parameters or a mesh that do not fit the kernel.
        """
        from jtile.calls.meshes import debugger

        return debugger(self, args, seed, mesh, meta)

    def defvjp(self, fwd: Callable[..., Any], bwd: Callable[..., Any]) -> None:
        """Give the kernel a reverse mode of its own, which `jax.grad` and `jax.vjp` then use, also under `jax.vmap`.

        Forward mode stays automatic.

        Args:
          fwd: `fwd(*args, **meta) -> (result, residuals)`, an ordinary JAX function of the kernel's arguments; the
            residuals are a pytree of arrays.
          bwd: `bwd(residuals, cotangent, **meta) -> cotangents`, one for each argument and of its structure, None for
            zero. The cotangent has the structure of the result, with None for what is not of floats.
        Raises:
          KernelTypeError: when one of them gives what does not fit; at differentiation.
        """
        for rule, what in ((fwd, "fwd"), (bwd, "bwd")):
            if not callable(rule):
                where = self._signature.where
                raise KernelTypeError(f"{what} of kernel {self.name} is a function, got {rule!r}", where)
        self._vjp = fwd, bwd
        self._variants.clear()
        for calls in (self._bound, self._sized, self._families):
            calls.cache_clear()

    # -- from a call to a program -----------------------------------------------------------------------------------
    def _seen(
        self, tree: Structure, leaves: list[Any], meta: dict[str, Any], defaults: Mapping[str, Any]
    ) -> _Bound | None:
        """What an earlier call with the same types and meta-parameters resolved to, without looking any closer.

        Only for leaves of exactly these types: a subclass or a tracer may be no array, or need a cast first.
        """
        for x in leaves:
            if type(x) is not ARRAY.type and type(x) is not np.ndarray:
                return None
        try:
            key = self._key(tree, leaves, meta, defaults)
            return self._bound.get(key) or self._sized.get(key)
        except TypeError:  # a meta-parameter that cannot be hashed: the slow path names it
            return None

    def _resolve(
        self, tree: Structure, leaves: list[Any], meta: dict[str, Any], defaults: Mapping[str, Any] | None = None
    ) -> _Bound:
        self._signature.check_meta(meta)
        key = self._key(tree, leaves, meta, defaults)
        bound = self._bound.get(key) or self._sized.get(key)
        if bound is None:
            with _mesh.watched() as watch:
                bound = self._choose(tree, leaves, meta, defaults or {}, key)
            if watch.asked and not self._on_mesh:
                self._on_mesh = True
                key = self._key(tree, leaves, meta, defaults)
            (self._sized if bound.program.dynamic else self._bound).put(key, bound)
        for x in leaves:
            ARRAY.learn(x)
        return bound

    def _key(self, tree: Structure, leaves: list[Any], meta: dict[str, Any], defaults: Mapping[str, Any] | None) -> Any:
        """All that the result of `_resolve` depends on."""
        key = _key(tree, leaves, meta)
        if defaults:
            key += key_of(dict(defaults))
        if self._on_mesh:
            _mesh.asked()
            key = *key, tuple(_mesh.mesh_axes().items())
        if self._tuning is None and not self._asks and not autos(meta):
            return key
        from jtile.tune.space import state

        return *key, state()

    def _choose(
        self, tree: Structure, leaves: list[Any], meta: dict[str, Any], defaults: Mapping[str, Any], key: Any
    ) -> _Bound:
        """Fill in what the call leaves out: from the tuner's entry, `defaults` (options among them), the signature, and
        the model of time where these say `jt.auto`."""
        if self._tuning is not None:
            from jtile.tune.choose import choose

            return choose(self, tree, leaves, meta, defaults)
        if defaults:
            own = {k: v for k, v in defaults.items() if k not in CHOICES and k not in meta}
            options = {k: v for k, v in defaults.items() if k in CHOICES and getattr(self._options, k) is None}
            return self._variant(options)._resolve(tree, leaves, {**meta, **own})
        full = self._signature.bind_meta(meta)
        if autos(full):
            from jtile.tune.resolve import resolve

            return resolve(self, tree, leaves, full)
        return self._bind(tree, leaves, full, key)

    def _bind(self, tree: Structure, leaves: list[Any], meta: dict[str, Any], key: Any) -> _Bound:
        types, marks = strip(tree_unflatten(tree, [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]))
        given = tuple(a + b for a, b in zip(marks, declared(self._signature, self._spec.dynamic, types), strict=True))
        layout = lay_out(self._signature, self._spec, types, meta)
        if not any(given) and not any(is_symbolic(n) for x in leaves for n in x.shape):
            return self._trace(layout, meta, tree_flatten(types)[1], key)
        return self._bind_dynamic(layout, given, meta, key)

    def _bind_dynamic(self, layout: Layout, marks: Any, meta: dict[str, Any], key: Any) -> _Bound:
        """The program of the sizes' family; `layout` is that of the sizes at hand."""
        from jtile.calls.dynamic import Callee, Family, check, marked

        leaves, tree = tree_flatten(layout.inputs)
        of = Callee(f"kernel {self.name}", self._signature.where)
        found = marked(of, layout.names[: len(leaves)], leaves, marks)
        if found is None:
            return self._trace(layout, meta, tree, key)

        def make(multiples: dict[str, int]) -> _Bound:
            types = [jax.ShapeDtypeStruct(found.shape(k, x.shape, multiples), x.dtype) for k, x in enumerate(leaves)]
            return self._trace_dynamic(tree_unflatten(tree, types), meta, tree, (signature, tuple(multiples.values())))

        static = tuple(
            tuple(n if s is None else s for n, s in zip(x.shape, row)) for x, row in zip(leaves, found.places)
        )
        signature = tree, static, tuple(found.bounds.items()), tuple(x.dtype for x in leaves), *key[2:]
        family = self._families.get(signature) or self._families.put(signature, Family(tuple(found.sizes), make))
        bound, values = family.pick(found.sizes)
        check(self._signature, bound.layout, layout, values)
        return bound

    def _trace_dynamic(self, inputs: Any, meta: dict[str, Any], tree: Structure, key: Any) -> _Bound:
        """A program whose sizes are symbols; errors say that this is why."""
        try:
            return self._trace(lay_out(self._signature, self._spec, inputs, meta), meta, tree, key)
        except jax.errors.InconclusiveDimensionOperation as e:
            raise KernelTypeError(
                f"out_type, grid or scratch of kernel {self.name} asks for the size of a dynamic dimension: "
                f"{str(e).splitlines()[0]} Compute with +, -, *, //, % and jt.cdiv, or mark fewer dimensions dynamic",
                self._signature.where,
            ) from e

    @functools.cached_property
    def _body(self) -> Callable[..., None]:
        """The function with its tile loops rewritten into structured control flow."""
        from jtile import trace

        return trace.rewrite_loops(self._fn, self._lines)

    @roomy
    def _trace(self, layout: Layout, meta: dict[str, Any], tree: Structure, key: Any) -> _Bound:
        from jtile import ir, trace
        from jtile.calls.custom_vjp import custom_vjp
        from jtile.primitive.program import Spec as Around
        from jtile.primitive.program import make_program

        where = self._signature.where
        jaxpr = self._written and self._written([*layout.inputs, *layout.outputs, *layout.scratch], meta)
        jaxpr = jaxpr or trace.trace(
            self._body, layout.inputs, layout.outputs, layout.scratch,
            meta=meta, name=self.name, grid=layout.grid, axes=layout.axes, aliases=layout.aliases, inits=layout.inits,
        )  # fmt: skip
        around = Around(
            self.name, count_leaves(layout.inputs), count_leaves(layout.outputs), layout.grid,
            layout.aliases, layout.inits, layout.names, ir.Loc(*where) if where else ir.NOWHERE,
            tuple(is_complex(x.dtype) for x in jax.tree.leaves((layout.inputs, layout.outputs))),
            shared=shared_refs(layout),
        )  # fmt: skip
        types = tree_flatten(layout.inputs)[0]
        vjp = self._vjp and custom_vjp(self._signature, self._vjp, tree, layout, types, meta, key)
        program = make_program(
            jaxpr, around, meta=tuple(sorted(meta.items())), options=in_force(self._options), vjp=vjp,
            hand=self._hand(layout, tree, meta),
        )  # fmt: skip
        return _Bound(program, layout, layout.out_tree, runner(program, layout))

    def _hand(self, layout: Layout, tree: Structure, meta: dict[str, Any]) -> Hand | None:
        """The sharding rule that the user gave, checked against the arrays of this call."""
        pattern = self._pattern
        if pattern is None:
            return None
        inputs, outputs = tree_flatten(layout.inputs)[0], tree_flatten(layout.outputs)[0]
        check_ranks(pattern, self.name, [*inputs, *outputs], len(inputs), layout.names, self._signature.where)

        def shard(parts: Mapping[str, int]) -> Program:
            cut = [
                jax.ShapeDtypeStruct(tuple(n // parts.get(d or "", 1) for n, d in zip(x.shape, dims)), x.dtype)
                for x, dims in zip(inputs, pattern.inputs)
            ]
            return self._resolve(tree, cut, meta).program

        memory = lambda rows, types: tuple((*d, None) if is_split(x.dtype) else d for d, x in zip(rows, types))
        return Hand(memory(pattern.inputs, inputs), memory(pattern.outputs, outputs), shard)


def _key(tree: Structure, leaves: list[Any], meta: dict[str, Any]) -> Any:
    """All that a call's `Program` depends on, JAX's options that change how a body is traced among them."""
    config = jax.config
    state = config.jax_enable_x64, config.jax_default_matmul_precision, config.jax_numpy_dtype_promotion
    return tree, tuple([(x.shape, x.dtype) for x in leaves]), key_of(meta), state, current().overlap
