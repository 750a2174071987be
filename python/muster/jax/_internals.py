"""The private parts of JAX that this package uses. No other file touches a private name of JAX.

JAX has no public way to add a cluster environment, or to connect a client without a service in process 0, and none to
make an array over memory in a few microseconds. The names in this file exist in every release from 0.6.2 to 0.12.0,
with different arguments. The tests run the releases of tests/jax/versions. An older release is refused; with a newer
one, a warning is logged.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

import jax

from muster._tls import Tls
from muster.errors import MusterError, SettingsError, UnsupportedRelease
from muster.jax._preemption import FirstStepManager

_LOG = logging.getLogger("muster")

# The releases of JAX and jaxlib that are tested; an older one is refused.
_OLDEST = (0, 6, 2)
_NEWEST = (0, 12, 0)
_SUPPORTED = f"muster.jax supports JAX and jaxlib {'.'.join(map(str, _OLDEST))} to {'.'.join(map(str, _NEWEST))}"
_WITHOUT_IT = (
    "A program joins its job without muster.jax if JAX_COORDINATOR_ADDRESS and JAX_COORDINATOR_BIND_ADDRESS=127.0.0.1:0 are set and "
    "it calls jax.distributed.initialize()"
)


def _private(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UnsupportedRelease(f"JAX {jax.__version__} has no {name}: {_SUPPORTED}. {_WITHOUT_IT}") from error


def _check_releases() -> None:
    """Raises if JAX or jaxlib is too old, though it may have all names of this file: what they do may differ."""
    for package, release in (("JAX", jax.__version_info__), ("jaxlib", _private("jaxlib.version").__version_info__)):
        text = ".".join(map(str, release))
        if tuple(release) < _OLDEST:
            raise UnsupportedRelease(f"{package} {text} is too old: {_SUPPORTED}. {_WITHOUT_IT}")
        if tuple(release[:2]) > _NEWEST[:2]:
            _LOG.warning("%s %s is not tested: %s", package, text, _SUPPORTED)


_check_releases()
clusters: Any = _private("jax._src.clusters")
distributed: Any = _private("jax._src.distributed")
xla_bridge: Any = _private("jax._src.xla_bridge")

# Makes an array over the memory of a DLPack capsule. jax.dlpack.from_dlpack() calls it too, and then spends most of its time in a
# conversion that has nothing to do, except for types of 64 bits.
_array_of_capsule: Any = getattr(_private("jaxlib._jax"), "dlpack_managed_tensor_to_buffer", None)

# Makes a DLPack capsule of an array. The array's own __dlpack__() calls it too, after checks that take three times as long.
_capsule_of_array: Any = getattr(_private("jaxlib._jax"), "buffer_to_dlpack_managed_tensor", None)

# The class of arrays that have memory; traced ones and those of keys are of others. To look at the class takes less time than to
# ask jax.Array and jax.core.Tracer.
concrete_array: Any = getattr(_private("jax._src.array"), "ArrayImpl", None)

# Up to 0.6.2 an interval and a count of missed heartbeats, then one timeout.
_HEARTBEAT_BY_COUNT = not hasattr(distributed.State, "partition_index")

# The step between the ids of the CPU devices of two processes.
DEVICES_PER_PROCESS = 131072 if _HEARTBEAT_BY_COUNT else 2048

_VISIBLE_DEVICES = ("jax_cuda_visible_devices", "jax_rocm_visible_devices", "jax_oneapi_visible_devices")


def state() -> Any:
    """Returns the state of jax.distributed, which JAX's own initialize() fills in."""
    return distributed.global_state


def array_over(buffer: Any) -> Any:
    """Returns an array of JAX over the memory of a Buffer, whose type has fewer than 64 bits; None if this release of JAX has no
    function for that which is quicker than jax.dlpack.from_dlpack()."""
    if _array_of_capsule is None:
        return None
    device = xla_bridge.get_backend("cpu").device_from_local_hardware_id(buffer.device)
    return _array_of_capsule(buffer.__dlpack__(), device, None)


def array_while_received(buffer: Any) -> tuple[Any, Any] | None:
    """Returns an array of JAX over the memory of a Buffer into which a transfer receives now, and its backend. Nobody may see it
    before the transfer is complete. None if no transfer receives into it now, or if `array_over()` does not serve it."""
    if _array_of_capsule is None:
        return None
    capsule = buffer.lend_while_received()
    if capsule is None:
        return None
    backend = xla_bridge.get_backend("cpu")
    return _array_of_capsule(capsule, backend.device_from_local_hardware_id(buffer.device), None), backend


def is_present_backend(backend: Any) -> bool:
    """Returns whether a backend for the CPU is still the one that makes arrays now."""
    return xla_bridge.get_backend("cpu") is backend


def capsule_of(array: Any) -> Any:
    """Returns the capsule of DLPack by which an array of JAX that is defined lends its memory."""
    if _capsule_of_array is None:
        return array.__dlpack__()
    # The capsule keeps the array that it is made of, which must not be the program's: when that one is deleted, jaxlib would end
    # the process.
    return _capsule_of_array(array.addressable_data(0))


def process_id() -> int:
    """Returns the number of this process in its job."""
    number: int = state().process_id
    return number


def check_not_too_late() -> None:
    """Raises if JAX has joined a job or begun to compute."""
    if state().client is not None:
        raise MusterError(
            "this process has joined a job already: call muster.jax.initialize() or jax.distributed.initialize(), and once"
        )
    if xla_bridge.backends_are_initialized():
        raise MusterError(
            "JAX has computed already, or listed its devices, and then it is too late to join a job: call "
            "muster.jax.initialize() before anything else of JAX"
        )


def tls() -> tuple[Tls | None, Mapping[str, Any]]:
    """Returns the certificates that JAX is configured with, and the arguments by which its client gets them."""
    of_config = getattr(distributed, "_get_mtls_kwargs", None)
    if of_config is None:
        return None, {}
    arguments: dict[str, Any] = of_config(None, None, None, None, None)
    ca = arguments.get("mtls_ca_file")
    if not ca:
        return None, arguments
    return Tls(ca, arguments.get("mtls_cert_file") or None, arguments.get("mtls_key_file") or None), arguments


def new_client(
    address: str, process_id: int, timeout: int, heartbeat_timeout: int, tls_arguments: Mapping[str, Any]
) -> Any:
    """Returns a client of the coordination service that is not connected."""
    runtime = _private("jaxlib._jax")
    heartbeats: dict[str, Any] = (
        {"heartbeat_interval": 1, "max_missing_heartbeats": heartbeat_timeout}
        if _HEARTBEAT_BY_COUNT
        else {"heartbeat_timeout": heartbeat_timeout}
    )
    return runtime.get_distributed_runtime_client(
        address, process_id, init_timeout=timeout, use_compression=True, **heartbeats, **tls_arguments
    )


def adopt(client: Any, address: str, num_processes: int, process_id: int, preemption: bool) -> None:
    """Makes a connected client that of jax.distributed, as its initialize() does."""
    current = state()
    current.coordinator_address = address
    current.num_processes = num_processes
    current.process_id = process_id
    current.client = client
    if preemption:
        if hasattr(jax.config, "jax_enable_preemption_service"):
            config: Any = jax.config
            config.update("jax_enable_preemption_service", True)
        # Without what `when_joined` has added.
        type(current).initialize_preemption_sync_manager(current)
        _ensure_first_step_counts()
    index = os.environ.get("JAX_PARTITION_INDEX") or os.environ.get("JAX_SLICE_INDEX")
    setattr(current, "slice_index" if _HEARTBEAT_BY_COUNT else "partition_index", int(index) if index else None)


def when_joined(then: Callable[[Any, int], None]) -> None:
    """Calls `then` with the client and the number of this process each time JAX's own initialize() has joined a job.

    The last thing that initialize() does with a connected client is to make its preemption sync manager.
    """
    current = state()
    make_manager = getattr(current, "initialize_preemption_sync_manager", None)
    if make_manager is None:
        return

    def after_connecting() -> None:
        make_manager()
        _ensure_first_step_counts()
        then(current.client, current.process_id)

    current.initialize_preemption_sync_manager = after_connecting


def preemption_is_on() -> bool:
    """Returns whether JAX is configured to catch SIGTERM and to agree on a step. JAX 0.6.2 has no such setting, so its variable
    is read here."""
    config: Any = jax.config
    if hasattr(config, "jax_enable_preemption_service"):
        return bool(config.jax_enable_preemption_service)
    return os.environ.get("JAX_ENABLE_PREEMPTION_SERVICE", "1").lower() not in ("0", "f", "false", "n", "no", "off")


def _ensure_first_step_counts() -> None:
    """Replaces JAX's preemption sync manager by one that also knows runs which go on from a checkpoint. JAX's own
    `multihost_utils.reached_preemption_sync_point()`, which Orbax calls, uses it as well."""
    current = state()
    manager = current.preemption_sync_manager
    if manager is not None and not isinstance(manager, FirstStepManager):
        current.preemption_sync_manager = FirstStepManager(manager, current.client, current.process_id)


def reached_sync_point(step: int) -> bool:
    """Returns whether all processes save at this step. Call it in every step, in every process, from the same first step on."""
    if state().preemption_sync_manager is None:
        raise SettingsError(
            "preemption is off in this process (JAX_ENABLE_PREEMPTION_SERVICE=0 or preemption=False), so there is no step to agree "
            "on: turn it on, or do not call reached_sync_point()"
        )
    # The process may have joined by jax.distributed.initialize().
    _ensure_first_step_counts()
    reached: Any = importlib.import_module("jax.experimental.multihost_utils").reached_preemption_sync_point
    return bool(reached(step))


def show_devices(local_device_ids: list[int]) -> None:
    """Restricts this process to these devices of its machine."""
    config: Any = jax.config
    for name in _VISIBLE_DEVICES:
        if hasattr(config, name):
            config.update(name, ",".join(map(str, local_device_ids)))


def devices() -> list[Any]:
    """Returns the devices of the present backend, of all processes."""
    return list(jax.devices())


def renew_backend() -> None:
    """Makes a new backend with the next computation. The distributed client stays, and arrays stay usable."""
    backend: Any = importlib.import_module("jax.extend.backend")
    backend.clear_backends()
    caches: Any = jax.clear_caches
    caches()


def await_arrays() -> Exception | None:
    """Waits until every array of the present backend is defined. Returns the error of one that is not, if there is one."""
    untyped: Any = jax
    arrays: list[Any] = untyped.live_arrays()
    try:
        untyped.block_until_ready(arrays)
        return None
    except Exception as error:
        first = error
    return first if any(_has_failed(array) for array in arrays) else None


def _has_failed(array: Any) -> bool:
    """Waits until an array is defined, and returns whether it has an error. A deleted one has none."""
    try:
        array.block_until_ready()
    except Exception:
        return not array.is_deleted()
    return False


def is_ended_collective(error: BaseException) -> bool:
    """Returns whether an exception comes from a collective that was ended."""
    seen: BaseException | None = error
    while seen is not None:
        # Releases raise it as different classes.
        text = str(seen).lower()
        if "gloo" in text or "nccl" in text:
            return True
        seen = seen.__cause__ or seen.__context__
    return False


_DISABLED_PASSES = "--xla_disable_hlo_passes"
_COMBINER = "cpu-all-reduce-combiner"


def keep_all_reduces_apart() -> None:
    """Tells XLA not to combine the all-reduces of a program for CPUs. It has no effect after JAX has computed.

    XLA gives the parts of a combined all-reduce to gloo one after the other, even after one of them has failed (from 0.9.2 on). The
    next part then takes messages of the failed part for its own: it never ends, or gloo aborts the process. The first failure of an
    all-reduce that is not combined ends the program. Combining saves nothing over gloo, which sends each part by itself.
    """
    flags = os.environ.get("XLA_FLAGS", "").split()
    given = [flag for flag in flags if flag.partition("=")[0] == _DISABLED_PASSES]
    # XLA uses the last one.
    passes = given[-1].partition("=")[2].split(",") if given else []
    if _COMBINER not in passes:
        flags.append(f"{_DISABLED_PASSES}={','.join([*filter(None, passes), _COMBINER])}")
        os.environ["XLA_FLAGS"] = " ".join(flags)


_NCCL_VARIABLE = "XLA_PYTHON_CLIENT_ABORT_COLLECTIVES_ON_FAILURE"
_NCCL_FLAGS = (
    "--xla_gpu_nccl_terminate_on_error=false",
    "--xla_gpu_nccl_async_execution=true",
    "--xla_gpu_nccl_blocking_communicators=false",
)


def _can_abort_nccl() -> bool:
    return not _HEARTBEAT_BY_COUNT


def abort_collectives_on_failure() -> None:
    """Sets what jaxlib needs to end the collectives of GPUs when a process is lost."""
    if not _can_abort_nccl():
        raise SettingsError(f"JAX {jax.__version__} cannot end the collectives of GPUs: use JAX 0.9.2 or later")
    if xla_bridge.backends_are_initialized():
        raise SettingsError(
            "JAX has computed already, or listed its devices: call abort_collectives_on_failure() before anything else of JAX"
        )
    flags = os.environ.get("XLA_FLAGS", "").split()
    names = {flag.partition("=")[0] for flag in flags}
    flags += [flag for flag in _NCCL_FLAGS if flag.partition("=")[0] not in names]
    os.environ["XLA_FLAGS"] = " ".join(flags)
    os.environ[_NCCL_VARIABLE] = "1"


def collectives() -> str:
    """Returns which library runs the collectives, if live_devices() can end them; raises if it cannot."""
    config: Any = jax.config
    platform = config.jax_platforms.split(",")[0] if config.jax_platforms else jax.default_backend()
    if platform == "cpu":
        library = getattr(config, "jax_cpu_collectives_implementation", None)
        if library == "mpi":
            raise SettingsError(
                "live_devices() cannot end collectives that run over MPI: set jax_cpu_collectives_implementation to gloo"
            )
        return "gloo"
    if platform not in ("gpu", "cuda"):
        raise SettingsError(f"live_devices() cannot end the collectives of the platform {platform}: it can on cpu and cuda")
    if not _can_abort_nccl():
        raise SettingsError(f"JAX {jax.__version__} cannot end the collectives of GPUs: use JAX 0.9.2 or later")
    flags = os.environ.get("XLA_FLAGS", "").split()
    if os.environ.get(_NCCL_VARIABLE) != "1" or any(flag not in flags for flag in _NCCL_FLAGS):
        raise SettingsError(
            "jaxlib does not end the collectives of GPUs when a process is lost: call muster.jax.abort_collectives_on_failure() "
            f"before anything else of JAX, or set {_NCCL_VARIABLE}=1 and XLA_FLAGS='{' '.join(_NCCL_FLAGS)}'"
        )
    return "nccl"


def process_failure_bases() -> tuple[type[Exception], ...]:
    """Returns JAX's own exception for a failed process, in the releases that have it (from 0.10.2 on)."""
    own = getattr(importlib.import_module("jax.experimental.multihost_utils"), "ProcessFailureError", None)
    return () if own is None else (own,)
