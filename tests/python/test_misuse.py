"""muster.transfer used in a wrong way: each is an error of its own class that says what to do, and nothing ends the process."""

from __future__ import annotations

import contextlib
import re
import time

import pytest

from conftest import PATIENCE_S
from test_agent import in_threads
from test_transfer import engines, jax_task, server, task  # noqa: F401

import muster
import muster.transfer
from muster.transfer import Send


def refused(kind: type[Exception], says: str, call) -> None:
    with pytest.raises(kind, match=re.escape(says)) as error:
        call()
    assert type(error.value) is kind, repr(error.value)


def connect(first, second) -> None:
    """Moves a byte, so that the connection is there and a launch reserves its memory at once."""
    in_threads(lambda: first.send(b"x", 1, "first").wait(PATIENCE_S), lambda: second.receive(bytearray(1), 0, "first").wait(PATIENCE_S))


def test_a_request_that_names_nothing_is_refused(engines):
    first, _ = engines
    for call in (first.transfer, first.prepare):
        refused(muster.SettingsError, "name at least one send or receive", lambda: call([]))


def test_a_buffer_that_is_received_into_is_used_by_nothing_else(engines):
    first, second = engines
    connect(first, second)
    buffer = muster.empty(1000, "uint8")
    receiving = second.receive(buffer, 0, "k")
    says = "the Buffer can be used again when the transfer is over"
    # A busy machine may still exchange the connection that both have dialled.
    end = time.monotonic() + PATIENCE_S
    with contextlib.suppress(muster.ArrayMemoryError):
        while time.monotonic() < end:
            memoryview(buffer).release()
            time.sleep(0.01)
    refused(muster.ArrayMemoryError, says, lambda: memoryview(buffer))
    refused(muster.ArrayMemoryError, says, buffer.__dlpack__)
    # A second transfer of it fails, on both sides, and the first one goes on.
    for attempt in (lambda: second.receive(buffer, 0, "again").wait(PATIENCE_S), lambda: second.send(buffer, 0, "sent").wait(PATIENCE_S)):
        refused(muster.ArrayMemoryError, says, attempt)
    assert not receiving.done()
    first.send(b"\7" * 1000, 1, "k").wait(PATIENCE_S)
    receiving.wait(PATIENCE_S)
    assert bytes(memoryview(buffer)) == b"\7" * 1000
    for attempt in (lambda: first.send(bytes(1000), 1, "again"), lambda: first.receive(bytearray(1000), 1, "sent")):
        with pytest.raises(muster.TransferError):
            attempt().wait(PATIENCE_S)


def test_what_is_closed_is_not_used_any_more(engines):
    first, second = engines
    connect(first, second)
    prepared = first.prepare([Send(b"x", 1, "k")])
    prepared.close()
    prepared.close()
    refused(muster.TransferError, "closed: prepare them again", prepared.launch)


def test_an_engine_that_was_closed_says_so_to_every_call(scene, server):
    code = """
engine.close()    # It is that of an Agent, and ends with it.
pending = engine.receive(bytearray(10), 1 - me, "never")
prepared = engine.prepare([Receive(bytearray(10), 1 - me, "never")], channel=1)
agent.barrier("ready", 60)
agent.end()
def raises(call):
    try: call()
    except (muster.StaleIncarnation, muster.TransferError) as error: say("REFUSED", type(error).__name__, error)
    else: raise AssertionError("no error")
assert engine.ended
for call in (lambda: engine.send(b"x", 1 - me, "k"), lambda: engine.receive(bytearray(1), 1 - me, "k"), lambda: engine.transfer([Send(b"x", 1 - me, "k")]),
             lambda: engine.prepare([Send(b"x", 1 - me, "k")]), engine.peers, lambda: engine.wait_for_peers([1 - me]), pending.wait,
             lambda: prepared.launch().wait()):
    raises(call)
pending.cancel("it is over"); prepared.close(); engine.close(); agent.end()
assert pending.done()
"""
    tasks = [task(scene, server, me, code) for me in range(2)]
    for program in tasks:
        refusals = [line for line in program.succeed().splitlines() if line.startswith("REFUSED")]
        assert len(refusals) == 8 and all("again" in line for line in refusals), refusals


def test_after_a_fork_the_child_is_told_and_the_parent_goes_on(scene, server):
    code = """
import gc, os
import muster.transfer
peer = 1 - me
def exchange(key):
    target = bytearray(1 << 20)
    both = engine.transfer([Send(pattern(1 << 20, me), peer, f"{key} {me}"), Receive(target, peer, f"{key} {peer}")])
    both.wait(60)
    assert target == pattern(1 << 20, peer)
exchange("before")
buffer = muster.empty(100, "uint8")
pending = engine.receive(buffer, peer, "pending") if me else engine.send(b"\\5" * 100, peer, "not yet", channel=1)
prepared = engine.prepare([Receive(bytearray(100), peer, f"prepared {peer}"), Send(b"\\6" * 100, peer, f"prepared {me}")])
transfer = prepared.launch()
child = os.fork()
if child == 0:
    def raises(call):
        try: call()
        except muster.MusterError as error: assert "forked" in str(error) and "spawn" in str(error), error
        else: raise AssertionError("no error")
    for call in (lambda: engine.send(b"x", peer, "k"), lambda: engine.receive(bytearray(1), peer, "k"), lambda: engine.prepare([Send(b"x", peer, "k")]),
                 engine.peers, lambda: engine.wait_for_peers([peer]), engine.close, pending.wait, lambda: pending.cancel("by the child"),
                 prepared.launch, prepared.close, agent.end, lambda: agent.leave(), lambda: muster.transfer.attach(me, service=service)):
        raises(call)
    # Objects that the child drops end nothing of the parent's.
    del pending, prepared, transfer, engine, agent, buffer
    gc.collect()
    say("CHILD")
    sys.exit(0)
_, status = os.waitpid(child, 0)
assert status == 0, status
transfer.wait(60)
prepared.launch().wait(60)
prepared.close()
if me: pending.cancel("enough")
else:
    engine.receive(bytearray(100), peer, "pending").cancel("enough")
exchange("after")
say("DONE")
agent.barrier("end", 60)
agent.leave()
"""
    tasks = [task(scene, server, me, code) for me in range(2)]
    for program in tasks:
        text = program.succeed()
        assert "CHILD" in text and "DONE" in text, text


def test_wrong_arrays_devices_and_keys_of_jax_programs(scene, release):
    server = scene.serve("--tasks", "2")
    code = """
engine.wait_for_peers([peer])
def refused(kind, says, call):
    try: call()
    except kind as error: assert type(error) is kind and says in str(error), repr(error)
    else: raise AssertionError(f"{kind.__name__}: {says}")
mine, theirs = [[d for d in jax.devices() if d.process_index == process] for process in (me, peer)]
ones = jnp.ones((4, 4))

# Deleted, donated, traced, and of a type whose elements share bytes.
deleted = jnp.ones(3); deleted.delete()
refused(muster.ArrayDeleted, "was deleted", lambda: engine.send(deleted, peer, "k"))
refused(muster.ArrayDeleted, "was deleted", lambda: engine.prepare([muster.transfer.Send(deleted, peer, "k")]))
refused(muster.ArrayMemoryError, "outside of it", lambda: jax.jit(lambda x: engine.send(x, peer, "k"))(ones))
refused(muster.ArrayMemoryError, "key_data", lambda: engine.send(jax.random.key(0), peer, "k"))
refused(muster.ArrayMemoryError, "never changes", lambda: engine.receive(ones, peer, "k"))

# An address that is no multiple of the size of an element.
odd = np.frombuffer(bytearray(41), np.uint8)[1:].view(np.float32)
assert odd.ctypes.data % 4
refused(muster.ArrayMemoryError, "copy it first", lambda: engine.send(odd, peer, "k"))

# Devices and arrays of another process, and both ends in this one.
refused(muster.SettingsError, "both of this task", lambda: engine.send(ones, mine[0], "k"))
refused(muster.SettingsError, "both of this task", lambda: engine.receive(np.zeros(3), me, "k"))
there = NamedSharding(Mesh(np.array(theirs), ("x",)), P("x"))
refused(muster.SettingsError, "no device of this process", lambda: engine.receive(jax.ShapeDtypeStruct((4, 4), jnp.float32, sharding=there), peer, "k"))
try: elsewhere = jax.make_array_from_single_device_arrays((4, 4), there, [], dtype=jnp.float32)
except (TypeError, ValueError): elsewhere = None    # JAX 0.6.2 has no array without shards here.
if elsewhere is not None:
    refused(muster.ArrayMemoryError, "no shard in this process", lambda: engine.send(elsewhere, peer, "k"))

# No peer, no key, no channel.
for peerless in ("1", -1, 1.0, None, jax.devices):
    refused(muster.SettingsError, "is no peer", lambda: engine.send(ones, peerless, "k"))
for keyless in (1.5, None, b"k", -1, 2**64, ("k",)):
    refused(muster.SettingsError, "is no key", lambda: engine.send(ones, peer, keyless))
refused(muster.Deadline, "muster.transfer.attach()", lambda: engine.send(ones, 7, "k", timeout=0.1).wait())
refused(muster.SettingsError, "no sharding", lambda: engine.device_put(np.ones(3), there))

# Of all that nothing is left: what comes next is in step.
target = np.zeros((4, 4), np.float32)
both = engine.transfer([muster.transfer.Send(ones, peer, me), muster.transfer.Receive(target, peer, peer)])
both.wait(60)
assert (target == 1).all()
engine.close()
refused(muster.StaleIncarnation, "closed", lambda: engine.send(ones, peer, "k"))
refused(muster.MusterError, "start the task again", muster.transfer.attach)
engine.close()
say("DONE")
import urllib.request
while b'waits_for="error"} 2' not in urllib.request.urlopen(sys.argv[-1] + '/metrics').read():
    time.sleep(0.01)
jax.distributed.shutdown()
"""
    tasks = [jax_task(scene, release, server, me, code) for me in range(2)]
    for program in tasks:
        assert "DONE" in program.succeed(), program.text()
