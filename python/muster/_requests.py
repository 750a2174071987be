"""Requests of transfers, in the form that the extension takes.

A request says which arrays are sent and received, in which parts, and under which keys. This file also adds the
program's own names to errors. The extension moves the bytes. Begin at `Launch`. One array that is not divided is
requested by a `WholeArray` instead, because a `Launch` costs more than all other work for a small array.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
import hashlib
import re
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from muster import _native
from muster._memory import source, source_of_jax, target
from muster.errors import LayoutMismatch, MusterError, OrderMismatch, SettingsError, TransferError

if TYPE_CHECKING:
    from muster.jax._packed import Packing

__all__ = [
    "CHANNEL_MAX",
    "OF_SENDER",
    "RESHARDING",
    "TOGETHER",
    "Launch",
    "Part",
    "Peer",
    "Receive",
    "Request",
    "Send",
    "WholeArray",
    "WholeTarget",
    "channel_number",
    "is_process",
    "peer_address",
    "whole_array_to_receive",
    "whole_array_to_send",
]

_KEY_MAX = 2**64
CHANNEL_MAX = 2**30
_PROCESS_MAX = 2**20
_JOB = re.compile("[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")


@dataclass(frozen=True)
class Peer:
    """A process of another job of the same server, such as `Peer(job="serve", task=0)`. The process there names this one, too.
    Both jobs must name each other in their setting `transfers-with`."""

    job: str
    """The name of the job."""
    task: int
    """The number of the process in its job."""
    device: int | None = None
    """The number of one of its devices, in that job; by default the first one."""


@dataclass(frozen=True)
class Send:
    """An array that is sent to another process."""

    array: Any
    """A jax.Array, a NumPy array, a muster.Buffer, or anything else that lends its memory. It must not change until it is sent."""
    to: Any
    """The number of the process, or one of its JAX devices; or a Peer, which is a process of another job."""
    key: str | int
    """The name that both sides give the transfer."""


@dataclass(frozen=True)
class Receive:
    """An array that is received from another process."""

    into: Any
    """A muster.Buffer, a NumPy array, `bytearray` or `memoryview`, which must not be used until it is received; or a
    jax.ShapeDtypeStruct, of which an array is made."""
    source: Any
    """The number of the process, or one of its JAX devices; or a Peer, which is a process of another job."""
    key: str | int
    """The name that both sides give the transfer."""


# A channel of this module is four of the engine, whose launches are matched by their order: what the process with the lower number
# sends alone, what the other one sends alone, launches of several transfers, and arrays that change their sharding.
_CHANNELS = 4
# The first of the first two; the extension knows which one is the sender's.
OF_SENDER = 0
TOGETHER = 2
RESHARDING = 3


class Part(NamedTuple):
    """An array, or one shard of it."""

    array: Any
    """What is sent or received into. An array of JAX has its memory only when it is defined."""
    place: str = ""
    """The part of the array that it is; empty for the whole."""
    device: int | None = None
    """The number of its device."""
    packed: str = ""
    """The data type and shape, if elements share bytes."""
    is_jax: bool = False
    """Whether it is an array of JAX, which is sent."""


class WholeTarget(NamedTuple):
    """The memory for an array that is not divided."""

    memory: _native.Buffer
    finish: Callable[[], Any]
    """Returns the array, once it is received."""
    build_early: Callable[[], None]
    """Does what it can of the work of `finish` while the array is received."""


class Request:
    """A transfer of one array, or of one shard, as the extension takes it."""

    __slots__ = ("far", "job", "key", "memory", "name", "near", "outgoing", "part", "task")

    def __init__(self, outgoing: bool, part: Part, peer: Any, key: str | int) -> None:
        self.outgoing = outgoing
        self.part = part
        self.memory: Any = None
        self.job, self.task, self.far = peer_address(peer)
        self.near = None if self.far is None else part.device
        self.key = _number(key, part.place)
        self.name = f"{key!r} (shard {part.place})" if part.place else repr(key)

    @property
    def place(self) -> str:
        """What both sides must agree on beside the data type and shape of the memory."""
        return f"{self.part.place} {self.part.packed}" if self.part.packed else self.part.place

    def is_undefined(self) -> bool:
        """Returns whether it sends an array of JAX that is not computed yet."""
        return self.part.is_jax and _native.is_ready(self.part.array) is False

    def find_memory(self) -> None:
        """Finds the memory. It waits until an array of JAX is computed."""
        if self.memory is not None:
            return
        array, packed = self.part.array, self._packing()
        if packed is not None:
            self.memory = source(packed.pack_flat(array))
        elif self.part.is_jax:
            self.memory = source_of_jax(array)
        else:
            self.memory = source(array) if self.outgoing else target(array)

    @property
    def nbytes(self) -> int:
        """The bytes of it."""
        packed = self._packing()
        if self.memory is None and packed is not None:
            return packed.size(self.part.array.shape)
        return int((self.part.array if self.memory is None else self.memory).nbytes)

    def _packing(self) -> Packing | None:
        """Returns how the elements that are sent share bytes."""
        if not self.outgoing or not self.part.packed:
            return None
        from muster.jax._packed import packing

        return packing(self.part.array.dtype)

    def describe(self) -> str:
        """Returns the data type and shape, once the memory is known."""
        return self.part.packed or f"{self.memory.dtype}{list(self.memory.shape)}"


class Launch:
    """The transfers of a launch, and what becomes of them."""

    def __init__(self, transfers: Sequence[Send | Receive]) -> None:
        self.requests: list[Request] = []
        self.finish: list[Callable[[], Any]] = []
        self.failure: MusterError | None = None
        """Why an array that was to be sent has no memory."""
        for transfer in transfers:
            self._add(transfer)
        if packed := [request.part.packed for request in self.requests if request.part.packed]:
            from muster.jax._packed import warn_of_copies

            # At the caller of send() or receive().
            warn_of_copies(packed, stacklevel=4)
        for request in self.requests:
            _remember_name(request.key, request.name)

    def _add(self, transfer: Send | Receive) -> None:
        parts: list[Any] = []
        if isinstance(transfer, Send):
            value, peer = transfer.array, transfer.to
            if _is_jax(value, "Array"):
                from muster.jax._shards import parts_to_send

                parts.extend(parts_to_send(value))
            else:
                parts.append(Part(value))
            self.finish.append(lambda: None)
        else:
            value, peer = transfer.into, transfer.source
            if _is_jax(value, "ShapeDtypeStruct"):
                from muster.jax._shards import parts_to_receive

                received, finish = parts_to_receive(value)
                parts.extend(received)
                self.finish.append(finish)
            else:
                parts.append(Part(value))
                self.finish.append(lambda: value)
        outgoing = isinstance(transfer, Send)
        self.requests += [Request(outgoing, part, peer, transfer.key) for part in parts]

    def find_memory(self, wait: bool = True) -> list[Any]:
        """Finds the memory of each array. Returns the arrays of JAX that are not computed yet, if it shall not wait for them."""
        undefined: list[Any] = []
        for request in self.requests:
            if wait or not request.is_undefined():
                request.find_memory()
            else:
                undefined.append(request.part.array)
        return undefined

    def results(self) -> list[Any]:
        """Returns what became of each transfer: the array that was received, or None for one that was sent."""
        return [finish() for finish in self.finish]

    def explain(self, error: MusterError) -> MusterError:
        """Returns the error with the keys and layouts as the program knows them."""
        return _explain(error, self.requests)


class WholeArray:
    """A launch of one array that is not divided, with a process of this job."""

    __slots__ = ("_key", "finish", "key", "memory")

    failure: MusterError | None = None

    def __init__(self, memory: _native.Source | _native.Buffer, key: str | int, finish: Callable[[], Any]) -> None:
        self.memory = memory
        self.key = _number(key, "")
        self.finish = finish
        self._key = key
        _remember_name(self.key, repr(key))

    @property
    def name(self) -> str:
        return repr(self._key)

    @property
    def requests(self) -> Sequence[WholeArray]:
        return (self,)

    def describe(self) -> str:
        """Returns the data type and shape."""
        return f"{self.memory.dtype}{list(self.memory.shape)}"

    def results(self) -> list[Any]:
        """Returns a list of the array that was received, or of None if it was sent."""
        return [self.finish()]

    def explain(self, error: MusterError) -> MusterError:
        """Returns the error with the key and the layout as the program knows them."""
        return _explain(error, self.requests)


def whole_array_to_send(value: Any) -> _native.Source | _native.Buffer | None:
    """Returns the memory of a Buffer, or of an array of JAX that is defined and lies on one CPU device of this process. None
    for every other value, which a `Launch` sends or refuses."""
    if isinstance(value, _native.Buffer):
        return value
    shards: Any = sys.modules.get("muster.jax._shards")
    found: _native.Source | None = None if shards is None else shards.whole_source(value)
    return found


def whole_array_to_receive(value: Any) -> WholeTarget | None:
    """Returns the memory for a Buffer, or for a jax.ShapeDtypeStruct without a sharding. None for every other value, which a
    `Launch` receives or refuses."""
    if isinstance(value, _native.Buffer):
        return WholeTarget(value, lambda: value, lambda: None)
    shards: Any = sys.modules.get("muster.jax._shards")
    found: WholeTarget | None = None if shards is None else shards.whole_target(value)
    return found


def _explain(error: MusterError, requests: Sequence[Request] | Sequence[WholeArray]) -> MusterError:
    text = str(error)
    for request in requests:
        name = request.name
        if isinstance(error, LayoutMismatch) and request.memory is not None:
            name += f" ({request.describe()} here)"
        text = text.replace(f"{request.key:016x}", name)
    if isinstance(error, OrderMismatch):
        # The other side's keys are known here if they were used here, too.
        text = re.sub("[0-9a-f]{16}", lambda found: _names.get(int(found[0], 16), found[0]), text)
        text = re.sub(r"\bchannel (\d+)", lambda found: f"channel {int(found[1]) // _CHANNELS}", text)
    return type(error)(text, error.reason) if isinstance(error, TransferError) else error


# The last keys that were used, by their numbers.
_names: dict[int, str] = {}
_NAMES_MAX = 4096

# The numbers of the texts that were used last as keys of whole arrays. To hash a text takes longer than to look it up.
_numbers: dict[str, int] = {}


def _remember_name(number: int, name: str) -> None:
    _names[number] = name
    while len(_names) > _NAMES_MAX:
        _names.pop(next(iter(_names)), None)


def _is_jax(value: Any, kind: str) -> bool:
    """Returns whether a value is of this class of JAX. A program that has not imported JAX has none."""
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(value, getattr(jax, kind, ()))


def peer_address(peer: Any) -> tuple[str | None, int, int | None]:
    """Returns the job of a process if it is another one, the number of the process, and of its device if one is named."""
    if is_process(peer):
        return None, peer, None
    if isinstance(peer, Peer):
        if not (isinstance(peer.job, str) and _JOB.fullmatch(peer.job)):
            raise SettingsError(f"{peer.job!r} is no job: give its name, as `muster job list` shows it")
        if not is_process(peer.task):
            raise SettingsError(f"{peer.task!r} is no task of job {peer.job}: give its number")
        return peer.job, peer.task, peer.device
    process, device = getattr(peer, "process_index", None), getattr(peer, "id", None)
    if isinstance(process, int) and isinstance(device, int):
        return None, process, device
    raise SettingsError(
        f"{peer!r} is no peer: give the number of a process, one of its JAX devices, or a muster.transfer.Peer of another job"
    )


def is_process(number: Any) -> bool:
    """Returns whether a value can be the number of a process."""
    return isinstance(number, int) and not isinstance(number, bool) and 0 <= number < _PROCESS_MAX


def channel_number(channel: int, kind: int) -> int:
    """Returns the number of a channel of the engine."""
    if not 0 <= channel < CHANNEL_MAX:
        raise SettingsError(f"channel is {channel}: give a number from 0 to {CHANNEL_MAX - 1}")
    return channel * _CHANNELS + kind


def _number(key: str | int, place: str) -> int:
    """Returns the number of the transfer of the shard at this place, under this key."""
    if isinstance(key, int) and not place and 0 <= key < _KEY_MAX:
        return key
    if isinstance(key, str) and not place:
        known = _numbers.get(key)
        if known is not None:
            return known
        if len(_numbers) >= _NAMES_MAX:
            _numbers.clear()
        _numbers[key] = number = _hash(key, place)
        return number
    if not isinstance(key, (str, int)) or (isinstance(key, int) and not 0 <= key < _KEY_MAX):
        raise SettingsError(f"{key!r} is no key: give a text, or a number below 2**64")
    return _hash(key, place)


def _hash(key: str | int, place: str) -> int:
    text = f"{type(key).__name__}\0{place}\0{key}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
