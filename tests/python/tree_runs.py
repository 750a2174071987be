#!/usr/bin/env python3
"""Measures how long a tree of arrays takes to change its shardings across processes, beside JAX's own `jax.device_put`.

    target/python/tools/bin/python tests/python/tree_runs.py [--release RELEASE ...] [--rounds 15] [--arrays 200] [--mib 64]

Four processes with one CPU device each hold a tree, divided by a mesh (data 4), and put it onto a mesh (data 2, model 2), by
turns with Muster and with JAX, whose programs are compiled before the first round. The processes meet before each turn; the time
of a turn is that of the slowest process. It prints medians, and the least and the greatest.
"""

from __future__ import annotations

import argparse
import json
import statistics

from conftest import RELEASES, Scene, interpreter

COUNT = 4

PROCESS = """
import json, sys, time, jax
jax.config.update("jax_num_cpu_devices", 1)
try: jax.config.update("jax_cpu_collectives_implementation", "gloo")
except AttributeError: pass
import muster.jax, muster.transfer
count, me, rounds, arrays, mib = map(int, sys.argv[2:7])
muster.jax.initialize(sys.argv[1], count, me, initialization_timeout=60)
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
engine = muster.transfer.attach()
devices = np.array(jax.devices())
rows, both = NamedSharding(Mesh(devices, ("data",)), P("data")), NamedSharding(Mesh(devices.reshape(2, 2), ("data", "model")), P("data", "model"))
# One large array for each three small ones.
columns = max(8, (mib << 20) // 4 // 256 // max(1, arrays // 4) // 8 * 8)
shapes = [(256, columns) if number % 4 == 0 else (64, 8 + 8 * (number % 7)) for number in range(arrays)]
tree = [jax.make_array_from_callback(s, rows, lambda index, s=s, n=n: (np.arange(s[0] * s[1], dtype=np.float32).reshape(s) + n)[index]) for n, s in enumerate(shapes)]
ways = {"muster": lambda: engine.device_put(tree, both), "jax": lambda: jax.device_put(tree, both)}
def turn(way):
    multihost_utils.sync_global_devices(way)
    began = time.perf_counter()
    result = jax.block_until_ready(ways[way]())
    return time.perf_counter() - began, result
first, times = {}, {"muster": [], "jax": []}
one, other = [], []
for way in ways:
    first[way], result = turn(way)
    (one if way == "muster" else other).extend(result)
for a, b in zip(one, other):
    for x, y in zip(a.addressable_shards, b.addressable_shards):
        assert x.index == y.index and (np.asarray(x.data) == np.asarray(y.data)).all()
del one, other, result
for number in range(rounds):
    for way in sorted(ways, reverse=bool(number % 2)):
        seconds, result = turn(way)
        times[way].append(seconds)
        del result
print("TIMES", json.dumps({"first": first, "times": times, "bytes": sum(4 * a * b for a, b in shapes)}), flush=True)
multihost_utils.sync_global_devices("end")
jax.distributed.shutdown()
"""


def run(scene: Scene, release: str, rounds: int, arrays: int, mib: int) -> None:
    server = scene.serve("--tasks", str(COUNT))
    numbers = [str(rounds), str(arrays), str(mib)]
    programs = [scene.python(release, PROCESS, server.grpc, str(COUNT), str(me), *numbers) for me in range(COUNT)]
    found = [json.loads(program.line("TIMES (.*)")[1]) for program in programs]
    for program in programs:
        program.succeed()
    print(f"{release}: {arrays} arrays, {found[0]['bytes'] / (1 << 20):.1f} MiB, {rounds} rounds")
    for way in ("muster", "jax"):
        slowest = [1000 * max(times) for times in zip(*(process["times"][way] for process in found))]
        first = 1000 * max(process["first"][way] for process in found)
        print(
            f"  {way:6}  median {statistics.median(slowest):.1f} ms, {min(slowest):.1f} to {max(slowest):.1f}; the first time {first:.0f} ms"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--release", action="append", choices=RELEASES, help="a release of JAX; the newest by default")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--arrays", type=int, default=200)
    parser.add_argument("--mib", type=int, default=64)
    options = parser.parse_args()
    for release in options.release or [release for release in RELEASES if interpreter(release).exists()][-1:]:
        scene = Scene()
        try:
            run(scene, release, options.rounds, options.arrays, options.mib)
        finally:
            scene.close()


if __name__ == "__main__":
    main()
