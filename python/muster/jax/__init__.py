"""Joins a JAX process to its job.

After `import muster.jax`, `jax.distributed.initialize()` looks for Muster before it looks for Slurm, Open MPI or
Kubernetes. It finds Muster if these variables are set, as `muster launch` does:

    MUSTER_PROCESS_ID, MUSTER_NUM_PROCESSES     which process this is, and how many there are
    JAX_COORDINATOR_ADDRESS                     HOST:PORT of the service; or MUSTER_COORDINATOR_ADDRESS, and then the numbers
                                                may come from Slurm, Kubernetes or Open MPI
    MUSTER_LOCAL_PROCESS_ID                     if set, the one GPU that this process uses
    MUSTER_JAX_DETECTION                        0 turns all of this off

`muster.jax.initialize()` does the same by an explicit call. It starts no service of JAX's own in process 0, and
raises errors where JAX's initialize() ends the process.

The import also sets `--xla_disable_hlo_passes=cpu-all-reduce-combiner` in XLA_FLAGS, which `live_devices()` needs on
CPUs: a combined all-reduce does not end when a process is lost. The processes of a job must compile the same programs,
so import muster.jax in all of them, and before JAX computes anything.
"""

from __future__ import annotations

from muster.jax import _cluster, _internals
from muster.jax._arrays import DefinitionEvent, describe, when_defined
from muster.jax._elastic import elastic
from muster.jax._initialize import initialize
from muster.jax._internals import abort_collectives_on_failure, reached_sync_point
from muster.jax._live import LiveDevices, MembershipChanged, live_devices
from muster.jax._recover import recover

__all__ = [
    "DefinitionEvent",
    "LiveDevices",
    "MembershipChanged",
    "abort_collectives_on_failure",
    "describe",
    "elastic",
    "initialize",
    "live_devices",
    "recover",
    "reached_sync_point",
    "when_defined",
]

_cluster.register()
_internals.keep_all_reduces_apart()
