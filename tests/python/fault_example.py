"""Runs JAX's own example of fault-tolerant training, which is written for GPUs, on CPUs: for `fault_runs.py`.

    fault_example.py EXAMPLE muster|jax SERVICE COUNT PROCESS STOP_FILE

EXAMPLE is `docs/_static/fault_tolerance/data_parallelism_with_recovery.py` of JAX's public repository. It runs as it stands, but
for this: flags for GPUs are left out; the address and the number of the process are given; `absl`, which it only uses for its
arguments, is replaced; and what releases have renamed or changed since (`shard_map`, the default axes of a mesh) is as it was. With `muster`, it is
muster.jax.live_devices that it enters.

It says the same lines as `fault_trainer.py`.
"""

import contextlib
import faulthandler
import hashlib
import json
import os
from pathlib import Path
import re
import signal
import sys
import time
import types

EXAMPLE, KIND, SERVICE, COUNT, ME, STOP = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]), sys.argv[6]

import jax
from jax.experimental import multihost_utils
import numpy as np

import muster.jax

HEARTBEAT_S = 2


def say(what, **fields):
    print(json.dumps({"at": time.monotonic(), "what": what, **fields}), flush=True)


class OwnError(Exception):
    """What a block of this process raises when it is told to."""


faulthandler.register(signal.SIGQUIT)
faults = []
signal.signal(signal.SIGUSR1, lambda *_: faults.append("before"))
signal.signal(signal.SIGUSR2, lambda *_: faults.append("after"))
is_inside = False
stock = multihost_utils.live_devices


def raise_if_told(when):
    if is_inside and when in faults:
        faults.remove(when)
        say("raises", when=when)
        raise OwnError(f"{when} the collectives, in process {ME}")


class LiveDevices:
    """The block of the example: says how it ended."""

    epoch = 0
    is_first = True

    def __init__(self, devices):
        self.block = muster.jax.live_devices(timeout=60) if KIND == "muster" else stock(devices)

    def __enter__(self):
        global is_inside
        if LiveDevices.is_first:
            LiveDevices.is_first = False
            say("ready", pid=os.getpid())
        self.frame = sys._getframe(1)
        self.began = time.monotonic()
        try:
            devices = self.block.__enter__()
        except Exception as error:
            self.tell(error)
            raise
        LiveDevices.epoch = getattr(devices, "epoch", 0)
        self.members = {str(p): str(i) for p, i in sorted(getattr(devices, "incarnations", {}).items())}
        is_inside = True
        return devices

    def __exit__(self, *raised):
        global is_inside
        is_inside = False
        try:
            swallowed = self.block.__exit__(*raised)
        except Exception as error:
            self.tell(error)
            raise
        if raised[1] is not None:
            self.tell(raised[1])
            return swallowed
        names = self.frame.f_locals
        weights = np.asarray(names["new_weights"].addressable_shards[0].data)
        digest = hashlib.sha256(weights.tobytes()).hexdigest()[:16]
        took = time.monotonic() - self.began
        say("commit", step=int(names["step"]) + 1, digest=digest, epoch=LiveDevices.epoch, members=self.members, took=took)
        self.end_if_told()
        return swallowed

    def tell(self, error):
        took = time.monotonic() - self.began
        if isinstance(error, muster.jax.MembershipChanged):
            causes = {str(p): c for p, c in sorted(error.causes.items())}
            fields = {"lost": sorted(error.lost), "joined": sorted(error.joined), "causes": causes, "committed": error.committed}
            say("changed", epoch=LiveDevices.epoch, took=took, **fields)
        elif isinstance(error, muster.StaleIncarnation):
            say("stale", error=str(error))
            os._exit(3)
        else:
            say("own", epoch=LiveDevices.epoch, took=took, error=f"{type(error).__name__}: {error}"[:300])
        self.end_if_told()

    def end_if_told(self):
        if os.path.exists(STOP):
            say("end", step=0)
            os._exit(0)


def initialize(**given):
    """Joins the job, with the arguments of the example that are not about GPUs."""
    with contextlib.suppress(AttributeError):
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    if KIND == "muster":
        muster.jax.initialize(SERVICE, COUNT, ME, initialization_timeout=60, heartbeat_timeout_seconds=HEARTBEAT_S)
    else:
        given = {name: value for name, value in given.items() if name != "local_device_ids"}
        join(**{**given, "coordinator_address": SERVICE})


def for_cpus(text):
    """Returns the example without its flags for GPUs."""
    text, found = re.subn(r"os\.environ\['XLA_FLAGS'\] = ' '\.join\(\[.*?\]\)\n", "", text, flags=re.DOTALL)
    text, more = re.subn(r"os\.environ\['XLA_PYTHON_CLIENT_\w+'\] = '1'\n", "", text)
    if found != 1 or more < 1:
        sys.exit("fault_example: the example is not the one that this was written for")
    if not hasattr(jax.config, "jax_enable_recoverability"):
        text = re.sub(r'  jax\.config\.update\("jax_enable_recoverability", True\)\n', "", text)
    return text


def absl():
    """Returns stand-ins for the parts of absl that read the example's two arguments."""
    values = {"i": ME, "n": COUNT}
    app, flags = types.ModuleType("absl.app"), types.ModuleType("absl.flags")
    app.run = lambda main: main([])
    flags.DEFINE_integer = lambda name, *_: types.SimpleNamespace(value=values[name])
    package = types.ModuleType("absl")
    package.app, package.flags = app, flags
    return {"absl": package, "absl.app": app, "absl.flags": flags}


def one_shard_map():
    """Gives a release the two names by which the example calls shard_map, if it has one of them only."""
    try:
        from jax.experimental import shard_map
    except ImportError:
        shard_map = types.ModuleType("jax.experimental.shard_map")
        shard_map.shard_map = jax.shard_map
        sys.modules["jax.experimental.shard_map"] = jax.experimental.shard_map = shard_map
    if not hasattr(jax, "shard_map"):
        jax.shard_map = shard_map.shard_map


def automatic_mesh(shape, names, **given):
    """Makes a mesh as releases did when the example was written: by default its axes are explicit today."""
    kinds = getattr(jax.sharding, "AxisType", None)
    if kinds is not None:
        given.setdefault("axis_types", (kinds.Auto,) * len(names))
    return make_mesh(shape, names, **given)


def told_block_until_ready(value):
    value = ready(value)
    raise_if_told("after")
    return value


def told_print(*words):
    raise_if_told("before")


one_shard_map()
sys.modules.update(absl())
multihost_utils.live_devices = LiveDevices
join, jax.distributed.initialize = jax.distributed.initialize, initialize
make_mesh, jax.make_mesh = jax.make_mesh, automatic_mesh
ready, jax.block_until_ready = jax.block_until_ready, told_block_until_ready
exec(compile(for_cpus(Path(EXAMPLE).read_text()), EXAMPLE, "exec"), {"__name__": "__main__", "print": told_print})
