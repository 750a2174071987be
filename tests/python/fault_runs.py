#!/usr/bin/env python3
"""Random faults in a job that trains with muster.jax.live_devices.

    target/python/tools/bin/python tests/python/fault_runs.py [--release RELEASE ...] [--events 200] [--seed N]
                                                              [--pauses N]
                                                              [--example FILE] [--service muster|jax]

A seeded run: three processes train, and one event comes after the other: kill -9 of any process, SIGSTOP, an exception before or
after the collectives of a block, an exclusion by REST, and the return of what was lost. Often the next event comes before the
job has recovered. After every step it is checked:

- each survivor is in step: it commits every step once, one after the other;
- the parameters are the same on all, bit by bit;
- a step is committed by all members that live, or by none;
- of the change of an epoch all say the same.

It prints the times from an event to the next step of all survivors, and from a start to the first step of the process that came
back. With --example it runs JAX's own example of fault-tolerant training in place of the trainer of this project:
`docs/_static/fault_tolerance/data_parallelism_with_recovery.py` of JAX's public repository, which is not kept here. With
--service jax that program runs with JAX's own live_devices and service, to see what happens there.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
import contextlib
from dataclasses import dataclass, field
import json
import os
from pathlib import Path
import queue
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time

import muster

HERE = Path(__file__).resolve().parent
TARGET = HERE.parents[1] / "target/python"
COUNT = 3
GRACE_S = 0.5
HEARTBEAT_S = 2.0
# How long a process waits for gloo until it ends itself.
STUCK_S = 12.0
# A run is given up after this time without a step.
PATIENCE_S = 60.0


@dataclass
class Life:
    """One incarnation of a process, and what it has said."""

    process: subprocess.Popen
    number: int
    began: float
    lines: list[dict] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    ended_by: str = ""
    ended_at: float = float("inf")

    def said(self, what: str) -> list[dict]:
        return [line for line in list(self.lines) if line["what"] == what]

    def steps_since(self, at: float) -> list[dict]:
        return [line for line in self.said("commit") if line["at"] > at]


@dataclass
class Event:
    kind: str
    number: int
    at: float
    # How long the service needs to find out.
    grace: float = 0.0


class Job:
    """A server, the processes of its job, and the events so far."""

    def __init__(self, release: str, seed: int, program: list[str], needs_first: bool = False, patience: float = PATIENCE_S) -> None:
        # Whether the program cannot let a process in while process 0 is away.
        self.needs_first = needs_first
        self.release, self.random, self.program, self.patience = release, random.Random(seed), program, patience
        self.python = TARGET / release / "bin/python"
        self.folder = Path(tempfile.mkdtemp(prefix="muster-faults-"))
        self.stop = self.folder / "stop"
        self.events: list[Event] = []
        self.lives: list[Life] = []
        self.live: dict[int, Life] = {}
        self.excluded: dict[int, object] = {}
        self.servers: list[subprocess.Popen] = []
        self.news: queue.Queue[None] = queue.Queue()

    def serve(self) -> None:
        command = [TARGET / "tools/bin/muster", "serve", "--tasks", str(COUNT), "--recoverable", "--grpc", "127.0.0.1:0", "--http"]
        command += ["127.0.0.1:0", "--heartbeat-timeout", f"{HEARTBEAT_S:g}s"]
        server = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.servers.append(server)
        assert server.stdout
        for line in server.stdout:
            fields = line.split()
            if fields[:1] == ["HTTP"]:
                self.http = fields[1].rstrip("/")
                break
        threading.Thread(target=lambda: [None for _ in server.stdout], daemon=True).start()
        self.client = muster.Client(self.http)
        self.service = self.client._get("/api/v1/server")["grpc"][0]["address"]

    def start(self, number: int) -> None:
        command = [str(self.python), *self.program, self.service, str(COUNT), str(number), str(self.stop)]
        # After each change all programs are compiled again: from the cache of JAX, as one would run such a job.
        cache = {
            "JAX_COMPILATION_CACHE_DIR": str(self.folder / "cache"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        env = environment() | cache
        process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        life = Life(process, number, time.monotonic())
        self.lives.append(life)
        self.live[number] = life
        threading.Thread(target=self.read, args=(life,), daemon=True).start()

    def read(self, life: Life) -> None:
        assert life.process.stdout
        for line in life.process.stdout:
            life.text.append(line.rstrip())
            with contextlib.suppress(ValueError):
                read = json.loads(line)
                if isinstance(read, dict) and "what" in read:
                    life.lines.append(read)
            self.news.put(None)
        self.news.put(None)

    def wait(self, what: str, holds: Callable[[], bool]) -> None:
        end = time.monotonic() + self.patience
        stuck = time.monotonic() + 8.0
        while not holds():
            if self.needs_first and 0 not in self.live and time.monotonic() > stuck and not self.stop.exists():
                # It waits for process 0.
                self.perform("return", 0)
            left = end - time.monotonic()
            if left <= 0:
                for life in self.live.values():
                    # They say where they are.
                    life.process.send_signal(signal.SIGQUIT)
                time.sleep(1.0)
                raise AssertionError(f"{self.release}: not within {self.patience:g} s: {what}\n{self.tail()}")
            self.check_no_death()
            with contextlib.suppress(queue.Empty):
                self.news.get(timeout=min(left, 0.2))

    def check_no_death(self) -> None:
        for life in list(self.live.values()):
            if life.process.poll() is None or self.stop.exists():
                continue
            if any("is stuck in a collective" in line for line in life.text[-3:]):
                # Gloo has lost an operation, and the process has ended itself: one more event.
                self.events.append(Event("stuck", life.number, time.monotonic(), grace=STUCK_S))
                self.end_life(life.number, "stuck")
            else:
                text = f"process {life.number} ended by itself with {life.process.returncode}"
                raise AssertionError(f"{self.release}: {text}\n{self.tail()}")

    def tail(self, lines: int = 40) -> str:
        last = "\n".join(f"  {event.kind} {event.number} at {event.at:.3f}" for event in self.events[-6:])
        texts = [f"--- process {life.number} ({life.ended_by or 'live'})\n" + "\n".join(life.text[-lines:]) for life in self.lives[-6:]]
        return f"seed events:\n{last}\n" + "\n".join(texts)

    def end_life(self, number: int, how: str) -> None:
        life = self.live.pop(number)
        life.ended_by, life.ended_at = how, time.monotonic()

    def in_step(self) -> list[int]:
        """Returns the live processes that take part."""
        return [number for number, life in self.live.items() if life.said("commit")]

    def recovered(self) -> bool:
        last = self.events[-1].at if self.events else 0.0
        return len(self.live) > 0 and all(life.steps_since(max(last, life.began)) for life in self.live.values())

    def choose(self) -> tuple[str, int]:
        """Returns the next event."""
        missing = [number for number in range(COUNT) if number not in self.live]
        victims = self.in_step()
        kinds = ["return"] * (3 if missing else 0)
        if len(victims) > 1:
            kinds += ["kill", "kill", "kill", "stop", "exclude"]
        if victims:
            kinds += ["before", "after"]
        kind = self.random.choice(kinds)
        number = self.random.choice(missing if kind == "return" else victims)
        if self.needs_first and kind == "return" and 0 in missing:
            number = 0
        if self.needs_first and number == 0 and kind in ("kill", "stop", "exclude") and not self.recovered():
            return "before", 0
        return kind, number

    def perform(self, kind: str, number: int) -> None:
        event = Event(kind, number, time.monotonic())
        self.events.append(event)
        if kind == "return":
            exclusion = self.excluded.pop(number, None)
            if exclusion:
                self.client.readmit(exclusion, reason="it may come back")
            self.start(number)
        elif kind == "kill":
            event.grace = GRACE_S
            self.live[number].process.kill()
            self.end_life(number, "kill")
        elif kind == "stop":
            event.grace = HEARTBEAT_S
            process = self.live[number].process
            process.send_signal(signal.SIGSTOP)
            self.end_life(number, "stop")
        elif kind == "exclude":
            self.excluded[number] = self.client.exclude(number, reason="a fault run")
            self.end_life(number, "exclude")
        else:
            self.live[number].process.send_signal(signal.SIGUSR1 if kind == "before" else signal.SIGUSR2)

    def run(self, events: int) -> None:
        self.serve()
        for number in range(COUNT):
            self.start(number)
        self.wait("the first step", self.recovered)
        while len(self.events) < events:
            self.perform(*self.choose())
            if self.random.random() < (0.7 if self.needs_first else 0.3):
                # The next one comes while the job recovers. The example rests for a second between two blocks.
                time.sleep(self.random.uniform(0.0, 1.5 if self.needs_first else 0.6))
                if self.live and self.in_step():
                    continue
            self.wait(f"a step after event {len(self.events)} ({self.events[-1].kind} {self.events[-1].number})", self.recovered)
            time.sleep(self.random.uniform(0.0, 0.2))
        self.wait("a step after the last event", self.recovered)
        self.stop.touch()
        for life in self.live.values():
            self.wait("the end", lambda life=life: life.process.poll() is not None)
            assert life.process.returncode == 0, f"process {life.number} ended with {life.process.returncode}\n{self.tail(30)}"

    def close(self) -> None:
        for life in self.lives:
            with contextlib.suppress(ProcessLookupError):
                life.process.kill()
                life.process.send_signal(signal.SIGCONT)
            life.process.wait()
        for server in self.servers:
            server.terminate()
            server.wait()


def environment() -> dict[str, str]:
    ours = ("MUSTER_", "JAX_", "OMPI_", "SLURM_", "PYTHON", "XLA_")
    env = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return env | {"JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1", "TF_CPP_MIN_LOG_LEVEL": "2"}


def check_steps(job: Job) -> int:
    """Checks that all survivors are in step with equal parameters. Returns the number of committed steps."""
    commits: dict[tuple[int, int], tuple[dict, Life]] = {}
    for life in job.lives:
        previous = None
        for commit in life.said("commit"):
            # The example begins anew after a loss of its process 0.
            begins_anew = job.needs_first and previous is not None and commit["epoch"] > previous["epoch"]
            in_order = previous is None or begins_anew or commit["step"] == previous["step"] + 1
            assert in_order, f"process {life.number} went from {previous} to {commit}\n{job.tail()}"
            previous = commit
            first, _ = commits.setdefault((commit["epoch"], commit["step"]), (commit, life))
            for what in ("digest", "members"):
                assert commit[what] == first[what], f"{commit} (process {life.number}) but {first}\n{job.tail()}"
            if not job.needs_first:
                others = [known for (_, step), (known, _) in commits.items() if step == commit["step"]]
                assert others == [first], f"step {commit['step']} was committed twice: {others}\n{job.tail()}"
    for (epoch, step), (commit, _) in commits.items():
        for member in map(int, commit["members"]):
            for life in job.lives:
                own = life.said("commit")
                if life.number != member or not life.began < commit["at"] < life.ended_at or not own:
                    continue
                took_part = any((other["epoch"], other["step"]) == (epoch, step) for other in own)
                # A process that is lost just then may not have said so any more; one that went on must have.
                went_on = any((other["epoch"], other["step"]) > (epoch, step) for other in own)
                came_before = (own[0]["epoch"], own[0]["step"]) < (epoch, step)
                assert took_part or not (came_before and went_on), f"process {member} has no step {step} of epoch {epoch}\n{job.tail()}"
                assert took_part or not came_before or life.ended_by, f"process {member} has no step {step}\n{job.tail()}"
    return len(commits)


def check_changes(job: Job) -> int:
    """Checks that all processes were told the same of each change. Returns the number of changes."""
    told: dict[int, tuple[dict, Life]] = {}
    for life in job.lives:
        for change in life.said("changed"):
            first, other = told.setdefault(change["epoch"], (change, life))
            for what in ("lost", "joined", "causes", "committed"):
                assert change[what] == first[what], f"epoch {change['epoch']}: {change} (process {life.number}) but {first} (process {other.number})"
    return len(told)


def times(job: Job) -> dict[str, list[float]]:
    """Returns how long things took, by what happened.

    - "kill, told": from the event until all survivors had left their block and were told; of an exception from where it was
      raised. This is how long a collective, or the agreement, held anybody up.
    - "kill, next step": until all survivors had committed a step again, for which all programs are compiled anew.
    - "return": until the first step of the process that came back.

    An event during which the next one came is left out.
    """
    taken: dict[str, list[float]] = {}
    for index, event in enumerate(job.events):
        until = job.events[index + 1].at if index + 1 < len(job.events) else float("inf")
        if event.kind == "return":
            life = next((life for life in job.lives if life.number == event.number and abs(life.began - event.at) < 0.5), None)
            ready = life and life.said("ready")
            if life and ready and life.said("commit"):
                taken.setdefault("return, from its first call", []).append(life.said("commit")[0]["at"] - ready[0]["at"])
                taken.setdefault("return, from its start", []).append(life.said("commit")[0]["at"] - event.at)
            continue
        began = event.at
        if event.kind in ("before", "after"):
            raised = [line["at"] for life in job.lives if life.number == event.number for line in life.said("raises")]
            began = min((at for at in raised if at > event.at), default=until)
        # A victim ends just after its event.
        survivors = [life for life in job.lives if life.began < event.at < life.ended_at - 0.5]
        told, steps = [], []
        for life in survivors:
            news = [line["at"] for what in ("changed", "own") for line in life.said(what) if line["at"] > began]
            told.append(min(news, default=float("inf")))
            steps.append(min((line["at"] for line in life.said("commit") if line["at"] > told[-1]), default=float("inf")))
        if survivors and max(told) < until:
            taken.setdefault(f"{event.kind}, told", []).append(max(told) - began)
        if survivors and max(steps) < until:
            taken.setdefault(f"{event.kind}, next step", []).append(max(steps) - began)
    return taken


@dataclass
class Pause:
    """The time between two steps of a process."""

    # Without what the service needs to find the losses in it.
    beyond: float
    life: Life
    before: dict
    after: dict


def pauses(job: Job) -> list[Pause]:
    """Returns the pauses of all processes; a process pauses for the first time after its first step."""
    found = []
    for life in job.lives:
        commits = life.said("commit")
        for before, after in zip(commits, commits[1:]):
            allowed = sum(event.grace for event in job.events if before["at"] - 0.05 < event.at < after["at"])
            found.append(Pause(after["at"] - before["at"] - allowed, life, before, after))
    return found


def describe_pause(job: Job, pause: Pause) -> list[str]:
    """Returns what happened in a pause, how long its process computed meanwhile, and how long its threads waited for a processor."""
    begin, end = pause.before["at"], pause.after["at"]
    computed, queued = (pause.after.get(name, 0.0) - pause.before.get(name, 0.0) for name in ("computed", "queued"))
    lines = [
        f"  {pause.beyond:.2f} s beyond the grace: process {pause.life.number} paused for {end - begin:.2f} s, in which it computed for "
        f"{computed:.2f} s, and its threads waited for a processor for {queued:.2f} s"
    ]
    seen = [(event.at, f"{event.kind} {event.number}") for event in job.events]
    for life in job.lives:
        for line in list(life.lines):
            more = f", lost {line['lost']}, joined {line['joined']}" if line["what"] == "changed" else ""
            seen.append((line["at"], f"  process {life.number} says {line['what']}, epoch {line.get('epoch', '-')}{more}"))
    return lines + [f"    {at - begin:+6.2f} s {what}" for at, what in sorted(seen) if begin - 0.1 <= at <= end]


def report(job: Job, steps: int, changes: int, began: float) -> str:
    kinds: dict[str, int] = {}
    for event in job.events:
        kinds[event.kind] = kinds.get(event.kind, 0) + 1
    counts = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    lines = [f"JAX {job.release}: {len(job.events)} events ({counts}), {steps} steps, {changes} changes, {time.monotonic() - began:.0f} s"]
    for kind, taken in sorted(times(job).items()):
        lines.append(f"  {kind:30} p50 {statistics.median(taken):6.2f} s   worst {max(taken):6.2f} s   ({len(taken)})")
    longest = max(pause.beyond for pause in pauses(job))
    lines.append(f"  {'longest pause beyond the grace':30} {longest:.2f} s")
    # The example sleeps for a second after each block: how long its blocks took, with their beginnings and ends.
    took = [(line["took"], line["at"]) for life in job.lives for what in ("commit", "changed", "own") for line in life.said(what) if "took" in line]
    if took:
        allowed = lambda end, long: sum(event.grace for event in job.events if end - long - 0.05 < event.at < end)
        beyond = [long - allowed(end, long) for long, end in took]
        lines.append(f"  {'blocks, beyond the grace':30} p50 {statistics.median(beyond):6.2f} s   worst {max(beyond):6.2f} s   ({len(beyond)})")
    return "\n".join(lines)


def run(release: str, seed: int, events: int, example: str = "", shown_pauses: int = 0, show=print) -> Job:
    """Runs one job with random events, checks it, and shows the times."""
    program = [str(HERE / "fault_example.py"), example, "muster"] if example else [str(HERE / "fault_trainer.py")]
    job = Job(release, seed, program, needs_first=bool(example))
    began = time.monotonic()
    try:
        job.run(events)
    finally:
        job.close()
    steps, changes = check_steps(job), check_changes(job)
    show(report(job, steps, changes, began))
    for pause in sorted(pauses(job), key=lambda pause: -pause.beyond)[:shown_pauses]:
        show("\n".join(describe_pause(job, pause)))
    return job


def run_on_jax_service(release: str, example: str, victim: int, limit: float = 45.0) -> None:
    """Runs the example on JAX's own service and live_devices, kills one process, starts it again, and shows what happens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    job = Job(release, 0, [str(HERE / "fault_example.py"), example, "jax"])
    job.service = f"127.0.0.1:{port}"
    os.environ["JAX_ENABLE_RECOVERABILITY"] = "1"
    try:
        for number in range(COUNT):
            job.start(number)
        end = time.monotonic() + 60
        while time.monotonic() < end and not all(life.said("commit") for life in job.live.values()):
            time.sleep(0.2)
        if not all(life.said("commit") for life in job.live.values()):
            last = next((line for life in job.lives for line in reversed(life.text) if "rror" in line), "")
            print(f"  JAX's service, JAX {release}: no step within 60 s: {last[:200]}", flush=True)
            return
        time.sleep(2.0)
        killed = job.lives[victim]
        killed.process.kill()
        job.end_life(victim, "kill")
        at = killed.ended_at
        for what in (f"kill -9 of process {victim}", f"process {victim} comes back"):
            if what.endswith("back"):
                job.start(victim)
                at = time.monotonic()
            time.sleep(limit)
            print(f"  JAX's service, JAX {release}: {what}; {limit:g} s later:", flush=True)
            for life in job.lives:
                code = life.process.poll()
                state = "runs" if code is None else f"ended with {code}"
                errors = [line["error"] for line in life.said("own") if line["at"] > at]
                steps = life.steps_since(at)
                first = f", the first after {steps[0]['at'] - at:.1f} s" if steps else ""
                error = f", error: {errors[0][:120]}" if errors else ""
                print(f"    process {life.number}: {state}, {len(steps)} steps{first}{error}", flush=True)
    finally:
        job.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--release", action="append")
    parser.add_argument("--events", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--example", default="", help="JAX's example, to run in place of the trainer")
    parser.add_argument("--pauses", type=int, default=0, help="how many of the longest pauses to describe")
    parser.add_argument("--service", choices=["muster", "jax"], default="muster")
    args = parser.parse_args()
    releases = args.release or sorted(home.name for home in TARGET.iterdir() if home.name[0].isdigit())
    for release in releases:
        print(f"JAX {release}, seed {args.seed}", flush=True)
        if args.service == "jax":
            for victim in (1, 0):
                run_on_jax_service(release, args.example, victim)
        else:
            run(release, args.seed, args.events, args.example, args.pauses)


if __name__ == "__main__":
    main()
