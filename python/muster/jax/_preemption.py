"""The step at which all processes save after a preemption notice, if the notice came before their first step.

JAX's manager computes the common step once, when the notice comes: one more than the highest step that a process has passed to
`reached_sync_point()`, or 1 if no process has called it. A run that goes on from a checkpoint has steps higher than that, so it
would never save. Then the common step is the first step of the run: the first process that comes to it writes it into the store.
All processes read the same steps there, so they agree whether JAX's step counts or this one.
"""

from __future__ import annotations

import logging
from typing import Any

_LOG = logging.getLogger("muster")

# JAX's directory: the step that each process had when it learned of the notice. Its keys end in the number of the process.
_STEPS = "PREEMPTION_CURRENT_COUNTER/"
# The service reads it, too, to show the common step.
_FIRST_STEP = "muster/preemption/first_step"
_ANSWER_MS = 10_000


class FirstStepManager:
    """Takes the place of JAX's preemption sync manager, which it calls."""

    def __init__(self, manager: Any, client: Any, process_id: int) -> None:
        self.manager, self.client, self.process_id = manager, client, process_id
        # Whether it is known by which rule the common step is found.
        self.is_settled = False
        self.common_step: int | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.manager, name)

    def reached_sync_point(self, step: int) -> bool:
        """Returns whether all processes save at this step."""
        # While JAX agrees on a step, this call waits. So afterwards the steps of all processes are in the store, or this process
        # has not learned of a notice before its first call.
        reached = bool(self.manager.reached_sync_point(step))
        if not self.is_settled:
            try:
                if not reached and step > 1 and self._is_notice_before_first_step():
                    self.common_step = self._first_step_of_run(step)
            except Exception as error:
                _LOG.warning("the common step of a preemption is not known; the next step asks again: %s", error)
            else:
                self.is_settled = True
        return reached or step == self.common_step

    def _is_notice_before_first_step(self) -> bool:
        """Returns whether the processes agreed before any of them had called `reached_sync_point()`."""
        entries = self.client.key_value_dir_get(_STEPS)
        steps = {key.replace(":", "/").rpartition("/")[2]: int(value) for key, value in entries}
        return str(self.process_id) in steps and max(steps.values()) == 0

    def _first_step_of_run(self, step: int) -> int:
        try:
            self.client.key_value_set(_FIRST_STEP, str(step))
        except Exception as error:
            if "ALREADY_EXISTS" not in str(error):
                raise
        return int(self.client.blocking_key_value_get(_FIRST_STEP, _ANSWER_MS))
