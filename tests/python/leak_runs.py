#!/usr/bin/env python3
"""Transfers, cancellations, failures and arrays that are collected, again and again: nothing grows.

    target/python/tools/bin/python tests/python/leak_runs.py [--release RELEASE] [--count 100000]

Two JAX processes do the same things in the same order, each a transfer that succeeds or fails in its own way. Each process looks at
its resident memory, its descriptors and its threads: after a warm-up, now and then, and at the end. It prints what it has seen.
"""

from __future__ import annotations

import argparse
import json
import statistics

from conftest import RELEASES, Scene, interpreter
from test_transfer import JAX

PROGRAM = JAX + """
import asyncio, ctypes, gc, json, os
from muster.transfer import Receive, Send
count, samples = int(sys.argv[3]), int(sys.argv[4])
libc = ctypes.CDLL(None)
sends = me == 0
SIZE = 20_000
add = jax.jit(lambda x: x + 1, donate_argnums=0)
slow = jax.jit(lambda x: jax.lax.fori_loop(0, 20, lambda _, y: jnp.sin(y), x))
struct = jax.ShapeDtypeStruct((SIZE,), jnp.float32)
host = np.arange(SIZE, dtype=np.float32)
target, small = np.zeros(SIZE, np.float32), np.zeros(8, np.float32)
kept = muster.empty(SIZE, "float32")

def fails(kind, call):
    try: call()
    except kind: return
    raise AssertionError(f"no {kind}")

def check(array, n): assert float(array[1]) == n and array.shape == (SIZE,), (array[1], n)
def value(n): return jnp.full(SIZE, float(n % 1000), jnp.float32)

def memory(n):
    if sends: engine.send(host, peer, f"memory {n}").wait()
    else: assert engine.receive(target, peer, f"memory {n}").result()[5] == 5
def buffers(n):
    buffer = muster.empty(SIZE, "float32")
    if sends: engine.send(buffer, peer, n).wait()
    else: engine.receive(buffer, peer, n).result()
def collected(n):
    if sends: engine.send(value(n), peer, n).wait()
    else: check(engine.receive(struct, peer, n).result(), n % 1000)
def deleted(n):
    if sends:
        array = value(n).block_until_ready()
        sending = engine.send(array, peer, n)
        array.delete()
        sending.wait()
    else: check(engine.receive(struct, peer, n).result(), n % 1000)
def donated(n):
    if sends:
        array = value(n).block_until_ready()
        sending = engine.send(array, peer, n)
        add(array)
        sending.wait()
    else: check(engine.receive(struct, peer, n).result(), n % 1000)
def undefined(n):
    if sends: engine.send(slow(value(0)), peer, n).wait()
    else: check(engine.receive(struct, peer, n).result(), 0)
def gone(n):
    if sends:
        array = value(n); array.delete()
        fails(muster.ArrayDeleted, lambda: engine.send(array, peer, n))
def cancelled(n):
    if sends:
        engine.receive(small, peer, "go").wait()
        fails(muster.Cancelled, engine.send(host, peer, n).wait)
    else:
        receiving = engine.receive(target, peer, n)
        receiving.cancel("enough")
        fails(muster.Cancelled, receiving.wait)
        engine.send(small, peer, "go").wait()
def mismatched(n):
    if sends: fails(muster.LayoutMismatch, engine.send(host, peer, n).wait)
    else: fails(muster.LayoutMismatch, engine.receive(small, peer, n).wait)
def disordered(n):
    key = f"{n} of {me}"
    if sends: fails(muster.OrderMismatch, engine.send(host, peer, key).wait)
    else: fails(muster.OrderMismatch, engine.receive(target, peer, key).wait)
def late(n):
    if sends:
        engine.receive(small, peer, "go").wait()
        fails(muster.TransferError, engine.send(host, peer, n).wait)
    else:
        fails(muster.Deadline, engine.receive(target, peer, n, timeout=0.0).wait)
        engine.send(small, peer, "go").wait()
def busy(n):
    if sends: fails(muster.TransferError, engine.send(kept, peer, n).wait)
    else:
        view = memoryview(kept)
        fails(muster.ArrayMemoryError, lambda: engine.receive(kept, peer, n).wait())
def together(n):
    both = [Send(host, peer, f"{n} of {me}"), Receive(target, peer, f"{n} of {peer}"), Send(value(n), peer, f"{n} also of {me}"), Receive(struct, peer, f"{n} also of {peer}")]
    check(engine.transfer(both).result()[3], n % 1000)
def prepared(n):
    with engine.prepare([Send(host, peer, n) if sends else Receive(target, peer, n)]) as held:
        for _ in range(3): held.launch().wait()
def awaited(n):
    async def main():
        transfer = engine.send(host, peer, n) if sends else engine.receive(struct, peer, n)
        try: await asyncio.wait_for(asyncio.ensure_future(result(transfer)), 0)
        except asyncio.TimeoutError: await transfer
    async def result(transfer): return await transfer
    loop.run_until_complete(main())
def dropped(n):
    # Its outcome is of no interest to anybody.
    if sends: engine.send(value(n), peer, n)
    else: engine.receive(struct, peer, n)
def refused(n):
    fails(muster.SettingsError, lambda: engine.send(host, me, n))
    fails(muster.ArrayMemoryError, lambda: engine.send(host[::2], peer, n))

loop = asyncio.new_event_loop()
work = [memory, buffers, collected, deleted, donated, undefined, gone, cancelled, mismatched, disordered, late, busy, together, prepared, awaited,
        dropped, refused]

def look(done):
    # Once this transfer is over, those of dropped objects are too, on both sides.
    buffers("look")
    for _ in range(3): gc.collect(); time.sleep(0.1)
    libc.malloc_trim(0)
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))
    rss = [int(status[name].split()[0]) for name in ("RssAnon", "RssShmem")]
    say("LOOK", json.dumps({"done": done, "rss": sum(rss), "files": len(os.listdir("/proc/self/fd")), "threads": int(status["Threads"])}))

engine.wait_for_peers([peer])
for n in range(count):
    if n % (count // samples) == 0 and n >= count // 4: look(n)
    work[n % len(work)](n)
look(count)
jax.distributed.shutdown()
"""

# The most that resident memory may grow, in KiB, and in bytes for each transfer.
SLACK_KIB = 6 << 10
SLACK_EACH = 32


def run(scene: Scene, release: str, count: int, samples: int = 16, show=print) -> None:
    # With the heartbeat timeout of JAX's clients: they send a heartbeat at half of theirs.
    server = scene.serve("--tasks", "2", "--heartbeat-timeout", "100s")
    programs = [scene.python(release, PROGRAM, server.grpc, str(me), str(count), str(samples)) for me in range(2)]
    for me, program in enumerate(programs):
        while program.process.poll() is None:
            # Its own deadline is that of a line, which comes after a part of the work.
            if program.next(r"LOOK (.*)")[1].startswith(f'{{"done": {count},'):
                break
        program.succeed()
        looks = [json.loads(line[5:]) for line in program.lines if line.startswith("LOOK ")]
        show(f"{release}, process {me}, {count} transfers: " + "; ".join(f"{look['done']}: {look['rss']} KiB, {look['files']} files, {look['threads']} threads" for look in looks))
        third = max(len(looks) // 3, 1)
        first, last = looks[:third], looks[-third:]
        for what, slack in (("files", 2), ("threads", 2), ("rss", SLACK_KIB + count * SLACK_EACH / 1024)):
            before, after = [statistics.median(look[what] for look in part) for part in (first, last)]
            assert after <= before + slack, f"{what} of process {me} grew from {before} to {after}: {looks}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--release", action="append", choices=RELEASES, help="a release of JAX; the newest by default")
    parser.add_argument("--count", type=int, default=100_000)
    options = parser.parse_args()
    for release in options.release or [next(release for release in reversed(RELEASES) if interpreter(release).exists())]:
        scene = Scene()
        try:
            run(scene, release, options.count)
        finally:
            scene.close()


if __name__ == "__main__":
    main()
