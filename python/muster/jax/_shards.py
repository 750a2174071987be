"""The shards of arrays, as transfers send and receive them.

A shard is named by its position in the array, such as `0:4,8:16`. A shard that is the whole array has no such name.
If a process has several copies of a shard, the shard is sent and received once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from muster import _native
from muster._boxes import extents, from_index, whole
from muster._memory import WIDE, Buffer, check_concrete, check_plain_dtype, deleted, empty, plain_dtype_name
from muster._requests import Part, WholeTarget
from muster.errors import ArrayMemoryError, SettingsError
from muster.jax._internals import array_while_received, capsule_of, concrete_array, is_present_backend
from muster.jax._packed import Packing, packing

__all__ = ["parts_to_receive", "parts_to_send", "whole_source", "whole_target"]


def parts_to_send(array: jax.Array) -> list[Part]:
    """Returns the shards of an array that this process has."""
    check_concrete(array, jax)
    if array.is_deleted():
        raise deleted(array)
    packed = packing(array.dtype)
    if array.sharding.num_devices == 1 and array.is_fully_addressable:
        device: Any = next(iter(array.sharding.device_set))
        return [Part(array, "", int(device.id), _elements(packed, array.shape), is_jax=True)]
    parts: dict[str, Part] = {}
    for shard in array.addressable_shards:
        place = _place(shard.index, array.shape)
        parts.setdefault(place, Part(shard.data, place, int(shard.device.id), _elements(packed, shard.data.shape), is_jax=True))
    if not parts:
        raise ArrayMemoryError(
            f"the array ({array.dtype}{list(array.shape)}) has no shard in this process: send it from a process that has one of its "
            "devices, or move it with device_put() in all processes that have one of either sharding"
        )
    return [parts[place] for place in sorted(parts)]


def whole_source(array: Any) -> _native.Source | None:
    """Returns the memory of an array that is defined and lies on one CPU device of this process. None for every other value:
    `parts_to_send()` serves or refuses it, and says why."""
    if type(array) is not concrete_array:
        return None
    sharding = array.sharding
    if type(sharding) is not SingleDeviceSharding and not (sharding.num_devices == 1 and array.is_fully_addressable):
        return None
    # The extension refuses memory of another device, and elements that share bytes.
    if _native.is_ready(array) is not True:
        return None
    try:
        return _native.Source.from_dlpack(capsule_of(array))
    except Exception:
        return None


class _ReceivedArray:
    """An array without a sharding that is received into a Buffer."""

    __slots__ = ("_buffer", "_early")

    def __init__(self, buffer: Buffer) -> None:
        self._buffer = buffer
        # The array and its backend. The program gets the array when the transfer is complete.
        self._early: tuple[Any, Any] | None = None

    def build_early(self) -> None:
        try:
            found = array_while_received(self._buffer)
        except Exception:
            # The transfer is under way. `finish` raises the error, if it is still there.
            return
        if found is not None and found[0].unsafe_buffer_pointer() == self._buffer.address:
            self._early = found

    def finish(self) -> jax.Array:
        early, self._early = self._early, None
        if early is not None and is_present_backend(early[1]):
            array: jax.Array = early[0]
            return array
        return self._buffer.array()


def whole_target(struct: Any) -> WholeTarget | None:
    """Returns the memory for a jax.ShapeDtypeStruct without a sharding. None for every other value, and for a data type that JAX
    converts or that was not sent or received before."""
    if type(struct) is not jax.ShapeDtypeStruct or struct.sharding is not None:
        return None
    name = plain_dtype_name(struct.dtype)
    if name is None or name in WIDE:
        return None
    buffer = Buffer(list(struct.shape), name, 0)
    received = _ReceivedArray(buffer)
    return WholeTarget(buffer, received.finish, received.build_early)


def parts_to_receive(struct: Any) -> tuple[list[Part], Callable[[], jax.Array]]:
    """Returns memory for the shards that this process is to have, and what makes an array of it, without a copy."""
    sharding, shape = struct.sharding, tuple(struct.shape)
    local = jax.local_devices(backend="cpu")
    packed = packing(struct.dtype)
    if packed is None:
        check_plain_dtype(struct.dtype)
    if sharding is None:
        buffer = _empty(packed, shape, struct.dtype, 0)
        return [Part(buffer, "", int(local[0].id), _elements(packed, shape))], lambda: _array(packed, buffer, shape)
    buffers: dict[str, Buffer] = {}
    sizes: dict[str, tuple[int, ...]] = {}
    parts: list[Part] = []
    holders: list[tuple[Any, str]] = []
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        if device not in local:
            raise SettingsError(f"{device} has no memory of the host: receive onto a CPU device and copy from there (jax.device_put)")
        place = _place(index, shape)
        if place not in buffers:
            sizes[place] = extents(from_index(index, shape))
            buffers[place] = _empty(packed, sizes[place], struct.dtype, local.index(device))
            parts.append(Part(buffers[place], place, int(device.id), _elements(packed, sizes[place])))
        holders.append((device, place))
    if not parts:
        raise SettingsError("the sharding has no device of this process: receive a part that it is to have")

    def finish() -> jax.Array:
        arrays = {place: _array(packed, buffer, sizes[place]) for place, buffer in buffers.items()}
        # The copies of a shard on other devices are made here.
        shards = [arrays[place] if device in arrays[place].devices() else jax.device_put(arrays[place], device) for device, place in holders]
        make: Any = jax.make_array_from_single_device_arrays
        array: jax.Array = make(shape, sharding, shards)
        return array

    return sorted(parts, key=lambda part: part.place), finish


def _elements(packed: Packing | None, shape: tuple[int, ...]) -> str:
    return "" if packed is None else f"{packed.dtype}{list(shape)}"


def _empty(packed: Packing | None, shape: tuple[int, ...], dtype: Any, device: int) -> Buffer:
    return empty(shape, dtype, device) if packed is None else empty(packed.size(shape), packed.carrier, device)


def _array(packed: Packing | None, buffer: Buffer, shape: tuple[int, ...]) -> jax.Array:
    if packed is None:
        return buffer.array()
    array: jax.Array = jax.device_put(packed.unpack_flat(np.asarray(buffer), shape), jax.local_devices(backend="cpu")[buffer.device])
    return array


def _place(index: tuple[slice, ...], shape: tuple[int, ...]) -> str:
    box = from_index(index, shape)
    return "" if box == whole(shape) else ",".join(f"{start}:{end}" for start, end in box)
