"""A task without JAX: the native worker, with the calls of the service that JAX's client also offers."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from muster import _native
from muster._network import Network, native_network
from muster._tls import Tls, native_tls
from muster.errors import Deadline, MusterError, TasksMissing

if TYPE_CHECKING:
    from muster.transfer import Engine

__all__ = ["Agent", "Member", "join"]


# How long the service may take to say which tasks are missing, and how many a message lists.
_QUESTION_S = 5.0
_NAMED_MAX = 20


@dataclass(frozen=True, order=True)
class Member:
    """A task in one incarnation."""

    process_id: int
    """The number of the task."""
    incarnation: int
    """The random identity of this life of it."""


def join(
    service: str | None = None,
    num_processes: int | None = None,
    process_id: int | Literal["auto"] | None = None,
    *,
    timeout: float = 300.0,
    heartbeat_timeout: float = 100.0,
    tls: Tls | None = None,
    network: Network | None = None,
) -> Agent:
    """Registers this process as a task of a job, without JAX, and returns when the service counts it as connected.

    In a run that is forming, that is when all tasks have registered. Heartbeats are sent by threads of their own from then
    on. What is left out is found as `muster worker` finds it: in MUSTER_PROCESS_ID, MUSTER_NUM_PROCESSES and
    JAX_COORDINATOR_ADDRESS, or in the variables of Slurm, Kubernetes or Open MPI.

    Args:
        service: HOST:PORT of the service's gRPC port.
        num_processes: how many tasks the job must have; if nothing says it, what the service says.
        process_id: the number of this task; or "auto": the service gives it the number that this host had in earlier runs.
        timeout: how long to wait, in seconds, for the service and for the other tasks.
        heartbeat_timeout: the job's heartbeat timeout in seconds; a heartbeat is sent at half of it.
        tls: certificates, if the service requires TLS.
        network: how other hosts reach the transfer engine of this task (`Agent.engine()`); if left out, they do not.

    Raises:
        ClusterEnvError: nothing says which task this is or where the service is, or two sources disagree.
        ServiceUnreachable: the service does not answer.
        TasksMissing: not all tasks have registered in time; `tasks` has those that have not.
        Refused: the service refuses the task, for example because it is excluded.
    """
    if process_id == "auto" or (process_id is None and os.environ.get("MUSTER_PROCESS_ID") == "auto"):
        address, tasks, task, _ = _native.claim_place(service, num_processes, native_tls(tls), timeout)
    else:
        address, tasks, task = _native.find_place(service, num_processes, process_id)
    _check_no_jax_client(address, task)
    files = native_tls(tls)
    try:
        native = _native.Agent.join(
            address,
            tasks,
            task,
            timeout=timeout,
            heartbeat_timeout=heartbeat_timeout,
            tls=files,
            network=native_network(network),
        )
    except Deadline as late:
        presence = _native.task_presence(address, files, _QUESTION_S)
        missing = [other for other, incarnation, _, _ in presence if incarnation == 0 and other != task]
        if not missing:
            raise
        names = ", ".join(map(str, missing[:_NAMED_MAX])) + (", …" if len(missing) > _NAMED_MAX else "")
        raise TasksMissing(
            f"{len(missing)} of {len(presence)} tasks have not registered at {address}: {names} (waited for {timeout:g} s). "
            "Start them, or look at `muster status`; then join again",
            missing,
        ) from late
    return Agent(native)


def _check_no_jax_client(service: str, process_id: int) -> None:
    """Raises if JAX's client has registered this task: a second registration would take its place and end the process."""
    distributed: Any = sys.modules.get("jax._src.distributed")
    if distributed is None:
        return
    state = distributed.global_state
    if state.client is not None and state.process_id == process_id and state.coordinator_address == service:
        raise MusterError(
            f"this process is task {process_id} at {service} already, by JAX's client, and a second registration would take "
            "its place: use jax.distributed, or join before and instead of jax.distributed.initialize()"
        )


class Agent:
    """One incarnation of a task. `join()` makes one.

    Every call is interrupted by Ctrl-C, waits without the GIL and has a deadline. All of them raise StaleIncarnation once
    this incarnation is over, Refused if the service refuses (an excluded task is refused everything, with the reason), and
    ServiceUnreachable if it is away for more than 30 s.

    As a context manager it leaves at the end; after an exception it ends without leaving, as a process that dies does.
    """

    __slots__ = ("_native",)

    def __init__(self, native: _native.Agent) -> None:
        self._native = native

    @property
    def process_id(self) -> int:
        """The number of this task."""
        return self._native.process_id

    @property
    def num_processes(self) -> int:
        """How many tasks the job has."""
        return self._native.num_processes

    @property
    def incarnation(self) -> int:
        """The random identity of this life of the task."""
        return self._native.incarnation

    @property
    def run(self) -> int:
        """The identity of the job's run."""
        return self._native.run

    def engine(self) -> Engine:
        """Returns the transfer engine of this incarnation, which ends with it."""
        from muster.transfer import Engine

        return Engine(self._native.engine())

    def barrier(self, name: str, timeout: float = 300.0, *, process_ids: Sequence[int] | None = None) -> int:
        """Waits until all tasks, or those of `process_ids`, have come to the barrier. Returns how often it was used before."""
        return self._native.barrier(name, timeout, None if process_ids is None else list(process_ids))

    def live_set(self, timeout: float = 300.0) -> tuple[Member, ...]:
        """Returns the live tasks, once every one of them has called this. All get the same answer."""
        return tuple(Member(*member) for member in self._native.live_set(timeout))

    def put(self, key: str, value: bytes | str, *, overwrite: bool = False) -> None:
        """Writes a key, which must not exist unless `overwrite`. A text is written as UTF-8."""
        self._native.put(key, value.encode() if isinstance(value, str) else bytes(value), overwrite=overwrite)

    def get(self, key: str, timeout: float = 300.0) -> bytes:
        """Returns the value of a key, once it has one."""
        return self._native.get_value(key, timeout)

    def try_get(self, key: str) -> bytes | None:
        """Returns the value of a key; None if it has none."""
        return self._native.try_get(key)

    def list(self, directory: str) -> dict[str, bytes]:
        """Returns the keys below a directory with their values."""
        return dict(self._native.list_keys(directory))

    def delete(self, key: str) -> None:
        """Deletes a key and all keys below it."""
        self._native.delete(key)

    def connected(self) -> dict[int, int]:
        """Returns at once the connected tasks and their incarnations, as far as this process knows them."""
        return self._native.connected()

    def watch(self, known: Mapping[int, int], timeout: float = 300.0) -> dict[int, int]:
        """Returns the connected tasks and their incarnations as soon as they differ from `known`."""
        return self._native.watch(dict(known), timeout)

    def notice(self) -> str | None:
        """Returns the preemption notice of the job; None if there is none."""
        return self._native.notice()

    def drain(self) -> None:
        """Asks all tasks to agree on a step and save, as JAX does at SIGTERM."""
        self._native.drain()

    def reached_sync_point(self, step: int, timeout: float = 300.0) -> bool:
        """Returns whether all tasks have agreed to save before `step`. Call it before each step, with its number."""
        return self._native.reached_sync_point(step, timeout)

    def leave(self, timeout: float = 300.0) -> None:
        """Leaves the job: alone if it is recoverable, else together with all other tasks.

        If that does not succeed in time, this incarnation continues; `end()` ends it all the same.
        """
        self._native.leave(timeout)

    def end(self) -> None:
        """Ends without telling the service, which then counts this task as lost."""
        self._native.end()

    def __enter__(self) -> Agent:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and not self._native.has_ended:
            self.leave()
        else:
            self.end()

    def __repr__(self) -> str:
        return f"<muster.Agent process {self.process_id} of {self.num_processes}, incarnation {self.incarnation:016x}>"
