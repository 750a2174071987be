"""muster.transfer: transfers that are requested before the other process has attached its engine, or before their array is
computed."""

from __future__ import annotations

from conftest import RELEASES

import pytest

# A JAX process of two, which has not attached yet. `tell(key)` and `wait_for(key)` order what the two do.
JAX = """
import asyncio, gc, os, sys, threading, time, weakref
import jax, muster, muster.jax, muster.transfer
service, me = sys.argv[1], int(sys.argv[2])
muster.jax.initialize(service, 2, me, initialization_timeout=60)
import jax.numpy as jnp, numpy as np
client = jax._src.distributed.global_state.client
peer = 1 - me
jax.devices()  # both processes, as each waits for the other
slow = jax.jit(lambda x: jax.lax.fori_loop(0, 60, lambda _, y: jnp.tanh(y @ y), x))
slow(jnp.ones((300, 300))).block_until_ready()
def say(*what): print(*what, flush=True)
def tell(key): client.key_value_set(key, "1")
def wait_for(key): client.blocking_key_value_get(key, 60_000)
"""

NEWEST = RELEASES[-1:]


def start(scene, server, release: str, me: int, code: str):
    return scene.python(release, JAX + code, server.grpc, str(me))


@pytest.mark.parametrize("release", NEWEST, indirect=True)
def test_transfers_are_requested_before_the_peer_has_attached_and_keep_their_order(scene, release):
    server = scene.serve("--tasks", "2")
    sender = """
engine = muster.transfer.attach()
began = time.monotonic()
first = engine.send(np.arange(1000), peer, "first")
kept = np.arange(1000)
gone = weakref.ref(kept)
cancelled = engine.send(kept, peer, "cancelled")
late = engine.send(np.arange(10), peer, "late", timeout=0.3)
second = engine.send(jnp.arange(5), peer, "second")
undefined = [engine.send(slow(jnp.full((300, 300), n, jnp.float32)), peer, f"undefined {n}") for n in range(3)]
answer = engine.receive(jax.ShapeDtypeStruct((3,), jnp.float32), peer, "answer")
together = engine.transfer([muster.transfer.Send(np.arange(n), peer, f"of {n}") for n in (2, 3)])
assert time.monotonic() - began < 10 and not first.done()
all_requested = time.monotonic() - began
# What is wrong with a request itself is said at once, and takes no place.
try: engine.transfer([muster.transfer.Send(np.arange(3), peer, "twice")] * 2)
except muster.MusterError as error: say("TWICE", error)
cancelled.cancel("not wanted")
try: cancelled.wait()
except muster.Cancelled as error: say("CANCELLED", error)
del cancelled, kept
for _ in range(200):
    gc.collect()
    if gone() is None: break
    time.sleep(0.05)
assert gone() is None, "a cancelled transfer keeps its memory"
try: late.wait()
except muster.Deadline as error: say("LATE", error)

async def both():
    beats = 0
    waiting = asyncio.ensure_future(wait(first))
    tell("attach")
    while not waiting.done():
        await asyncio.sleep(0.001)
        beats += 1
    return beats
async def wait(transfer): return await transfer
say("BEATS", asyncio.run(both()))
assert first.wait().sent == 8000
second.wait(); together.wait()
for transfer in undefined: transfer.wait()
assert (np.asarray(answer.result()) == [1, 2, 3]).all()
# From now on at once.
engine.send(np.arange(7), peer, "last").wait()
say("THREADS", sum(thread.name == "muster-undefined" for thread in threading.enumerate()))
say("DONE")
jax.distributed.shutdown()
"""
    receiver = """
wait_for("attach")
time.sleep(0.2)
engine = muster.transfer.attach()
def receive(count, dtype, key):
    target = np.zeros(count, dtype)
    engine.receive(target, peer, key).wait()
    return target
assert (receive(1000, np.int64, "first") == np.arange(1000)).all()
for key, count in (("cancelled", 1000), ("late", 10)):
    try: receive(count, np.int64, key)
    except muster.TransferError as error: say("NOT", key, type(error).__name__, error)
assert (receive(5, np.int32, "second") == np.arange(5)).all()
for n in range(3):
    assert (receive((300, 300), np.float32, f"undefined {n}") == np.asarray(slow(jnp.full((300, 300), n, jnp.float32)))).all()
engine.send(np.array([1, 2, 3], np.float32), peer, "answer").wait()
targets = [np.zeros(n, np.int64) for n in (2, 3)]
engine.transfer([muster.transfer.Receive(target, peer, f"of {len(target)}") for target in targets]).wait()
assert (targets[1] == np.arange(3)).all()
receive(7, np.int64, "last")
say("DONE")
jax.distributed.shutdown()
"""
    programs = [start(scene, server, release, me, code) for me, code in enumerate((sender, receiver))]
    told = programs[0].succeed()
    assert "CANCELLED cancelled by task 0: not wanted" in told, told
    assert "TWICE " in told, told
    assert "LATE " in told and "connected, but has no transfer engine yet" in told, told
    assert "THREADS 1" in told, told
    beats = int(programs[0].line("BEATS (.*)")[1])
    assert beats > 20, f"the event loop stood still while the peer was waited for: {beats} beats"
    heard = programs[1].succeed()
    assert "NOT cancelled" in heard and "NOT late" in heard, heard


@pytest.mark.parametrize("release", NEWEST, indirect=True)
def test_what_waits_for_a_peer_fails_with_the_engine_and_at_the_end_of_the_interpreter(scene, release):
    server = scene.serve("--tasks", "2", "--recoverable")
    code = """
engine = muster.transfer.attach()
waiting = [engine.send(np.arange(10), peer, f"key {n}") for n in range(100)]
undefined = engine.send(slow(jnp.ones((300, 300))), peer, "undefined")
for transfer in waiting[:50]: transfer.cancel("half of them")
def wait(transfer):
    try: transfer.wait()
    except muster.MusterError as error: say("OVER", type(error).__name__, error)
threads = [threading.Thread(target=wait, args=(transfer,)) for transfer in waiting[50:53]]
for thread in threads: thread.start()
engine.close()
for thread in threads: thread.join(20)
assert not any(thread.is_alive() for thread in threads)
assert all(transfer.done() for transfer in waiting)
say("CLOSED")
os._exit(0)
"""
    idle = start(scene, server, release, 1, "say('READY')\ntime.sleep(1000)")
    closing = start(scene, server, release, 0, code)
    told = closing.succeed()
    assert told.count("OVER StaleIncarnation") == 3 and "CLOSED" in told, told
    idle.kill()
    leaving = """
engine = muster.transfer.attach()
waiting = [engine.send(np.arange(10), peer, f"key {n}") for n in range(100)]
threading.Thread(target=waiting[0].wait, daemon=True).start()
say("READY")
"""
    server = scene.serve("--tasks", "2", "--recoverable")
    idle = start(scene, server, release, 1, "say('READY')\ntime.sleep(1000)")
    ending = start(scene, server, release, 0, leaving)
    ending.line("READY")
    text = ending.succeed()
    assert "panicked" not in text and "Fatal" not in text, text
    idle.kill()
