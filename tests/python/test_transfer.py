"""muster.transfer: arrays move between real processes, with JAX and without."""

from __future__ import annotations

import re
import signal
import time
import urllib.request

import pytest

from conftest import PATIENCE_S, ROOT, TOOLS, interpreter

import muster
import muster.transfer
from test_agent import in_threads, join_all

# A task without JAX, in a process of its own: its engine is that of a muster.Agent. Standard input is not used; what the test
# has to say comes as keys of the job.
TASK = """
import asyncio, sys, threading, time, muster
from muster.transfer import Receive, Send
service, me = sys.argv[1], int(sys.argv[2])
agent = muster.join(service, 2, me, timeout=60)
engine = agent.engine()
def say(*what): print(*what, flush=True)
def pattern(size, seed):
    return bytes((seed + n * 131 + (n >> 8)) & 0xff for n in range(min(size, 65536))) * (size // min(size, 65536))
say("JOINED", agent.incarnation)
"""


def task(scene, server, me: int, code: str):
    """Starts a task that joins and then runs the code."""
    return scene.start([TOOLS / "bin/python", "-c", TASK + code, server.grpc, str(me)])


@pytest.fixture
def server(scene):
    """A server with a recoverable job of two tasks."""
    return scene.serve("--tasks", "2", "--recoverable")


@pytest.fixture
def engines(server):
    """Two engines in this process."""
    agents = join_all(server, 2)
    yield tuple(agent.engine() for agent in agents)
    for agent in agents:
        agent.end()


def test_bytes_move_between_processes_one_by_one_together_and_prepared(scene, server):
    code = """
peer, size = 1 - me, 8 << 20
target = bytearray(size)
if me == 0:
    sent = engine.send(pattern(size, 1), peer, "large")
    assert sent.result() is None
    assert engine.receive(target, peer, "answer").result() is target
else:
    received = engine.receive(target, peer, "large")
    assert received.result() is target and received.wait().received == size and received.done()
    assert target == pattern(size, 1)
    stats = engine.send(memoryview(pattern(size, 2)), peer, "answer").wait()
    assert (stats.sent, stats.received) == (size, 0) and stats.seconds > 0
if me == 0:
    assert target == pattern(size, 2)

# Several as one, in both directions.
mine, theirs = [bytearray(100 + n) for n in range(5)], [pattern(100 + n, 10 * peer + n) for n in range(5)]
both = engine.transfer(
    [Send(pattern(100 + n, 10 * me + n), peer, f"{me}/{n}") for n in range(5)]
    + [Receive(mine[n], peer, f"{peer}/{n}") for n in range(5)]
)
results = both.result()
assert results[:5] == [None] * 5 and all(got is want for got, want in zip(results[5:], mine, strict=True))
assert mine == theirs, me

# Prepared once, launched often, over the same memory.
buffer = bytearray(64 << 10)
transfer = Send(buffer, peer, "step") if me == 0 else Receive(buffer, peer, "step")
with engine.prepare([transfer]) as prepared:
    for step in range(50):
        if me == 0:
            buffer[:] = pattern(len(buffer), step)
        prepared.launch().wait()
        if me == 1:
            assert buffer == pattern(len(buffer), step), step
say("DONE", sorted(engine.peers()), engine.devices)
agent.barrier("end", 60)
agent.leave()
"""
    tasks = [task(scene, server, me, code) for me in range(2)]
    for me, program in enumerate(tasks):
        assert f"DONE [{1 - me}] ({me * 2048},)" in program.succeed()


def test_the_survivor_of_a_kill_gets_peer_dead_and_transfers_with_the_next_incarnation(scene, server):
    waits = """
target = bytearray(1 << 20)
def receive():
    try:
        engine.receive(target, 1 - me, "never").wait()
    except muster.PeerDead as error:
        assert isinstance(error, ConnectionError) and error.reason in ("peer_dead", "transport"), error.reason
        say("DEAD", error)
    except muster.StaleIncarnation as error:
        say("DEAD", error)
engine.wait_for_peers([1 - me])
say("WAITS")
receive()
# Until the service has noticed, the peer is the one that is gone.
while True:
    try:
        engine.receive(target, 1 - me, "again").wait()
        break
    except (muster.TransferError, muster.StaleIncarnation):
        time.sleep(0.05)
assert target == pattern(1 << 20, 5)
say("AGAIN")
agent.barrier("end", 60)
agent.leave()
"""
    survivor = task(scene, server, 0, waits)
    victim = task(scene, server, 1, "engine.wait_for_peers([0])\nsay('READY')\ntime.sleep(1000)")
    survivor.line("WAITS")
    victim.line("READY")
    # Its launch is at the peer by then, or comes too late for it.
    time.sleep(0.2)
    victim.kill()
    told = survivor.line("DEAD (.*)")[1]
    assert "task 1" in told and "attach" in told, told
    again = "engine.send(pattern(1 << 20, 5), 0, 'again').wait()\nagent.barrier('end', 60)\nagent.leave()\n"
    task(scene, server, 1, again).succeed()
    survivor.line("AGAIN")
    survivor.succeed()


def test_different_layouts_and_different_orders_are_errors_on_both_sides(engines):
    first, second = engines
    sides = in_threads(
        lambda: first.send(bytes(64), 1, "weights").wait(),
        lambda: second.receive(memoryview(bytearray(64)).cast("f"), 0, "weights").wait(),
    )
    for side, mine in zip(sides, ("uint8[64]", "float32[16]")):
        assert type(side) is muster.LayoutMismatch and side.reason == "layout_mismatch", side
        assert "key 'weights'" in str(side) and f"({mine} here)" in str(side) and "one shape, dtype" in str(side), side
    sides = in_threads(
        lambda: first.send(bytes(64), 1, "a").wait(),
        lambda: second.receive(bytearray(64), 0, "b").wait(),
    )
    for side in sides:
        assert type(side) is muster.OrderMismatch and "'a' (" in str(side) and "'b' (" in str(side), side
    # Nothing of that is left behind.
    target = bytearray(64)
    in_threads(lambda: first.send(bytes(range(64)), 1, "c").wait(), lambda: second.receive(target, 0, "c").wait())
    assert target == bytes(range(64))


def test_a_cancelled_transfer_lands_nowhere(engines):
    first, second = engines
    target = bytearray(1 << 20)
    receiving = second.receive(target, 0, "x")
    assert not receiving.done()
    receiving.cancel("no longer wanted")
    target[:] = bytes(1 << 20)
    for side, says in ((receiving, "task 1: no longer wanted"), (first.send(b"\1" * (1 << 20), 1, "x"), "by task 1")):
        with pytest.raises(muster.Cancelled, match=says) as cancelled:
            side.wait(PATIENCE_S)
        assert cancelled.value.reason == "cancelled"
    assert target == bytes(1 << 20)
    receiving.cancel("twice does no harm")


def test_every_wait_has_a_deadline(engines):
    first, second = engines
    late = second.receive(bytearray(10), 0, "late", timeout=0.3)
    with pytest.raises(muster.Deadline, match="0 of 10 bytes.*a longer timeout") as error:
        late.wait()
    assert isinstance(error.value, TimeoutError) and late.done()
    # A wait that is over does not end the transfer.
    target = bytearray(10)
    receiving = second.receive(target, 0, "slow")
    with pytest.raises(muster.Deadline, match="goes on"):
        receiving.wait(0.1)
    with pytest.raises(muster.Cancelled):
        # The other side of the one that was late.
        first.send(bytes(10), 1, "late").wait()
    first.send(b"0123456789", 1, "slow").wait()
    assert receiving.result() is target and target == b"0123456789"
    with pytest.raises(muster.Deadline, match=r"task 7 is not connected; call muster.transfer.attach\(\)"):
        first.send(b"x", 7, "nobody", timeout=0.2).wait()


def test_requests_that_make_no_sense_are_refused_at_once(engines):
    first, _ = engines
    for wrong, kind, says in (
        (lambda: first.send(b"x", "one", "k"), muster.SettingsError, "'one' is no peer"),
        (lambda: first.send(b"x", -1, "k"), muster.SettingsError, "-1 is no peer"),
        (lambda: first.send(b"x", 0, "k"), muster.SettingsError, "both of this task"),
        (lambda: first.send(b"x", 1, 1.5), muster.SettingsError, "1.5 is no key"),
        (lambda: first.send(3, 1, "k"), muster.ArrayMemoryError, "int lends no memory"),
        (lambda: first.send(memoryview(b"a.b.")[::2], 1, "k"), muster.ArrayMemoryError, "pass a copy, bytes(x)"),
        (lambda: first.receive(b"x", 1, "k"), muster.ArrayMemoryError, "memory of this bytes is read-only"),
        (lambda: first.receive(memoryview(bytearray(8))[::2], 1, "k"), muster.ArrayMemoryError, "not contiguous"),
        (lambda: first.send(b"x", 1, "k", timeout=-1), muster.SettingsError, "timeout is -1"),
        (lambda: first.send(b"x", 1, "k", priority="urgent"), muster.SettingsError, "latency, normal, bulk"),
        (lambda: first.send(b"x", 1, "k", channel=-1), muster.SettingsError, "channel is -1"),
        (lambda: first.transfer([]), muster.SettingsError, "no transfers were given"),
        (lambda: first.transfer([muster.transfer.Send(b"x", 1, "k")] * 2), muster.SettingsError, "used twice"),
    ):
        with pytest.raises(kind, match=re.escape(says)):
            wrong()


def test_the_two_directions_and_launches_of_several_do_not_disturb_one_another(engines):
    targets = [[bytearray(10) for _ in range(4)] for _ in range(2)]

    def talk(me, engine):
        # Each side sends first, as programs do; only what goes one way has an order.
        sent = [engine.send(bytes([me] * 10), 1 - me, f"{n} of {me}") for n in range(2)]
        both = [muster.transfer.Send(bytes([me + 5] * 10), 1 - me, me), muster.transfer.Receive(targets[me][3], 1 - me, 1 - me)]
        together = None if me else engine.transfer(both)
        received = [engine.receive(targets[me][n], 1 - me, f"{n} of {1 - me}") for n in range(2)]
        together = together or engine.transfer(both)
        for transfer in [*sent, *received, together]:
            transfer.wait(PATIENCE_S)

    assert in_threads(*[lambda me=me, engine=engine: talk(me, engine) for me, engine in enumerate(engines)]) == [None, None]
    for me in range(2):
        assert targets[me] == [bytearray([1 - me] * 10)] * 2 + [bytearray(10), bytearray([6 - me] * 10)]


def test_a_process_copies_what_it_sends_to_itself(engines):
    first, second = engines
    here, there = bytearray(1_000_000), bytearray(10)
    sent = first.transfer([
        muster.transfer.Receive(here, 0, "within"),
        muster.transfer.Send(b"0123456789", 1, "across"),
        muster.transfer.Send(b"0123456789" * 100_000, 0, "within"),
    ])
    received = second.transfer([muster.transfer.Receive(there, 0, "across")])
    for transfer in (sent, received):
        transfer.wait(PATIENCE_S)
    assert here == b"0123456789" * 100_000 and there == b"0123456789"


def test_a_buffer_is_received_into_unless_a_view_of_it_lives(engines):
    first, second = engines
    buffer = muster.empty((4, 2), "float32")
    in_threads(lambda: first.send(memoryview(bytes(32)).cast("f", (4, 2)), 1, "k").wait(), lambda: second.receive(buffer, 0, "k").wait())
    assert memoryview(buffer).tolist() == [[0.0, 0.0]] * 4
    view = memoryview(buffer)
    with pytest.raises(muster.ArrayMemoryError, match="1 living export"):
        second.receive(buffer, 0, "again").wait(PATIENCE_S)
    # The other side is told, and what comes after is in step.
    with pytest.raises(muster.TransferError):
        first.send(view, 1, "again").wait(PATIENCE_S)
    view.release()
    target = muster.empty((4, 2), "float32")
    both = in_threads(lambda: first.send(buffer, 1, "next").result(), lambda: second.receive(target, 0, "next").result())
    assert both[0] is None and both[1] is target


def test_the_memory_is_given_back(engines):
    first, second = engines
    target = bytearray(1000)
    in_threads(lambda: first.send(bytes(1000), 1, "k").wait(), lambda: second.receive(target, 0, "k").wait())
    end = time.monotonic() + PATIENCE_S
    while True:
        # A call of the package releases what the engine has let go of.
        second.peers()
        try:
            target.extend(b"more")
            break
        except BufferError:
            assert time.monotonic() < end, "the memory is still lent"
            time.sleep(0.01)


def test_other_threads_run_while_one_waits(engines):
    _, second = engines
    receiving = second.receive(bytearray(10), 0, "k", timeout=2.0)
    counted = 0
    waiter = in_background(lambda: pytest.raises(muster.Deadline, receiving.wait))
    while waiter.is_alive():
        counted += 1
    assert counted > 10_000


def in_background(call):
    import threading

    thread = threading.Thread(target=call)
    thread.start()
    return thread


def test_transfers_can_be_awaited(scene, server):
    code = """
peer = 1 - me
async def main():
    ticks = 0
    async def tick():
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0)
    ticking = asyncio.ensure_future(tick())
    targets = [bytearray(1 << 16) for _ in range(4)]
    if me == 0:
        await asyncio.sleep(0.2)
        await asyncio.gather(*[engine.send(pattern(1 << 16, n), peer, n) for n in range(4)])
    else:
        got = await asyncio.gather(*[engine.receive(targets[n], peer, n) for n in range(4)])
        assert all(a is b for a, b in zip(got, targets, strict=True))
        assert targets == [pattern(1 << 16, n) for n in range(4)] and ticks > 10
        # A task that is cancelled awaits no longer; the transfer goes on.
        late = engine.receive(targets[0], peer, "late")
        waiting = asyncio.ensure_future(asyncio.wait_for(late, 0.1))
        try:
            await waiting
        except asyncio.TimeoutError:
            say("TIMEOUT", late.done())
        agent.put("now", b"")
        assert (await late) is targets[0] and targets[0] == pattern(1 << 16, 9)
        failing = engine.receive(targets[1], peer, "fails", timeout=0.2)
        try:
            await failing
        except muster.Deadline:
            say("DEADLINE")
    ticking.cancel()
asyncio.run(main())
if me == 0:
    agent.get("now", 60)
    engine.send(pattern(1 << 16, 9), peer, "late").wait()
import os
say("FILES", len(os.listdir("/proc/self/fd")))
agent.barrier("end", 60)
agent.leave()
"""
    tasks = [task(scene, server, me, code) for me in range(2)]
    tasks[0].succeed()
    text = tasks[1].succeed()
    assert "TIMEOUT False" in text and "DEADLINE" in text, text


def test_ctrl_c_ends_a_wait(scene, server):
    code = """
engine.wait_for_peers([1 - me])
receiving = engine.receive(bytearray(10), 1 - me, "never")
say("WAITS")
try:
    receiving.wait()
except KeyboardInterrupt:
    say("INTERRUPTED", receiving.done())
receiving.cancel("interrupted")
try:
    engine.send(b"x", 7, "nobody").wait()
except KeyboardInterrupt:
    say("AGAIN")
agent.end()
"""
    waiting = task(scene, server, 0, code)
    other = task(scene, server, 1, "engine.wait_for_peers([0])\ntime.sleep(1000)")
    waiting.line("WAITS")
    time.sleep(0.3)
    waiting.process.send_signal(signal.SIGINT)
    assert waiting.line("INTERRUPTED (.*)")[1] == "False"
    time.sleep(0.3)
    waiting.process.send_signal(signal.SIGINT)
    waiting.line("AGAIN")
    waiting.succeed()
    other.kill()


def test_an_interpreter_that_exits_while_a_transfer_runs_just_exits(scene, server):
    code = """
engine.wait_for_peers([1 - me])
target = bytearray(64 << 20)
receiving = engine.receive(target, 1 - me, "large") if me else engine.send(target, 1 - me, "large")
threading.Thread(target=receiving.wait, daemon=True).start()
say("EXITS")
"""
    leaving = task(scene, server, 1, code)
    other = task(scene, server, 0, code.replace('say("EXITS")', "time.sleep(1000)"))
    leaving.line("EXITS")
    began = time.monotonic()
    text = leaving.succeed()
    assert time.monotonic() - began < 20 and "Traceback" not in text and "panicked" not in text, text
    other.kill()


def test_an_engine_ends_with_its_incarnation(server):
    agents = join_all(server, 2)
    first, second = [agent.engine() for agent in agents]
    assert first.incarnation == agents[0].incarnation and first.process_id == 0 and "process 0" in repr(first)
    pending = first.receive(bytearray(10), 1, "k")
    server.client.exclude(0, reason="a flaky card")
    with pytest.raises((muster.StaleIncarnation, muster.Cancelled, muster.PeerDead)):
        pending.wait()
    server.until("the engine knows", lambda job: first.ended)
    with pytest.raises((muster.StaleIncarnation, muster.Refused), match="a flaky card"):
        first.send(b"x", 1, "k")
    with pytest.raises(muster.MusterError):
        second.send(b"x", 0, "k", timeout=1).wait()
    for agent in agents:
        agent.end()
    with pytest.raises(muster.StaleIncarnation, match="closed|over"):
        second.send(b"x", 0, "k")


def test_a_program_without_jax_is_told_what_to_call():
    with pytest.raises(muster.MusterError, match="muster.jax.initialize"):
        muster.transfer.attach()
    with pytest.raises(muster.SettingsError, match="give task="):
        muster.transfer.attach(service="127.0.0.1:1")
    with pytest.raises(muster.ServiceUnreachable):
        muster.transfer.attach(0, service="127.0.0.1:1", timeout=5)
    for network, says in (
        (muster.Network(listen="here"), "listen is .here."),
        (muster.Network(listen="0.0.0.0:0"), "can be reached by other machines"),
        (muster.Network(token_file="/no/such/file"), "cannot read the secret"),
        (muster.Network(tls=muster.Tls("ca")), "certificate of its own"),
    ):
        with pytest.raises(muster.SettingsError, match=says):
            muster.join("127.0.0.1:1", 1, 0, network=network, timeout=1)


# A JAX process with two CPU devices, which attaches after it has joined.
JAX = """
import sys, threading, time, jax
jax.config.update("jax_num_cpu_devices", 2)
try: jax.config.update("jax_cpu_collectives_implementation", "gloo")
except AttributeError: pass
import muster.jax, muster.transfer
me = int(sys.argv[2])
muster.jax.initialize(sys.argv[1], 2, me, initialization_timeout=60)
import jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
peer = 1 - me
engine = muster.transfer.attach()
def say(*what): print(*what, flush=True)
"""


def jax_task(scene, release, server, me: int, code: str, **variables: str):
    return scene.python(release, JAX + code, server.grpc, str(me), server.http, **variables)


def transfers(server) -> dict:
    return server.client._get(f"/api/v1/jobs/{server.client.job().name}/transfers")


def test_jax_processes_attach_and_move_arrays(scene, release, tmp_path):
    server = scene.serve("--tasks", "2")
    code = """
assert engine is muster.transfer.attach() is muster.transfer.attach(me), "one engine in a process"
assert len(engine.devices) == 2 and engine.process_id == me
engine.wait_for_peers([peer])
assert sorted(engine.peers()) == [peer] and len(engine.peers()[peer]) == 2

# NumPy arrays of any type and shape.
for number, dtype in enumerate([np.float32, np.int8, np.bool_, np.complex64, jnp.bfloat16, jnp.float8_e4m3fn]):
    for shape in [(), (0, 3), (5,), (3, 4, 5)]:
        size = int(np.prod(shape))
        array = np.asarray(np.arange(size).reshape(shape) % 2 + me).astype(dtype)
        target = np.zeros(shape, dtype)
        key = f"{number} {shape}"
        both = engine.transfer([muster.transfer.Send(array, peer, f"{me} {key}"), muster.transfer.Receive(target, peer, f"{peer} {key}")])
        assert both.result()[1] is target
        assert (target == np.asarray(np.arange(size).reshape(shape) % 2 + peer).astype(dtype)).all(), (dtype, shape)

# An array that is not contiguous is not copied in secret.
try: engine.send(np.zeros((2, 3)).T, peer, "turned")
except muster.ArrayMemoryError as error: say("REFUSED", error)

# Arrays of JAX: one that is not computed yet, one that is donated and one that is deleted while they are sent; and then one
# that is computed, which is sent after them.
def slow(x):
    return jax.lax.fori_loop(0, 200, lambda _, y: jnp.sin(y) * 0.5 + y * 0.5, x) * 0 + x
def pattern(seed): return jnp.arange(1 << 20, dtype=jnp.float32) * seed
compute, spend = jax.jit(slow), jax.jit(lambda x: x + 1, donate_argnums=0)
if me == 0:
    compute(pattern(0)).block_until_ready()
    pending = compute(pattern(3))
    transfers = [engine.send(pending, peer, "jax")]
    given = pattern(4).block_until_ready()
    transfers.append(engine.send(given, peer, "given"))
    after = spend(given)
    dropped = pattern(5).block_until_ready()
    transfers.append(engine.send(dropped, peer, "dropped"))
    dropped.delete()
    say("PENDING", pending.is_ready())
    for transfer in transfers: transfer.wait()
    assert (np.asarray(after) == np.asarray(pattern(4)) + 1).all()
    # One that is deleted has nothing to send, and one that fails says why; the other side is told.
    try: engine.send(given if given.is_deleted() else dropped, peer, "gone")
    except muster.ArrayDeleted as error: say("DELETED", error)
else:
    arrays = [engine.receive(jax.ShapeDtypeStruct((1 << 20,), jnp.float32), peer, key) for key in ("jax", "given", "dropped")]
    for seed, transfer in zip((3, 4, 5), arrays):
        array = transfer.result()
        assert isinstance(array, jax.Array) and array is transfer.result()
        assert (np.asarray(array) == np.asarray(pattern(seed))).all(), seed
    # The array is the memory that was received into: it is 64-byte aligned memory of Muster, and not a copy.
    buffer = muster.empty((1 << 10,), jnp.bfloat16)
    assert buffer.array().unsafe_buffer_pointer() == buffer.address

# The names of both sides, and a layout that differs, in a message that says so.
try:
    if me == 0: engine.send(np.zeros((2, 3), np.float32), peer, "weights").wait()
    else: engine.receive(np.zeros((3, 2), np.float32), peer, "weights").wait()
except muster.LayoutMismatch as error:
    say("MISMATCH", error)
say("DONE")
import urllib.request
while b'waits_for="error"} 2' not in urllib.request.urlopen(sys.argv[-1] + '/metrics').read():
    time.sleep(0.01)
import os
while not os.path.exists(os.environ["STOP"]):
    time.sleep(0.05)
jax.distributed.shutdown()
"""
    tasks = [jax_task(scene, release, server, me, code, STOP=str(tmp_path / "stop")) for me in range(2)]
    for program in tasks:
        program.line("DONE")
    # The job's page, REST and metrics show what moved, as of native workers.
    moved = 3 * (4 << 20)

    def seen(_):
        page = transfers(server)
        moved_now = sum(bytes["received"] for bytes in page["totals"]["bytes"])
        return page if page["reporting"] == 2 and page["failures"] and moved_now >= moved else None

    page = server.until("both report what they have moved and what has failed", seen)
    assert {launches["outcome"] for launches in page["totals"]["launches"]} >= {"completed", "layout_mismatch"}, page
    received, sent = [
        sum(pair[side] or 0 for pair in page["pairs"] if (pair["from"], pair["to"]) == way)
        for way, side in (((0, 1), "received"), ((1, 0), "sent"))
    ]
    assert received >= moved and sent > 0, page
    metrics = urllib.request.urlopen(f"{server.http}/metrics", timeout=10).read().decode()
    assert re.search(r'muster_transfer_task_bytes_total{[^}]*task="1"[^}]*direction="received"} [1-9]', metrics), metrics[-3000:]
    html = urllib.request.urlopen(f"{server.http}/jobs/{server.client.job().name}/transfers", timeout=10).read().decode()
    assert "MiB" in html, html
    (tmp_path / "stop").touch()
    texts = [program.succeed() for program in tasks]
    assert all("REFUSED" in text and "ascontiguousarray" in text for text in texts), texts
    assert "DELETED" in texts[0]
    for text, here in zip(texts, ("float32[2, 3]", "float32[3, 2]")):
        assert f"'weights' ({here} here)" in text, text


def test_arrays_of_jax_that_come_again_and_again_are_whole_and_stay_so(scene, release):
    server = scene.serve("--tasks", "2")
    code = """
dtypes, shape = [jnp.float32, jnp.bfloat16, jnp.int8, jnp.bool_, jnp.float8_e4m3fn, jnp.complex64], (64, 300)
def array(dtype, seed):
    return ((jnp.arange(shape[0] * shape[1]) + seed) % 7 < 3).reshape(shape).astype(dtype).block_until_ready()
def same(got, dtype, seed):
    want = array(dtype, seed)
    return got.dtype == dtype and got.shape == shape and (np.asarray(got).view(np.uint8) == np.asarray(want).view(np.uint8)).all()
def meet():
    target = np.zeros(1, np.uint8)
    both = [engine.send(np.ones(1, np.uint8), peer, "meet", channel=1), engine.receive(target, peer, "meet", channel=1)]
    for transfer in both: transfer.wait()

kept = []
for step in range(12):
    # The receiver comes first, then the sender does.
    coming = []
    if me == 1 and step % 2 == 0:
        coming = [engine.receive(jax.ShapeDtypeStruct(shape, dtype), peer, f"{dtype}") for dtype in dtypes]
        assert not any(transfer.done() for transfer in coming)
    meet()
    if me == 0:
        arrays = [array(dtype, step) for dtype in dtypes]
        transfers = [engine.send(each, peer, f"{dtype}") for each, dtype in zip(arrays, dtypes)]
        for each in arrays: each.delete()
        del arrays
        for transfer in transfers: transfer.wait()
    else:
        if not coming: time.sleep(0.05)
        coming = coming or [engine.receive(jax.ShapeDtypeStruct(shape, dtype), peer, f"{dtype}") for dtype in dtypes]
        for transfer, dtype in zip(coming, dtypes):
            got = transfer.result()
            assert got is transfer.result() and got.committed and list(got.devices()) == [jax.local_devices()[0]]
            assert same(got, dtype, step), (step, dtype)
            kept.append((got, dtype, step))
    # One that never comes is cancelled, and its memory is used for others.
    if me == 1:
        never = engine.receive(jax.ShapeDtypeStruct(shape, jnp.float32), peer, "never", channel=2)
        never.cancel("it is not needed")
        try: never.result(); raise SystemExit("it has come")
        except muster.Cancelled: pass
        del never
    meet()
    if me == 0:
        try: engine.send(array(jnp.float32, 0), peer, "never", channel=2).wait(); raise SystemExit("it was received")
        except muster.Cancelled: pass
# What was received can be donated and sent on.
if me == 1:
    addresses = {each.unsafe_buffer_pointer() for each, _, _ in kept}
    assert len(addresses) == len(kept) and all(address % 64 == 0 for address in addresses)
    assert all(same(*each) for each in kept), "an array has changed"
    spent = jax.jit(lambda x: x * 2, donate_argnums=0)(kept[0][0])
    assert (np.asarray(spent) == 2 * np.asarray(array(jnp.float32, 0))).all()
    engine.send(kept[7][0], peer, "back").wait()
else:
    assert same(engine.receive(jax.ShapeDtypeStruct(shape, jnp.bfloat16), peer, "back").result(), jnp.bfloat16, 1)
say("DONE")
jax.distributed.shutdown()
"""
    tasks = [jax_task(scene, release, server, me, "import time\nimport muster\n" + code) for me in range(2)]
    for program in reversed(tasks):
        assert "DONE" in program.succeed()


def test_what_cannot_be_sent_is_refused_with_the_same_words_at_every_call(scene, release):
    server = scene.serve("--tasks", "2")
    code = """
def refused(call, kind, text):
    try: call()
    except kind as error: assert text in str(error), error
    else: raise SystemExit(f"nothing said {text!r}")
whole = jnp.ones(4).block_until_ready()
gone = jnp.ones(4).block_until_ready(); gone.delete()
if me == 0:
    engine.wait_for_peers([peer])
    for _ in range(2):
        refused(lambda: engine.send(gone, peer, "k"), muster.ArrayDeleted, "was deleted")
        refused(lambda: engine.send(jax.random.key(1), peer, "k"), muster.ArrayMemoryError, "key_data")
        refused(lambda: jax.jit(lambda x: engine.send(x, peer, "k") and x)(whole), muster.ArrayMemoryError, "inside jit")
        refused(lambda: engine.receive(whole, peer, "k"), muster.ArrayMemoryError, "never changes")
        refused(lambda: engine.send(whole, True, "k"), muster.SettingsError, "no peer")
        refused(lambda: engine.send(whole, peer, 1.5), muster.SettingsError, "no key")
        refused(lambda: engine.send(whole, peer, "k", channel=-1), muster.SettingsError, "channel is -1")
        refused(lambda: engine.send(whole, peer, "k", priority="urgent"), muster.SettingsError, "latency, normal, bulk")
        refused(lambda: engine.receive(jax.ShapeDtypeStruct((4,), jnp.float32), me, "k"), muster.SettingsError, "both of this task")
# The names of both sides, for whole arrays of JAX.
for _ in range(2):
    try:
        if me == 0: engine.send(whole, peer, "weights").wait()
        else: engine.receive(jax.ShapeDtypeStruct((5,), jnp.float32), peer, "weights").result()
    except muster.LayoutMismatch as error: say("MISMATCH", error)
    try:
        if me == 0: engine.send(whole, peer, "one").wait()
        else: engine.receive(jax.ShapeDtypeStruct((4,), jnp.float32), peer, "other").result()
    except muster.OrderMismatch as error: say("ORDER", error)
say("DONE")
jax.distributed.shutdown()
"""
    tasks = [jax_task(scene, release, server, me, "import muster\n" + code) for me in range(2)]
    for program, shape, key in zip(tasks, ("[4]", "[5]"), ("one", "other")):
        text = program.succeed()
        assert text.count(f"'weights' (float32{shape} here)") == 2 and text.count(f"'{key}'") == 2, text


def test_shards_are_sent_from_the_devices_that_have_them(scene, release):
    server = scene.serve("--tasks", "2")
    code = """
mesh = Mesh(np.array(jax.local_devices()), ("d",))
whole = np.arange(32, dtype=np.float32).reshape(8, 4)
engine.wait_for_peers([peer])
if me == 0:
    array = jax.device_put(whole, NamedSharding(mesh, P("d")))
    engine.transfer([muster.transfer.Send(shard.data, peer, f"shard {n}") for n, shard in enumerate(array.addressable_shards)]).wait()
    # From one device to another.
    engine.send(array.addressable_shards[1].data, engine_device(peer, 0), "device").wait()
    # The whole, and copies on both devices.
    engine.send(array, peer, "whole").wait()
    engine.send(jax.device_put(whole, NamedSharding(mesh, P())), peer, "copies").wait()
    try: engine.send(array, peer, "mismatch").wait()
    except muster.OrderMismatch as error: say("MISMATCH", error)
else:
    halves = [np.zeros((4, 4), np.float32) for _ in range(2)]
    engine.transfer([muster.transfer.Receive(half, peer, f"shard {n}") for n, half in enumerate(halves)]).wait()
    assert (np.concatenate(halves) == whole).all()
    engine.receive(halves[0], engine_device(peer, 1), "device").wait()
    assert (halves[0] == whole[4:]).all()
    for key, spec in (("whole", P("d")), ("copies", P())):
        struct = jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=NamedSharding(mesh, spec))
        array = engine.receive(struct, peer, key).result()
        assert array.sharding.spec == spec and len(array.addressable_shards) == 2
        assert (np.asarray(array) == whole).all(), key
        assert float(jax.jit(jnp.sum)(array)) == whole.sum()
    struct = jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=NamedSharding(mesh, P(None, "d")))
    try: engine.receive(struct, peer, "mismatch").wait()
    except muster.OrderMismatch as error: say("MISMATCH", error)
say("DONE")
import urllib.request
while b'waits_for="error"} 2' not in urllib.request.urlopen(sys.argv[-1] + '/metrics').read():
    time.sleep(0.01)
jax.distributed.shutdown()
"""
    helper = """
def engine_device(process, ordinal):
    return [device for device in jax.devices() if device.process_index == process][ordinal]
"""
    tasks = [jax_task(scene, release, server, me, helper + code) for me in range(2)]
    for program, place in zip(tasks, ("0:4,0:4", "0:8,0:2")):
        assert "MISMATCH" in (text := program.succeed()) and f"'mismatch' (shard {place})" in text, text


def test_the_survivor_of_a_killed_jax_process_goes_on(scene, release):
    server = scene.serve("--tasks", "2", "--recoverable", "--heartbeat-timeout", "4s")
    code = """
engine.wait_for_peers([peer])
say("READY", engine.incarnation)
target = np.zeros(1 << 20, np.float32)
if me == 1:
    time.sleep(1000)
try:
    engine.receive(target, peer, "never").wait()
except (muster.PeerDead, muster.StaleIncarnation) as error:
    say("DEAD", error)
assert engine.ended is None
say("LIVES")
while True:
    try:
        received = engine.receive(target, peer, "again").wait(60).received
        break
    except (muster.TransferError, muster.StaleIncarnation):
        time.sleep(0.05)
import os
os._exit(0 if received == target.nbytes and target[5] == 5 else 1)
"""
    survivor, victim = [jax_task(scene, release, server, me, code) for me in range(2)]
    survivor.line("READY")
    victim.line("READY")
    time.sleep(0.3)
    victim.kill()
    assert "task 1" in survivor.line("DEAD (.*)")[1]
    survivor.line("LIVES")
    back = """
engine.send(np.arange(1 << 20, dtype=np.float32), peer, "again").wait()
import os
os._exit(0)
"""
    again = jax_task(scene, release, server, 1, back)
    assert survivor.end() == 0, survivor.text()
    assert again.end() == 0, again.text()


def test_a_jax_process_may_exit_while_a_transfer_runs(scene, release):
    server = scene.serve("--tasks", "2", "--recoverable", "--heartbeat-timeout", "4s")
    code = """
engine.wait_for_peers([peer])
target = np.zeros(16 << 20, np.uint8)
receiving = engine.receive(target, peer, "large")
threading.Thread(target=receiving.wait, daemon=True).start()
say("READY")
if me == 0:
    time.sleep(1000)
"""
    other, leaving = [jax_task(scene, release, server, me, code) for me in range(2)]
    other.line("READY")
    text = leaving.succeed()
    assert "panicked" not in text and "Fatal" not in text, text


def test_an_attached_engine_ends_when_another_process_takes_the_task(scene, release):
    server = scene.serve("--tasks", "2", "--recoverable", "--heartbeat-timeout", "4s")
    code = """
say("READY")
while engine.ended is None:
    time.sleep(0.05)
try:
    engine.send(b"x", peer, "k")
except muster.StaleIncarnation as error:
    say("ENDED", error)
import os
os._exit(0)
"""
    first, other = [jax_task(scene, release, server, me, code) for me in range(2)]
    for program in (first, other):
        program.line("READY")
    server.client.exclude(1, reason="a flaky card")
    assert "a flaky card" in other.line("ENDED (.*)")[1]
    assert first.process.poll() is None


def test_a_jax_process_that_has_not_joined_is_told_so(scene, release):
    code = "import jax, muster.transfer\ntry: muster.transfer.attach()\nexcept muster.MusterError as error: print('ERROR', error)\n"
    assert "has not joined a job by JAX" in scene.python(release, code).succeed()


def test_an_array_changes_its_sharding_across_processes(scene, release):
    server = scene.serve("--tasks", "2")
    code = """
whole = np.arange(8 * 12, dtype=np.float32).reshape(8, 12)
every = jax.devices()
def mesh(devices, *shape): return Mesh(np.array(devices).reshape(shape), ("x", "y"))
def shard(sharding): return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])
shardings = [
    NamedSharding(mesh(every, 4, 1), P("x")),
    NamedSharding(mesh(every, 2, 2), P("y", "x")),
    NamedSharding(mesh(every, 2, 2), P(None, "x")),
    NamedSharding(mesh(every[::-1], 2, 2), P(("x", "y"), None)),
    NamedSharding(mesh(every, 4, 1), P()),
    NamedSharding(mesh(every, 4, 1), P("x")),
]
array = shard(shardings[0])
for before, after in zip(shardings, shardings[1:]):
    array = engine.device_put(array, after)
    assert array.sharding.is_equivalent_to(after, 2) and array.dtype == jnp.float32
    for piece in array.addressable_shards:
        assert (np.asarray(piece.data) == whole[piece.index]).all(), (before, after)
    assert float(jax.jit(lambda x: x.sum(), out_shardings=NamedSharding(after.mesh, P()))(array)) == whole.sum()
# From the devices of one process to those of the other.
one, other = [NamedSharding(mesh([d for d in every if d.process_index == process], 2, 1), P("x")) for process in range(2)]
moved = engine.device_put(shard(one) if me == 0 else jax.ShapeDtypeStruct(whole.shape, jnp.float32, sharding=one), other)
pieces = getattr(moved, "addressable_shards", [])
assert len(pieces) == (2 if me == 1 else 0) and moved.sharding == other and moved.shape == whole.shape
for piece in pieces:
    assert (np.asarray(piece.data) == whole[piece.index]).all()
try: engine.device_put(jnp.zeros((3, 4)), shardings[0])
except muster.PlanError as error: say("PLAN", error)
try: engine.device_put(whole, shardings[0])
except muster.SettingsError as error: say("ARRAY", error)
say("DONE")
import urllib.request
while b'waits_for="error"} 2' not in urllib.request.urlopen(sys.argv[-1] + '/metrics').read():
    time.sleep(0.01)
jax.distributed.shutdown()
"""
    tasks = [jax_task(scene, release, server, me, code) for me in range(2)]
    codes = [program.end() for program in tasks]
    texts = [program.text() for program in tasks]
    for code, text in zip(codes, texts):
        assert code == 0 and "ARRAY a ndarray has no sharding" in text and "PLAN" in text, "\n".join(texts)


def test_the_program_of_the_readme_runs(scene, release, tmp_path):
    readme = (ROOT / "python/README.md").read_text()
    [program] = re.findall(r"```python\n# exchange\.py\n(.*?)```", readme, re.DOTALL)
    (tmp_path / "exchange.py").write_text(program)
    launch = scene.start([TOOLS / "bin/muster", "launch", "-n", "2", "--", interpreter(release), tmp_path / "exchange.py"])
    text = launch.succeed()
    assert "[0] process 0 has received 2 and sent 524288 bytes" in text, text
    assert "[1] process 1 has received 1 and sent 524288 bytes" in text, text


# A JAX process of one of two jobs, each of one task: the trainer sends its weights to the server of answers.
PEER_JAX = """
import sys, time, jax
import muster.jax, muster.transfer
from muster.transfer import Peer
muster.jax.initialize(sys.argv[1], 1, 0, initialization_timeout=60)
import jax.numpy as jnp, numpy as np
engine = muster.transfer.attach()
def say(*what): print(*what, flush=True)
def weights(step): return jnp.arange(1 << 18, dtype=jnp.float32).reshape(512, 512) * step
"""


def test_a_training_job_sends_weights_to_an_inference_job(scene, release):
    server = scene.serve("--job", "train=1@127.0.0.1:0", "--job", "serve=1@127.0.0.1:0", "--recoverable")
    about = server.client._get("/api/v1/server")
    addresses = {job: port["address"] for port in about["grpc"] for job in port["jobs"]}

    def allow(job: str, *others: str) -> None:
        body = {"settings": {"transfers_with": list(others)}, "reason": "weights"}
        server.client._request("PATCH", f"/api/v1/jobs/{job}", body)

    def start(job: str, code: str):
        return scene.python(release, PEER_JAX + code, addresses[job])

    trainer = start(
        "train",
        """
there = Peer("serve", 0)
try: engine.send(weights(1), there, "weights").wait()
except muster.PeerJobRefused as error: say("REFUSED", error.job, error.reason, error)
else: say("TAKEN")
try: engine.wait_for_peers([Peer("nowhere", 0)])
except muster.PeerJobRefused as error: say("NOWHERE", error)
for wrong in (Peer("Serve!", 0), Peer("serve", -1)):
    try: engine.send(weights(1), wrong, "weights")
    except muster.SettingsError as error: say("WRONG", error)
for attempt in range(600):
    try: engine.wait_for_peers([there], 60)
    except muster.PeerJobRefused: time.sleep(0.1)
    else: break
for step in range(1, 4):
    sent = engine.send(weights(step), there, "weights")
    assert sent.wait().sent == 1 << 20
# The other way, too, on the same channel.
answer = engine.receive(jax.ShapeDtypeStruct((3,), jnp.int32), there, "loss").result()
assert (np.asarray(answer) == [1, 2, 3]).all()
say("SENT")
pending = engine.receive(np.zeros(8, np.int8), there, "never")
try: pending.wait()
except muster.PeerJobRefused as error: say("WITHDRAWN", error)
""",
    )
    refused = trainer.line("REFUSED serve job_refused (.*)")[1]
    assert "muster job set train --transfers-with serve" in refused and "set serve --transfers-with train" in refused
    assert "nowhere" in trainer.line("NOWHERE (.*)")[1]
    trainer.line("WRONG .*Serve!")
    trainer.line("WRONG .*-1")
    allow("train", "serve")
    allow("serve", "train")
    answers = start(
        "serve",
        """
there = Peer(job="train", task=0)
for step in range(1, 4):
    got = engine.receive(jax.ShapeDtypeStruct((512, 512), jnp.float32), there, "weights").result()
    assert (np.asarray(got) == np.asarray(weights(step))).all(), step
engine.send(np.array([1, 2, 3], np.int32), there, "loss").wait()
say("RECEIVED")
while engine.ended is None: time.sleep(0.1)
""",
    )
    answers.line("RECEIVED")
    trainer.line("SENT")
    allow("serve")
    assert "transfers-with of job serve does not name train" in trainer.line("WITHDRAWN (.*)")[1]
    trainer.succeed()
    answers.kill()
