"""Counts the calls of JAX that threads of the package make, and delays the end of the interpreter until they
return.

If a thread is in a call of JAX when the interpreter ends, the thread cannot return to Python. JAX does not expect
that, and ends the process with SIGABRT. So the end of the interpreter waits for these calls, and no more calls
begin.
"""

from __future__ import annotations

import atexit
import os
import threading

from muster.errors import MusterError

__all__ = ["calls_of_jax"]

# The longest wait for the calls that are under way; each compiles a tiny program at most.
_PATIENCE_S = 60.0


class CallsOfJax:
    """A context in which a thread calls JAX. It raises MusterError if the interpreter ends."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._running = 0
        self._process: int | None = None
        self._is_over = False

    def register(self) -> None:
        """Waits for the calls when the interpreter ends. It comes before the first thread starts."""
        if self._process != os.getpid():
            self._process = os.getpid()
            atexit.register(self._stop)

    def __enter__(self) -> None:
        with self._changed:
            if self._is_over:
                raise MusterError("the interpreter ends")
            self._running += 1

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._running -= 1
            self._changed.notify_all()

    def _stop(self) -> None:
        # A forked process has none of the threads.
        if self._process == os.getpid():
            with self._changed:
                self._is_over = True
                self._changed.wait_for(lambda: self._running == 0, _PATIENCE_S)


calls_of_jax = CallsOfJax()
