"""`elastic()`: performs training steps, and continues when processes are lost or come back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from muster.jax._epochs import LiveDevices, MembershipChanged
from muster.jax._internals import process_id
from muster.jax._live import live_devices
from muster.jax._recover import Placement, recover

Step = Callable[[Any, LiveDevices, int], Any]


def elastic(
    step: Step,
    state: Any,
    steps: int,
    *,
    done: int = 0,
    place: Placement | None = None,
    on_change: Callable[[MembershipChanged], None] | None = None,
    check: bool = True,
    timeout: float = 600.0,
) -> Any:
    """Runs `steps` training steps and returns the last state. Each step is finished by all live processes, or by none.

    A process that is lost costs the others the step that was under way. One that comes back, or comes new, gets the state of the
    others from their memory, without a checkpoint. All processes of the job call it with the same arguments. The job must be
    recoverable (`muster serve --recoverable`).

    Args:
        step: `step(state, devices, number)` returns the next state. It computes on these devices only, and must not donate the
            state, because the step is done again if a process is lost.
        state: a tree of arrays of JAX or NumPy and numbers: that of `done`.
        steps: the number of steps.
        done: the steps that the state has behind it, for example because it is from a checkpoint.
        place: the sharding of each array for the devices of an epoch, as for `recover()`.
        on_change: called when the membership has changed, outside of a block.
        check, timeout: as for `recover()` and `live_devices()`.

    Raises:
        What `step` raises, in the process in which it does, and in all if it does in all; StateLost and StateDiverged of
        `recover()`; StaleIncarnation if this process is not counted as live any more.
    """
    epoch = None
    while done < steps:
        try:
            with live_devices(timeout) as devices:
                if devices.epoch != epoch:
                    state, done = recover(state, done, devices, place=place, check=check, timeout=timeout)
                    epoch = devices.epoch
                following = step(state, devices, done) if done < steps else state
        except MembershipChanged as change:
            own = change.__cause__ if process_id() in change.causes else None
            if own is not None and not change.lost and not change.joined:
                # The block has failed by itself, here too, and would again.
                raise own from None
            if on_change is not None:
                on_change(change)
        else:
            state, done = following, min(done + 1, steps)
    return state
