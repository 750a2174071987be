"""Muster for Python: the coordination plane of multi-controller JAX jobs.

    muster.jax      joins a JAX process to its job (`import muster.jax`); needs JAX
    muster.Client   shows the jobs of a service and steers them, over HTTP
    muster.Agent    a task without JAX: barriers, key-value store, live set; `muster.join()` makes one
    muster.show_stacks()  lets an operator ask for the stacks of this process
    muster.nccl_plugin()  the file of NCCL's profiler plug-in, which this package contains
    muster.empty    allocates memory of the transfer engine as a muster.Buffer, which JAX and NumPy use without a copy
    muster.transfer moves arrays between the processes of a job: `muster.transfer.attach()`
    muster.errors   the exceptions

Importing this module needs neither JAX nor NumPy.
"""

from __future__ import annotations

from muster._agent import Agent, Member, join
from muster._client import Client
from muster._memory import Buffer, empty
from muster._models import (
    Drain,
    Event,
    Exclusion,
    ExclusionPreview,
    FirstCause,
    Job,
    JobSummary,
    Run,
    Task,
)
from muster._native import __version__
from muster._nccl import nccl_plugin
from muster._network import Network
from muster._stacks import show_stacks
from muster._tls import Tls
from muster.errors import (
    ArrayDeleted,
    ArrayMemoryError,
    Cancelled,
    ClusterEnvError,
    ComputationFailed,
    CopyWarning,
    Deadline,
    LayoutMismatch,
    MusterError,
    OrderMismatch,
    PeerDead,
    PeerJobRefused,
    PlanError,
    Refused,
    ServiceUnreachable,
    SettingsError,
    Stalled,
    StaleIncarnation,
    TasksMissing,
    TransferError,
)

__all__ = [
    "Agent",
    "ArrayDeleted",
    "ArrayMemoryError",
    "Buffer",
    "Cancelled",
    "Client",
    "ClusterEnvError",
    "ComputationFailed",
    "CopyWarning",
    "Deadline",
    "Drain",
    "Event",
    "Exclusion",
    "ExclusionPreview",
    "FirstCause",
    "Job",
    "JobSummary",
    "LayoutMismatch",
    "Member",
    "MusterError",
    "Network",
    "OrderMismatch",
    "PeerDead",
    "PeerJobRefused",
    "PlanError",
    "Refused",
    "Run",
    "ServiceUnreachable",
    "SettingsError",
    "Stalled",
    "StaleIncarnation",
    "Task",
    "TasksMissing",
    "Tls",
    "TransferError",
    "__version__",
    "empty",
    "join",
    "nccl_plugin",
    "show_stacks",
]
