"""Restores local checkpoints of Orbax correctly after processes and hosts have changed places.

Orbax's emergency checkpoints (ReplicatorCheckpointManager) stay on the disks of the hosts. Orbax uses process ids
to find out which device ids a host has now. So if processes have changed hosts since the save, it fails or reads
another host's part. This module matches the hosts themselves, by the identities that Muster has for them
(MUSTER_HOST_ID, or what the cluster or the machine provides):

    muster.jax.initialize()
    muster.orbax.install()                  # in every process, before saving and before restoring

Importing this module needs neither JAX nor Orbax. It is tested with orbax-checkpoint 0.12.8 and JAX 0.10.2 and
0.12.0.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from muster import _native
from muster.errors import ClusterEnvError, Deadline, MusterError, SettingsError

__all__ = ["host_rows", "install", "write_jax_init_info"]

_LOG = logging.getLogger("muster")

# Where each process publishes its row: the ids of its devices, in JSON.
_ROWS = "muster/host_rows/"
# The order of the hosts at the time of a save, in the folder of Orbax's process metadata.
_HOSTS_FILE = "muster_hosts.json"
_INIT_INFO_FILE = "jax-init-info.txt"
_TESTED = "muster.orbax is tested with orbax-checkpoint 0.12.8"

_Host = tuple[str, int]
"""The identity of a process: its host, and its number there."""
_Rows = list[list[int]]


def host_rows(timeout: float = 300.0) -> list[list[int]]:
    """Returns the ids of the devices of each process, in the order of the identities of their hosts.

    The order stays when processes change hosts, and when device ids change. Every process of the job must call it, and each waits
    for the others.

    Raises:
        ClusterEnvError: two processes have the same identity, or nothing identifies this host.
        Deadline: not all processes have called it within `timeout` seconds.
    """
    return _ordered(_gather_identities(timeout))[1]


def install(timeout: float = 300.0) -> list[list[int]]:
    """Makes Orbax match hosts by their identities, when saving and when restoring; returns the rows of `host_rows()`.

    Call it in every process once JAX has joined its job: in place of Orbax's `initialize_distributed_to_device_ids()`, or after it.
    It may be called again, which a process must do if the devices have changed. A save keeps the order of the hosts beside Orbax's
    own metadata, so a restore also finds the places of the hosts that stayed if others were replaced. A new host takes the place
    of a missing one, whose data Orbax expects there; bringing them is the replicator's part.

    Raises:
        MusterError: this release of Orbax is built in another way than those that are known.
    """
    multihost = _import_orbax_module("orbax.checkpoint._src.multihost.multihost")
    consistency = _import_orbax_module("orbax.checkpoint.experimental.emergency.mesh_consistency")
    for module, name in (
        (multihost, "_DISTRIBUTED_TO_DEVICE_IDS"),
        (consistency, "save_process_metadata"),
        (consistency, "read_process_metadata"),
    ):
        if not hasattr(module, name):
            raise MusterError(f"{module.__name__} has no {name}: {_TESTED}")
    hosts, rows = _ordered(_gather_identities(timeout))
    multihost._DISTRIBUTED_TO_DEVICE_IDS = rows
    known = getattr(consistency, "_muster_hosts", None)
    consistency._muster_hosts = hosts
    if known is None:
        _wrap_metadata_functions(consistency)
    return rows


def write_jax_init_info(
    directory: str | os.PathLike[str],
    *,
    service: str | None = None,
    process_id: int | Literal["auto"] | None = None,
    timeout: float = 300.0,
) -> Path:
    """Writes `jax-init-info.txt`, from which Orbax's `initialize_multi_tier_checkpointing()` learns which process this is.

    The file has two lines: the process id, and the address of the service. Call it before that function, in every process. What is
    left out is found as `muster.jax.initialize()` finds it.

    Args:
        directory: the local checkpoint directory of this process.
        service: HOST:PORT of the service's gRPC port.
        process_id: the number of this process; or "auto": the service gives it the number that this host had in earlier runs, so
            that the process finds the checkpoints of its host.
        timeout: how long to wait for that, in seconds.

    Raises:
        ClusterEnvError: nothing says which process this is or where the service is.
        SettingsError: the directory cannot be written to.
    """
    # Registers the cluster environment, by which jax.distributed.initialize() learns the number of processes.
    cluster: Any = importlib.import_module("muster.jax._cluster")
    importlib.import_module("muster.jax")
    address, _, process = cluster.find_place(service, None, process_id, timeout=timeout)
    # Orbax calls jax.distributed.initialize(), with which process 0 would start a service at the address of Muster.
    os.environ.setdefault("JAX_COORDINATOR_BIND_ADDRESS", "127.0.0.1:0")
    path = Path(directory) / _INIT_INFO_FILE
    whole = path.with_name(f".{_INIT_INFO_FILE}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Orbax reads it as soon as it is there, so it comes whole.
        whole.write_text(f"{process}\n{address}\n", encoding="utf-8")
        whole.replace(path)
    except OSError as error:
        raise SettingsError(f"cannot write {path}: {error}") from error
    return path


def _gather_identities(timeout: float) -> list[tuple[_Host, list[int]]]:
    """Returns the identity and the device ids of each process, by process id."""
    jax: Any = importlib.import_module("jax")
    state: Any = importlib.import_module("muster.jax._internals").state()
    host, local, _, survives = _native.host_identity(None)
    own_ids = [int(device.id) for device in jax.local_devices()]
    if state.client is None:
        return [((host, local), own_ids)]
    if not survives:
        _LOG.warning("this host has no identity that stays when it starts again; its boot id stands in for one: set MUSTER_HOST_ID")
    count, process, client = int(state.num_processes), int(state.process_id), state.client
    client.key_value_set(_native.host_key(process), f"{local} {host}", allow_overwrite=True)
    own = json.dumps({"host": host, "local": local, "devices": own_ids})
    client.key_value_set(f"{_ROWS}{process}", own, allow_overwrite=True)
    end = time.monotonic() + timeout
    while True:
        published = {key.rsplit("/", 1)[-1]: value for key, value in client.key_value_dir_get(_ROWS)}
        missing = [number for number in range(count) if str(number) not in published]
        if not missing:
            return [_parse_row(number, published) for number in range(count)]
        left_ms = int((end - time.monotonic()) * 1000)
        if left_ms <= 0:
            shown = ", ".join(map(str, missing[:20]))
            raise Deadline(
                f"{len(missing)} of {count} processes have not called muster.orbax.host_rows() or install() within {timeout:g} s: "
                f"{shown}. Every process must call it"
            )
        try:
            client.blocking_key_value_get(f"{_ROWS}{missing[0]}", min(left_ms, 1000))
        except Exception as error:
            # The class differs between releases; the status is in the text.
            if "DEADLINE_EXCEEDED" not in str(error):
                raise MusterError(f"the service does not tell the rows of the other processes: {error}") from error


def _parse_row(process: int, published: Mapping[str, str]) -> tuple[_Host, list[int]]:
    try:
        row = json.loads(published[str(process)])
        return (str(row["host"]), int(row["local"])), [int(device) for device in row["devices"]]
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise MusterError(f"the key {_ROWS}{process} holds no row: {error!r}; only muster.orbax writes it") from error


def _ordered(rows: Sequence[tuple[_Host, list[int]]]) -> tuple[list[_Host], _Rows]:
    """Returns the hosts in order, and the device ids of each."""
    by_host: dict[_Host, int] = {}
    for process, (host, _) in enumerate(rows):
        if host in by_host:
            raise ClusterEnvError(
                f"processes {by_host[host]} and {process} both say that they are process {host[1]} of host {host[0]}: set "
                "MUSTER_LOCAL_PROCESS_ID if one host runs several, or MUSTER_HOST_ID if two hosts have the same identity"
            )
        by_host[host] = process
    hosts = sorted(by_host)
    return hosts, [rows[by_host[host]][1] for host in hosts]


def _aligned(saved_rows: Sequence[Sequence[int]], saved: Sequence[_Host], now: Sequence[_Host]) -> _Rows:
    """Returns the saved rows in the order of the present hosts. A host without a row gets that of a host that is gone."""
    if not len(saved_rows) == len(saved) == len(now):
        # Orbax matches no hosts then.
        return [list(row) for row in saved_rows]
    row_of = dict(zip(saved, saved_rows))
    present = set(now)
    left = iter([row for host, row in zip(saved, saved_rows) if host not in present])
    return [list(row_of[host] if host in row_of else next(left)) for host in now]


def _wrap_metadata_functions(consistency: Any) -> None:
    """Wraps the two functions by which Orbax saves and reads the metadata of processes."""
    save, read = consistency.save_process_metadata, consistency.read_process_metadata

    async def save_process_metadata(directory: Any, global_mesh: Any, distributed_to_device_ids: Any) -> None:
        await save(directory, global_mesh, distributed_to_device_ids)
        folder = consistency.process_metadata_folder(directory)
        (folder / _HOSTS_FILE).write_text(json.dumps(consistency._muster_hosts))

    def read_process_metadata(directory: Any) -> Any:
        rows, device_ids = read(directory)
        path = consistency.process_metadata_folder(directory) / _HOSTS_FILE
        if path.exists():
            try:
                saved = [(str(host), int(local)) for host, local in json.loads(path.read_text())]
            except (TypeError, ValueError, RecursionError) as error:
                raise MusterError(f"{path} holds no list of hosts: {error!r}") from error
            rows = _aligned(rows, saved, consistency._muster_hosts)
        return rows, device_ids

    consistency.save_process_metadata = save_process_metadata
    consistency.read_process_metadata = read_process_metadata


def _import_orbax_module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MusterError(f"there is no {name} ({error}): install orbax-checkpoint; {_TESTED}") from error
