"""`python -m muster`: the command `muster`."""

import sys

from muster._command import run

run([sys.executable, "-m", "muster"])
