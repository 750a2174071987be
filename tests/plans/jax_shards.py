"""Asks JAX which part of an array each device holds, for many meshes and partition specs.

Prints what tests/plans/jax_shards.json has: one case a line.
"""
import json
import os
import random

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=24"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

random.seed(20)
devices = jax.devices()


def cases():
    for sizes in [(1,), (6,), (2, 3), (4, 2), (2, 3, 4), (2, 1, 3), (2, 2, 2, 3)]:
        names = [f"a{i}" for i in range(len(sizes))]
        for _ in range(6):
            chosen = random.sample(devices, int(np.prod(sizes)))
            rank = random.randint(0, 3)
            entries = [[] for _ in range(rank)]
            for name in random.sample(names, len(names)):
                place = random.randint(0, rank)
                if place < rank:
                    entries[place].append(name)
            ways = [int(np.prod([sizes[names.index(n)] for n in e], dtype=int)) for e in entries]
            shape = [w * random.randint(1, 3) for w in ways]
            spec = [None if not e else e[0] if len(e) == 1 else e for e in entries]
            while spec and spec[-1] is None and random.random() < 0.5:
                spec.pop()
            yield names, sizes, chosen, spec, shape


lines = []
for names, sizes, chosen, spec, shape in cases():
    mesh = Mesh(np.array(chosen).reshape(sizes), names)
    entries = [tuple(e) if isinstance(e, list) else e for e in spec]
    sharding = NamedSharding(mesh, PartitionSpec(*entries))
    held = {
        device.id: [[*index.indices(size)[:2]] for index, size in zip(indices, shape)]
        for device, indices in sharding.devices_indices_map(tuple(shape)).items()
    }
    lines.append(json.dumps({
        "sharding": {
            "mesh": {
                "axes": [{"name": n, "size": s} for n, s in zip(names, sizes)],
                "devices": [d.id for d in chosen],
            },
            "spec": spec,
        },
        "shape": shape,
        "held": [[device, held[device]] for device in sorted(held)],
    }))
print("[\n" + ",\n".join(lines) + "\n]")
