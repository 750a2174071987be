"""muster.Client against a real server."""

from __future__ import annotations

import dataclasses
from datetime import datetime, timezone
import socket
import threading
import time

import pytest

from conftest import PATIENCE_S, TOOLS

import muster


@pytest.fixture
def job(scene):
    """A server with a recoverable job of three tasks, all connected."""
    server = scene.serve("--tasks", "3", "--recoverable")
    agents: dict[int, muster.Agent] = {}

    def join(task: int) -> None:
        agents[task] = muster.join(server.grpc, 3, task, timeout=PATIENCE_S)

    threads = [threading.Thread(target=join, args=(task,)) for task in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(agents) == [0, 1, 2]
    yield server, agents
    for agent in agents.values():
        agent.end()


def test_it_shows_a_job_and_its_tasks(job):
    server, agents = job
    client = server.client
    assert client.version() == muster.__version__
    [summary] = client.jobs()
    assert (summary.name, summary.tasks, summary.state, summary.live, summary.recoverable) == ("default", 3, "running", 3, True)
    shown = client.job()
    assert (shown.run.number, shown.run.state, shown.exclusions) == (1, "running", ())
    assert shown.run.opened_at <= shown.run.started_at <= datetime.now(timezone.utc)
    tasks = client.tasks()
    assert tasks == list(shown.run.tasks) or [task.task for task in tasks] == [0, 1, 2]
    assert [task.state for task in tasks] == ["connected"] * 3
    assert [int(task.incarnation, 16) for task in tasks] == [agents[task].incarnation for task in range(3)]
    assert client.task(1).address.startswith("127.0.0.1:")
    assert client.task(1).raw["recoverable"] is True
    with pytest.raises(dataclasses.FrozenInstanceError):
        tasks[0].state = "failed"


def test_it_excludes_and_readmits(job):
    server, agents = job
    client = server.client
    preview = client.preview_exclusion(2)
    assert (preview.tasks, preview.live, preview.ends_run) == ((2,), (0, 1), None)
    assert client.exclusions() == [], "a preview changes nothing"
    made = client.exclude(2, reason="flaky network", seconds=3600)
    assert (made.task, made.host, made.reason, made.in_force, made.tasks) == (2, None, "flaky network", True, (2,))
    assert made.expires_at > made.since
    assert client.task(2).state == "excluded"
    with pytest.raises(muster.Refused, match="flaky network"):
        agents[2].watch(agents[2].connected(), timeout=PATIENCE_S)
    with pytest.raises(muster.Refused, match="flaky network") as refused:
        muster.join(server.grpc, 3, 2, timeout=PATIENCE_S)
    assert refused.value.code == "PERMISSION_DENIED"
    with pytest.raises(muster.Refused, match="exclusions\\(\\) shows all") as refused:
        client.exclude(2, reason="again")
    assert refused.value.code == "already-excluded"
    over = client.readmit(made, reason="replaced")
    assert not over.in_force and client.exclusions() == []
    assert [exclusion.id for exclusion in client.exclusions(state="over")] == [made.id]
    back = muster.join(server.grpc, 3, 2, timeout=PATIENCE_S)
    assert client.task(2).state == "connected" and client.task(2).unsynced
    back.end()


def test_a_drain_reaches_every_task_and_they_agree_on_a_step(job):
    server, agents = job
    assert server.client.drain_status().notice is None
    saved: dict[int, int] = {}
    began = threading.Barrier(4)

    def work(task: int) -> None:
        step = 10 * task
        assert not agents[task].reached_sync_point(step, timeout=PATIENCE_S)
        began.wait(PATIENCE_S)
        while not agents[task].reached_sync_point(step := step + 1, timeout=PATIENCE_S):
            time.sleep(0.01)
        saved[task] = step

    threads = [threading.Thread(target=work, args=(task,)) for task in range(3)]
    for thread in threads:
        thread.start()
    began.wait(PATIENCE_S)
    drain = server.client.drain(reason="kernel update")
    assert drain.notice and drain.agreed_step is None
    for thread in threads:
        thread.join(PATIENCE_S)
    agreed = server.client.drain_status().agreed_step
    assert agreed is not None and set(saved) == {0, 1, 2} and min(saved.values()) >= agreed >= 20
    assert agents[0].notice() == drain.notice
    with pytest.raises(muster.Refused) as refused:
        server.client.drain(reason="again")
    assert refused.value.code in ("drain-under-way", "not-running")


def test_it_follows_events_from_any_number_on(job):
    server, agents = job
    client = server.client
    events = client.events(kinds=["task-connected"])
    assert [event.task for event in events] == [0, 1, 2] or {event.task for event in events} == {0, 1, 2}
    assert events[0].job == "default" and events[0].at.tzinfo is timezone.utc
    assert client.events(newest=True, limit=1)[0].number >= events[-1].number
    coming = client.follow(timeout=PATIENCE_S)
    first = threading.Timer(0.2, agents[1].end)
    first.start()
    told = next(event for event in coming if event.kind == "task-failed")
    assert told.task == 1 and told.reason
    again = client.follow(after=told.number - 1, timeout=PATIENCE_S)
    assert next(again) == told
    began = time.monotonic()
    assert list(client.follow(after=told.number, kinds="job-declared", timeout=0.5)) == []
    assert time.monotonic() - began < PATIENCE_S
    with pytest.raises(muster.Refused, match="there are"):
        client.events(kinds="no-such-kind")


def test_following_goes_on_after_the_server_was_stopped_for_a_moment(scene):
    server = scene.serve("--tasks", "1")
    port = server.http.rpartition(":")[2]
    coming = muster.Client(server.http, timeout=PATIENCE_S).follow(after=0, timeout=PATIENCE_S)
    assert [next(coming).kind for _ in range(2)] == ["job-declared", "run-opened"]
    server.program.kill()
    after = scene.start([TOOLS / "bin/muster", "serve", "--grpc", "127.0.0.1:0", "--http", f"127.0.0.1:{port}", "--tasks", "1"])
    grpc = after.line(r"^\s+gRPC\s+(\S+)")[1]
    after.line(r"^\s+HTTP")
    with muster.join(grpc, 1, 0, timeout=PATIENCE_S):
        seen = next(coming)
        assert seen.number > 2 and seen.kind in ("barrier-started", "task-registering"), seen


def test_jobs_are_found_by_name_and_named_if_there_are_many(scene, monkeypatch):
    server = scene.serve("--job", "train=2", "--job", "eval=1")
    with pytest.raises(muster.SettingsError, match="eval, train"):
        server.client.job()
    assert server.client.job("eval").tasks == 1
    assert muster.Client(server.http, job="train").job().tasks == 2
    monkeypatch.setenv("MUSTER_SERVER", server.http)
    monkeypatch.setenv("MUSTER_JOB", "train")
    assert muster.Client().job().name == "train"
    with pytest.raises(muster.Refused, match="the jobs are: eval, train") as refused:
        server.client.job("../jobs")
    assert refused.value.code == "no-such-job"


def test_a_token_is_sent_and_its_absence_explained(scene, tmp_path, monkeypatch):
    made = scene.start([TOOLS / "bin/muster", "token", "new", "--name", "ops", "--role", "operator", "--file", tmp_path / "t"])
    made.succeed()
    [token] = made.lines
    server = scene.start(
        [TOOLS / "bin/muster", "serve", "--grpc", "127.0.0.1:0", "--http", "127.0.0.1:0", "--tasks", "1", "--tokens-file", tmp_path / "t"]
    )
    http = server.line(r"HTTP\s+(http://\S+)")[1].rstrip("/")
    with pytest.raises(muster.Refused, match="MUSTER_TOKEN") as refused:
        muster.Client(http).jobs()
    assert refused.value.code == "no-token"
    assert muster.Client(http, token=token).jobs()[0].name == "default"
    (tmp_path / "token").write_text(f"{token}\n")
    monkeypatch.setenv("MUSTER_TOKEN_FILE", str(tmp_path / "token"))
    assert muster.Client(http).jobs()[0].name == "default"
    with pytest.raises(muster.SettingsError, match="no token has"):
        muster.Client(http, token="two\r\nlines")


def test_what_is_no_server_is_explained(scene):
    with pytest.raises(muster.ServiceUnreachable, match="muster serve") as unreachable:
        muster.Client("http://127.0.0.1:1").jobs()
    assert isinstance(unreachable.value, ConnectionError) and unreachable.value.service == "http://127.0.0.1:1"
    for url in ("ftp://a:1", "http://a:x", "http://", "http://a/b", "http://a:99999"):
        with pytest.raises(muster.SettingsError, match="HTTP address"):
            muster.Client(url)
    grpc = scene.serve("--tasks", "1").grpc
    with pytest.raises(muster.MusterError, match="8477|HTTP address"):
        muster.Client(grpc, timeout=5).jobs()


class Listener:
    """A server that says one thing, a piece at a time."""

    def __init__(self, pieces: list[bytes], pause: float) -> None:
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.url = "http://127.0.0.1:%d" % self.socket.getsockname()[1]
        threading.Thread(target=self.serve, args=(pieces, pause), daemon=True).start()

    def serve(self, pieces: list[bytes], pause: float) -> None:
        while True:
            try:
                stream, _ = self.socket.accept()
            except OSError:
                return
            with stream:
                try:
                    for piece in pieces:
                        stream.sendall(piece)
                        time.sleep(pause)
                except OSError:
                    pass


def test_a_server_that_answers_byte_by_byte_does_not_hold_a_client_beyond_its_timeout():
    slow = Listener([b"HTTP/1.1 200 OK\r\n", *[b"X: y\r\n"] * 1000], 0.05)
    with pytest.raises(muster.Deadline, match="longer timeout") as late:
        muster.Client(slow.url, timeout=1.0).jobs()
    assert isinstance(late.value, TimeoutError)


def test_hostile_answers_are_errors_of_this_package():
    head = b"HTTP/1.1 200 OK\r\ncontent-length: "
    for body in (b"[]", b"{}", b'{"jobs": 5}', b'{"jobs": [{}]}', b"\xff\xfe", b"nonsense", b'{"jobs": [], "next": {}}', b"[" * 100_000):
        with pytest.raises(muster.MusterError):
            muster.Client(Listener([head + str(len(body)).encode() + b"\r\n\r\n" + body], 0).url, timeout=5).jobs()
    for text in (b"", b"\x00\x00\x12", b"HTTP/9.9 what\r\n\r\n", b"HTTP/1.1 200 OK\r\ncontent-length: -5\r\n\r\n"):
        with pytest.raises(muster.MusterError):
            muster.Client(Listener([text], 0).url, timeout=2).jobs()
    # The same page for ever.
    page = b'{"jobs": [], "next": "a"}'
    with pytest.raises(muster.MusterError, match="same page"):
        muster.Client(Listener([head + str(len(page)).encode() + b"\r\n\r\n" + page], 0).url, timeout=5).jobs()
