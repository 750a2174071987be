"""Changes the shardings of trees of arrays across processes: the implementation of `Engine.device_put()`.

Every process describes each array before and after the change, in the same order. It gives the extension its
shards, and memory for the shards that it is to receive. The extension plans all arrays and moves them together.
Begin at `device_put`.
"""

from __future__ import annotations

from dataclasses import dataclass
import json
from typing import Any

import jax
from jax.sharding import Sharding, SingleDeviceSharding
import numpy as np

from muster import _native
from muster._boxes import Box, extents, from_index
from muster._memory import Buffer, deleted, empty, source
from muster.errors import MusterError, PlanError, SettingsError
from muster.jax._arrays import describe
from muster.jax._packed import Packing, packing, warn_of_copies
from muster.jax._trees import named_leaves

__all__ = ["device_put"]

_Struct: Any = jax.ShapeDtypeStruct
_make_array: Any = jax.make_array_from_single_device_arrays


def device_put(engine: _native.Engine, tree: Any, shardings: Any, options: tuple[int, str, float, float]) -> Any:
    """Returns the tree with these shardings."""
    leaves, structure = named_leaves(tree)
    if len(leaves) == 1 and leaves[0][1] is tree:
        leaves = [("", tree)]
    # Arrays that have the same shape, type and shardings are described once.
    routes: dict[Any, _ReshardRoute] = {}
    results: list[Any] = []
    moves: list[_ArrayMove] = []
    for (name, leaf), sharding in zip(leaves, _sharding_of_each_leaf(shardings, tree, len(leaves)), strict=True):
        with _NameInErrors(name):
            sharding = _check_leaf(leaf, sharding)
            if leaf.sharding.is_equivalent_to(sharding, leaf.ndim):
                results.append(_with_equivalent_sharding(leaf, sharding))
                continue
            key = (tuple(leaf.shape), leaf.dtype, leaf.sharding, sharding)
            if key not in routes:
                routes[key] = _plan_route(*key)
            moves.append(_ArrayMove(name, leaf, routes[key]))
            results.append(moves[-1])
    if packed := [f"{move.name} ({move.leaf.dtype})" for move in moves if move.route.packed is not None]:
        warn_of_copies(packed, stacklevel=3)
    if moves:
        tasks = sorted(set[int]().union(*(route.tasks for route in routes.values())))
        engine.reshard([move.prepare() for move in moves], tasks, options)
    return structure.unflatten(result.finish() if isinstance(result, _ArrayMove) else result for result in results)


def _sharding_of_each_leaf(shardings: Any, tree: Any, count: int) -> list[Any]:
    """Returns the sharding of each leaf."""
    targets: list[Any] = []

    def add(sharding: Any, part: Any) -> None:
        targets.extend([sharding] * len(jax.tree_util.tree_leaves(part)))

    if isinstance(shardings, (Sharding, jax.Device)):
        return [shardings] * count
    try:
        jax.tree_util.tree_map(add, shardings, tree)
    except ValueError as error:
        raise SettingsError(f"the tree of shardings is neither like that of the arrays nor a prefix of it: {error}") from error
    return targets


class _NameInErrors:
    """Puts the name of an array, if it has one, before the message of an error."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, MusterError) and self._name:
            raise type(error)(f"{self._name}: {error}") from error


def _check_leaf(leaf: Any, sharding: Any) -> Any:
    """Checks a leaf and its new sharding, and returns the sharding."""
    if not isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct)):
        raise SettingsError(f"a {type(leaf).__name__} has no sharding: give a jax.Array")
    if isinstance(leaf, jax.Array) and leaf.is_deleted():
        raise deleted(leaf)
    if leaf.sharding is None:
        raise PlanError("the jax.ShapeDtypeStruct has no sharding: make it with sharding=NamedSharding(mesh, spec)")
    if isinstance(sharding, jax.Device):
        return SingleDeviceSharding(sharding)
    if not isinstance(sharding, Sharding):
        raise SettingsError(f"{sharding!r} is no sharding: give a jax.sharding.NamedSharding(mesh, spec)")
    return sharding


def _with_equivalent_sharding(leaf: Any, sharding: Any) -> Any:
    """Returns an array whose shards are where another sharding, of the same meaning, has them."""
    if leaf.sharding == sharding:
        return leaf
    if not isinstance(leaf, jax.Array):
        return _Struct(leaf.shape, leaf.dtype, sharding=sharding)
    return _assemble(leaf.shape, leaf.dtype, sharding, [shard.data for shard in leaf.addressable_shards])


def _assemble(shape: tuple[int, ...], dtype: Any, sharding: Any, shards: list[Any]) -> Any:
    if shards:
        return _make_array(shape, sharding, shards)
    try:
        return _make_array(shape, sharding, shards, dtype=dtype)
    except ValueError:
        # JAX 0.6.2 has no arrays without a part in this process.
        return _Struct(shape, dtype, sharding=sharding)


@dataclass(frozen=True)
class _ReshardRoute:
    """How arrays of one shape and data type come from one sharding to another."""

    shape: tuple[int, ...]
    dtype: Any
    sharding: Any
    """The new one."""
    before: str
    after: str
    tasks: frozenset[int]
    """The processes of both shardings."""
    parts: list[tuple[Any, int, Box]]
    """The devices of this process that are to have a part: each with its index, and the part of what is moved."""
    packed: Packing | None
    spread: bool
    """Whether elements that could share bytes are moved with a byte each, because shards begin or end inside of bytes."""


def _plan_route(shape: tuple[int, ...], dtype: Any, before: Any, after: Any) -> _ReshardRoute:
    packed = packing(dtype)
    local = jax.local_devices(backend="cpu")
    try:
        # The shape and type of the memory that is moved.
        moved, carrier, spread = shape, dtype, False
        if packed is not None:
            spread = not _fills_bytes(packed, shape, before, after)
            carrier = np.dtype(packed.carrier)
            moved = shape if spread else (*shape[:-1], shape[-1] // packed.count)
        source_text, target_text = (json.dumps(describe(_Struct(moved, carrier, sharding=each))) for each in (before, after))
        parts: list[tuple[Any, int, Box]] = []
        for device, index in after.devices_indices_map(moved).items():
            # JAX 0.6.2 calls the device of a SingleDeviceSharding addressable, wherever it is.
            if device.process_index != jax.process_index():
                continue
            if device not in local:
                raise PlanError(f"{device} has no memory of the host: put the array onto CPU devices and copy from there (jax.device_put)")
            parts.append((device, local.index(device), from_index(index, moved)))
    except (SettingsError, ValueError) as error:
        # JAX refuses dimensions that are not divisible.
        raise PlanError(str(error)) from error
    tasks = frozenset(int(device.process_index) for sharding in (before, after) for device in sharding.device_set)
    return _ReshardRoute(shape, dtype, after, source_text, target_text, tasks, parts, packed, spread)


def _fills_bytes(packed: Packing, shape: tuple[int, ...], *shardings: Any) -> bool:
    """Returns whether no byte has elements of two rows or of two shards."""
    if not shape or shape[-1] % packed.count:
        return False
    ends = (index[-1].indices(shape[-1]) for sharding in shardings for index in sharding.devices_indices_map(shape).values())
    return all(start % packed.count == 0 and end % packed.count == 0 for start, end, _ in ends)


class _ArrayMove:
    """An array that is moved."""

    def __init__(self, name: str, leaf: Any, route: _ReshardRoute) -> None:
        self.name = name
        self.leaf = leaf
        self.route = route
        self.buffers: list[tuple[Any, Buffer]] = []

    def prepare(self) -> tuple[str, str, str, dict[int, _native.Source], dict[int, _native.Buffer]]:
        """Returns what the extension needs to know. It waits until the array is computed."""
        route = self.route
        with _NameInErrors(self.name):
            held: dict[int, _native.Source] = {}
            if isinstance(self.leaf, jax.Array):
                held = {int(shard.device.id): source(self._bytes(shard.data)) for shard in self.leaf.addressable_shards}
            dtype = route.dtype if route.packed is None else route.packed.carrier
            self.buffers = [(device, empty(extents(part), dtype, number)) for device, number, part in route.parts]
        wanted: dict[int, _native.Buffer] = {int(device.id): buffer for device, buffer in self.buffers}
        return self.name, route.before, route.after, held, wanted

    def _bytes(self, shard: Any) -> Any:
        packed = self.route.packed
        if packed is None:
            return shard
        return packed.spread(shard).view(packed.carrier) if self.route.spread else packed.pack(shard)

    def _array(self, device: Any, buffer: Buffer) -> Any:
        packed = self.route.packed
        if packed is None:
            return buffer.array()
        values = np.asarray(buffer)
        values = packed.gather(values.view(np.uint8)) if self.route.spread else packed.unpack(values)
        return jax.device_put(values, device)

    def finish(self) -> Any:
        """Returns the array of what has been moved."""
        route = self.route
        return _assemble(route.shape, route.dtype, route.sharding, [self._array(*part) for part in self.buffers])
