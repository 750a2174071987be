"""NCCL's profiler plug-in, which this package contains."""

from __future__ import annotations

import os

from muster import _native


def nccl_plugin() -> str:
    """Returns the file of the plug-in by which Muster sees which task holds up a collective.

    Only a Python program can load it. Set it before the program makes its first communicator, for every task of the job::

        os.environ["NCCL_PROFILER_PLUGIN"] = muster.nccl_plugin()

    `muster launch --collectives` does that for the processes that it starts.
    """
    return os.path.abspath(_native.__file__)
