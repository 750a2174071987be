"""`recover()`: gives every process the newest state that any process has, from the memory of its peers.

All members of an epoch call it in their block. Each member writes which boxes (parts) of each array it has and
which it wants, and reads what the other members wrote. So all members compute the same plan: which process sends
which part of each wanted box. Each member then writes the digests of the parts that it sends. One launch of the
transfer engine moves all parts of a process. Begin at `recover`.

- *Newest.* Parts are taken only from processes with the highest version.
- *Checked.* The trees must be equal in structure, shapes and data types. Boxes that several processes hold must
  have equal digests. Each part that moves must arrive with the digest that its sender has written, also a part that
  is cut out of a box.
- *All or none.* `recover()` changes no array of the caller. If a process is lost meanwhile, `recover()` raises in
  the others, so their block is not committed. The program calls it again in the next epoch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
import hashlib
import json
import os
from typing import Any
import zlib

import jax
import numpy as np

from muster import transfer
from muster._boxes import Box, cover, extents, from_index, index, whole
from muster.errors import ArrayDeleted, SettingsError, StateDiverged, StateLost
from muster.jax._epochs import EpochMember, LiveDevices
from muster.jax._live import current_member
from muster.jax._trees import named_leaves

# The most arrays or boxes that a message lists.
_NAMED_MAX = 5
_ALIGNMENT = 64
# The memory that one thread digests at a time, and the most threads: their hashes do not hold the GIL.
_CHUNK = 4 << 20
_THREADS_MAX = 8
_DIGEST = hashlib.sha256().digest_size

Placement = Callable[[LiveDevices], Any]


@dataclass(frozen=True)
class _Leaf:
    """One array of the tree: what this process has of it, and what it wants."""

    name: str
    shape: tuple[int, ...]
    dtype: Any
    value: Any
    sharding: Any
    held: dict[Box, Any]
    """The parts that this process has, as arrays of NumPy over their memory."""
    wanted: list[Box]


@dataclass(frozen=True)
class _StateRecord:
    """What a process says of its state."""

    version: int
    structure: str
    check: bool
    held: list[list[Box]]
    wanted: list[list[Box]]

    def encode(self) -> bytes:
        return zlib.compress(json.dumps(vars(self), separators=(",", ":")).encode())

    @classmethod
    def decode(cls, value: bytes) -> _StateRecord:
        read = json.loads(zlib.decompress(value))
        held, wanted = ([[_box(box) for box in boxes] for boxes in read[name]] for name in ("held", "wanted"))
        return cls(read["version"], read["structure"], read["check"], held, wanted)


def _box(bounds: Sequence[Sequence[int]]) -> Box:
    return tuple((start, end) for start, end in bounds)


_Region = tuple[int, Box, Box]
"""A part of a box that a process holds: the array, the box, and the part of it, which may be the whole box."""


@dataclass(frozen=True)
class _Part:
    """A part of a wanted box, and who fills it."""

    leaf: int
    wanted: Box
    receiver: int
    sender: int
    held: Box
    """The box of the sender that has the part."""
    part: Box

    @property
    def region(self) -> _Region:
        return self.leaf, self.held, self.part


def recover(
    state: Any,
    version: int,
    devices: LiveDevices,
    *,
    place: Placement | None = None,
    check: bool = True,
    timeout: float = 300.0,
) -> tuple[Any, int]:
    """Returns the newest state that a process of the epoch has, and its version. All processes of the epoch call it.

        with muster.jax.live_devices() as devices:
            if devices.epoch != epoch:
                state, version = muster.jax.recover(state, version, devices)

    Args:
        state: a tree of arrays: of JAX, of NumPy, or numbers. A process that has just come gives its initial state, or
            jax.ShapeDtypeStruct in place of arrays.
        version: how new the state is, for example the number of steps that it has behind it.
        devices: what live_devices() yields; the call is made in its block.
        place: returns the sharding of each array for these devices: one for all arrays, or a tree like `state`. Without it,
            each process gets every array whole, on its first device.
        check: whether to compare the contents of what several processes have, and what arrives with what was sent. It is done
            if any process asks for it.
        timeout: how long it may take, in seconds.

    Returns:
        The state, of which an array of NumPy is one again, and every other array is an array of JAX; and its version.

    Raises:
        StateLost: no live process has a part of an array in the newest version.
        StateDiverged: the processes have different trees, or different contents under one version; or a part has arrived
            here with other contents than its sender had.
        ArrayDeleted: an array of the state was donated or deleted.
        MusterError: a process was lost meanwhile.
    """
    member = current_member()
    if not member.is_inside or member.epoch is None or member.epoch.number != devices.epoch:
        raise SettingsError("recover() is called in the block of live_devices(), with the devices that it yields")
    leaves, tree = _leaves(state, place(devices) if place is not None else None)
    structure = hashlib.sha256(repr((tree, [(leaf.name, leaf.shape, str(leaf.dtype)) for leaf in leaves])).encode()).hexdigest()
    record = _StateRecord(version, structure, check, [list(leaf.held) for leaf in leaves], [leaf.wanted for leaf in leaves])
    records = {process: _StateRecord.decode(value) for process, value in member.exchange(record.encode(), timeout).items()}
    newest = max(record.version for record in records.values())
    _check_structure(records)
    current = {process: record for process, record in sorted(records.items()) if record.version == newest}
    parts = _plan_parts(records, current, leaves, newest)
    sent = dict.fromkeys(part.region for part in parts if part.sender == member.me != part.receiver)
    sources = {region: _region_contents(leaves, region) for region in sent}
    digests: dict[int, dict[_Region, bytes]] = {}
    if any(record.check for record in records.values()):
        digests = _exchange_digests(member, _regions_to_digest(parts, current), leaves, sources, timeout)
        _check_contents(digests, leaves)
    filled, arrived = _allocate_wanted_boxes(parts, leaves, newest == version, member.me)
    _move(member, parts, sources, arrived, timeout)
    if digests:
        _check_arrived(parts, arrived, digests, leaves)
    for number, (target, buffer) in arrived.items():
        if buffer is not target:
            target[...] = buffer
    values = [_assemble(leaf, [filled[number, box] for box in leaf.wanted]) for number, leaf in enumerate(leaves)]
    return jax.tree_util.tree_unflatten(tree, values), newest


def _leaves(state: Any, shardings: Any) -> tuple[list[_Leaf], Any]:
    leaves, tree = named_leaves(state)
    if shardings is None or isinstance(shardings, jax.sharding.Sharding):
        places = [shardings] * len(leaves)
    else:
        places = tree.flatten_up_to(shardings)
    return [_leaf(name, value, place) for (name, value), place in zip(leaves, places, strict=True)], tree


def _leaf(name: str, value: Any, sharding: Any) -> _Leaf:
    held: dict[Box, Any] = {}
    if isinstance(value, jax.Array):
        if value.is_deleted():
            raise ArrayDeleted(
                f"{name} was deleted, or donated to a computation whose block was not committed: do not donate the state"
            )
        for shard in value.addressable_shards:
            box = from_index(shard.index, value.shape)
            if box not in held:
                held[box] = np.asarray(shard.data)
    elif not isinstance(value, jax.ShapeDtypeStruct):
        value = np.asarray(value)
        if value.dtype.hasobject:
            raise SettingsError(f"{name} is no array: a state has arrays and numbers only")
        held[whole(value.shape)] = value
    shape = tuple(value.shape)
    if sharding is None:
        wanted = [whole(shape)]
    else:
        wanted = sorted({from_index(each, shape) for each in sharding.addressable_devices_indices_map(shape).values()})
    return _Leaf(name, shape, np.dtype(value.dtype), value, sharding, held, wanted)


def _bytes(array: Any) -> Any:
    """Returns the memory of a contiguous array as bytes."""
    return array.reshape(-1).view(np.uint8)


def _region_contents(leaves: list[_Leaf], region: _Region) -> Any:
    """Returns the contents of a region of this process, contiguous: the memory of the array itself if it is."""
    number, held, part = region
    return np.ascontiguousarray(leaves[number].held[held][index(part, held)])


def _digests(arrays: Sequence[Any]) -> list[bytes]:
    """Returns the digest of each contiguous array: that of the digests of its chunks, which several threads compute."""
    chunks = [list(_chunks(_bytes(array))) for array in arrays]
    threads = min(_THREADS_MAX, os.cpu_count() or 1, sum(map(len, chunks)))
    with ThreadPoolExecutor(max(threads, 1), "muster-digest") as pool:
        running = [[pool.submit(_sha256, chunk) for chunk in each] for each in chunks]
        return [_sha256(b"".join(future.result() for future in each)) for each in running]


def _chunks(memory: Any) -> Iterator[Any]:
    for start in range(0, memory.size, _CHUNK):
        yield memory[start : start + _CHUNK]


def _sha256(memory: Any) -> bytes:
    return hashlib.sha256(memory).digest()


def _check_structure(records: dict[int, _StateRecord]) -> None:
    structures = {record.structure: process for process, record in records.items()}
    if len(structures) > 1:
        one, other = sorted(structures.values())[:2]
        raise StateDiverged(
            f"process {one} and process {other} have states of different structure: give recover() the same tree of arrays, of "
            "the same shapes and data types, in every process"
        )


def _regions_to_digest(parts: list[_Part], current: dict[int, _StateRecord]) -> dict[int, list[_Region]]:
    """Returns for each process the regions that it digests: those that it sends, and the boxes that other processes have as well.

    The parts that are cut out of boxes come first.
    """
    sent: dict[int, list[_Region]] = {process: [] for process in current}
    for part in parts:
        if part.sender != part.receiver:
            sent[part.sender].append(part.region)
    holders = Counter((number, box) for record in current.values() for number, boxes in enumerate(record.held) for box in boxes)
    regions = {}
    for process, record in current.items():
        cut = [region for region in sent[process] if region[1] != region[2]]
        sent_whole = [region for region in sent[process] if region[1] == region[2]]
        shared = [(number, box, box) for number, boxes in enumerate(record.held) for box in boxes if holders[number, box] > 1]
        regions[process] = list(dict.fromkeys([*cut, *sent_whole, *shared]))
    return regions


def _exchange_digests(
    member: EpochMember,
    regions: dict[int, list[_Region]],
    leaves: list[_Leaf],
    sources: Mapping[_Region, Any],
    timeout: float,
) -> dict[int, dict[_Region, bytes]]:
    """Returns the digests of the regions of all processes, each of which has computed its own.

    A part that is cut out of a box is digested before the whole box. So if another thread of the process writes the state meanwhile,
    either the digest of the part differs from what arrives, or that of the box from those of the other processes.
    """
    own = regions.get(member.me, [])
    arrays = [sources[region] if region in sources else _region_contents(leaves, region) for region in own]
    cut = sum(held != part for _, held, part in own)
    values = member.exchange(b"".join(_digests(arrays[:cut]) + _digests(arrays[cut:])), timeout)
    found = {}
    for process, each in regions.items():
        value = values[process]
        found[process] = {region: value[_DIGEST * at : _DIGEST * (at + 1)] for at, region in enumerate(each)}
    return found


def _check_contents(digests: dict[int, dict[_Region, bytes]], leaves: list[_Leaf]) -> None:
    seen: dict[tuple[int, Box], tuple[int, bytes]] = {}
    different = []
    for process, regions in sorted(digests.items()):
        for (number, box, part), digest in regions.items():
            if box == part:
                first, expected = seen.setdefault((number, box), (process, digest))
                if digest != expected:
                    different.append(f"{leaves[number].name} in processes {first} and {process}")
    if different:
        more = f", and {len(different) - _NAMED_MAX} more" if len(different) > _NAMED_MAX else ""
        raise StateDiverged(
            f"processes have different contents under one version: {', '.join(different[:_NAMED_MAX])}{more}. Give equal states "
            "equal versions only, or pass check=False to take those of any"
        )


def _plan_parts(records: dict[int, _StateRecord], current: dict[int, _StateRecord], leaves: list[_Leaf], newest: int) -> list[_Part]:
    """Returns the parts of all wanted boxes, in an order that is the same in all processes."""
    parts, missing = [], []
    senders = list(current)
    for turn, (process, record) in enumerate(sorted(records.items())):
        for number, boxes in enumerate(record.wanted):
            # Data that is already here is not moved; other data the processes send in turn.
            own = [process] if process in current else []
            first = (turn + number) % len(senders)
            order = [*own, *senders[first:], *senders[:first]]
            held = {sender: current[sender].held[number] for sender in senders}
            for wanted in boxes:
                found, nobody = cover(wanted, held, order)
                parts += [_Part(number, wanted, process, sender, box, part) for sender, box, part in found]
                missing += [f"{leaves[number].name}[{', '.join(f'{a}:{b}' for a, b in box)}]" for box in nobody]
    if missing:
        unique = sorted(set(missing))
        more = f", and {len(unique) - _NAMED_MAX} more" if len(unique) > _NAMED_MAX else ""
        raise StateLost(
            f"no live process has {', '.join(unique[:_NAMED_MAX])}{more} of version {newest}: restore the state from a checkpoint, "
            "and shard it so that each part is in more than one process"
        )
    return parts


_Arrived = dict[int, tuple[Any, Any]]
"""For the number of each part that this process receives: its place in the wanted box, and the memory into which it is received."""


def _allocate_wanted_boxes(
    parts: list[_Part], leaves: list[_Leaf], is_current: bool, me: int
) -> tuple[dict[tuple[int, Box], Any], _Arrived]:
    """Returns the wanted boxes of this process, filled with what is here already, and the memory for the parts that are not."""
    filled: dict[tuple[int, Box], Any] = {}
    for number, leaf in enumerate(leaves):
        for box in leaf.wanted:
            mine = leaf.held.get(box) if is_current else None
            filled[number, box] = _aligned_memory(extents(box), leaf.dtype) if mine is None else mine
    arrived: _Arrived = {}
    for number, part in enumerate(parts):
        if part.receiver != me:
            continue
        leaf = leaves[part.leaf]
        target = filled[part.leaf, part.wanted][index(part.part, part.wanted)]
        if part.sender != me:
            arrived[number] = target, target if target.flags.c_contiguous else np.empty(target.shape, target.dtype)
        elif part.wanted not in leaf.held:
            target[...] = leaf.held[part.held][index(part.part, part.held)]
    return filled, arrived


def _move(member: EpochMember, parts: list[_Part], sources: Mapping[_Region, Any], arrived: _Arrived, timeout: float) -> None:
    """Moves all parts that this process sends or receives, and waits for them."""
    launch: list[transfer.Send | transfer.Receive] = []
    for number, part in enumerate(parts):
        key = f"{member.room}/{number}"
        if number in arrived:
            launch.append(transfer.Receive(_bytes(arrived[number][1]), part.sender, key))
        elif part.sender == member.me != part.receiver:
            launch.append(transfer.Send(_bytes(sources[part.region]), part.receiver, key))
    if launch:
        transfer.attach(timeout=timeout).transfer(launch, timeout=timeout, channel=member.channel).wait()


def _aligned_memory(shape: tuple[int, ...], dtype: Any) -> Any:
    """Returns memory that JAX uses without a copy."""
    length = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    memory = np.empty(length + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + length].view(dtype).reshape(shape)


def _check_arrived(
    parts: list[_Part], arrived: _Arrived, digests: dict[int, dict[_Region, bytes]], leaves: list[_Leaf]
) -> None:
    """Raises if a part has not arrived as its sender had it when it wrote the digest."""
    found = _digests([buffer for _, buffer in arrived.values()])
    for number, digest in zip(arrived, found, strict=True):
        part = parts[number]
        if digest != digests[part.sender][part.region]:
            raise StateDiverged(
                f"{leaves[part.leaf].name} has arrived from process {part.sender} with other contents than it had there: the "
                "process has written it meanwhile, or it was damaged on its way. Do not write the state in other threads, and "
                "do the block again"
            )


def _assemble(leaf: _Leaf, boxes: list[Any]) -> Any:
    """Returns the array of the filled boxes."""
    if leaf.sharding is None:
        [array] = boxes
        if not isinstance(leaf.value, np.ndarray):
            return jax.device_put(array, jax.local_devices()[0])
        return array
    by_box = dict(zip(leaf.wanted, boxes, strict=True))
    indices = leaf.sharding.addressable_devices_indices_map(leaf.shape)
    shards = [jax.device_put(by_box[from_index(each, leaf.shape)], device) for device, each in indices.items()]
    return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, shards)
