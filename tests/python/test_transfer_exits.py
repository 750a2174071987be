"""An interpreter ends at any moment of its transfers, with the exit code that it has without them: no abort, and no hang."""

from __future__ import annotations

import signal

import pytest

from conftest import outer_releases
from test_transfer import JAX, TASK, TOOLS

# How a program ends, and its exit code; minus the signal that ends it.
WAYS = {
    "return": ("", 0),
    "sys.exit": ("sys.exit(3)", 3),
    "exception": ("raise ValueError('mine')", 1),
    "sigint": ("signal.raise_signal(signal.SIGINT); time.sleep(1)", -signal.SIGINT),
    "sigterm": ("signal.signal(signal.SIGTERM, signal.SIG_DFL); os.kill(os.getpid(), signal.SIGTERM); time.sleep(1)", -signal.SIGTERM),
    "handler": ("signal.signal(signal.SIGTERM, lambda *_: sys.exit(4)); os.kill(os.getpid(), signal.SIGTERM); time.sleep(1)", 4),
}

# The transfers under way at that moment, with the process `peer`. `end()` ends the program.
MOMENTS = {
    "sender": """
sending = engine.send(pattern(64 << 20, 1), peer, "large")
held = engine.prepare([Send(pattern(64 << 20, 2), peer, "more")], channel=1)
launched = [held.launch() for _ in range(4)]
end()
""",
    "receiver": """
buffers = [muster.empty(64 << 20, "uint8") for _ in range(4)]
receiving = [engine.receive(buffer, peer, n) for n, buffer in enumerate(buffers)]
while not receiving[0].done(): time.sleep(0.001)
held = memoryview(buffers[0])
end()
""",
    "threads": """
def churn(channel):
    while True:
        engine.receive(bytearray(1 << 16), peer, "there", channel=channel).wait()
        engine.send(bytes(1 << 16), peer, "back", channel=channel).wait()
for channel in range(10, 13): threading.Thread(target=churn, args=(channel,), daemon=True).start()
time.sleep(0.3)
end()
""",
    "waiting": """
waiting = [engine.receive(bytearray(100), peer, f"never {n}", channel=20 + n) for n in range(3)]
for transfer in waiting: threading.Thread(target=transfer.wait, daemon=True).start()
time.sleep(0.2)
end()
""",
    "asyncio": """
async def main():
    tasks = [asyncio.ensure_future(awaited(engine.receive(bytearray(100), peer, "never", channel=30 + n))) for n in range(3)]
    await asyncio.sleep(0.2)
    end()
    # Ctrl-C cancels the main task where it awaits.
    await asyncio.sleep(1)
async def awaited(transfer): await transfer
asyncio.run(main())
""",
    "fork": """
pending = engine.receive(bytearray(100), peer, "never", channel=40)
held = engine.prepare([Receive(bytearray(100), peer, "prepared")], channel=41)
launched = held.launch()
child = os.fork()
if child == 0: end(); os._exit(0)
ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
assert ended == int(code), ended
end()
""",
}

# With JAX: what is sent may not be computed yet.
PENDING = """
slow = jax.jit(lambda x: jax.lax.fori_loop(0, 10_000, lambda _, y: jnp.sin(y) * 0.5 + y * 0.5, x))
pending = [engine.send(slow(jnp.ones(1 << 16)), peer, n) for n in range(2)]
say("PENDING", [transfer.done() for transfer in pending])
end()
"""
# A forked child that runs JAX's own work at the end waits for threads of JAX that it does not have, with transfers and without.
FORK = MOMENTS["fork"].replace("end(); os._exit(0)", "os._exit(int(code))")
JAX_MOMENTS = MOMENTS | {"fork": FORK, "pending": PENDING}

ENDING = """
import asyncio, os, signal, threading
from muster.transfer import Receive, Send
signal.signal(signal.SIGINT, signal.default_int_handler)
def pattern(size, seed): return bytes((seed + n * 131) & 0xff for n in range(4096)) * (size // 4096)
code = sys.argv[-1]
def end():
    say("ENDS")
    WAY
peer = 0
engine.wait_for_peers([peer])
"""

# The process that stays: it sends to and receives from each of those that end.
STAYS = """
import threading
from muster.transfer import Receive, Send
large = bytes(64 << 20)
def tolerant(call):
    try: call()
    except muster.MusterError: pass
def serve(task):
    engine.wait_for_peers([task])
    def churn(channel):
        while True:
            engine.send(bytes(1 << 16), task, "there", channel=channel).wait()
            engine.receive(bytearray(1 << 16), task, "back", channel=channel).wait()
    def flood():
        for n in range(4): engine.send(large, task, n, timeout=60).wait()
    def take():
        engine.receive(bytearray(64 << 20), task, "large", timeout=60).wait()
    for call in (flood, take, *[lambda channel=channel: churn(channel) for channel in range(10, 13)]):
        threading.Thread(target=tolerant, args=(call,), daemon=True).start()
for task in range(1, int(sys.argv[-1])): threading.Thread(target=tolerant, args=(lambda task=task: serve(task),), daemon=True).start()
say("STAYS")
time.sleep(1000)
"""


def check(programs, ways) -> None:
    for program, (way, moment) in zip(programs, ways):
        _, wanted = WAYS[way]
        code, text = program.end(), program.text()
        assert code == wanted, f"{way}, {moment}: exit code {code}\n{text}"
        assert "panicked" not in text and "Fatal" not in text and "terminate called" not in text, f"{way}, {moment}\n{text}"
        assert ("ValueError: mine" in text) == (way == "exception"), f"{way}, {moment}\n{text}"


def ending(way: str) -> str:
    return ENDING.replace("WAY", WAYS[way][0] or "pass")


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_program_without_jax_ends_as_python_does(scene, moment):
    count = 1 + len(WAYS)
    server = scene.serve("--tasks", str(count), "--recoverable")
    join = TASK.replace("muster.join(service, 2, me, timeout=60)", f"muster.join(service, {count}, me, timeout=60)")

    def start(me: int, code: str, argument: str):
        return scene.start([TOOLS / "bin/python", "-c", join + code, server.grpc, str(me), argument])

    stays = start(0, STAYS, str(count))
    programs = [start(me, ending(way) + MOMENTS[moment], str(WAYS[way][1])) for me, way in enumerate(WAYS, 1)]
    check(programs, [(way, moment) for way in WAYS])
    assert stays.process.poll() is None, stays.text()


@outer_releases
def test_a_jax_program_ends_as_python_does(scene, release):
    # Each moment, and each way.
    ways = list(zip([*WAYS, "return"], JAX_MOMENTS, strict=True))
    count = 1 + len(ways)
    server = scene.serve("--tasks", str(count), "--recoverable")
    join = JAX.replace("muster.jax.initialize(sys.argv[1], 2,", f"muster.jax.initialize(sys.argv[1], {count},")

    def start(me: int, code: str, argument: str):
        return scene.python(release, join + code, server.grpc, str(me), argument)

    stays = start(0, STAYS, str(count))
    programs = [start(me, ending(way) + JAX_MOMENTS[moment], str(WAYS[way][1])) for me, (way, moment) in enumerate(ways, 1)]
    check(programs, ways)
    assert stays.process.poll() is None, stays.text()
