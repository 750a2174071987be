"""The command `muster` that the wheel installs: runs the command line of the extension in this process."""

from __future__ import annotations

import os
import signal
import sys
from typing import NoReturn

from muster import _native


def main() -> NoReturn:
    """Runs the command. The script that pip installs calls it."""
    script = sys.argv[0]
    run([sys.executable, script] if os.path.isfile(script) else [sys.executable, "-m", "muster"])


def run(restart: list[str]) -> NoReturn:
    """Runs the command; `restart` starts this program again, for the processes of a launch."""
    # As for a program that is not Python: Ctrl-C ends the process unless the command handles it, or whoever started the
    # process had it ignored; and a file that grows too large is a signal.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    _native.run_command(["muster", *sys.argv[1:]], restart, _native.__file__)
