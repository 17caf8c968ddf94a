"""Models over the devices of a mesh: which device has which weights, and the programs of a model inside of
`jax.shard_map`.

Every device holds a model of its own, whose weights are parts of the checkpoint's (`shards.py`). The weights of
all devices are arrays of JAX whose first dimension runs over the devices; so is what the cache keeps of the tokens.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jtile as jt
from jtile._errors import ModelError

from . import cache as kv
from .adapters import apply_adapter, read_adapter
from .checkpoint import Checkpoint
from .decoder import Decoder
from .host import on_host
from .parallel import Axes, laid
from .programs import Memory
from .prompt import Prompt
from .shards import Heads, Part, Place, Share

MOST = 4096  # devices of a mesh that a command makes: a CPU would act as millions, and take hours for that
ROLES = ("tensor", "expert", "context")
WEIGHTS, ROWS, SAME, MEMORY = "weights", "rows", "same", "memory"
ENTRIES, STATE = "entries", "state"  # a cache; what every device keeps for the next call
DONATED = (MEMORY, ENTRIES, STATE)

# For each program of models and of `serving.programs`: how its arguments (behind the structure of the model, if it has
# one) and its results lie on the devices.
LIES: dict[str, tuple[tuple[str, ...], Any]] = {
    "logits": ((WEIGHTS, ROWS, ROWS, ROWS), ROWS),
    "embed": ((WEIGHTS, ROWS, ROWS), ROWS),
    "prefill": ((WEIGHTS, ROWS, ROWS, SAME), (ROWS, ROWS, ROWS, MEMORY)),
    "decode": ((WEIGHTS, MEMORY, ROWS, ROWS, SAME, SAME, ROWS, SAME), (ROWS, ROWS, SAME, ROWS, ROWS, ROWS, MEMORY)),
    "step": ((WEIGHTS, ENTRIES, SAME, SAME, SAME, SAME, WEIGHTS), (SAME, ENTRIES)),
    "several": ((WEIGHTS, ENTRIES, STATE, SAME, SAME, SAME, WEIGHTS), (SAME, ENTRIES, STATE)),
    "choose": ((SAME, STATE, STATE, SAME, SAME, SAME), (SAME, SAME, STATE, STATE)),
    "put": ((STATE, SAME, SAME), STATE),
    "copy": ((ENTRIES, SAME, SAME), ENTRIES),
}


@dataclasses.dataclass(frozen=True)
class Devices:
    """A mesh, and what its axes do for a model; see `load`."""

    mesh: Mesh
    axes: Axes

    @classmethod
    def of(cls, mesh: Any, parallel: Mapping[str, str] | None, config: Any) -> Devices:
        """Checks `mesh` and `parallel`, as `load` takes them, for a model of this configuration.

        Raises:
          ModelError: `mesh` is no mesh or has devices of other processes, a role or an axis is unknown, an axis has
            two roles, or the model cannot be cut so.
        """
        if not isinstance(mesh, Mesh):
            raise ModelError(f"mesh is a jax.sharding.Mesh, of jax.make_mesh; got {type(mesh).__name__}")
        if parallel is None and len(mesh.axis_names) == 1:
            parallel = {"tensor": mesh.axis_names[0]}
        if not isinstance(parallel, Mapping) or not parallel:
            raise ModelError(
                f"parallel says what the axes {_listed(mesh.axis_names)} of the mesh do for the model: "
                f'{{"tensor": "{mesh.axis_names[0]}"}}, or others of {", ".join(ROLES)}; got {parallel!r}'
            )
        for role, axis in parallel.items():
            if role not in ROLES:
                raise ModelError(f"parallel has {role!r}; a model is cut by {', '.join(ROLES)}")
            if axis not in mesh.axis_names:
                raise ModelError(
                    f"parallel has {role!r}: {axis!r}; the axes of the mesh are {_listed(mesh.axis_names)}"
                )
        if len(set(parallel.values())) < len(parallel):
            raise ModelError(f"parallel gives one axis of the mesh to two roles: {dict(parallel)}")
        far = [d for d in mesh.devices.flat if d.process_index != jax.process_index()]
        if far:
            raise ModelError(f"the mesh has devices of other processes, as {far[0]}; a model runs on those of one")
        devices = list(mesh.devices.flat)
        if len(set(devices)) < len(devices):
            raise ModelError(f"the mesh has a device twice: {_listed(sorted(d.id for d in devices))}")
        # `jax.make_mesh` gives explicit axes, along which every array would have to lie cut before it is cut here
        mesh = Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * mesh.devices.ndim)
        found = cls(mesh, Axes(**parallel, talk=jt.can_talk(mesh.devices.flat)))
        found._check(config)
        return found

    def _check(self, config) -> None:
        experts, count = experts_of(config), self.size("expert")
        if self.axes.expert is not None and not experts:
            raise ModelError("parallel has 'expert', and this model has no mixtures of experts; use 'tensor'")
        if experts % count:
            raise ModelError(
                f"the model has {experts} experts, which the {count} devices along {self.axes.expert!r} do not divide"
            )
        if self.axes.context is not None and getattr(config.attention, "index", None) is not None:
            raise ModelError(
                "parallel has 'context', and an indexer chooses the tokens that a token of this model attends to, for "
                "which a device needs all of them; use 'tensor' and 'expert'"
            )
        heads, tensor = config.attention.heads, self.size("tensor")
        if tensor > heads:
            raise ModelError(
                f"the model has {heads} heads of attention, fewer than the {tensor} devices along "
                f"{self.axes.tensor!r}; use a smaller mesh, or give some of them to 'context'"
            )

    def size(self, role: str) -> int:
        """How many devices a role has; 1 where it has no axis."""
        axis = getattr(self.axes, role)
        return 1 if axis is None else self.mesh.shape[axis]

    def read(self, checkpoint: Checkpoint, dtype: str, adapter: str | os.PathLike | None = None) -> Parts:
        """The model of a checkpoint, with an adapter if there is one: each device's weights are read and brought to it
        one after the other."""
        shares = self._shares(checkpoint)
        models = {at: self._model(checkpoint, dtype, share, adapter) for at, share in shares.items()}
        split = {at: nnx.split(model) for at, model in models.items()}
        flat = {at: jax.tree.flatten(state) for at, (_, state) in split.items()}
        structures = [(split[at][0], flat[at][1]) for at in flat]
        if any(found != structures[0] for found in structures):
            raise ModelError(
                f"{checkpoint.source} stores the matrices of its experts in several ways, so that devices would run "
                "different programs; take a checkpoint that is quantised in one way"
            )
        leaves = [self.together({at: flat[at][0][i] for at in flat}) for i in range(len(flat[0, 0][0]))]
        return Parts(self, checkpoint.config, models[0, 0], structures[0], leaves, shares)

    def _shares(self, checkpoint: Checkpoint) -> dict[tuple[int, int], Share]:
        """The share of each device, by its places along the axes of tensor and expert."""
        config: Any = checkpoint.config
        heads, experts, unit = config.attention.heads, experts_of(config), checkpoint.unit()
        kv_heads = getattr(config.attention, "kv_heads", heads)
        found = {}
        for t, e in np.ndindex(self.size("tensor"), self.size("expert")):
            tensor, expert = Place(t, self.size("tensor")), Place(e, self.size("expert"))
            of = Heads.at(heads, kv_heads, tensor)
            found[t, e] = Share(heads, kv_heads, of, tensor, expert, experts, unit)
        return found

    def _model(self, checkpoint: Checkpoint, dtype: str, share: Share, adapter: str | os.PathLike | None) -> Decoder:
        config: Any = checkpoint.config
        attention = config.attention
        counts = {"heads": len(share.of.queries), "kv_heads": len(share.of.keys)}
        fields = {name: count for name, count in counts.items() if hasattr(attention, name)}
        own = dataclasses.replace(config, attention=dataclasses.replace(attention, **fields))
        # host devices share one memory, and programs would be compiled for each of them
        where = None if on_host() else self._device(share.tensor.index, share.expert.index)
        with jax.default_device(where):
            model = Decoder(own, Part(checkpoint, share), checkpoint.tied, dtype)
            if adapter is not None:
                model = apply_adapter(model, read_adapter(adapter, model, share))
        return laid(model, self.axes)

    def _device(self, tensor: int, expert: int):
        at = {self.axes.tensor: tensor, self.axes.expert: expert}
        return self.mesh.devices[tuple(at.get(axis, 0) for axis in self.mesh.axis_names)]

    def together(self, parts: Mapping[tuple[int, int], jax.Array]) -> jax.Array:
        """One array over the mesh, out of parts by their places along the axes of tensor and expert; devices along
        other axes have copies."""
        names, (count, *rest) = self.mesh.axis_names, parts[0, 0].shape
        place = lambda at, axis: 0 if axis is None else at[names.index(axis)]
        arrays = [
            jax.device_put(parts[place(at, self.axes.tensor), place(at, self.axes.expert)], self.mesh.devices[at])
            for at in np.ndindex(self.mesh.devices.shape)
        ]
        return jax.make_array_from_single_device_arrays((count * len(parts), *rest), self.lies(WEIGHTS), arrays)

    def _spec(self, kind: str) -> Any:
        if kind == MEMORY:
            rows = self._spec(ROWS)
            return Memory(kv.KVCache(self._spec(ENTRIES), rows, rows, context=self.axes.context), rows)
        specs = {WEIGHTS: P(self.axes.of_weights), ROWS: P(self.axes.expert), ENTRIES: P(self.axes.names)}
        return specs.get(kind, P())

    def lies(self, kind: str) -> Any:
        """The sharding of arrays of the kind `kind` (see `LIES`)."""
        return jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), self._spec(kind))

    def over(self, function: Callable, takes: tuple[str, ...], gives: Any) -> Callable:
        """A function of what each device has, turned into a function of what all of them have; takes, gives: how
        arguments and results lie."""
        return jax.shard_map(
            function,
            mesh=self.mesh,
            in_specs=_each(self._spec, takes),
            out_specs=_each(self._spec, gives),
            check_vma=False,
        )

    def lower(self, function: Any, *args, **static) -> jax.stages.Lowered:
        """Lowers one of the programs of `LIES` for all devices."""
        takes, gives = LIES[function.__name__]
        structure, args = args[: -len(takes)], args[-len(takes) :]
        run = self.over(lambda *args: function.__wrapped__(*structure, *args, **static), takes, gives)
        donated = tuple(i for i, kind in enumerate(takes) if kind in DONATED)
        shardings = _each(self.lies, takes), _each(self.lies, gives)
        jitted = jax.jit(run, in_shardings=shardings[0], out_shardings=shardings[1], donate_argnums=donated)
        with here(self):
            return jitted.lower(*args)

    def full(self, x: np.ndarray) -> np.ndarray:
        """Rows [batch, ...] with copies of the last one behind them, so that devices share them out equally."""
        more = -len(x) % self.size("expert")
        return np.concatenate([x, np.repeat(x[-1:], more, axis=0)]) if more else x

    def filled(self, prompt: Prompt) -> Prompt:
        """The prompt with its rows made more by `full`."""
        return dataclasses.replace(
            prompt, ids=self.full(prompt.ids), lengths=self.full(prompt.lengths), mask=self.full(prompt.mask)
        )

    def numbers(self, numbers: Mapping[str, np.ndarray], batch: int) -> dict[str, np.ndarray]:
        """The numbers of `Sampling.traced` for the rows of `filled`; a table for all rows is repeated for each row."""
        if self.axes.expert is None:
            return dict(numbers)
        return {name: self.full(np.broadcast_to(x, (batch, *x.shape[1:]))) for name, x in numbers.items()}


@dataclasses.dataclass(frozen=True)
class Parts:
    """A model over devices. config: that of the whole model; first: the module of the first device; structure, weights:
    see `programs.merge`; shares: the share of each device, by its places along the axes of tensor and expert."""

    devices: Devices
    config: Any
    first: Decoder
    structure: tuple
    weights: list[jax.Array]
    shares: Mapping[tuple[int, int], Share]


def here(devices: Devices | None) -> contextlib.AbstractContextManager:
    """A block in which JAX computes over the mesh of a model, whatever mesh the caller has set (`jax.set_mesh`)."""
    return contextlib.nullcontext() if devices is None else jax.set_mesh(devices.mesh)


def experts_of(config: Any) -> int:
    """The number of experts of each mixture of a model; 0 if it has no mixtures."""
    mixture = getattr(config, "mixture", None)
    return mixture.experts if mixture is not None else getattr(config, "experts", 0)


def devices_at_hand(text: str) -> dict[str, Any]:
    """The `mesh` and the `parallel` of `load`, from the text that a command got: "2" (heads and features over two
    devices) or "tensor=2,expert=4". A CPU acts as that many devices, if JAX has not started yet.

    Raises:
      ModelError: the text is something else, or asks for more devices than there are.
    """
    entries = [part.split("=") for part in (f"tensor={text}" if text.isdecimal() else text).split(",")]
    if not all(len(e) == 2 and e[0] in ROLES and e[1].isdecimal() and int(e[1]) > 0 for e in entries) or (
        len({e[0] for e in entries}) < len(entries)
    ):
        raise ModelError(
            f"devices is a number, as 2, or numbers of {', '.join(ROLES)}, as tensor=2,expert=4; got {text!r}"
        )
    sizes = {role: int(count) for role, count in entries}
    count = math.prod(sizes.values())
    if count > MOST:
        raise ModelError(f"the model is to be cut over {count} devices; a model runs over {MOST} at most")
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        with contextlib.suppress(RuntimeError):  # JAX has started already
            jax.config.update("jax_num_cpu_devices", count)
    found = jax.devices()
    if count > len(found):
        raise ModelError(f"the model is to be cut over {count} devices, and there are {len(found)}")
    mesh = Mesh(np.array(found[:count]).reshape(tuple(sizes.values())), tuple(sizes))
    return {"mesh": mesh, "parallel": {role: role for role in sizes}}


def _each(of: Callable, what: Any) -> Any:
    return tuple(map(of, what)) if isinstance(what, tuple) else of(what)


def _listed(names) -> str:
    return ", ".join(map(repr, names))
