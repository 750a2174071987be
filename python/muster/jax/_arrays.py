"""Finds out when an array is defined (its contents have been computed), and how it is sharded.

JAX computes asynchronously, so an array exists before its contents. `when_defined()` returns an event that
completes when the contents exist. No thread waits for it: the module dispatches a computation whose inputs are the
array and a token of 64 bytes, and JAX returns the token when that computation is over. One such program is compiled
for each shape, data type and device. The programs that were used last are kept.
"""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.core
import jax.dlpack
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from muster import _native
from muster._memory import check_defined, deleted
from muster.errors import ComputationFailed, Deadline, SettingsError

__all__ = ["DefinitionEvent", "describe", "when_defined"]

# The compiled programs that are kept. Each takes some tens of milliseconds to make.
_PROGRAMS_MAX = 256

_TOKEN_BYTES = 64

T = TypeVar("T")

# Public names of JAX whose types it does not declare.
_config: Any = jax.config
_dtypes: Any = jax.dtypes
_Struct: Any = jax.ShapeDtypeStruct

_MEMORY_KINDS = (None, "device", "pinned_host", "unpinned_host")


class DefinitionEvent:
    """Completes when an array is defined, or when its computation has failed. `when_defined()` makes one."""

    __slots__ = ("_results", "native")

    native: _native.DefinitionEvent
    """The event of the transfer engine. It does not tell success from failure: `check()` does."""

    def __init__(self, native: _native.DefinitionEvent, results: list[Any]) -> None:
        self.native = native
        # They fail with the array, and outlive its donation.
        self._results = results

    def done(self) -> bool:
        """Returns whether the array is defined or has failed."""
        return self.native.done()

    def wait(self, timeout: float = 300.0) -> None:
        """Waits until the array is defined.

        Raises:
            ComputationFailed: its computation has failed.
            Deadline: it is not defined in time.
        """
        self.native.wait(timeout)
        self.check()

    def check(self) -> None:
        """Raises ComputationFailed if the computation has failed, and Deadline if it is not over. It does not wait."""
        if not self.native.done():
            raise Deadline("the array is not defined yet: wait() waits for it")
        reason = self.native.wait(0.0)
        if reason is not None:
            raise ComputationFailed(reason)
        for result in self._results:
            check_defined(result)

    def __repr__(self) -> str:
        return f"<muster.jax.DefinitionEvent, {'over' if self.done() else 'pending'}>"


def when_defined(array: jax.Array) -> DefinitionEvent:
    """Returns an event that completes when an array of this process is defined, on all its local devices.

    It does not wait, and no thread does. The array may be deleted or donated afterwards.

    Raises:
        ArrayDeleted: the array was deleted or donated.
        ComputationFailed: its computation has failed already.
    """
    if isinstance(array, jax.core.Tracer):
        raise SettingsError("inside jit an array is not computed: call when_defined() outside of it, with the result")
    if _dtypes.issubdtype(array.dtype, _dtypes.extended):
        array = jax.random.key_data(array)
    ready = _native.is_ready(array)
    if ready is None:
        raise deleted(array)
    native = _native.DefinitionEvent()
    if ready:
        check_defined(array)
        native.arm()
        return DefinitionEvent(native, [])
    results: list[Any] = []
    try:
        for shard in array.addressable_shards:
            _make_event_wait_for_array(native, shard.data, results)
    except BaseException as error:
        native.fail(f"{type(error).__name__}: {error}")
        if array.is_deleted():
            raise deleted(array) from None
        raise
    native.arm()
    return DefinitionEvent(native, results)


def _make_event_wait_for_array(native: _native.DefinitionEvent, data: Any, results: list[Any]) -> None:
    """Makes an event wait for an array on one device."""
    [device] = data.sharding.device_set
    if device.platform != "cpu" or device not in jax.local_devices(backend="cpu"):
        # A token is for the CPU devices of the present backend, so a thread has to wait. JAX lets the others run meanwhile.
        token = native.token(0)
        threading.Thread(target=_wait_for, args=(data, token), name="muster-definition", daemon=True).start()
        results.append(data)
        return
    token = native.token(device.local_hardware_id)
    program = _programs.get(data, device)
    # Python would run the program in place of JAX.
    with jax.disable_jit(False) if _config.jax_disable_jit else contextlib.nullcontext():
        results.append(program(data, jax.dlpack.from_dlpack(token)))


def _wait_for(data: Any, _token: _native.Token) -> None:
    # The token is given back with the end of this thread.
    with contextlib.suppress(Exception):
        data.block_until_ready()


class _TokenPrograms:
    """The programs that pass a token on when an array is defined, the last used ones."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[Any, Callable[[Any, Any], Any]] = OrderedDict()
        self._backend: Any = None

    def get(self, data: Any, device: Any) -> Callable[[Any, Any], Any]:
        """Returns the program for arrays like this one, on this device."""
        key, backend = (data.shape, data.dtype, data.sharding), device.client
        with self._lock:
            if backend is not self._backend:
                # The programs of a former backend would keep it.
                self._kept.clear()
                self._backend = backend
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        program = _in_new_thread(lambda: _compile_token_program(data.shape, data.dtype, data.sharding, device))
        with self._lock:
            if backend is self._backend:
                self._kept[key] = program
                while len(self._kept) > _PROGRAMS_MAX:
                    self._kept.popitem(last=False)
        return program


def _compile_token_program(shape: Any, dtype: Any, sharding: Any, device: Any) -> Callable[[Any, Any], Any]:
    array = _Struct(shape, dtype, sharding=sharding)
    token = _Struct((_TOKEN_BYTES,), jax.numpy.uint8, sharding=SingleDeviceSharding(device))
    return jax.jit(lambda _, token: token, keep_unused=True).lower(array, token).compile()


def _in_new_thread(call: Callable[[], T]) -> T:
    """Runs a call outside of the contexts of this thread, such as the mesh of jax.set_mesh(), in which all devices count."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="muster-compile", daemon=True)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


_programs = _TokenPrograms()


def describe(array: jax.Array | jax.ShapeDtypeStruct) -> dict[str, Any]:
    """Returns the shape, the data type and the sharding of an array as the planner reads them, and `muster transfer plan` as JSON.

    Device ids are those of this run and of this release of JAX.

    Args:
        array: an array, or a jax.ShapeDtypeStruct with a sharding.

    Raises:
        SettingsError: its sharding does not say which device holds which part.
    """
    shape, sharding = tuple(int(size) for size in array.shape), array.sharding
    if _dtypes.issubdtype(array.dtype, _dtypes.extended):
        raise SettingsError(f"an array of {array.dtype} has no bytes that can be planned: describe jax.random.key_data(x)")
    if sharding is None:
        raise SettingsError("the jax.ShapeDtypeStruct has no sharding: make it with sharding=NamedSharding(mesh, spec)")
    kind = getattr(sharding, "memory_kind", None)
    if kind not in _MEMORY_KINDS:
        raise SettingsError(f"memory of the kind {kind!r} cannot be reached: use {', '.join(map(repr, _MEMORY_KINDS[1:]))}")
    placed = _describe_named_sharding(sharding) if isinstance(sharding, NamedSharding) else _describe_by_device_parts(shape, sharding)
    return {"shape": list(shape), "dtype": str(array.dtype), "sharding": placed}


def _describe_named_sharding(sharding: NamedSharding) -> dict[str, Any]:
    mesh: Any = sharding.mesh
    spec: Any = sharding.spec
    if isinstance(mesh, AbstractMesh):
        raise SettingsError("an abstract mesh has no devices: make the sharding of a jax.sharding.Mesh")
    if getattr(spec, "unreduced", None) or getattr(spec, "reduced", None):
        raise SettingsError("the parts of an unreduced array are no values yet: add them up first, in jit with out_shardings")
    entries: list[None | str | list[str]] = []
    for entry in tuple(spec):
        if entry is PartitionSpec.UNCONSTRAINED:
            raise SettingsError("an unconstrained dimension has no division: say None or the names of axes in the PartitionSpec")
        entries.append(entry if entry is None or isinstance(entry, str) else [str(axis) for axis in entry])
    axes = [{"name": str(name), "size": int(size)} for name, size in zip(mesh.axis_names, mesh.devices.shape)]
    return {"mesh": {"axes": axes, "devices": [int(device.id) for device in mesh.devices.flat]}, "spec": entries}


def _describe_by_device_parts(shape: tuple[int, ...], sharding: Any) -> dict[str, Any]:
    """Describes any sharding by the part of each device. The parts must be a grid of equal ones, each held equally often."""
    held: dict[tuple[int, ...], list[int]] = {}
    for device, index in sharding.devices_indices_map(shape).items():
        start = tuple(part.indices(size)[0] for part, size in zip(index, shape))
        held.setdefault(start, []).append(int(device.id))
    starts = [sorted({start[at] for start in held}) for at in range(len(shape))]
    copies = {len(devices) for devices in held.values()}
    counts = [len(each) for each in starts]
    total = 1
    for count in counts:
        total *= count
    even = all(size % count == 0 and each == list(range(0, size, size // count)) for size, count, each in zip(shape, counts, starts) if count > 1)
    if not even or total != len(held) or len(copies) != 1:
        raise SettingsError(f"{type(sharding).__name__} divides the array unevenly: put it into a NamedSharding (jax.device_put)")
    [copy_count] = copies
    axes = [{"name": f"dimension{at}", "size": count} for at, count in enumerate(counts) if count > 1]
    if copy_count > 1:
        axes.append({"name": "copies", "size": copy_count})
    devices = [device for start in sorted(held) for device in held[start]]
    spec = [f"dimension{at}" if count > 1 else None for at, count in enumerate(counts)]
    return {"mesh": {"axes": axes, "devices": devices}, "spec": spec}
