"""The exceptions of this package. The message of each says what to do next.

Every exception is a MusterError, which is a RuntimeError. If Python has a class for the same failure, the exception
is also of that class: for example, `except TimeoutError` catches Deadline.
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = [
    "ArrayDeleted",
    "ArrayMemoryError",
    "Cancelled",
    "ClusterEnvError",
    "ComputationFailed",
    "CopyWarning",
    "Deadline",
    "LayoutMismatch",
    "MusterError",
    "OrderMismatch",
    "PeerDead",
    "PeerJobRefused",
    "PlanError",
    "Refused",
    "ServiceUnreachable",
    "SettingsError",
    "Stalled",
    "StaleIncarnation",
    "StateDiverged",
    "StateLost",
    "TasksMissing",
    "TransferError",
    "UnsupportedRelease",
]


class MusterError(RuntimeError):
    """The base of all exceptions of this package."""


class SettingsError(MusterError, ValueError):
    """An argument, a file or an environment variable cannot be used."""


class ClusterEnvError(SettingsError):
    """The place of this process in its job is unknown, or two sources disagree about it."""


class UnsupportedRelease(MusterError, ImportError):
    """The installed JAX or jaxlib is too old, or lacks what this package uses of it. The message names the supported releases."""


class ServiceUnreachable(MusterError, ConnectionError):
    """No Muster answers at the address."""

    service: str
    """The address: HOST:PORT of the gRPC port, or the URL of the HTTP port."""

    def __init__(self, message: str, service: str = "") -> None:
        super().__init__(message)
        self.service = service


class Deadline(MusterError, TimeoutError):
    """A wait was not over within its timeout."""


class TasksMissing(Deadline):
    """Not all tasks of the job have registered within the timeout."""

    tasks: tuple[int, ...]
    """The tasks that have not registered, ascending."""

    def __init__(self, message: str, tasks: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.tasks = tuple(tasks)


class Refused(MusterError):
    """The service has answered with an error."""

    code: str
    """The status: of gRPC, such as PERMISSION_DENIED, or the type of the problem over HTTP, such as `ends-run`."""

    def __init__(self, message: str, code: str = "") -> None:
        super().__init__(message)
        self.code = code


class StaleIncarnation(MusterError):
    """This incarnation of the task is over: the service counts it as lost, another process took its place, or its run ended."""


class StateLost(MusterError):
    """A part of the state was only in processes that are lost."""


class StateDiverged(MusterError):
    """Processes that should have equal states have different ones."""


class TransferError(MusterError):
    """A transfer has failed. No byte of it lands any more, here or at the peer."""

    reason: str
    """The reason as in metrics and on the job's page: `peer_dead`, `cancelled`, `stalled` and so on."""

    def __init__(self, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason


class PeerDead(TransferError, ConnectionError):
    """The process at the other end is gone."""


class PeerJobRefused(TransferError):
    """The settings of the two jobs do not allow transfers between them, or do not any more; or there is no such job. The message
    says which job's setting is missing and how to set it."""

    job: str
    """The other job."""

    def __init__(self, message: str, job: str = "", reason: str = "job_refused") -> None:
        super().__init__(message, reason)
        self.job = job


class Cancelled(TransferError):
    """The program of one side has cancelled the transfer."""


class Stalled(TransferError):
    """Nothing has moved for longer than the stall timeout, or the peer was silent for as long."""


class LayoutMismatch(TransferError):
    """The two sides have arrays of different shape, dtype or division into shards."""


class OrderMismatch(TransferError):
    """The two sides have launched different transfers as the same one."""


class PlanError(MusterError, ValueError):
    """An array cannot be moved from one sharding to the other."""


class ArrayMemoryError(MusterError, BufferError):
    """The memory of an array or of a Buffer cannot be used in this way, or not now."""


class ArrayDeleted(ArrayMemoryError):
    """The array was deleted, or donated to a computation, and has no memory."""


class ComputationFailed(MusterError):
    """The computation that was to define an array has failed. The cause is JAX's own error."""


class CopyWarning(UserWarning):
    """A copy was made where the memory itself was asked for."""
