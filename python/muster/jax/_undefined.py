"""Launches transfers of arrays of JAX that are not computed yet, when they are. One thread serves all of them, and it waits
for all of their events at once.

Begin at `launch_when_defined()`.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

from muster import _native
from muster.jax._arrays import DefinitionEvent, when_defined
from muster.jax._calls import calls_of_jax

__all__ = ["launch_when_defined"]


class _Waiting:
    """A launch whose arrays are not defined yet."""

    __slots__ = ("arrays", "events", "fail", "launch", "left")

    def __init__(self, arrays: list[Any], launch: Callable[[], None], fail: Callable[[BaseException], None]) -> None:
        self.arrays = arrays
        self.launch = launch
        self.fail = fail
        self.events: list[DefinitionEvent] | None = None
        # The events that are not over.
        self.left = 0


class _Launcher:
    """The thread, and the launches that wait. The thread takes numbers of launches from a queue: one when the launch is added,
    and one for each of its events that is over."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_running = False
        self._queue = _native.EventQueue()
        self._waiting: dict[int, _Waiting] = {}
        self._numbers = itertools.count()

    def add(self, waiting: _Waiting) -> None:
        calls_of_jax.register()
        with self._lock:
            if not self._is_running:
                threading.Thread(target=self._run, name="muster-undefined", daemon=True).start()
                self._is_running = True
            number = next(self._numbers)
            self._waiting[number] = waiting
            self._queue.put(number)

    def _run(self) -> None:
        while True:
            number = self._queue.next()
            # Events of a launch that has failed may still come.
            waiting = self._waiting.get(number)
            if waiting is not None and self._goes_on_or_fails(number, waiting):
                del self._waiting[number]
            # The next launch may be long in coming.
            del waiting

    def _goes_on_or_fails(self, number: int, waiting: _Waiting) -> bool:
        """Does what is next for a launch. Returns whether that was the last."""
        try:
            return self._go_on(number, waiting)
        except BaseException as error:
            # Its frames would keep the arrays.
            waiting.fail(error.with_traceback(None))
            return True

    def _go_on(self, number: int, waiting: _Waiting) -> bool:
        if waiting.events is None:
            with calls_of_jax:
                events = waiting.events = [when_defined(array) for array in waiting.arrays]
            waiting.arrays = []
            waiting.left = len(events)
            for event in events:
                self._queue.put_when_over(event.native, number)
            return not events
        waiting.left -= 1
        if waiting.left > 0:
            return False
        with calls_of_jax:
            for event in waiting.events:
                event.check()
            waiting.launch()
        return True


def launch_when_defined(arrays: list[Any], launch: Callable[[], None], fail: Callable[[BaseException], None]) -> None:
    """Calls `launch` when all of these arrays are defined, or `fail` with the reason if one of them cannot be. It returns at
    once; the call is made on another thread."""
    _launcher.add(_Waiting(arrays, launch, fail))


_launcher = _Launcher()
