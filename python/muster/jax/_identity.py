"""Which task this JAX process is: its number, its incarnation and its devices."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax

from muster import _native
from muster._tls import native_tls
from muster.errors import Deadline, MusterError, StaleIncarnation
from muster.jax import _internals

__all__ = ["Identity", "identify"]

T = TypeVar("T")


class Identity(NamedTuple):
    """A task that JAX's client has registered."""

    service: str
    process_id: int
    incarnation: int
    devices: list[int]
    tls: tuple[str, str | None, str | None] | None


def identify(timeout: float) -> Identity:
    """Returns the task that JAX's client of this process has registered."""
    state = _internals.state()
    client, me = state.client, state.process_id
    if client is None:
        raise MusterError("this process has not joined a job by JAX: call muster.jax.initialize() or jax.distributed.initialize() first")
    tls = native_tls(_internals.tls()[0])
    answer = _in_thread(lambda: client.get_live_nodes([me]), timeout)
    if isinstance(answer, dict):
        incarnation = int(answer.get(me, 0))
    else:
        # JAX 0.6.2 answers with numbers alone.
        presence = _native.task_presence(state.coordinator_address, tls, timeout)
        incarnation = next((life for task, life, _, _ in presence if task == me and me in answer), 0)
    if not incarnation:
        raise StaleIncarnation(f"the service does not count task {me} as live any more: `muster status` shows why; start it again")
    devices = [int(device.id) for device in jax.local_devices()]
    return Identity(state.coordinator_address, me, incarnation, devices, tls)


def _in_thread(call: Callable[[], T], timeout: float) -> T:
    """Runs a call of JAX's client, which nothing interrupts, in a thread; Ctrl-C and the timeout end the wait for it."""
    results: list[T] = []
    errors: list[Exception] = []
    is_over = threading.Event()

    def run() -> None:
        try:
            results.append(call())
        except Exception as error:
            errors.append(error)
        finally:
            is_over.set()

    threading.Thread(target=run, name="muster-call", daemon=True).start()
    if not is_over.wait(timeout):
        raise Deadline(f"the service has not answered within {timeout:g} s: `muster status` shows whether it is there")
    if errors:
        raise MusterError(f"the service does not say whether this task is live: {errors[0]}") from errors[0]
    return results[0]
