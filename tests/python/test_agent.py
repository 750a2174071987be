"""muster.Agent: a task without JAX, against a real server."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
import time

import pytest

from conftest import PATIENCE_S, clean_environment

import muster


def in_threads(*calls):
    """Runs calls at the same time; returns their results, in order."""
    results = [None] * len(calls)

    def run(at, call):
        try:
            results[at] = call()
        except Exception as error:
            results[at] = error

    threads = [threading.Thread(target=run, args=pair) for pair in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), "a call did not end"
    return results


def join_all(server, count: int) -> list[muster.Agent]:
    agents = in_threads(*[lambda task=task: muster.join(server.grpc, count, task, timeout=PATIENCE_S) for task in range(count)])
    assert all(isinstance(agent, muster.Agent) for agent in agents), agents
    return agents


@pytest.fixture
def pair(scene):
    """A server with a recoverable job of two tasks, both in this process."""
    server = scene.serve("--tasks", "2", "--recoverable")
    agents = join_all(server, 2)
    yield server, *agents
    for agent in agents:
        agent.end()


def test_tasks_meet_and_share_keys(pair):
    _, first, second = pair
    assert (first.process_id, second.process_id, first.num_processes) == (0, 1, 2)
    assert first.run == second.run and first.incarnation != second.incarnation
    assert in_threads(lambda: first.barrier("step", 60), lambda: second.barrier("step", 60)) == [0, 0]
    assert in_threads(lambda: first.barrier("step", 60), lambda: second.barrier("step", 60)) == [1, 1]
    assert first.barrier("alone", 60, process_ids=[0]) == 0
    members = in_threads(lambda: first.live_set(60), lambda: second.live_set(60))
    assert members == [(muster.Member(0, first.incarnation), muster.Member(1, second.incarnation))] * 2

    assert first.try_get("a/b") is None
    first.put("a/b", b"\0bytes\xff")
    second.put("a/c", "text")
    assert (second.try_get("a/b"), first.get("a/c", 60)) == (b"\0bytes\xff", b"text")
    assert dict(first.list("a")) == {"a/b": b"\0bytes\xff", "a/c": b"text"}
    with pytest.raises(muster.Refused, match="overwrite=True") as refused:
        second.put("a/b", b"other")
    assert refused.value.code == "ALREADY_EXISTS"
    second.put("a/b", b"other", overwrite=True)
    first.delete("a")
    assert second.list("a") == {}
    late = threading.Timer(0.3, lambda: first.put("late", b"here"))
    late.start()
    assert second.get("late", 60) == b"here"


def test_a_wait_ends_at_its_deadline_and_says_what_to_do(pair):
    _, first, _ = pair
    for call in (
        lambda: first.barrier("nobody", 0.3),
        lambda: first.get("nothing", 0.3),
        lambda: first.live_set(0.3),
        lambda: first.watch(first.connected(), 0.3),
    ):
        began = time.monotonic()
        with pytest.raises(muster.Deadline) as late:
            call()
        assert isinstance(late.value, TimeoutError) and isinstance(late.value, muster.MusterError)
        assert time.monotonic() - began < PATIENCE_S
        assert "muster " in str(late.value), "it names a command that shows more"
    for wrong in (-1.0, float("nan"), float("inf"), 1e12):
        with pytest.raises(muster.SettingsError, match="number of seconds"):
            first.get("nothing", wrong)


def test_who_is_missing_is_named(scene):
    server = scene.serve("--tasks", "4")
    outcomes = in_threads(*[lambda task=task: muster.join(server.grpc, 4, task, timeout=2.0) for task in (0, 2)])
    for outcome in outcomes:
        assert isinstance(outcome, muster.TasksMissing) and outcome.tasks == (1, 3), outcome
        assert "2 of 4 tasks have not registered" in str(outcome) and ": 1, 3 (" in str(outcome), outcome


def test_the_death_of_a_task_is_seen(scene):
    server = scene.serve("--tasks", "2", "--recoverable")
    other = scene.start(
        [sys.executable, "-c", f"import muster, time; muster.join({server.grpc!r}, 2, 1); print('joined'); time.sleep(1000)"]
    )
    with muster.join(server.grpc, 2, 0, timeout=PATIENCE_S) as agent:
        other.line("joined")
        both = agent.connected()
        if len(both) < 2:
            both = agent.watch(both, PATIENCE_S)
        assert sorted(both) == [0, 1]
        other.kill()
        assert agent.watch(both, PATIENCE_S) == {0: agent.incarnation}
        assert agent.live_set(PATIENCE_S) == (muster.Member(0, agent.incarnation),)
    server.until("it has left", lambda job: job.run.tasks[0].state == "disconnected")
    with pytest.raises(muster.StaleIncarnation, match="join again"):
        agent.try_get("a")


def test_after_an_exception_it_ends_as_a_process_that_dies(scene):
    server = scene.serve("--tasks", "1", "--recoverable", "--disconnect-grace", "100ms")
    with pytest.raises(ZeroDivisionError), muster.join(server.grpc, 1, 0, timeout=PATIENCE_S):
        _ = 1 / 0
    server.until("it is lost", lambda job: job.run.tasks[0].state == "failed")


def test_a_replaced_incarnation_is_over(pair):
    server, first, second = pair
    newer = muster.join(server.grpc, 2, 1, timeout=PATIENCE_S)
    with pytest.raises(muster.StaleIncarnation, match="join again"):
        second.watch(second.connected(), PATIENCE_S)
    assert newer.try_get("a") is None
    newer.end()


def test_tasks_drain_one_another(pair):
    _, first, second = pair
    assert not first.reached_sync_point(1) and first.notice() is None
    first.drain()

    def work(agent, step):
        while not agent.reached_sync_point(step, 60):
            step += 1
            time.sleep(0.01)
        return step

    steps = in_threads(lambda: work(first, 3), lambda: work(second, 7))
    assert max(steps) >= 7 and second.notice()


WAITS = {
    "barrier": "agent.barrier('nobody', 600)",
    "get": "agent.get('nothing', 600)",
    "live_set": "agent.live_set(600)",
    "watch": "agent.watch(agent.connected(), 600)",
    "leave": "agent.leave(600)",
    "join": "muster.join(sys.argv[2], 2, 1, timeout=600)",
    "join without a service": "muster.join('127.0.0.1:1', 2, 1, timeout=600)",
    "follow": "list(muster.Client(sys.argv[3]).follow(timeout=600))",
}


@pytest.mark.parametrize("wait", WAITS)
def test_ctrl_c_interrupts_every_wait(scene, wait):
    # A job whose tasks share their fate: leaving waits for the other task.
    server = scene.serve("--tasks", "2")
    code = f"""
import sys, muster, threading
agent = None
if sys.argv[1] == "joined":
    agent = muster.join(sys.argv[2], 2, 0)
    known = agent.connected()
    if len(known) < 2: agent.watch(known)
print("waits", flush=True)
try:
    {WAITS[wait]}
except KeyboardInterrupt:
    print("interrupted", flush=True)
    import os; os._exit(0)
"""
    joined = "no" if "join" in wait or wait == "follow" else "joined"
    program = scene.start([sys.executable, "-c", code, joined, server.grpc, server.http])
    other = muster.join(server.grpc, 2, 1, timeout=PATIENCE_S) if joined == "joined" else None
    program.line("waits")
    time.sleep(0.3)
    began = time.monotonic()
    program.process.send_signal(signal.SIGINT)
    program.line("^interrupted$")
    assert time.monotonic() - began < PATIENCE_S
    assert program.end() == 0
    if other:
        other.end()


def test_a_wait_lets_other_threads_run_and_a_busy_one_does_not_stop_heartbeats(scene):
    server = scene.serve("--tasks", "2", "--recoverable", "--heartbeat-timeout", "2s")
    agents = in_threads(
        *[lambda task=task: muster.join(server.grpc, 2, task, timeout=PATIENCE_S, heartbeat_timeout=2.0) for task in range(2)]
    )
    waiting = threading.Thread(target=lambda: agents[0].barrier("meet", 60))
    waiting.start()
    # One operation that holds the GIL for longer than the heartbeat timeout.
    power, began = 1_000_000, time.monotonic()
    while time.monotonic() - began < 3.0:
        _ = 3**power
        power = min(power * 2, 16_000_000)
    assert [task.state for task in server.client.tasks()] == ["connected"] * 2
    agents[1].barrier("meet", 60)
    waiting.join(PATIENCE_S)
    assert not waiting.is_alive()
    for agent in agents:
        agent.end()


def test_a_process_that_was_forked_is_told_what_to_do(pair):
    _, first, _ = pair
    child = os.fork()
    if child == 0:
        try:
            first.try_get("a")
        except muster.MusterError as error:
            os._exit(0 if "spawn" in str(error) else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert first.try_get("a") is None, "the parent goes on"


def test_the_place_is_found_in_the_environment_or_its_absence_explained(scene):
    server = scene.serve("--tasks", "1")
    code = "import muster; print(muster.join(timeout=60))"

    def run(**variables):
        return subprocess.run(
            [sys.executable, "-c", code], env=clean_environment(**variables), capture_output=True, text=True, timeout=PATIENCE_S
        )

    place = {"JAX_COORDINATOR_ADDRESS": server.grpc, "MUSTER_PROCESS_ID": "0", "MUSTER_NUM_PROCESSES": "1"}
    assert run(**place).stdout.startswith("<muster.Agent process 0 of 1, ")
    missing = run().stderr
    assert "muster.errors.ClusterEnvError: nothing says which task this is" in missing
    assert "process_id=" in missing and "MUSTER_PROCESS_ID=N" in missing and "--" not in missing, missing
    assert "service=" in run(MUSTER_PROCESS_ID="0").stderr
    assert "MUSTER_PROCESS_ID is 'x'" in run(**place | {"MUSTER_PROCESS_ID": "x"}).stderr.replace('"', "'")
    wrong = run(**place | {"MUSTER_NUM_PROCESSES": "4"}).stderr
    assert "muster.errors.SettingsError: the job has 1 task(s), but this worker was told 4" in wrong, wrong


def test_a_service_that_is_not_there_or_is_something_else_is_named(scene):
    with pytest.raises(muster.ServiceUnreachable, match="muster serve") as unreachable:
        muster.join("127.0.0.1:1", 1, 0, timeout=0.5)
    assert unreachable.value.service == "127.0.0.1:1" and isinstance(unreachable.value, ConnectionError)
    http = scene.serve("--tasks", "1").http.removeprefix("http://")
    with pytest.raises(muster.ServiceUnreachable, match="gRPC port"):
        muster.join(http, 1, 0, timeout=0.5)


def test_errors_survive_a_pickle():
    error = muster.TasksMissing("tasks are missing", [3, 1])
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), copy.tasks) == (muster.TasksMissing, "tasks are missing", (3, 1))
    for kind in (muster.Refused, muster.ServiceUnreachable, muster.ClusterEnvError, muster.Deadline, muster.StaleIncarnation):
        assert issubclass(kind, muster.MusterError) and issubclass(kind, RuntimeError)
        assert str(pickle.loads(pickle.dumps(kind("text")))) == "text"
