"""Moves arrays between the processes of a job: `attach()`, then `Engine.send()` and `Engine.receive()`.

    engine = muster.transfer.attach()                    # once in each process, after it has joined its job
    engine.send(array, to=1, key="weights").wait()       # in process 0
    engine.receive(target, source=0, key="weights").wait()      # in process 1

A Peer is a process of another job of the same server: `engine.send(array, to=Peer(job="serve", task=0),
key="weights")`. Each of the two jobs must name the other in its setting `transfers-with`, and each of the two
processes must name the other.

Transfers are matched by their order. The n-th send to a process is received by that process's n-th receive from this
one, and both must have the same key. Transfers in the other direction do not count. Likewise, the n-th `transfer()`
with a process matches its n-th `transfer()` with this one. If the keys differ, the error is OrderMismatch. If the
shapes or dtypes differ, it is LayoutMismatch. A transfer that fails or is cancelled counts, too, also before the
other process has attached: the one that it was to match fails there. After a transfer has failed, or after `cancel()`
has returned, no byte is written to its memory.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import sys
import threading
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from muster import _native
from muster._network import Network, native_network
from muster._requests import (
    OF_SENDER,
    RESHARDING,
    TOGETHER,
    Launch,
    Peer,
    Receive,
    Send,
    WholeArray,
    channel_number,
    is_process,
    peer_address,
    whole_array_to_receive,
    whole_array_to_send,
)
from muster._tls import Tls, native_tls
from muster.errors import LayoutMismatch, MusterError, OrderMismatch, SettingsError, TransferError

__all__ = ["Engine", "Network", "Peer", "Prepared", "Receive", "Send", "Stats", "Transfer", "attach"]

_CANCEL_S = 60.0


@dataclass(frozen=True)
class Stats:
    """What a completed transfer has moved."""

    sent: int
    """Bytes."""
    received: int
    """Bytes."""
    seconds: float
    """From the launch until all of it was in place, here and at the peers."""


class Transfer:
    """Transfers in flight. It can be awaited; then it gives its `result()`.

    To drop it cancels nothing.
    """

    __slots__ = ("_launch", "_native", "_result", "_single")

    def __init__(self, native: _native.Transfer, launch: Launch | WholeArray, single: bool) -> None:
        self._native = native
        self._launch = launch
        self._single = single
        self._result: list[Any] | None = None

    def wait(self, timeout: float | None = None) -> Stats:
        """Waits until the transfers are complete, here and at the peers. The default timeout is their own deadline.

        Raises:
            PeerDead, PeerJobRefused, StaleIncarnation, Cancelled, Stalled, LayoutMismatch, OrderMismatch, TransferError: it has
                failed.
            ArrayDeleted, ComputationFailed: an array that was to be sent has no contents.
            SettingsError, ArrayMemoryError: the request cannot be carried out, or its memory is in use. It was made before the
                peer had attached or the array was computed; otherwise the call that requests it raises them.
            Deadline: its own deadline has passed, and it has failed; or `timeout` has, and it goes on.
        """
        return Stats(*self._wait(timeout))

    def _wait(self, timeout: float | None) -> tuple[int, int, float]:
        try:
            return self._native.wait(timeout)
        except (LayoutMismatch, OrderMismatch) as error:
            raise self._launch.explain(error) from None
        except TransferError:
            if self._launch.failure is not None:
                raise self._launch.failure from None
            raise

    def done(self) -> bool:
        """Returns whether it is complete, or has failed."""
        return self._native.done()

    def result(self, timeout: float | None = None) -> Any:
        """Waits, and returns what was received; None for what was sent. Of several transfers: a list, in their order."""
        self._wait(timeout)
        if self._result is None:
            self._result = self._launch.results()
        return self._result[0] if self._single else list(self._result)

    def cancel(self, reason: str, timeout: float = _CANCEL_S) -> None:
        """Cancels what is not complete. When it returns, no byte can land any more, here or at the peers: that is proven, and
        the memory may be used for other things.

        Raises:
            Deadline: the peers have not confirmed it in time. The memory must not be used yet; call it again.
        """
        self._native.cancel(reason, timeout)

    def __await__(self) -> Generator[Any, None, Any]:
        if not self.done():
            loop = asyncio.get_running_loop()
            over = loop.create_future()
            reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
            watch: object = None
            try:
                # The extension closes the writing end when it is over, which wakes the loop. It takes no GIL for that.
                watch = self._native.close_when_done(writer)
                os.close(writer)
                writer = -1
                loop.add_reader(reader, _resolve, over)
                yield from over
            finally:
                # A transfer may be awaited many times; no descriptor may stay behind.
                watch = None
                if writer >= 0:
                    os.close(writer)
                if not loop.is_closed():
                    loop.remove_reader(reader)
                os.close(reader)
        return self.result()

    def __repr__(self) -> str:
        names = ", ".join(request.name for request in self._launch.requests[:3])
        more = ", …" if len(self._launch.requests) > 3 else ""
        return f"<muster.transfer.Transfer of {names}{more}: {'over' if self.done() else 'in flight'}>"


def _nothing() -> None:
    """Returns the result of an array that was sent."""


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class Prepared:
    """Transfers whose slow work is done: the connections are made and the peers know what comes. `launch()` starts them, any
    number of times; the peers launch theirs as often, in the same order."""

    __slots__ = ("_launch", "_native")

    def __init__(self, native: _native.Prepared, launch: Launch) -> None:
        self._native = native
        self._launch = launch

    def launch(self) -> Transfer:
        """Starts the transfers. The deadline begins now."""
        return Transfer(self._native.launch(), self._launch, single=False)

    def close(self) -> None:
        """Releases the prepared transfers. Launches in flight continue."""
        self._native.close()

    def __enter__(self) -> Prepared:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Engine:
    """The transfer engine of this process. `attach()` returns it, and `muster.Agent.engine()` for a task without JAX.

    It is of one incarnation of the task, and ends with it: then every call raises StaleIncarnation with the reason. Threads
    that launch transfers independently of one another use different channels, because the launches of a channel are matched
    by their order.
    """

    __slots__ = ("__weakref__", "_here", "_native")

    def __init__(self, native: _native.Engine) -> None:
        self._native = native
        self._here = native.process_id

    @property
    def process_id(self) -> int:
        """The number of this process."""
        return self._here

    @property
    def incarnation(self) -> int:
        """The incarnation of this process."""
        return self._native.incarnation

    @property
    def devices(self) -> tuple[int, ...]:
        """The numbers of the devices of this process, in the whole job."""
        return tuple(self._native.devices)

    @property
    def ended(self) -> str | None:
        """Why the engine has ended; None while it has not."""
        return self._native.ended

    def peers(self) -> dict[int, tuple[int, ...]]:
        """Returns the processes that have attached, as far as this one has learned, with their devices."""
        return {process: tuple(devices) for process, (_, devices) in self._native.peers().items()}

    def wait_for_peers(self, processes: Sequence[int | Peer], timeout: float = 300.0) -> None:
        """Waits until these processes have attached. The first transfer with a process does so by itself.

        Raises:
            PeerJobRefused: the settings of this job and of the Peer's do not allow transfers between them.
        """
        peers = [peer_address(process) for process in processes]
        self._native.wait_for_peers([(job, task) for job, task, _ in peers], timeout)

    def send(
        self,
        array: Any,
        to: Any,
        key: str | int,
        *,
        timeout: float = 300.0,
        stall_timeout: float = 30.0,
        channel: int = 0,
        priority: str = "normal",
    ) -> Transfer:
        """Sends an array to another process, of this job or of another one, which receives it under the same key.

        It returns at once, also before the other process has attached. The memory of the array itself is sent, without a copy: a
        jax.Array may be deleted or donated meanwhile, and need not be computed yet; other memory must not change until the
        transfer is over. Memory that cannot be sent as it is is refused, and the message says how to copy it.

        Args:
            array: a jax.Array, of which the shards that this process has are sent; a NumPy array, a muster.Buffer, or anything
                else that lends its memory.
            to: the number of the process, or one of its JAX devices; or a Peer, which is a process of another job. Not this
                process: see `transfer`.
            key: the name that both sides give the transfer.
            timeout: how long it may take, in seconds.
            stall_timeout: how long nothing may move once both sides have launched it, and how long the peer may be silent.
            channel: launches are matched by their order on a channel.
            priority: `latency`, `normal` or `bulk`.
        """
        memory = whole_array_to_send(array) if is_process(to) else None
        if memory is None:
            return self._transfer([Send(array, to, key)], True, channel, priority, timeout, stall_timeout)
        launch = WholeArray(memory, key, _nothing)
        options = (channel_number(channel, OF_SENDER), priority, timeout, stall_timeout)
        return Transfer(self._native.transfer_whole(True, memory, to, launch.key, options), launch, single=True)

    def receive(
        self,
        into: Any,
        source: Any,
        key: str | int,
        *,
        timeout: float = 300.0,
        stall_timeout: float = 30.0,
        channel: int = 0,
        priority: str = "normal",
    ) -> Transfer:
        """Receives an array from another process, which sends it under the same key. The arguments are those of `send`.

        Args:
            into: a muster.Buffer, a NumPy array, `bytearray` or `memoryview`, of the shape and dtype that is sent; or a
                jax.ShapeDtypeStruct, with a sharding of local devices or without one, and then `result()` is a jax.Array
                over the memory that was received, without a copy.
            source: the number of the process, or one of its JAX devices; or a Peer, which is a process of another job.
        """
        target = whole_array_to_receive(into) if is_process(source) else None
        if target is None:
            return self._transfer([Receive(into, source, key)], True, channel, priority, timeout, stall_timeout)
        launch = WholeArray(target.memory, key, target.finish)
        options = (channel_number(channel, OF_SENDER), priority, timeout, stall_timeout)
        transfer = Transfer(self._native.transfer_whole(False, target.memory, source, launch.key, options), launch, single=True)
        # The bytes are on their way meanwhile.
        target.build_early()
        return transfer

    def transfer(
        self,
        transfers: Sequence[Send | Receive],
        *,
        timeout: float = 300.0,
        stall_timeout: float = 30.0,
        channel: int = 0,
        priority: str = "normal",
    ) -> Transfer:
        """Launches several transfers as one, which is quicker if they are small. Each peer launches its part as one, too.

        A `Send` to this process itself needs its `Receive` in the same call: the engine copies the bytes. Both are of the first
        device of the process, unless they name one.
        """
        return self._transfer(transfers, False, channel, priority, timeout, stall_timeout)

    def prepare(
        self,
        transfers: Sequence[Send | Receive],
        *,
        timeout: float = 300.0,
        stall_timeout: float = 30.0,
        channel: int = 0,
        priority: str = "normal",
    ) -> Prepared:
        """Prepares transfers that are launched many times, over the same memory."""
        launch = Launch(transfers)
        launch.find_memory()
        options = (channel_number(channel, TOGETHER), priority, timeout, stall_timeout)
        return Prepared(self._native.prepare(launch.requests, options), launch)

    def device_put(
        self,
        tree: Any,
        shardings: Any,
        *,
        timeout: float = 300.0,
        stall_timeout: float = 30.0,
        channel: int = 0,
        priority: str = "normal",
    ) -> Any:
        """Moves an array, or a tree of arrays, to other shardings across processes, and returns the result.

        All processes that have a device of any of these shardings call it with the same tree, in the same order. All arrays
        move together, in one launch with each process, and each byte moves once between hosts. It waits until all of it is in
        place. Other threads go on meanwhile; a coroutine awaits `asyncio.to_thread(engine.device_put, tree, shardings)`. The
        results lie in memory of Muster, without a further copy; the arrays stay as they are. An array that has its sharding
        already is not moved: the result shares its memory. A process that has no device of a sharding gets an array without
        shards; with JAX 0.6.2, which has none, a jax.ShapeDtypeStruct.

        Elements that share bytes, as those of int4, are copied, and a CopyWarning says so.

        Args:
            tree: a jax.Array, or any tree of them; a process that has no device of an array may give a jax.ShapeDtypeStruct
                with its sharding.
            shardings: the jax.sharding.Sharding that all arrays are to have, or a tree of shardings, whose structure is that
                of `tree` or a prefix of it. A device stands for a sharding of that device alone.

        Raises:
            PlanError: there is no way from the one sharding to the other; the message names the array, as `state['w'][0]`, and
                says why.
            LayoutMismatch: another process has called it with another array; the message names it.
            PeerDead, Deadline, and what else a transfer raises.
        """
        if "jax" not in sys.modules:
            raise SettingsError(f"a {type(tree).__name__} has no sharding: give a jax.Array, or a tree of them")
        from muster.jax._reshard import device_put

        return device_put(self._native, tree, shardings, (channel_number(channel, RESHARDING), priority, timeout, stall_timeout))

    def _transfer(
        self,
        transfers: Sequence[Send | Receive],
        single: bool,
        channel: int,
        priority: str,
        timeout: float,
        stall_timeout: float,
    ) -> Transfer:
        launch = Launch(transfers)
        options = (channel_number(channel, OF_SENDER if single else TOGETHER), priority, timeout, stall_timeout)
        undefined = launch.find_memory(wait=False)
        if not undefined:
            return Transfer(self._native.transfer(launch.requests, single, options), launch, single)
        from muster.jax._undefined import launch_when_defined

        # It takes its place in the order now.
        sizes = [(request.outgoing, request.job, request.task, request.nbytes) for request in launch.requests]
        reserved = self._native.reserve(sizes, single, options)

        def launch_defined() -> None:
            launch.find_memory()
            self._native.launch_reserved(reserved, launch.requests)

        def fail(error: BaseException) -> None:
            if reserved.transfer().done():
                return
            launch.failure = error if isinstance(error, MusterError) else MusterError(f"the array cannot be sent: {error}")
            reserved.fail(str(error))

        launch_when_defined(undefined, launch_defined, fail)
        return Transfer(reserved.transfer(), launch, single)

    def close(self) -> None:
        """Ends the engine of `attach()`; transfers in flight fail. The process stays in its job, and cannot attach again: a
        process has one engine in its life. The engine of an Agent ends with the agent."""
        self._native.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<muster.transfer.Engine of process {self.process_id}, incarnation {self.incarnation:016x}>"


_lock = threading.Lock()
# The engines that this process has attached, by incarnation.
_attached: dict[int, Engine] = {}


def attach(
    task: int | None = None,
    *,
    service: str | None = None,
    devices: Sequence[int] | None = None,
    timeout: float = 60.0,
    tls: Tls | None = None,
    network: Network | None = None,
) -> Engine:
    """Starts the transfer engine of this process, which has joined its job by JAX, and returns it; the same one if called again.

    It does not register: JAX's client has. Peers, pages and metrics see it as the engine of the task. It ends with the
    incarnation of the task, at `Engine.close()`, and at the end of the interpreter.

    Args:
        task: the number of this process in its job; needed only with `service`.
        service: HOST:PORT, if another client than that of `jax.distributed` has registered the task.
        devices: the numbers of its devices; by default those of JAX.
        timeout: how long the service has, in seconds, for each answer.
        tls: certificates, if `service` requires TLS; for JAX's client they are those that JAX is configured with.
        network: how other hosts reach the engine; if left out, only processes of this host do.

    Raises:
        MusterError: this process has not joined a job, or has closed its engine.
        StaleIncarnation: the service does not count this process as live any more.
        ServiceUnreachable, Deadline: the service does not answer.
    """
    with _lock:
        if service is None:
            if "jax" not in sys.modules:
                raise MusterError(
                    "this process has not joined a job by JAX: call muster.jax.initialize() first; a task without JAX uses "
                    "muster.join() and Agent.engine()"
                )
            from muster.jax._identity import identify

            address, me, incarnation, own, files = identify(timeout)
            if task is not None and task != me:
                raise SettingsError(f"this process is task {me} of its job, not {task}: leave task out")
        else:
            if task is None:
                raise SettingsError("service= needs the number of the task: give task=")
            address, me, own, files = service, task, [task * 2048], native_tls(tls)
            presence = _native.task_presence(address, files, timeout)
            incarnation = next((life for number, life, _, _ in presence if number == me), 0)
        known = _attached.get(incarnation)
        if known is not None and known.ended is None:
            return known
        native = _native.Engine.attach(
            address,
            me,
            incarnation,
            own if devices is None else list(devices),
            timeout=timeout,
            tls=files,
            network=native_network(network),
        )
        if not _attached:
            atexit.register(_close_all)
        engine = _attached[incarnation] = Engine(native)
        return engine


def _close_all() -> None:
    """Ends the engines before the interpreter does, so that no transfer uses memory of objects that go away."""
    for engine in _attached.values():
        # A forked process has none of the threads, and is told so; the service may be gone.
        with contextlib.suppress(MusterError):
            engine.close()
