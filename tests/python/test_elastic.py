"""recover() and elastic(): processes are killed, come back and come new, and the state is that of an undisturbed run."""

from __future__ import annotations

import json
import os
from pathlib import Path
import random
import re
import signal

import pytest

from conftest import ROOT, TOOLS, interpreter, outer_releases

# A regression whose global batch depends on the step alone, so that its losses are those of any number of processes.
TRAIN = """
import json, os, sys, time
import muster.jax
import jax
try: jax.config.update("jax_cpu_collectives_implementation", "gloo")
except AttributeError: pass
muster.jax.initialize(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), initialization_timeout=60, heartbeat_timeout_seconds=2)
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
STEPS, ROWS, WIDTH, PAUSE = int(sys.argv[4]), 24, 16, float(sys.argv[5])

def place(devices):
    return NamedSharding(Mesh(np.array(devices), ("data",)), P())

def loss(weights, x, y):
    return ((x @ weights["w"] + weights["b"] - y) ** 2).mean()

def train(weights, x, y):
    value, slope = jax.value_and_grad(loss)(weights, x, y)
    return jax.tree_util.tree_map(lambda a, b: a - 0.05 * b, weights, slope), value

def batch(number):
    rng = np.random.default_rng(number)
    x = rng.normal(size=(ROWS, WIDTH)).astype(np.float32)
    return x, (x @ np.linspace(-1, 1, WIDTH) + 3).astype(np.float32)

def step(state, devices, number):
    rows = NamedSharding(Mesh(np.array(devices), ("data",)), P("data"))
    x, y = (jax.make_array_from_callback(a.shape, rows, lambda index, a=a: a[index]) for a in batch(number))
    whole = place(devices)
    weights, value = jax.jit(train, out_shardings=whole)(state, x, y)
    print("STEP", json.dumps({"number": number, "loss": float(value), "members": sorted(devices.incarnations), "process": int(sys.argv[3]), "at": time.monotonic()}), flush=True)
    # A test is slow while a process is away, so that it comes back before the end on any machine.
    time.sleep(PAUSE if len(devices) == int(sys.argv[2]) else float(os.environ.get("PAUSE_ALONE", PAUSE)))
    return weights

if sys.argv[6:] == ["struct"]:
    # It was started late: it has no state of its own.
    state = {"w": jax.ShapeDtypeStruct((WIDTH,), np.float32), "b": jax.ShapeDtypeStruct((), np.float32)}
else:
    state = {"w": np.zeros((WIDTH,), np.float32), "b": np.float32(0)}
final = muster.jax.elastic(step, state, STEPS, place=place, on_change=lambda change: print("CHANGED", change, flush=True))
print("FINAL", json.dumps(np.asarray(final["w"]).tolist()), flush=True)
jax.distributed.shutdown()
"""


def step_lines(program) -> list[dict]:
    return [json.loads(line) for line in re.findall(r"STEP (.*)", program.text())]


def losses(program) -> dict[int, float]:
    """The loss of each step, of those that were done again the last one."""
    return {step["number"]: step["loss"] for step in step_lines(program)}


def final_weights(program) -> list[float]:
    return json.loads(program.line("FINAL (.*)")[1])


def reference(scene, release, count: int) -> tuple[dict[int, float], list[float]]:
    """The losses and the final weights of one undisturbed process."""
    server = scene.serve("--tasks", "1", "--recoverable")
    program = scene.python(release, TRAIN, server.grpc, "1", "0", str(count), "0")
    program.succeed()
    return losses(program), final_weights(program)


def assert_close(one: list[float], other: list[float]) -> None:
    assert len(one) == len(other) and all(abs(a - b) <= 1e-4 * (1 + abs(b)) for a, b in zip(one, other)), (one, other)


def test_killed_processes_come_back_into_an_undisturbed_run(scene, release):
    count = 60
    expected, weights = reference(scene, release, count)
    server = scene.serve("--tasks", "4", "--recoverable")
    start = lambda me, *more: scene.python(  # noqa: E731
        release, TRAIN, server.grpc, "4", str(me), str(count), "0.1", *more, PAUSE_ALONE="1"
    )
    programs = [start(me) for me in range(4)]
    for program in programs:
        program.line("STEP")
    rng = random.Random(7)
    for victim in (2, 0, rng.randrange(4)):
        alive = next(program for me, program in enumerate(programs) if me != victim)
        programs[victim].kill()
        alive.next(r"CHANGED .*lost process %d" % victim)
        programs[victim] = start(victim, "struct")
        alive.next(r'"members": \[0, 1, 2, 3\]')
    for program in programs:
        program.succeed()
    for program in programs:
        assert_close(final_weights(program), weights)
        own = losses(program)
        assert_close([own[number] for number in sorted(own)], [expected[number] for number in sorted(own)])
    assert max(losses(programs[1])) == count - 1


# Eight columns over two processes, each column in two of them; and what happens when it is called.
SHARDED = """
import sys
import muster.jax
import jax
try: jax.config.update("jax_cpu_collectives_implementation", "gloo")
except AttributeError: pass
me = int(sys.argv[2])
muster.jax.initialize(sys.argv[1], 4, me, initialization_timeout=60, heartbeat_timeout_seconds=2)
import numpy as np
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

WHOLE = np.arange(6 * 8, dtype=np.float32).reshape(6, 8)

def columns(devices):
    # With three processes the array is in three parts, so that every part is cut out of others.
    shape = (2, 2) if len(devices) == 4 else (1, len(devices))
    mesh = Mesh(np.array(devices).reshape(shape), ("copies", "parts"))
    return {"m": NamedSharding(mesh, P("parts") if len(devices) == 3 else P(None, "parts")), "half": NamedSharding(mesh, P())}

version, changes = 1, 0
state = {"m": WHOLE * 0 if me == 3 else WHOLE, "half": jnp.full((3,), 1.5, jnp.bfloat16)}
if me == 3: version = 0
while True:
    try:
        with muster.jax.live_devices(timeout=60) as devices:
            state, version = muster.jax.recover(state, version, devices, place=columns)
            shards = {str(shard.index): np.asarray(shard.data) for shard in state["m"].addressable_shards}
            for shard in state["m"].addressable_shards:
                assert np.array_equal(np.asarray(shard.data), WHOLE[shard.index]), (shard.index, shard.data)
            assert state["half"].dtype == jnp.bfloat16 and float(state["half"].addressable_shards[0].data[0]) == 1.5
        print("HAS", len(devices), version, sorted(shards), flush=True)
    except muster.jax.MembershipChanged as change:
        cause = change.__cause__
        print("CHANGED", sorted(change.lost), type(cause).__name__, cause, flush=True)
        if isinstance(cause, muster.errors.StateLost):
            break
        continue
    import time; time.sleep(0.1)
"""


def test_shards_are_cut_from_replicas_until_nobody_has_one(scene, release):
    server = scene.serve("--tasks", "4", "--recoverable")
    programs = [scene.python(release, SHARDED, server.grpc, str(me)) for me in range(4)]
    for program in programs:
        program.line(r"HAS 4 1 .*slice\(\d, \d")
    programs[1].kill()
    for me in (0, 2, 3):
        programs[me].next(r"HAS 3 1 ")
    # Now each part is in one process only.
    programs[3].kill()
    for me in (0, 2):
        programs[me].line(r"CHANGED .*StateLost no live process has state\['m'\]\[\d:\d, \d:\d\].* of version 1: restore the state from a checkpoint")


def test_different_contents_under_one_version_are_named(scene):
    release = "0.12.0"
    server = scene.serve("--tasks", "2", "--recoverable")
    code = (
        "import sys, muster.jax, numpy as np\n"
        "me = int(sys.argv[2])\n"
        "muster.jax.initialize(sys.argv[1], 2, me, initialization_timeout=60)\n"
        "def refused(state):\n"
        "  try: muster.jax.elastic(lambda state, devices, number: state, state, 1)\n"
        "  except muster.MusterError as error: print('ERROR', type(error).__name__, error, flush=True)\n"
        "refused({'a': np.arange(3) + me})\n"
        "refused({'a': np.zeros(3 + me)})\n"
        "refused([object()])\n"
        "try: muster.jax.elastic(lambda state, devices, number: 1 // 0, np.zeros(2), 1)\n"
        "except ZeroDivisionError: print('OWN', flush=True)\n"
        "import jax; jax.distributed.shutdown()\n"
    )
    programs = [scene.python(release, code, server.grpc, str(me)) for me in range(2)]
    for program in programs:
        text = program.succeed()
        assert "StateDiverged processes have different contents under one version: state['a'] in processes 0 and 1" in text, text
        assert "StateDiverged process 0 and process 1 have states of different structure" in text, text
        assert "SettingsError state[0] is no array" in text and "OWN" in text, text


# Process 0 has the state, and process 1 has none. In the first attempt, between the digests and the transfer, process 0 writes into
# the memory of its array ("sent"), or after the transfer process 1 changes a bit of what it has received ("received").
DAMAGED = """
import sys
import muster.jax
import jax
try: jax.config.update("jax_cpu_collectives_implementation", "gloo")
except AttributeError: pass
me, parts, damage = int(sys.argv[2]), sys.argv[3], sys.argv[4]
muster.jax.initialize(sys.argv[1], 2, me, initialization_timeout=60, heartbeat_timeout_seconds=4)
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from muster.jax import _recover

WHOLE = np.arange(4 * 1024 * 1024, dtype=np.float32).reshape(1024, 4096)
own = WHOLE.copy()
move = _recover._move
def move_and_damage(member, parts, sources, arrived, timeout):
    if damage == "sent" and me == 0: own[700, 7] += 1
    move(member, parts, sources, arrived, timeout)
    if damage == "received" and me == 1: next(iter(arrived.values()))[1].reshape(-1).view(np.uint8)[-1] ^= 1
_recover._move = move_and_damage

def place(devices):
    spec = {"whole": P(), "rows": P("x"), "columns": P(None, "x")}[parts]
    return {"w": NamedSharding(Mesh(np.array(devices), ("x",)), spec)}

state, version = ({"w": own}, 1) if me == 0 else ({"w": jax.ShapeDtypeStruct(WHOLE.shape, WHOLE.dtype)}, 0)
while True:
    try:
        with muster.jax.live_devices(timeout=60) as devices:
            got, _ = muster.jax.recover(state, version, devices, place=place)
            for shard in got["w"].addressable_shards if me == 1 else []:
                assert np.array_equal(np.asarray(shard.data), WHOLE[shard.index])
        print("HAS", flush=True)
        break
    except muster.errors.StateDiverged as error: print("DIVERGED", error, flush=True)
    except muster.jax.MembershipChanged as change: print("CHANGED", change, flush=True)
    # The next attempt is undisturbed.
    own[...] = WHOLE
    _recover._move = move
jax.distributed.shutdown()
"""


@outer_releases
@pytest.mark.parametrize("damage", ["sent", "received"])
@pytest.mark.parametrize("parts", ["whole", "rows", "columns"])
def test_what_arrives_damaged_is_not_kept(scene, release, parts, damage):
    server = scene.serve("--tasks", "2", "--recoverable")
    programs = [scene.python(release, DAMAGED, server.grpc, str(me), parts, damage) for me in range(2)]
    for me, program in enumerate(programs):
        program.succeed()
        text = "\n".join(program.lines)
        if (parts, damage) == ("columns", "sent"):
            # Columns are not contiguous: a copy of them is digested and sent.
            assert text.count("HAS") == 1 and "DIVERGED" not in text, text
        elif me == 1:
            assert "DIVERGED state['w'] has arrived from process 0 with other contents than it had there" in text, text
        else:
            assert "CHANGED the block was not committed in any process: failed in process 1: StateDiverged: state['w']" in text, text


def children(pid: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid:
            found.append(int(stat.parent.name))
    return sorted(found)


@outer_releases
@pytest.mark.parametrize(
    ("page", "name", "result"), [("python/README.md", "elastic", "3.000"), ("README.md", "steps", "3.0")], ids=["package", "project"]
)
def test_the_programs_of_the_readmes_survive_kills(scene, release, tmp_path, page, name, result):
    [program] = re.findall(rf"```python\n# {name}\.py\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    # It says where it is, and is slow enough to be killed in the middle, and for the killed one to come back.
    pause = "    import time; time.sleep(0.02 if len(devices) == 4 else 1)\n"
    program = program.replace("    return train(", pause + "    print('AT', number, len(devices), flush=True)\n    return train(")
    (tmp_path / "elastic.py").write_text(program)
    command = [TOOLS / "bin/muster", "launch", "-n", "4", "--recoverable", "--max-restarts", "100", "--"]
    launch = scene.start([*command, interpreter(release), tmp_path / "elastic.py"])
    launch.next("AT 20 4")
    for _ in range(2):
        os.kill(children(launch.process.pid)[-1], signal.SIGKILL)
        # Whether the others take a step without it depends on which is quicker: they, or its return.
        [task] = launch.next(r"task (\d) failed \(SIGKILL\)").groups()
        launch.next(rf"\[{task}\] AT \d+ 4")
    text = launch.succeed()
    assert len(re.findall(rf"\[\d\] {re.escape(result)} after 300 steps", text)) == 4 and "2 restart(s)" in text, text
