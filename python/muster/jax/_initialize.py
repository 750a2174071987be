"""`muster.jax.initialize()`: joins a job as jax.distributed.initialize() does, but with errors that a program can
handle.

When `initialization_timeout` of JAX's client is over, the client ends the process with SIGABRT. So this module
gives the client a timeout of weeks and lets it connect in a thread. The caller waits for the thread with its own
deadline, and Ctrl-C ends the wait. The thread does not hold the GIL while it connects. JAX's client cannot be
stopped, so if the deadline passes, the thread keeps connecting. The next call of `initialize()` waits for the same
thread.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from typing import Any, Literal

from muster import _native
from muster._client import Client
from muster._tls import Tls, native_tls
from muster.errors import ClusterEnvError, Deadline, MusterError, Refused, ServiceUnreachable, SettingsError, TasksMissing
from muster.jax import _cluster, _internals
from muster.jax._cluster import QUESTION_S

_LOG = logging.getLogger("muster")

# Longer than anybody waits, and less than 2**31 milliseconds.
_CLIENT_TIMEOUT_S = 20 * 24 * 3600
# How often the missing tasks are logged.
_LOG_S = 10.0
# The most tasks that a message lists.
_NAMED_MAX = 20


class _Connection:
    """JAX's client, while it connects."""

    def __init__(self, address: str, process_id: int, client: Any) -> None:
        self.address = address
        self.process_id = process_id
        self.client = client
        self.error: Exception | None = None
        self.is_over = threading.Event()
        threading.Thread(target=self._connect, name="muster-join", daemon=True).start()

    def _connect(self) -> None:
        try:
            self.client.connect()
        except Exception as error:
            self.error = error
        finally:
            self.is_over.set()


_lock = threading.Lock()
_under_way: _Connection | None = None


def initialize(
    service: str | None = None,
    num_processes: int | None = None,
    process_id: int | Literal["auto"] | None = None,
    *,
    initialization_timeout: float = 300,
    heartbeat_timeout_seconds: float = 100,
    preemption: bool | None = None,
) -> None:
    """Joins this process to its job, in place of jax.distributed.initialize(). Call it before anything else of JAX.

    What is left out is found in the environment: MUSTER_PROCESS_ID, MUSTER_NUM_PROCESSES and JAX_COORDINATOR_ADDRESS, or the
    variables of Slurm, Kubernetes or Open MPI. Process 0 starts no service of its own.

    Args:
        service: HOST:PORT of the service's gRPC port.
        num_processes: how many processes the job has; if nothing says it, what the service says.
        process_id: the number of this process, from 0; or "auto": the service gives it the number that this host had in earlier
            runs, and a new host gets one when as many processes are there as the job has tasks.
        initialization_timeout: how long to wait, in seconds, for the service and for the other processes.
        heartbeat_timeout_seconds: the job's heartbeat timeout; a heartbeat is sent at half of it.
        preemption: whether SIGTERM is caught and becomes a notice, by which all processes agree on a step at which they save
            (`reached_sync_point()`). If it is off, SIGTERM ends the process. If not given, JAX's own setting counts, which is on
            unless JAX_ENABLE_PREEMPTION_SERVICE is 0.

    Raises:
        ClusterEnvError: nothing says which process this is or where the service is, or two sources disagree.
        ServiceUnreachable: no service answers.
        TasksMissing: not all processes have registered in time; `tasks` has those that have not. This process stays
            registered: call initialize() again to go on waiting, or end the process.
        Refused: the service refuses this process, for example because it is excluded.
    """
    if not 0 <= initialization_timeout < _CLIENT_TIMEOUT_S:
        raise SettingsError(f"initialization_timeout is {initialization_timeout}: give a number of seconds, at most 20 days")
    if not 1 <= heartbeat_timeout_seconds < _CLIENT_TIMEOUT_S:
        raise SettingsError(f"heartbeat_timeout_seconds is {heartbeat_timeout_seconds}: give a number of seconds, at least 1")
    if not _lock.acquire(blocking=False):
        raise SettingsError("another thread of this process is in muster.jax.initialize(): call it once, from one thread")
    try:
        _initialize(
            service,
            num_processes,
            process_id,
            float(initialization_timeout),
            int(heartbeat_timeout_seconds),
            _internals.preemption_is_on() if preemption is None else preemption,
        )
    finally:
        _lock.release()


def _initialize(
    service: str | None,
    num_processes: int | None,
    process_id: int | str | None,
    timeout: float,
    heartbeat_timeout: int,
    preemption: bool,
) -> None:
    global _under_way
    _internals.check_not_too_late()
    end = time.monotonic() + timeout
    identity = _cluster.own_identity()
    address, count, process = _cluster.find_place(service, num_processes, process_id, timeout=timeout)
    tls, tls_arguments = _internals.tls()
    presence = _cluster.wait_for_service(address, tls, timeout, end)
    tasks = len(presence)
    if count is not None and count != tasks:
        raise ClusterEnvError(
            f"the job at {address} has {tasks} task(s), but this process was told that there are {count} processes: correct "
            f"num_processes= or MUSTER_NUM_PROCESSES, or serve a job of {count} (`muster serve --tasks {count}`)"
        )
    if process >= tasks:
        raise ClusterEnvError(
            f"the job at {address} has {tasks} task(s), numbered from 0, and none with the number {process}: correct process_id= "
            "or MUSTER_PROCESS_ID"
        )
    _check_admission(address, process, tls, bool(presence[process][3]))
    connection = _under_way
    if connection is not None and (connection.address, connection.process_id) != (address, process):
        raise SettingsError(
            f"this process still registers as task {connection.process_id} at {connection.address}, since an earlier "
            "initialize() that was not over in time: call it with the same arguments, or start the process again"
        )
    if connection is None:
        client = _internals.new_client(address, process, _CLIENT_TIMEOUT_S, heartbeat_timeout, tls_arguments)
        connection = _under_way = _Connection(address, process, client)
    _wait_for_tasks(connection, tls, timeout, end)
    _under_way = None
    if connection.error is not None:
        raise _refusal_error(address, connection.error) from connection.error
    _restrict_devices()
    _internals.adopt(connection.client, address, tasks, process, preemption)
    if identity is not None:
        _cluster.publish_identity(connection.client, process, identity)


def _check_admission(address: str, process: int, tls: Tls | None, has_failed: bool) -> None:
    """Raises if the service refuses this process, upon which JAX's client would end it."""
    text = _native.query_admission_refusal(address, process, native_tls(tls), QUESTION_S)
    if text is None:
        return
    # A task that failed by an exclusion is refused with this text until it registers again, even if it was readmitted.
    if not has_failed or _is_excluded(process):
        raise Refused(f"the service at {address} refuses this process: {text}", "PERMISSION_DENIED")


def _is_excluded(process: int) -> bool:
    """Returns whether the REST API of the server, if MUSTER_SERVER names it, has an exclusion of the task in force."""
    if not os.environ.get("MUSTER_SERVER"):
        return False
    try:
        return any(process in exclusion.tasks for exclusion in Client(timeout=QUESTION_S).exclusions())
    except MusterError:
        return False


def _wait_for_tasks(connection: _Connection, tls: Tls | None, timeout: float, end: float) -> None:
    """Waits until the client has connected, which is when all tasks have registered."""
    while not connection.is_over.wait(min(max(end - time.monotonic(), 0.0), _LOG_S)):
        is_late = time.monotonic() >= end
        try:
            presence = _native.task_presence(connection.address, native_tls(tls), QUESTION_S)
        except (ServiceUnreachable, Deadline) as error:
            if is_late:
                raise ServiceUnreachable(f"{error} (tried for {timeout:g} s)", connection.address) from error
            continue
        missing = [task for task, incarnation, _, _ in presence if incarnation == 0]
        if not is_late:
            _LOG.warning("waits for %d of %d tasks to register: %s", len(missing), len(presence), _tasks_text(missing))
            continue
        if connection.is_over.is_set():
            return
        if missing:
            who = f"{len(missing)} of {len(presence)} tasks have not registered at {connection.address}: {_tasks_text(missing)}"
        else:
            who = f"all tasks have registered at {connection.address}, but not at the same time: some have gone again"
        raise TasksMissing(
            f"{who} (waited for {timeout:g} s). Start them, or look at `muster status`. This process stays registered: call "
            "initialize() again to go on waiting, or end the process",
            missing,
        )


def _tasks_text(tasks: list[int]) -> str:
    more = len(tasks) - _NAMED_MAX
    return ", ".join(map(str, tasks[:_NAMED_MAX])) + (f" and {more} more" if more > 0 else "")


def _refusal_error(address: str, error: Exception) -> Refused:
    code, _, text = str(error).partition(":")
    if not (code.isupper() and text):
        code, text = "UNKNOWN", str(error)
    return Refused(f"the service at {address} refuses this process: {code}:{text}", code)


def _restrict_devices() -> None:
    """Restricts this process to some GPUs of its machine, if the environment says so; as JAX's initialize() does."""
    named = os.environ.get("JAX_LOCAL_DEVICE_IDS")
    local = _cluster.local_process_id() if _cluster.is_on() else None
    try:
        ids = [int(text) for text in named.split(",")] if named else [] if local is None else [local]
    except ValueError:
        raise SettingsError(f"JAX_LOCAL_DEVICE_IDS is {named!r}: give numbers with commas between them, or unset it") from None
    if ids:
        _internals.show_devices(ids)
