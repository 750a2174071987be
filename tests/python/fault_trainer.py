"""Trains a line on all live processes together, and says after every step what it has: for `fault_runs.py`.

    fault_trainer.py SERVICE COUNT PROCESS STOP_FILE

Each line is JSON with the time of the monotonic clock, which the processes of a machine share. SIGUSR1 makes the next block raise
before its collectives, SIGUSR2 after them.
"""

import faulthandler
import functools
import hashlib
import json
import os
import signal
import sys
import time

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import numpy as np

import muster.jax

SERVICE, COUNT, ME, STOP = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
WIDTH = 64
POINTS_PER_DEVICE = 32


queued_by_thread = {}


def queued_seconds():
    """How long the threads of this process have waited for a processor, in all; 0 where the kernel does not say it."""
    for thread in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{thread}/schedstat", encoding="ascii") as file:
                queued_by_thread[thread] = int(file.read().split()[1])
        except (OSError, IndexError):
            pass  # It has ended meanwhile.
    return sum(queued_by_thread.values()) / 1e9


def say(what, **fields):
    computed = {"computed": time.process_time(), "queued": queued_seconds()}
    print(json.dumps({"at": time.monotonic(), "what": what, **computed, **fields}), flush=True)


class OwnError(Exception):
    """What a block of this process raises when it is told to."""


faulthandler.register(signal.SIGQUIT)
faults = []
signal.signal(signal.SIGUSR1, lambda *_: faults.append("before"))
signal.signal(signal.SIGUSR2, lambda *_: faults.append("after"))


def raise_if_told(when):
    if when in faults:
        faults.remove(when)
        say("raises", when=when)
        raise OwnError(f"{when} the collectives, in process {ME}")


def spread(devices, mesh, value):
    """Returns an array with one row from each device; this process's is `value`."""
    parts = [jax.device_put(value[None], device) for device in devices if device.process_index == ME]
    return jax.make_array_from_single_device_arrays((len(devices), *value.shape), NamedSharding(mesh, PartitionSpec("x")), parts)


def descend(weights, x, y):
    loss, gradient = jax.value_and_grad(lambda w: ((x @ w - y) ** 2).mean())(weights)
    return weights - 0.01 * gradient, loss


@functools.lru_cache(maxsize=1)
def programs(devices):
    """Returns the mesh of an epoch and the programs on it: one that shows every row to all, and a step."""
    mesh = Mesh(np.array(devices), ("x",))
    whole = NamedSharding(mesh, PartitionSpec())
    return mesh, whole, jax.jit(lambda a, b: (a, b), out_shardings=whole), jax.jit(descend, out_shardings=whole)


def one_step(devices, step, weights):
    """Returns the next step and weights, and whether all were told to stop."""
    mesh, whole, show, train = programs(tuple(devices))
    facts = np.array([step, os.path.exists(STOP)], np.float32)
    raise_if_told("before")
    facts, everyones = show(spread(devices, mesh, facts), spread(devices, mesh, weights))
    facts = np.asarray(facts)
    # A process that has just come has the first step: everybody takes what the furthest one has.
    ahead = int(facts[:, 0].argmax())
    step, weights = int(facts[ahead, 0]), np.asarray(everyones)[ahead]
    random = np.random.default_rng(step * 1000 + ME)
    x = random.normal(size=(POINTS_PER_DEVICE, WIDTH)).astype(np.float32)
    y = (x @ np.arange(WIDTH, dtype=np.float32)).astype(np.float32)

    replicated = [jax.device_put(weights, device) for device in devices if device.process_index == ME]
    replicated = jax.make_array_from_single_device_arrays(weights.shape, whole, replicated)
    descended = train(replicated, spread(devices, mesh, x), spread(devices, mesh, y))
    weights = np.asarray(descended[0])
    raise_if_told("after")
    return step + 1, weights, bool(facts[:, 1].min())


def main():
    try:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    except AttributeError:
        pass
    muster.jax.initialize(SERVICE, COUNT, ME, initialization_timeout=60, heartbeat_timeout_seconds=2)
    step, weights = 0, np.zeros((WIDTH,), np.float32)
    said, stop, epoch = False, False, 0
    while not stop:
        if not said:
            said = True
            say("ready", pid=os.getpid())
        try:
            with muster.jax.live_devices(timeout=60) as devices:
                if devices.epoch != epoch:
                    say("enters", epoch=devices.epoch)
                epoch = devices.epoch
                done = one_step(devices, step, weights)
            step, weights, stop = done
            digest = hashlib.sha256(weights.tobytes()).hexdigest()[:16]
            say("commit", step=step, digest=digest, epoch=epoch, members={str(p): str(i) for p, i in devices.incarnations.items()})
        except muster.jax.MembershipChanged as change:
            say(
                "changed",
                epoch=epoch,
                lost=sorted(change.lost),
                joined=sorted(change.joined),
                causes={str(p): c for p, c in sorted(change.causes.items())},
                committed=change.committed,
            )
        except OwnError as error:
            say("own", epoch=epoch, error=str(error))
        except muster.StaleIncarnation as error:
            say("stale", error=str(error))
            os._exit(3)
        time.sleep(0.02)
    say("end", step=step)
    jax.distributed.shutdown()


main()
