"""muster.jax.live_devices: real processes that are killed, stopped, fail and come back, with every JAX release."""

from __future__ import annotations

import os
import re
import signal
import time

from conftest import outer_releases
import fault_runs
import pytest

# One process: sums over all live processes, step after step, until everybody has been told to stop.
WORKER = """
import os, signal, sys, time
import muster.jax
import jax
try: jax.config.update("jax_cpu_collectives_implementation", "gloo")
except AttributeError: pass
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
service, count, me, life, how, at = sys.argv[1], *map(int, sys.argv[2:5]), sys.argv[5], int(sys.argv[6])
muster.jax.initialize(service, count, me, initialization_timeout=60, heartbeat_timeout_seconds=4)
def say(*words): print(*words, flush=True)
def queued():
    # The time for which the threads of this process were ready to run, and others ran.
    total = 0
    for task in os.listdir("/proc/self/task"):
        try: total += int(open(f"/proc/self/task/{task}/schedstat").read().split()[1])
        except OSError: pass
    return total / 1e9
def newcomer_is_ready():
    return muster.jax._live.current_member().native.list_keys("muster/live/ready", 10)
say("JOINED", me, life)
stop = left = False
step = 0
patience = 3 if how == "late" else 60
while not stop:
    step += 1
    waited = queued()
    try:
        with muster.jax.live_devices(timeout=patience) as devices:
            say('EPOCH', devices.epoch, devices.incarnations)
            mesh = Mesh(np.array(devices), ("x",))
            sharding = NamedSharding(mesh, P("x"))
            wants = os.path.exists(sys.argv[7])
            def spread(value):
                parts = [jax.device_put(np.full((1,), value, np.float32), d) for d in devices if d.process_index == me]
                return jax.make_array_from_single_device_arrays((len(devices),), sharding, parts)
            total = jax.jit(lambda a, b: (a.sum(), b.min()), out_shardings=NamedSharding(mesh, P()))
            if step == at and how == "kill": say("NOW", time.time()); os.kill(os.getpid(), signal.SIGKILL)
            if step == at and how == "stop": say("NOW", time.time()); os.kill(os.getpid(), signal.SIGSTOP)
            if step == at and how == "raise": say("NOW", time.time()); raise ValueError("before the sum")
            if step == at and how == "late" and me == 1: say("NOW", time.time()); time.sleep(10)
            if how == "kill-ready" and len(devices) == count - 1:
                while not newcomer_is_ready(): time.sleep(0.01)
                say("NOW", time.time()); os.kill(os.getpid(), signal.SIGKILL)
            values, wanted = total(spread(me + 1.0), spread(float(wants)))
            values, stop = float(values), bool(float(wanted))
            if step == at and how == "raise-after": say("NOW", time.time()); raise ValueError("after the sum")
        say("STEP", sorted(d.process_index for d in devices), values)
    except muster.jax.MembershipChanged as change:
        stop = False
        say("TOLD", time.time(), queued() - waited)
        if how in ("kill-told", "leave-told") and change.joined:
            say("NOW", time.time())
            if how == "kill-told": os.kill(os.getpid(), signal.SIGKILL)
            break
        say("CHANGED lost", sorted(change.lost), "joined", sorted(change.joined), "causes", dict(change.causes))
    except muster.StaleIncarnation as error:
        say("STALE", error)
        os._exit(3)
    except ValueError as error:
        stop = False
        say("OWN", error)
    if how == "leave" and step >= at and not left and muster.jax.reached_sync_point(step):
        left = True
        say("SAVES", step)
        if me == 1: break
    time.sleep(0.05)
jax.distributed.shutdown()
say("END")
"""


def start(scene, release, server, count, me, life, stop, how="none", at=0):
    return scene.python(release, WORKER, server.grpc, str(count), str(me), str(life), how, str(at), str(stop))


def committed(worker) -> int:
    """Returns how many steps a worker has committed so far."""
    return sum(line.startswith("STEP") for line in worker.lines)


def said_at(worker, what: str) -> float:
    return float(worker.line(rf"^{what} (\S+)")[1])


def lost_at(server, task: int) -> float:
    """Returns when the service counted a task as lost, the last time."""
    [event] = server.client.events(newest=True, limit=1, task=task, kinds=["task-failed"])
    return event.at.timestamp()


def assert_told_within_a_second(worker, since: float) -> None:
    """Checks the time from `since` to the MembershipChanged of a worker, without the time for which its threads waited for a CPU.

    It is one that has just come: the caller has waited for the line after it.
    """
    [told] = [line for line in worker.lines if line.startswith("TOLD")][-1:]
    _, at, queued = told.split()
    took = float(at) - since
    # Whatever the machine does, nobody has waited for gloo's 30 s.
    assert took - float(queued) < 1 and took < 10, f"told after {took:.3f} s, of which threads waited {queued} s for a CPU"


CASES = [("kill", 0), ("kill", 2), ("raise", 0), ("raise-after", 1)]


@pytest.mark.parametrize(("how", "victim"), CASES)
def test_a_step_is_committed_everywhere_or_nowhere(scene, release, tmp_path, how, victim):
    server = scene.serve("--tasks", "3", "--recoverable", "--heartbeat-timeout", "4s")
    stop = tmp_path / "stop"
    workers = [start(scene, release, server, 3, me, 0, stop, how if me == victim else "none", 4) for me in range(3)]
    left = sorted({0, 1, 2} - {victim})
    for me in left:
        workers[me].line(r"STEP \[0, 1, 2\] 6.0")
        if how == "kill":
            workers[me].line(rf"CHANGED lost \[{victim}\]")
            assert_told_within_a_second(workers[me], lost_at(server, victim))
            workers[me].line(rf"STEP {re.escape(str(left))} {sum(left) + 2.0}")
        else:
            workers[me].line(rf"CHANGED lost \[\] joined \[\] causes \{{{victim}: .ValueError: (before|after) the sum")
            assert_told_within_a_second(workers[me], said_at(workers[victim], "NOW"))
            assert committed(workers[me]) == 3, "the step in which one process failed is committed nowhere"
    if how == "kill":
        # It comes back, and the same devices are connected anew.
        workers[victim] = start(scene, release, server, 3, victim, 1, stop)
        for me in left:
            workers[me].line(rf"CHANGED .*joined \[{victim}\]")
    else:
        workers[victim].line("OWN (before|after) the sum")
    for worker in workers:
        worker.next(r"STEP \[0, 1, 2\] 6.0")
    stop.touch()
    for worker in workers:
        assert "END" in worker.succeed()
    counts = {me: committed(workers[me]) for me in range(3) if how != "kill" or me != victim}
    assert len(set(counts.values())) == 1, counts


def test_a_stopped_process_is_left_behind_when_the_service_counts_it_as_lost(scene, release, tmp_path):
    server = scene.serve("--tasks", "3", "--recoverable", "--heartbeat-timeout", "4s")
    stop = tmp_path / "stop"
    workers = [start(scene, release, server, 3, me, 0, stop, "stop" if me == 1 else "none", 4) for me in range(3)]
    for me in (0, 2):
        workers[me].line(r"CHANGED lost \[1\]")
        workers[me].line(r"STEP \[0, 2\] 4.0")
    stop.touch()
    for me in (0, 2):
        workers[me].succeed()


def test_a_stopped_process_that_wakes_up_is_told_that_it_is_stale(scene, release, tmp_path):
    server = scene.serve("--tasks", "2", "--recoverable", "--heartbeat-timeout", "4s")
    stop = tmp_path / "stop"
    workers = [start(scene, release, server, 2, me, 0, stop, "stop" if me == 1 else "none", 3) for me in range(2)]
    change = workers[0].line(r"CHANGED lost \[1\] joined \[\] causes (.*)")
    assert re.search(r"1: .heartbeat lost: Task 1", change[1]), change[0]
    workers[1].process.send_signal(signal.SIGCONT)
    workers[1].line("STALE .*process 1: Task 1 heartbeat timeout")
    assert workers[1].end() == 3
    stop.touch()
    workers[0].succeed()


def test_an_excluded_process_and_the_others_are_told_the_reason(scene, release, tmp_path):
    server = scene.serve("--tasks", "3", "--recoverable", "--heartbeat-timeout", "4s")
    stop = tmp_path / "stop"
    workers = [start(scene, release, server, 3, me, 0, stop) for me in range(3)]
    for worker in workers:
        worker.line(r"STEP \[0, 1, 2\] 6.0")
    server.client.exclude(0, reason="a flaky network card")
    told = [workers[me].line(r"CHANGED lost \[0\] joined \[\] causes (.*)")[1] for me in (1, 2)]
    assert told[0] == told[1] and "0: 'excluded: " in told[0] and "a flaky network card" in told[0], told
    workers[0].line("STALE .*a flaky network card")
    assert workers[0].end() == 3
    stop.touch()
    for me in (1, 2):
        workers[me].line(r"STEP \[1, 2\] 5.0")
        workers[me].succeed()


def test_a_drained_process_leaves_and_the_others_go_on(scene, release, tmp_path):
    server = scene.serve("--tasks", "2", "--recoverable", "--heartbeat-timeout", "4s")
    stop = tmp_path / "stop"
    # Both agree on the step; only one of them leaves there.
    workers = [start(scene, release, server, 2, me, 0, stop, "leave", 1) for me in range(2)]
    for worker in workers:
        worker.line(r"STEP \[0, 1\] 3.0")
    server.client.drain(reason="the host is needed")
    steps = [worker.line(r"SAVES (\d+)")[1] for worker in workers]
    assert steps[0] == steps[1], steps
    workers[1].succeed()
    workers[0].line(r"CHANGED lost \[1\] joined \[\] causes \{1: 'drained: it left the job after a preemption notice'\}")
    workers[0].next(r"STEP \[0\] 1.0")
    stop.touch()
    workers[0].succeed()


def test_a_process_that_comes_too_late_is_left_out_and_let_in_again(scene, release, tmp_path):
    server = scene.serve("--tasks", "2", "--recoverable", "--heartbeat-timeout", "4s")
    stop = tmp_path / "stop"
    code = WORKER.replace("if step == at and how == \"late\"", "if step == at and life == 0 and how == \"late\"").replace(
        "values, wanted = total(spread(me + 1.0), spread(float(wants)))",
        "values, wanted = total(spread(me + 1.0), spread(float(wants))) if step != at else (0.0, 0.0)",
    )
    arguments = [(server.grpc, "2", str(me), "0", "late", "3", str(stop)) for me in range(2)]
    workers = [scene.python(release, code, *given) for given in arguments]
    change = workers[0].line(r"CHANGED lost \[1\] joined \[\] causes (.*)")
    assert "1: 'late: it did not come to the end of the block within 3 s'" in change[1], change[0]
    workers[1].line(r"CHANGED lost \[1\]")
    workers[0].line(r"CHANGED lost \[\] joined \[1\]")
    for worker in workers:
        worker.next(r"STEP \[0, 1\] 3.0")
    stop.touch()
    for worker in workers:
        worker.succeed()


def test_a_newcomer_that_dies_before_its_first_collective_holds_nobody_up(scene, release, tmp_path):
    server = scene.serve("--tasks", "3", "--recoverable", "--heartbeat-timeout", "4s")
    stop = tmp_path / "stop"
    # In its first block, before it has published an address: the others would wait for it for 30 s.
    workers = [start(scene, release, server, 3, me, 0, stop, "kill" if me == 0 else "none", 1) for me in range(3)]
    for me in (1, 2):
        workers[me].line("JOINED")
    workers[0].line("NOW")
    for me in (1, 2):
        workers[me].line(r"CHANGED lost \[0\]")
        assert_told_within_a_second(workers[me], lost_at(server, 0))
        workers[me].line(r"STEP \[1, 2\] 5.0")
    # The same when one that came back dies like that.
    workers[0] = start(scene, release, server, 3, 0, 1, stop, "kill", 1)
    for me in (1, 2):
        workers[me].line(r"CHANGED lost \[\] joined \[0\]")
    workers[0].line("NOW")
    for me in (1, 2):
        workers[me].next(r"CHANGED lost \[0\]")
        assert_told_within_a_second(workers[me], lost_at(server, 0))
        workers[me].next(r"STEP \[1, 2\] 5.0")
    stop.touch()
    for me in (1, 2):
        workers[me].succeed()


def test_an_exception_in_the_first_block_ends_the_wait_of_the_others(scene, release, tmp_path):
    server = scene.serve("--tasks", "3", "--recoverable", "--heartbeat-timeout", "4s")
    stop = tmp_path / "stop"
    workers = [start(scene, release, server, 3, me, 0, stop, "raise" if me == 1 else "none", 1) for me in range(3)]
    for me in (0, 2):
        workers[me].line(r"CHANGED lost \[\] joined \[\] causes \{1: .ValueError: before the sum.\}")
        assert_told_within_a_second(workers[me], said_at(workers[1], "NOW"))
    workers[1].line("OWN before the sum")
    for worker in workers:
        worker.line(r"STEP \[0, 1, 2\] 6.0")
    stop.touch()
    for worker in workers:
        worker.succeed()


@pytest.mark.parametrize("how", ["kill-ready", "kill-told", "leave-told"])
def test_a_newcomer_and_a_member_that_leaves_at_once_hold_nobody_up(scene, release, tmp_path, how):
    """Process 1 leaves in the block before the epoch of process 2, or in that epoch before its first block."""
    server = scene.serve("--tasks", "3", "--recoverable", "--heartbeat-timeout", "4s")
    stop = tmp_path / "stop"
    workers = [start(scene, release, server, 3, me, 0, stop, how if me == 1 else "none") for me in range(3)]
    workers[0].line(r"STEP \[0, 1, 2\] 6.0")
    workers[2].kill()
    workers[0].line(r"CHANGED lost \[2\]")
    workers[2] = start(scene, release, server, 3, 2, 1, stop)
    # Without an end of their collectives, processes 0 and 2 would wait 30 s for the address of process 1.
    if how == "kill-ready":
        workers[0].line(r"CHANGED lost \[1\] joined \[2\]")
    else:
        workers[0].line(r"CHANGED lost \[\] joined \[2\]")
        workers[0].next(r"CHANGED lost \[1\] joined \[\]")
        workers[2].line(r"CHANGED lost \[1\] joined \[\]")
    since = said_at(workers[1], "NOW") if how == "leave-told" else lost_at(server, 1)
    assert_told_within_a_second(workers[0], since)
    for me in (0, 2):
        workers[me].line(r"STEP \[0, 2\] 4.0")
    stop.touch()
    for me in (0, 2):
        workers[me].succeed()


def test_the_list_has_the_epoch_and_the_incarnations(scene, release, tmp_path):
    server = scene.serve("--tasks", "2", "--recoverable", "--heartbeat-timeout", "4s")
    stop = tmp_path / "stop"
    workers = [start(scene, release, server, 2, me, 0, stop) for me in range(2)]
    epochs = [worker.line(r"EPOCH 1 (\{.*\})")[1] for worker in workers]
    assert epochs[0] == epochs[1] and set(eval(epochs[0])) == {0, 1}, epochs
    first = eval(epochs[0])
    workers[1].kill()
    workers[0].line(r"CHANGED lost \[1\] joined \[\] causes \{.*1: .killed: Task 1 connection lost")
    alone = eval(workers[0].next(r"EPOCH 2 (\{.*\})")[1])
    assert alone == {0: first[0]}
    workers[1] = start(scene, release, server, 2, 1, 1, stop)
    both = eval(workers[0].next(r"EPOCH 3 (\{.*\})")[1])
    assert both[0] == first[0] and both[1] != first[1]
    stop.touch()
    for worker in workers:
        worker.succeed()


PREEMPTION = """
import muster.jax, os, signal, sys, time
muster.jax.initialize(sys.argv[1], 1, 0, preemption={"on": True, "off": False, "default": None}[sys.argv[2]])
try:
    print("BEFORE", muster.jax.reached_sync_point(1), flush=True)
except muster.MusterError as error:
    print("ERROR", error, flush=True)
os.kill(os.getpid(), signal.SIGTERM)
step = 1
while not muster.jax.reached_sync_point(step):
    step += 1
    time.sleep(0.05)
print("SAVES", flush=True)
import jax; jax.distributed.shutdown()
"""


def test_preemption_can_be_on_or_off(scene, release):
    server = scene.serve("--tasks", "1", "--recoverable")
    text = scene.python(release, PREEMPTION, server.grpc, "on").succeed()
    assert "BEFORE False" in text and "SAVES" in text, text
    for how, variables in (("off", {}), ("default", {"JAX_ENABLE_PREEMPTION_SERVICE": "0"})):
        program = scene.python(release, PREEMPTION, server.grpc, how, **variables)
        program.line("ERROR preemption is off in this process")
        assert program.end() == -signal.SIGTERM


# One process: the notice comes before its first step, which is `first`. `whose` says which functions it calls.
FIRST_STEP = """
import jax, muster.jax, os, sys
from jax.experimental import multihost_utils
service, count, me, whose, first, begins = sys.argv[1], *map(int, sys.argv[2:4]), sys.argv[4], int(sys.argv[5]), sys.argv[6]
(jax.distributed if whose == "jax alone" else muster.jax).initialize(service, count, me)
reached = muster.jax.reached_sync_point if whose == "muster" else multihost_utils.reached_preemption_sync_point
print("JOINED", flush=True)
open(begins).read()
saves = [step for step in range(first, first + 10) if reached(step)]
print("SAVES", saves, flush=True)
jax.distributed.shutdown()
"""


@outer_releases
@pytest.mark.parametrize("whose", ["muster", "jax", "jax alone"])
@pytest.mark.parametrize(("first", "saves"), [(0, 1), (5000, 5000)])
def test_a_notice_before_the_first_step_is_for_a_step_that_all_reach(scene, release, tmp_path, whose, first, saves):
    server = scene.serve("--tasks", "2")
    begins = [tmp_path / str(me) for me in range(2)]
    for fifo in begins:
        os.mkfifo(fifo)
    programs = [
        scene.python(
            release, FIRST_STEP, server.grpc, "2", str(me), whose, str(first), str(fifo), JAX_COORDINATOR_BIND_ADDRESS="127.0.0.1:0"
        )
        for me, fifo in enumerate(begins)
    ]
    for program in programs:
        program.line("JOINED")
    server.client.drain(reason="kernel update")
    server.until("the tasks have agreed", lambda _: server.client.drain_status().agreed_step == 1)
    begins[0].write_text("")
    programs[0].line(rf"SAVES \[{saves}\]")
    assert server.client.drain_status().agreed_step == saves
    # It comes to its first step later than the other one to its last.
    begins[1].write_text("")
    for program in programs:
        assert f"SAVES [{saves}]" in program.succeed()


def test_gpus_need_what_jaxlib_has_for_them(scene, release):
    code = (
        "import jax, os\nimport muster.jax\nfrom muster.jax import _internals\njax.config.update('jax_platforms', 'cuda')\n"
        "for _ in range(2):\n"
        "  try: print('COLLECTIVES', _internals.collectives())\n"
        "  except muster.MusterError as error: print('ERROR', error)\n"
        "  try: muster.jax.abort_collectives_on_failure()\n"
        "  except muster.MusterError as error: print('ERROR', error)\n"
    )
    text = scene.python(release, code, XLA_FLAGS="--xla_gpu_nccl_async_execution=true").succeed()
    if release == "0.6.2":
        assert text.count("cannot end the collectives of GPUs: use JAX 0.9.2 or later") == 4, text
    else:
        assert "call muster.jax.abort_collectives_on_failure() before anything else" in text and "COLLECTIVES nccl" in text, text


def test_random_faults_leave_all_survivors_in_step(release):
    fault_runs.run(release, seed=7, events=12)


def test_it_is_explained_who_may_call_it(scene, release):
    code = "import muster.jax\ntry:\n  with muster.jax.live_devices(): pass\nexcept muster.MusterError as error: print('ERROR', error)\n"
    assert "call muster.jax.initialize() first" in scene.python(release, code).succeed()
    server = scene.serve("--tasks", "1", "--recoverable")
    code = (
        "import muster.jax, sys\nmuster.jax.initialize(sys.argv[1], 1, 0)\n"
        "with muster.jax.live_devices() as devices:\n"
        "  print('DEVICES', len(devices))\n"
        "  try:\n    with muster.jax.live_devices(): pass\n"
        "  except muster.MusterError as error: print('ERROR', error)\n"
        "try:\n  with muster.jax.live_devices(): raise ValueError('own')\n"
        "except ValueError as error: print('OWN', error)\n"
        "import jax; jax.distributed.shutdown()\n"
    )
    text = scene.python(release, code, server.grpc).succeed()
    assert "DEVICES 1" in text and "is open already" in text and "OWN own" in text, text


def test_xla_does_not_combine_all_reduces(scene, release):
    # A combined one goes on after its first part has failed, in the messages of that part.
    code = """
import os
import jax
import muster.jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
mesh = Mesh(np.array(jax.devices()), ("data",))
rows = jax.ShapeDtypeStruct((8, 4), np.float32, sharding=NamedSharding(mesh, P("data")))
sums = jax.jit(lambda x: (x.sum(0), x.sum(), x.max()), out_shardings=NamedSharding(mesh, P()))
text = sums.lower(rows).compile().as_text()
print("COUNT", sum(" all-reduce(" in line for line in text.splitlines()), os.environ["XLA_FLAGS"])
"""
    given = "--xla_force_host_platform_device_count=4 --xla_disable_hlo_passes=cse"
    text = scene.python(release, code, XLA_FLAGS=given).succeed()
    assert f"COUNT 3 {given} --xla_disable_hlo_passes=cse,cpu-all-reduce-combiner" in text, text
