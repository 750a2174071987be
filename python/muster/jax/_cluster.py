"""Makes `jax.distributed.initialize()` find Muster."""

from __future__ import annotations

import logging
import os
import time
from typing import Any

from muster import _native
from muster._tls import Tls, native_tls
from muster.errors import ClusterEnvError, Deadline, ServiceUnreachable
from muster.jax import _internals

_LOG = logging.getLogger("muster")

_ADDRESS = "MUSTER_COORDINATOR_ADDRESS"
_PROCESS_ID = "MUSTER_PROCESS_ID"
_DETECTION = "MUSTER_JAX_DETECTION"
# One question to the service, and the pause before the next if it is away.
QUESTION_S = 5.0
_PAUSE_S = 0.2
# How long JAX's own initialize() waits for the service if only that knows the number of processes: JAX's own default.
_SERVICE_S = 300.0

# A task, the incarnation that registered last (0: none did), whether it is connected, and its error.
Presence = list[tuple[int, int, bool, str]]

# In place of a process id: the service knows it.
_AUTO = "auto"

# JAX's own service, which process 0 starts beside Muster's: at a free port of this machine alone, where nobody looks for it.
_BIND_ADDRESS = ("JAX_COORDINATOR_BIND_ADDRESS", "127.0.0.1:0")


def is_on() -> bool:
    """Returns whether detection is on: MUSTER_JAX_DETECTION is not 0."""
    return os.environ.get(_DETECTION) != "0"


def is_present() -> bool:
    """Returns whether the environment says that this process belongs to a job of a Muster."""
    address = os.environ.get(_ADDRESS)
    return is_on() and bool(address or (os.environ.get(_PROCESS_ID) and os.environ.get("JAX_COORDINATOR_ADDRESS")))


def claims(process_id: int | str | None) -> bool:
    """Returns whether this process leaves its process id to the service, by `process_id` or by MUSTER_PROCESS_ID."""
    if isinstance(process_id, str) and process_id != _AUTO:
        raise ClusterEnvError(f"process_id is {process_id!r}: give a number, or {_AUTO!r}")
    return process_id == _AUTO or (process_id is None and os.environ.get(_PROCESS_ID) == _AUTO)


def find_place(
    service: str | None = None,
    num_processes: int | None = None,
    process_id: int | str | None = None,
    *,
    timeout: float = 300.0,
) -> tuple[str, int | None, int]:
    """Returns the address of the service, the number of processes if anything says it, and which process this is.

    If that is left to the service, it asks it, and waits for an answer for `timeout` seconds.
    """
    if not claims(process_id):
        return _native.find_place(service, num_processes, None if process_id is None else int(process_id))
    address, told, process, tasks = _native.claim_place(service, num_processes, native_tls(_internals.tls()[0]), timeout)
    return address, tasks if told is None else told, process


def wait_for_service(address: str, tls: Tls | None, timeout: float, end: float) -> Presence:
    """Returns the state of each task, once the service answers."""
    while True:
        left = max(end - time.monotonic(), 0.0)
        try:
            return _native.task_presence(address, native_tls(tls), max(min(left, QUESTION_S), _PAUSE_S))
        except (ServiceUnreachable, Deadline) as error:
            if time.monotonic() + _PAUSE_S >= end:
                raise ServiceUnreachable(f"{error} (tried for {timeout:g} s)", address) from error
        time.sleep(_PAUSE_S)


def own_identity() -> str | None:
    """Returns the identity of this process as it is published; None if nothing says it."""
    try:
        host, local, _, _ = _native.host_identity(None)
    except ClusterEnvError:
        if os.environ.get("MUSTER_HOST_ID"):
            raise
        return None
    return f"{local} {host}"


def publish_identity(client: Any, process_id: int, identity: str) -> None:
    """Writes the identity of this process into the store: by it the service finds the devices of this host again in later runs."""
    client.key_value_set(_native.host_key(process_id), identity, allow_overwrite=True)


def _publish_own_identity(client: Any, process_id: int) -> None:
    """Publishes the identity of a process that has joined by JAX's own initialize(). Nothing that fails here ends the program."""
    try:
        identity = own_identity()
        if identity is not None:
            publish_identity(client, process_id, identity)
    except Exception as error:
        _LOG.warning("the identity of this host is not published: %s", error)


def local_process_id() -> int | None:
    """Returns which of the processes of this machine this is; None if nothing says it."""
    text = os.environ.get("MUSTER_LOCAL_PROCESS_ID")
    if not text:
        return None
    try:
        return int(text)
    except ValueError:
        raise ClusterEnvError(f"MUSTER_LOCAL_PROCESS_ID is {text!r}, which is no number: correct it, or unset it") from None


def register() -> None:
    """Adds Muster to the cluster environments of JAX, before all others: those of Slurm or Open MPI may be present too. What joins by
    JAX's own initialize() publishes its identity as well."""
    if is_on():
        _internals.when_joined(_publish_own_identity)
    base: Any = _internals.clusters.ClusterEnv

    class MusterCluster(base):  # type: ignore[misc]
        """Detects a job of a Muster by MUSTER_* variables."""

        name = "muster"

        @classmethod
        def is_env_present(cls) -> bool:
            present = is_present()
            if present:
                # JAX reads it after the detection.
                os.environ.setdefault(*_BIND_ADDRESS)
            return present

        @classmethod
        def get_coordinator_address(
            cls, timeout_secs: int | None = None, override_coordinator_port: str | None = None
        ) -> str:
            # The address is needed before the service is asked for anything.
            address = _native.find_place(None, None, 0 if claims(None) else None)[0]
            if override_coordinator_port:
                return f"{address.rpartition(':')[0]}:{override_coordinator_port}"
            return address

        @classmethod
        def get_process_count(cls) -> int:
            address, count, _ = find_place()
            if count is not None:
                return count
            # An indexed job of Kubernetes does not tell its pods how many they are.
            return len(wait_for_service(address, _internals.tls()[0], _SERVICE_S, time.monotonic() + _SERVICE_S))

        @classmethod
        def get_process_id(cls) -> int:
            return find_place()[2]

        @classmethod
        def get_local_process_id(cls) -> int | None:
            return local_process_id()

    types: list[Any] = base._cluster_types
    types.remove(MusterCluster)
    types.insert(0, MusterCluster)
